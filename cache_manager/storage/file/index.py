"""In which slot the record of a key may be: twelve bytes a record, in buckets that are strings.

A bucket's entries are the last eight bytes of a key and a slot. They are hints: whose record is in a slot its head
says, so that no entry has to go when its record does; it goes when its bucket has grown. There are as many buckets as
the extents' slots need, so that only a new extent makes more. Not locked: the store's lock is held.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import numpy as np

from cache_manager.keys import BlockKey
from cache_manager.storage.file.extent import KEY_AT, UNSURE, Extent

Place = tuple[Extent, int]
"""A slot: an extent, and the number in it."""

_BITS: Final = 20
_LOCAL: Final = (1 << _BITS) - 1
_ENTRY = struct.Struct("<8sI")
_SLOT = struct.Struct("<8xI")
_PER_BUCKET: Final = 16
_BUCKET_NBYTES_MAX: Final = 2 * _PER_BUCKET * _ENTRY.size
_BUCKETS_MIN: Final = 1024


class KeyIndex:
    """The slots of keys, and the extents that these are in, by their ordinals."""

    def __init__(self) -> None:
        self._extents: dict[int, Extent] = {}
        self._buckets = [b""] * _BUCKETS_MIN
        self._shift = 65 - _BUCKETS_MIN.bit_length()  # a bucket's number is the first bits of its tags

    def join(self, extent: Extent) -> None:
        """Give an extent an ordinal."""
        extent.ordinal = next(i for i in range(len(self._extents) + 1) if i not in self._extents)
        self._extents[extent.ordinal] = extent

    def leave(self, extent: Extent) -> None:
        """Find nothing in an extent any more."""
        del self._extents[extent.ordinal]
        extent.ordinal = -1

    @property
    def extents(self) -> list[Extent]:
        return list(self._extents.values())

    def find_all(self, keys: Iterable[BlockKey]) -> list[Place | None]:
        """The slot of each key; ``None`` for one that has none."""
        found: list[Place | None] = []
        buckets, shift, extents = self._buckets, self._shift, self._extents
        slot_at, number = _SLOT.unpack_from, int.from_bytes
        for key in keys:
            tag, place = key[24:], None
            bucket = buckets[number(tag, "little") >> shift]
            at = bucket.find(tag)
            while at >= 0:
                if not at % 12:
                    (slot,) = slot_at(bucket, at)
                    extent, local = extents.get(slot >> _BITS), slot & _LOCAL
                    if extent is not None and extent.raw.startswith(key, local * extent.head_nbytes + KEY_AT):
                        place = extent, local
                        break
                at = bucket.find(tag, at + 1)
            found.append(place)
        return found

    def add_all(self, keys: Iterable[BlockKey], extent: Extent, start: int) -> None:
        """Find these in neighbouring slots, of which the heads are there; no other head may have the keys."""
        buckets, shift, pack, number = self._buckets, self._shift, _ENTRY.pack, int.from_bytes
        for slot, key in enumerate(keys, extent.ordinal << _BITS | start):
            tag = key[24:]
            which = number(tag, "little") >> shift
            if len(bucket := buckets[which]) >= _BUCKET_NBYTES_MAX:
                entries = dict.fromkeys(bucket[i : i + 12] for i in range(0, len(bucket), 12))
                bucket = b"".join(entry for entry in entries if self._holds(*_ENTRY.unpack(entry)))
            buckets[which] = bucket + pack(tag, slot)

    def _holds(self, tag: bytes, slot: int) -> bool:
        """Whether a slot holds a record of such a key."""
        extent, local = self._extents.get(slot >> _BITS), slot & _LOCAL
        if extent is None or local >= extent.slots or extent.uses[local] >= UNSURE:
            return False
        return extent.raw.startswith(tag, local * extent.head_nbytes + KEY_AT + 24)

    def fit(self) -> None:
        """Have enough buckets for the extents that have joined."""
        if sum(extent.slots for extent in self.extents) > _PER_BUCKET * len(self._buckets):
            self.load()

    def load(self) -> list[Place]:
        """Find every record that is served; the slots of older copies, which are hidden."""
        extents = self.extents
        bits = max(sum(extent.slots for extent in extents) // _PER_BUCKET, _BUCKETS_MIN - 1).bit_length()
        self._shift, self._buckets = 64 - bits, (buckets := [b""] * (1 << bits))
        tags = np.sort(np.concatenate([np.empty(0, "<u8"), *(e.tags[e.uses < UNSURE] for e in extents)]))
        twice = tags[1:][tags[1:] == tags[:-1]]
        del tags
        copies: dict[BlockKey, list[Place]] = {}
        for extent in extents if len(twice) else ():
            for local in np.flatnonzero((extent.uses < UNSURE) & np.isin(extent.tags, twice)).tolist():
                copies.setdefault(extent.key_of(local), []).append((extent, local))
        older: list[Place] = []
        for places in copies.values():
            older += sorted(places, key=lambda place: int(place[0].ticks[place[1]]))[:-1]
        for extent, local in older:
            extent.hide(local)
        for extent in extents:
            served = np.flatnonzero(extent.uses < UNSURE)
            entries = np.empty(len(served), [("tag", "<u8"), ("slot", "<u4")])
            entries["tag"], entries["slot"] = extent.tags[served], served + (extent.ordinal << _BITS)
            numbers = (entries["tag"] >> np.uint64(self._shift)).tolist()
            for number, (entry,) in zip(numbers, struct.iter_unpack("12s", entries.tobytes()), strict=True):
                buckets[number] += entry
        return older

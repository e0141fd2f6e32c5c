"""In which slot the record of a key may be: twelve bytes a record, in buckets that are strings.

A bucket's entries are the last eight bytes of a key and a slot. They are hints: whose record is in a slot its head
says, so that no entry has to go when its record does; it goes when its bucket has grown. There are as many buckets as
the extents' slots need, so that only a new extent makes more. Not locked: the store's lock is held.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np

from cache_manager.keys import BlockKey
from cache_manager.storage.file.extent import KEY_AT, USES_MAX, Extent

Place = tuple[Extent, int]
"""A slot: an extent, and the number in it."""

_BITS: Final = 20
_LOCAL: Final = (1 << _BITS) - 1
_ENTRY = struct.Struct("<8sI")
_SLOT = struct.Struct("<8xI")
_PER_BUCKET: Final = 32
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
        slot_at, number, append = _SLOT.unpack_from, int.from_bytes, found.append
        extent, local, after = None, 0, 0
        for key in keys:
            if extent is not None and extent.raw.startswith(key, after):  # the neighbour of the one before
                local += 1
            else:
                tag, extent = key[24:], None
                bucket = buckets[number(tag, "little") >> shift]
                at = bucket.find(tag)
                while at >= 0:
                    if not at % 12:
                        (slot,) = slot_at(bucket, at)
                        other, local = extents.get(slot >> _BITS), slot & _LOCAL
                        if other is not None and other.raw.startswith(key, local * other.head_nbytes + KEY_AT):
                            extent = other
                            break
                    at = bucket.find(tag, at + 1)
                if extent is None:
                    append(None)
                    continue
            after = (local + 1) * extent.head_nbytes + KEY_AT
            append((extent, local))
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
        if extent is None or local >= extent.slots or extent.uses[local] > USES_MAX:
            return False
        return extent.raw.startswith(tag, local * extent.head_nbytes + KEY_AT + 24)

    def fit(self) -> None:
        """Have enough buckets for the extents that have joined."""
        if sum(extent.slots for extent in self.extents) > _PER_BUCKET * len(self._buckets):
            self.load()

    def load(self) -> list[Place]:
        """Find every record that is served; the slots of older copies, which are served no more."""
        slots = sum(extent.slots for extent in self.extents)
        bits = max(slots // _PER_BUCKET, _BUCKETS_MIN - 1).bit_length()
        parts = 1 + (slots >> 18).bit_length()  # two at least, so that what is sorted at once is small
        self._shift, self._buckets = 64 - bits, []
        older: list[Place] = []
        for part in range(1 << parts):
            entries = self._entries_of(part, 64 - parts)
            tags = entries["tag"]
            older += self._older(entries[np.isin(tags, tags[1:][tags[1:] == tags[:-1]])]["slot"].tolist())
            first = np.arange(part << bits - parts, part + 1 << bits - parts, dtype=np.uint64) << np.uint64(self._shift)
            cuts, packed = (12 * np.searchsorted(tags, first)).tolist(), entries.tobytes()
            self._buckets += [packed[start:stop] for start, stop in pairwise([*cuts, len(packed)])]
        return older

    def _entries_of(self, part: int, shift: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Entries by tag, for the records whose tags begin with the bits of a part."""
        found = []
        for extent in self.extents:
            local = np.flatnonzero((extent.tags >> np.uint64(shift) == part) & (extent.uses <= USES_MAX))
            some = np.empty(len(local), [("tag", "<u8"), ("slot", "<u4")])
            some["tag"], some["slot"] = extent.tags[local], local + (extent.ordinal << _BITS)
            found.append(some)
        entries = np.concatenate(found) if found else np.empty(0, [("tag", "<u8"), ("slot", "<u4")])
        return entries[np.argsort(entries["tag"], kind="stable")]

    def _older(self, slots: Iterable[int]) -> list[Place]:
        """Of records of one key all but the one with the highest tick; they are served no more."""
        newest: dict[BlockKey, Place] = {}
        older: list[Place] = []
        for place in ((self._extents[slot >> _BITS], slot & _LOCAL) for slot in slots):
            key = place[0].key_of(place[1])
            old, newest[key] = sorted((newest.get(key, place), place), key=lambda each: int(each[0].ticks[each[1]]))
            if old is not newest[key]:
                older.append(old)
        for extent, local in older:
            extent.forget(local)
        return older

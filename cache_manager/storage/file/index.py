"""In which slot the record of a key may be: twelve bytes a record, in buckets that are strings.

A bucket's entries are the last eight bytes of a key and a slot. They are hints: the slot's head says whose record it
is, so an entry may outlive its record; it goes when its bucket has grown. The number of buckets follows the extents'
slots, so only a new extent makes more. Not locked: the store's lock is held.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.storage.file.extent import KEY_AT, Extent, Run

Found = tuple[int, Extent, int, int]
"""Keys whose records are neighbours: the place of the first one among the keys, its extent and slot, and how many."""

_BITS: Final = 20
_LOCAL: Final = (1 << _BITS) - 1
_NBYTES: Final = 12
_ENTRY = struct.Struct("<QI")
_TAG = struct.Struct("<24xQ")  # of a key
_SLOT = struct.Struct("<8xI")  # of an entry
_PER_BUCKET: Final = 32
_FULL_NBYTES: Final = 2 * _PER_BUCKET * _NBYTES
_BUCKETS_MIN: Final = 1024


class KeyIndex:
    """The slots of keys, and the extents by their ordinals."""

    def __init__(self) -> None:
        self._extents: dict[int, Extent] = {}
        self._make_buckets(_BUCKETS_MIN)

    @property
    def extents(self) -> list[Extent]:
        return list(self._extents.values())

    def join(self, extents: Sequence[Extent]) -> list[Run]:
        """Find what extents serve; the slots of older copies, which are served no more."""
        for extent in extents:
            extent.ordinal = next(i for i in range(len(self._extents) + 1) if i not in self._extents)
            self._extents[extent.ordinal] = extent
        older = self._forget_older() if any(len(extent.served) for extent in extents) else []
        slots = sum(extent.slots for extent in self.extents)
        if slots > _PER_BUCKET * len(self._buckets):
            self._make_buckets(slots // _PER_BUCKET)
            extents = self.extents
        bits = min(slots >> 18, 7).bit_length()  # buckets that grow one after the other leave no holes in memory
        for part in range(1 << bits):
            for extent in extents:
                served = extent.served
                self.add(extent, served[extent.tags[served] >> np.uint64(64 - bits) == part])
        return older

    def leave(self, extent: Extent) -> None:
        """Remove an extent from the index."""
        del self._extents[extent.ordinal]
        extent.ordinal = -1

    def find(self, keys: Sequence[BlockKey]) -> list[Found]:
        """Where the records of keys are, in the keys' order; those that have none are left out."""
        found: list[Found] = []
        buckets, shift, has, tag_of, slot_at = self._buckets, self._shift, self._has, _TAG.unpack, _SLOT.unpack_from
        at, count = 0, len(keys)
        while at < count:
            key, first = keys[at], at
            at += 1
            bucket, tag = buckets[tag_of(key)[0] >> shift], key[24:]
            entry = bucket.find(tag)
            while entry >= 0:
                (slot,) = slot_at(bucket, entry - entry % _NBYTES)
                if not entry % _NBYTES and (extent := has(slot, key, KEY_AT)):
                    local, nbytes, is_next = slot & _LOCAL, extent.head_nbytes, extent.raw.startswith
                    after = (local + 1) * nbytes + KEY_AT
                    while at < count and is_next(keys[at], after):
                        at += 1
                        after += nbytes
                    found.append((first, extent, local, at - first))
                    break
                entry = bucket.find(tag, entry + 1)
        return found

    def add(self, extent: Extent, slots: NDArray[np.int64]) -> None:
        """Find what is in these slots; no other slot may have a record of these keys."""
        self._enter(extent.tags[slots].tolist(), (slots + (extent.ordinal << _BITS)).tolist())

    def add_keys(self, extent: Extent, start: int, keys: Sequence[BlockKey]) -> None:
        """As :meth:`add`, for the keys of neighbours: without arrays, whose code is rarely in a processor's cache."""
        slot, tag_of = start + (extent.ordinal << _BITS), _TAG.unpack
        self._enter([tag_of(key)[0] for key in keys], range(slot, slot + len(keys)))

    def _enter(self, tags: Iterable[int], slots: Iterable[int]) -> None:
        buckets, shift, pack = self._buckets, self._shift, _ENTRY.pack
        for tag, slot in zip(tags, slots, strict=True):
            if len(bucket := buckets[tag >> shift]) >= _FULL_NBYTES:
                old = dict.fromkeys(bucket[i : i + _NBYTES] for i in range(0, len(bucket), _NBYTES))
                bucket = b"".join(each for each in old if self._has(_SLOT.unpack(each)[0], each[:8], KEY_AT + 24))
            buckets[tag >> shift] = bucket + pack(tag, slot)

    def _has(self, slot: int, what: bytes, at: int, /) -> Extent | None:
        """The extent of a slot whose head has these bytes."""
        extent = self._extents.get(slot >> _BITS)
        there = extent is not None and extent.raw.startswith(what, (slot & _LOCAL) * extent.head_nbytes + at)
        return extent if there else None

    def _make_buckets(self, count: int) -> None:
        """At least so many."""
        bits = (count - 1).bit_length()
        self._shift = 64 - bits  # a bucket's number is the first bits of its tags
        self._buckets = [b""] * (1 << bits)

    def _forget_older(self) -> list[Run]:
        """Of records of one key serve only the one with the highest tick."""
        tags = np.concatenate([extent.tags[extent.served] for extent in self.extents])
        tags.sort()
        twice = tags[1:][tags[1:] == tags[:-1]]
        found = [
            (int(extent.ticks[local]), extent.key_of(local), extent, local)
            for extent in (self.extents if len(twice) else ())
            for local in extent.served[np.isin(extent.tags[extent.served], twice)].tolist()
        ]
        found.sort(key=itemgetter(0))
        newest = {key: tick for tick, key, *_ in found}
        older = [(extent, local, 1) for tick, key, extent, local in found if newest[key] != tick]
        for extent, *run in older:
            extent.forget(*run)
        return older

"""In which slot the record of a key is: twelve bytes a record, in buckets that are strings.

A bucket's entries are the last eight bytes of a key and a slot; which key is meant, the slot's head says. There are as
many buckets as the extents' slots need, so that only a new extent makes more. Not locked: the store's lock is held.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.storage.file.extent import KEY_AT, UNSURE, Extent

BITS: Final = 20
"""A slot is ``extent.ordinal << BITS`` and its number in the extent."""
LOCAL: Final = (1 << BITS) - 1
NOWHERE: Final = -1

_ENTRY = struct.Struct("<8sI")
_SLOT = struct.Struct("<8xI")
_PER_BUCKET: Final = 16
_BUCKETS_MIN: Final = 1024


class KeyIndex:
    """The slots of keys, and the extents that these are in, by their ordinals."""

    def __init__(self) -> None:
        self.extents: dict[int, Extent] = {}
        self._buckets = [b""] * _BUCKETS_MIN

    def join(self, extent: Extent) -> None:
        """Give an extent an ordinal."""
        extent.ordinal = next(i for i in range(len(self.extents) + 1) if i not in self.extents)
        self.extents[extent.ordinal] = extent

    def find_all(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slot of each key, or ``NOWHERE``."""
        found: list[int] = []
        buckets, mask, extents, slot_at = self._buckets, len(self._buckets) - 1, self.extents, _SLOT.unpack_from
        for key in keys:
            bucket, tag, slot = buckets[hash(key) & mask], key[24:], NOWHERE
            at = bucket.find(tag)
            while at >= 0:
                if not at % 12:
                    (slot,) = slot_at(bucket, at)
                    extent = extents[slot >> BITS]
                    if extent.heads.startswith(key, (slot & LOCAL) * extent.head_nbytes + KEY_AT):
                        break
                    slot = NOWHERE
                at = bucket.find(tag, at + 1)
            found.append(slot)
        return found

    def find(self, key: BlockKey) -> int:
        return self.find_all((key,))[0]

    def add(self, key: BlockKey, slot: int) -> None:
        """Find ``key`` in ``slot``; it must be nowhere else."""
        buckets = self._buckets
        buckets[hash(key) & len(buckets) - 1] += _ENTRY.pack(key[24:], slot)

    def remove(self, key: BlockKey, slot: int) -> None:
        """Find ``key`` in ``slot`` no more; nothing happens if it was not."""
        which, entry = hash(key) & len(self._buckets) - 1, _ENTRY.pack(key[24:], slot)
        bucket = self._buckets[which]
        at = bucket.find(entry)
        while at % 12 and at >= 0:
            at = bucket.find(entry, at + 1)
        if at >= 0:
            self._buckets[which] = bucket[:at] + bucket[at + 12 :]

    def fit(self) -> None:
        """Have enough buckets for the extents that have joined."""
        if sum(extent.slots for extent in self.extents.values()) > _PER_BUCKET * len(self._buckets):
            self.load()

    def load(self) -> list[int]:
        """Find every record that is served; the slots of older copies, which are not found."""
        slots = sum(extent.slots for extent in self.extents.values())
        mask = (1 << max(slots // _PER_BUCKET, _BUCKETS_MIN - 1).bit_length()) - 1
        self._buckets = buckets = [b""] * (mask + 1)
        older: list[int] = []
        tags = np.sort(np.concatenate([np.empty(0, "<u8"), *map(_tags, self.extents.values())]))
        twice = {tag.tobytes() for tag in tags[1:][tags[1:] == tags[:-1]]}
        del tags
        for extent in self.extents.values():
            served = np.flatnonzero(np.frombuffer(extent.uses, np.uint8) < UNSURE)
            entries = np.empty(len(served), [("tag", "<u8"), ("slot", "<u4")])
            entries["tag"], entries["slot"] = _tags(extent), served + (extent.ordinal << BITS)
            keys = struct.iter_unpack("32s", extent.rows()[served, KEY_AT : KEY_AT + 32].tobytes())
            for (key,), (entry,) in zip(keys, struct.iter_unpack("12s", entries.tobytes()), strict=True):
                which = hash(key) & mask
                if twice and entry[:8] in twice and (known := self.find(key)) != NOWHERE:
                    slot, tick = _SLOT.unpack(entry)[0], self.extents[known >> BITS].tick(known & LOCAL)
                    if tick > extent.tick(slot & LOCAL):
                        older.append(slot)
                        continue
                    older.append(known)
                    self.remove(key, known)
                buckets[which] += entry
        return older


def _tags(extent: Extent) -> NDArray[np.uint64]:
    """The last eight bytes of the keys that an extent serves, in the order of their slots."""
    served = np.frombuffer(extent.uses, np.uint8) < UNSURE
    return np.ascontiguousarray(extent.rows()[served, KEY_AT + 24 : KEY_AT + 32]).view("<u8")[:, 0]

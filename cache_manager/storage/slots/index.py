"""In which slot the record of a key is: twelve bytes a record, in buckets that are strings.

A bucket's entries are the last eight bytes of a key and a slot; which key is meant, the slot's head says. So an entry
whose slot has gone, or holds another record by now, finds nothing. Buckets are split one at a time as records come
(linear hashing), so that no call pays for all of them. Not locked: the store's lock is held around every call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Final

import numpy as np

from cache_manager.keys import BlockKey
from cache_manager.storage.slots.extent import KEY_AT, Extent

ORDINAL_BITS: Final = 20
"""A slot is ``extent.ordinal << ORDINAL_BITS`` and its number in the extent."""
LOCAL: Final = (1 << ORDINAL_BITS) - 1
EXTENTS_MAX: Final = 1 << 12
NOWHERE: Final = -1

_ENTRY = struct.Struct("<8sI")
_SLOT = struct.Struct("<8xI")
_PER_BUCKET: Final = 5
_LONG_NBYTES: Final = 4 * _PER_BUCKET * _ENTRY.size
_BUCKETS_MIN: Final = 1024


class KeyIndex:
    """The slots of keys, and the extents that these are in, by their ordinals."""

    def __init__(self) -> None:
        self.extents: dict[int, Extent] = {}
        self._entries = 0
        self._buckets = [b""] * _BUCKETS_MIN
        self._mask = _BUCKETS_MIN - 1  # of the buckets that there will be when all of this round are split

    def join(self, extent: Extent) -> None:
        """Give an extent an ordinal; its records are found when they were added."""
        extent.ordinal = next(i for i in range(EXTENTS_MAX) if i not in self.extents)
        self.extents[extent.ordinal] = extent

    def leave(self, extent: Extent) -> None:
        """Find nothing in an extent any more."""
        del self.extents[extent.ordinal]

    def find_all(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slot of each key, or ``NOWHERE``."""
        found: list[int] = []
        buckets, mask, extents, slot_at = self._buckets, self._mask, self.extents, _SLOT.unpack_from
        count = len(buckets)
        for key in keys:
            at = hash(key) & mask
            bucket, tag, slot = buckets[at if at < count else at & mask >> 1], key[24:], NOWHERE
            at = bucket.find(tag)
            while at >= 0:
                if not at % 12:
                    (slot,) = slot_at(bucket, at)
                    extent = extents.get(slot >> ORDINAL_BITS)
                    if extent is not None and extent.heads.startswith(
                        key, (slot & LOCAL) * extent.shape.head_nbytes + KEY_AT
                    ):
                        break
                    slot = NOWHERE
                at = bucket.find(tag, at + 1)
            found.append(slot)
        return found

    def find(self, key: BlockKey) -> int:
        return self.find_all((key,))[0]

    def add(self, key: BlockKey, slot: int) -> None:
        """Find ``key`` in ``slot``; it must be nowhere else."""
        which = hash(key) & self._mask
        if which >= len(self._buckets):
            which &= self._mask >> 1
        bucket = self._buckets[which]
        if len(bucket) >= _LONG_NBYTES:
            bucket = b"".join(self._living(bucket))
        self._buckets[which] = bucket + _ENTRY.pack(key[24:], slot)
        self._entries += 1
        if self._entries > _PER_BUCKET * len(self._buckets):
            self._split()

    def remove(self, key: BlockKey, slot: int) -> None:
        """Find ``key`` in ``slot`` no more; nothing happens if it was not."""
        which = hash(key) & self._mask
        if which >= len(self._buckets):
            which &= self._mask >> 1
        bucket, entry = self._buckets[which], _ENTRY.pack(key[24:], slot)
        at = bucket.find(entry)
        while at % 12 and at >= 0:
            at = bucket.find(entry, at + 1)
        if at >= 0:
            self._buckets[which] = bucket[:at] + bucket[at + 12 :]
            self._entries -= 1

    def load(self) -> list[int]:
        """Find every living record of the extents that have joined; the slots of older copies, which are not found."""
        keys, ticks, slots = [], [], []
        for extent in self.extents.values():
            living = np.flatnonzero(extent.column("<u8"))
            rows = extent.rows()[living]
            keys.append(rows[:, KEY_AT : KEY_AT + 32].copy())
            ticks.append(rows[:, :8].copy().view("<u8")[:, 0])
            slots.append((living + (extent.ordinal << ORDINAL_BITS)).astype(np.uint32))
        if not keys:
            return []
        key, tick, slot = np.concatenate(keys), np.concatenate(ticks), np.concatenate(slots)
        del keys, ticks, slots
        tags = np.ascontiguousarray(key[:, 24:]).view("<u8")[:, 0]
        order = np.argsort(tags, kind="stable")
        twice = tags[order[1:]] == tags[order[:-1]]
        doubted = (
            order[np.concatenate([twice, [False]]) | np.concatenate([[False], twice])] if twice.any() else order[:0]
        )
        latest: dict[bytes, int] = {}
        older: list[int] = []
        for i in doubted.tolist():
            name = key[i].tobytes()
            other = latest.get(name)
            if other is None or tick[other] < tick[i]:
                latest[name] = i
            if other is not None:
                older.append(i if latest[name] == other else other)
        kept = np.ones(len(slot), bool)
        kept[older] = False
        gone: list[int] = slot[older].tolist()
        key, slot, tags = key[kept], slot[kept], tags[kept]
        hashes = np.fromiter(
            map(hash, chain.from_iterable(struct.iter_unpack("32s", key.tobytes()))), np.int64, len(slot)
        )
        self._entries = len(slot)
        count = max(_BUCKETS_MIN, self._entries // _PER_BUCKET)
        self._mask = (1 << (count - 1).bit_length()) - 1
        at = (hashes & self._mask).astype(np.uint32)
        at[at >= count] &= self._mask >> 1
        order = np.argsort(at)
        entries = np.empty(len(slot), np.dtype([("tag", "<u8"), ("slot", "<u4")]))
        entries["tag"], entries["slot"] = tags[order], slot[order]
        flat, bounds = entries.tobytes(), np.searchsorted(at[order], np.arange(count + 1)) * 12
        self._buckets = [flat[start:stop] for start, stop in pairwise(bounds.tolist())]
        return gone

    def _living(self, bucket: bytes) -> list[bytes]:
        """The entries that find something."""
        entries = [bucket[at : at + 12] for at in range(0, len(bucket), 12)]
        living = []
        for entry in entries:
            tag, slot = _ENTRY.unpack(entry)
            extent = self.extents.get(slot >> ORDINAL_BITS)
            if extent is not None and extent.key_of(slot & LOCAL).endswith(tag):
                living.append(entry)
        self._entries -= len(entries) - len(living)
        return living

    def _key_of(self, entry: bytes) -> BlockKey:
        slot = _SLOT.unpack(entry)[0]
        return self.extents[slot >> ORDINAL_BITS].key_of(slot & LOCAL)

    def _split(self) -> None:
        """One bucket more, with what belongs there of the bucket that had it until now."""
        new = len(self._buckets)
        if new > self._mask:
            self._mask = 2 * self._mask + 1
        source, mask = new & self._mask >> 1, self._mask
        entries = self._living(self._buckets[source])
        moves = [hash(self._key_of(entry)) & mask == new for entry in entries]
        self._buckets[source] = b"".join([entry for entry, goes in zip(entries, moves, strict=True) if not goes])
        self._buckets.append(b"".join([entry for entry, goes in zip(entries, moves, strict=True) if goes]))

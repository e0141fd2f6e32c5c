"""In which slot the record of a key is: a chain of slots for each bucket of keys, ten bytes a slot.

The last bytes of a key say its bucket. A bucket has its first slot, an extent the slot after each of its own. A slot
is in the chain that its head in memory says, or in none; a forgotten one stays there until it gets another head. The
number of buckets follows the extents' slots, so only a new extent makes more. Not locked: the store's lock is held.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Container, Iterable, Sequence
from itertools import compress
from typing import Final

import numpy as np

from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.lock import change
from cache_manager.storage.file.extent import BLANK, KEY_AT, TAIL, USES_MAX, Extent, Run
from cache_manager.storage.guard import StoreLock

Found = tuple[int, Extent, int, int]
"""Keys whose records are neighbours: the place of the first one among the keys, its extent, which slot of that extent
(``local``; a chain's *slot* names the extent, too), and how many."""

_BITS: Final = 20
_LOCAL: Final = (1 << _BITS) - 1
_TAIL: Final = struct.Struct(f"<{TAIL}")
_BUCKETS_MIN: Final = 1024
_FREE: Final = bytes(KEY_NBYTES)
"""What stands in a free slot where others have their key."""
ANY_TAIL: Final = range(1 << 32)


class KeyIndex:
    """The slots of keys, and the extents by their ordinals, of which the first one is 1: no slot is 0.

    If a change is interrupted, the store's ``lock`` stays torn.
    """

    def __init__(self, lock: StoreLock) -> None:
        self.lock = lock
        self._extents: dict[int, Extent] = {}
        self._make_buckets(_BUCKETS_MIN)

    @property
    def extents(self) -> list[Extent]:
        return list(self._extents.values())

    @change
    def join(self, extents: Sequence[Extent], older: list[Run]) -> None:
        """Find what extents serve; ``older`` gets the slots of older copies, which are served no more."""
        for extent in extents:
            extent.ordinal = next(i for i in range(1, len(self._extents) + 2) if i not in self._extents)
            self._extents[extent.ordinal] = extent
        slots = sum(extent.slots for extent in self.extents)
        if slots > len(self._firsts):
            self._make_buckets(slots)
            extents = self.extents
        twice = self._twice() if any(extent.ticks.any() for extent in extents) else ()
        for extent in extents:
            is_served = (extent.uses <= USES_MAX).tobytes()
            self._link(extent, compress(extent.tails_in(0, extent.slots), is_served), twice, older)

    @change
    def leave(self, extent: Extent) -> None:
        """Remove an extent from the index."""
        self._unlink(extent, 0, extent.slots)
        del self._extents[extent.ordinal]
        extent.ordinal = 0

    def find(self, keys: Sequence[BlockKey]) -> list[Found]:
        """Where the records of keys are, in the keys' order; those that have none are left out."""
        found: list[Found] = []
        firsts = self._firsts
        shift = self._shift
        tail_of = _TAIL.unpack
        extents = self._extents
        at = 0
        count = len(keys)
        while at < count:
            key = keys[at]
            first = at
            at += 1
            slot = firsts[tail_of(key)[0] >> shift]
            while slot:
                extent = extents[slot >> _BITS]
                local = slot & _LOCAL
                nbytes = extent.head_nbytes
                is_next = extent.raw.startswith
                if is_next(key, after := local * nbytes + KEY_AT):
                    while at < count and is_next(keys[at], after := after + nbytes) and keys[at] != _FREE:
                        at += 1
                    found.append((first, extent, local, at - first))
                    break
                slot = extent.nexts[local]
        return found

    @change
    def hold(self, extent: Extent, start: int, heads: bytearray, repeats: Container[int], older: list[Run]) -> None:
        """Serve records in slots. Of keys with a tail in ``repeats`` there may be copies: the older ones are forgotten,
        and ``older`` gets their slots."""
        count = len(heads) // extent.head_nbytes
        if extent.use_bytes[start] != BLANK:  # taken when it was free: it is in no chain
            self._unlink(extent, start, count)
        extent.hold(start, heads)
        self._link(extent, extent.tails_in(start, count), repeats, older)

    @change
    def release(self, extent: Extent, start: int, count: int) -> None:
        """Let slots that hold nothing, and have no heads on the disk, be taken again."""
        self._unlink(extent, start, count)
        extent.release(start, count)

    def _twice(self) -> set[int]:
        """The tails that several keys in the extents have, as copies do."""
        tails = np.concatenate([extent.tails for extent in self.extents])
        tails.sort()
        later = tails[1:]
        twice = later[later == tails[:-1]]
        return set(twice.tolist())

    def _link(
        self, extent: Extent, slots: Iterable[tuple[int, tuple[int]]], repeats: Container[int], older: list[Run]
    ) -> None:
        firsts = self._firsts
        shift = self._shift
        nexts = extent.nexts
        ordinal = extent.ordinal << _BITS
        for local, (tail,) in slots:
            bucket = tail >> shift
            if tail in repeats and (found := self.find([extent.key_of(local)])):
                _, other, there, _ = found[0]
                is_older = other.ticks[there] < extent.ticks[local]
                older.append((other, there, 1) if is_older else (extent, local, 1))
                Extent.forget(*older[-1])
            nexts[local] = firsts[bucket]
            firsts[bucket] = ordinal + local

    def _unlink(self, extent: Extent, start: int, count: int) -> None:
        firsts = self._firsts
        shift = self._shift
        nexts = extent.nexts
        ordinal = extent.ordinal << _BITS
        for local, (tail,) in extent.tails_in(start, count):
            slots = firsts
            at = tail >> shift
            mine = ordinal + local
            while (slot := slots[at]) and slot != mine:
                slots = self._extents[slot >> _BITS].nexts
                at = slot & _LOCAL
            if slot:
                slots[at] = nexts[local]

    def _make_buckets(self, count: int) -> None:
        """At least so many."""
        bits = (count - 1).bit_length()
        self._firsts = array("I", [0]) * (1 << bits)
        self._shift = 32 - bits

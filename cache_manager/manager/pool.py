"""Which blocks of a block manager are free, which are cached, which are away, and who gets the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockStateError
from cache_manager.keys import BlockKey
from cache_manager.manager.index import PrefixIndex
from cache_manager.ports import TierName

Ints = NDArray[np.int64]


class FreeBlocks:
    """The blocks of one tier that no sequence has and that have no content worth keeping.

    A block that a sequence has let go while a store job, a move, a step in place or a lease that somebody has taken
    around the manager still keeps it is *away*: :meth:`back` brings it once that has ended.
    """

    __slots__ = ("_aux", "away", "free", "tier")

    def __init__(self, aux: AuxBlocks, tier: TierName, blocks: int) -> None:
        self._aux, self.tier = aux, tier
        self.free = list(range(blocks - 1, -1, -1))  # the last one is given first
        self.away: dict[int, None] = {}  # in the order in which they were let go

    def sort_out(self, blocks: Sequence[int]) -> list[int]:
        """Of blocks that no sequence has any more, those that can be had; the others are away."""
        if not blocks:
            return []
        fine = self._aux.available(blocks, self.tier)
        if count(fine) == len(blocks):
            return list(blocks)
        self.away.update((block, None) for block, here in zip(blocks, fine.tolist(), strict=True) if not here)
        return [block for block, here in zip(blocks, fine.tolist(), strict=True) if here]

    def back(self, without: Collection[int] = ()) -> list[int]:
        """The blocks that are away no longer; those ``without`` are not asked about."""
        if not self.away:
            return []
        blocks = [block for block in self.away if block not in without]
        for block in blocks:
            del self.away[block]
        return self.sort_out(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Blocks that can be had: their rows are forgotten."""
        while blocks:
            try:
                self._aux.evict(blocks, self.tier)
            except BlockStateError:  # another thread has leased one just now
                blocks = self.sort_out(blocks)
            else:
                self.free.extend(blocks)
                return

    @property
    def room(self) -> int:
        """How many blocks can be had."""
        self.add(self.back())
        return len(self.free)

    def let_go(self, blocks: Sequence[int]) -> None:
        """A sequence has these blocks no longer."""
        self.add(self.sort_out(blocks))

    def next(self, n: int) -> list[int]:
        """The ``n`` blocks, or all there are, that would be given first."""
        return self.free[: -n - 1 : -1] if n else []

    def remove(self, blocks: Sequence[int]) -> None:
        """Give away ``blocks``, which :meth:`next` has named."""
        if blocks:
            assert self.free[: -len(blocks) - 1 : -1] == list(blocks), "blocks that next() has not named"
            del self.free[-len(blocks) :]


class BlockPool:
    """The blocks of ``aux`` that no sequence has: free ones, cached ones that ``index`` finds by key, those away.

    ``uses`` counts, by device block, the sequences and holders that have it; ``keeps`` the holders among them, which
    read nothing.
    """

    def __init__(self, aux: AuxBlocks, counts: Counter[str]) -> None:
        self._aux, self._counts = aux, counts
        self.index = PrefixIndex(aux.device_blocks)
        self.uses: NDArray[np.int32] = np.zeros(aux.device_blocks, np.int32)
        self.keeps: NDArray[np.int32] = np.zeros(aux.device_blocks, np.int32)
        self._holders = aux.holders()
        self._device = FreeBlocks(aux, "device", aux.device_blocks)
        self.host = FreeBlocks(aux, "host", aux.host_blocks)
        # One element of a memoryview costs a third of one element of an array.
        self._indexed_at, self._holders_at = self.index.indexed.data, self._holders.data
        self._keeps_at, self._uses_at = self.keeps.data, self.uses.data

    # ---------------------------------------------------------------- looking

    @property
    def device_room(self) -> int:
        """Blocks that :meth:`take` could give: free ones and cached ones that nobody holds."""
        self._come_back()
        return len(self._device.free) + self.index.idle

    def others_use(self, block: int) -> bool:
        """Whether anybody but one sequence may read the block, now or when it is found by key: it is not written then.

        Leases that somebody has taken around the manager count, those of holders do not.
        """
        return self._holders_at[block] - self._keeps_at[block] > 1 or bool(self._indexed_at[block])

    def readers(self, block: int) -> int:
        """How many may read the block by a lease of their own, holders not counted."""
        return int(self._holders_at[block] - self._keeps_at[block])

    def used_by_others(self, blocks: Ints) -> NDArray[np.bool_]:
        """:meth:`others_use` of each of ``blocks``."""
        shared = self._holders.take(blocks) - self.keeps.take(blocks) > 1
        return shared | self.index.indexed.take(blocks)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest cached run of ``keys``; with ``gate``, of those whose rows are complete."""
        found = self.index.match(keys)
        if found and self._aux.policy == "gate":
            complete = self._aux.complete(found)
            if count(complete) != len(found):
                self._counts["hits_cut_for_missing_rows"] += 1
                found = found[: int(np.argmin(complete))]
        return found

    # ---------------------------------------------------------------- giving

    def take(self, owners: Sequence[str], *, whole: bool = False, without: Sequence[int] = ()) -> list[int]:
        """Give each of ``owners`` a device block, free ones first, then cached ones, oldest first.

        As many as there are, for the first of the owners; with ``whole`` none unless there are enough. Blocks
        ``without`` are about to be shared, and not given.
        """
        excluded = frozenset(without)
        self._come_back(excluded)
        while True:
            chosen = self._first(len(owners), excluded)
            if not chosen or (whole and len(chosen) < len(owners)):
                return []
            try:
                self._aux.allocate_each(chosen, owners[: len(chosen)])
            except BlockStateError:  # somebody has taken one around the manager
                if not self._set_aside(chosen):
                    raise
            else:
                self.take_out(chosen)
                return chosen

    def choose(self, n: int) -> tuple[list[int], int]:
        """``n`` device blocks that :meth:`take_out` would take, or none; how many of them, the first ones, are free.

        They stay as they are if a move fails.
        """
        self._come_back()
        while len(chosen := self._first(n)) == n:
            if not self._set_aside(chosen):
                return chosen, min(n, len(self._device.free))
        return [], 0

    def _first(self, n: int, without: frozenset[int] = frozenset()) -> list[int]:
        free = self._device.next(n)
        return free if len(free) == n else free + self.index.oldest(n - len(free), without)

    def _set_aside(self, blocks: Sequence[int]) -> bool:
        """Count those of ``blocks`` that cannot be had as away; whether there were any."""
        here = set(self._device.sort_out(blocks))
        bad = [block for block in blocks if block not in here]
        self._device.free = [block for block in self._device.free if block not in self._device.away]
        self.index.hold(bad)
        return bool(bad)

    def take_out(self, blocks: Sequence[int]) -> None:
        """``blocks``, chosen just now, have become a sequence's."""
        free = min(len(blocks), len(self._device.free))
        self._device.remove(blocks[:free])
        for block in blocks[free:]:
            self.index.remove(block)
            self._counts["evicted_blocks"] += 1
        for block in blocks:
            self._uses_at[block] = 1

    def forget_cached(self, blocks: Sequence[int]) -> None:
        """Cached ``blocks`` have lost their content: they are free."""
        lost = [block for block in blocks if self.index.indexed[block]]
        for block in lost:
            self.index.remove(block)
        self._counts["evicted_blocks"] += len(lost)
        self._device.let_go(lost)

    def share(self, blocks: Sequence[int], owner: str, *, keeps: bool = False) -> None:
        """Let ``owner`` have device blocks with content, too; they are not evicted while it does."""
        if not blocks:
            return
        self._aux.share(blocks, owner)
        ids = np.asarray(blocks, np.int64)
        self.uses[ids] += 1
        self.keeps[ids] += keeps
        self.index.hold(blocks)
        for block in blocks if self._device.away else ():
            self._device.away.pop(block, None)

    # ---------------------------------------------------------------- getting back

    def let_go(self, blocks: Ints, *, keeps: bool = False) -> None:
        """A sequence has these device blocks no longer, in token order: each is cached if it can be found by key."""
        self.uses[blocks] -= 1
        if keeps:
            self.keeps[blocks] -= 1
        gone = blocks[self.uses.take(blocks) == 0]
        if gone.size:
            self._retire(self._device.sort_out(gone[::-1].tolist()))  # a chain loses its tail before its head

    def _come_back(self, without: Collection[int] = ()) -> None:
        """What is away no longer can be had; not what is about to be shared, whose key a duplicate might take."""
        if self._device.away:
            self._retire(self._device.back(without))

    def _retire(self, blocks: Sequence[int]) -> None:
        """Blocks that can be had and no sequence has: cached where a key is found at them and no duplicate takes it."""
        for block in blocks:
            heir = self.index.heir(block)
            if heir is not None and self._as_good(heir, block):
                self.index.promote(heir)
        self._device.add(self.index.release(blocks))

    def _as_good(self, block: int, other: int) -> bool:
        """Whether ``block`` has every required row, or ``other`` misses one too."""
        first, second = self._aux.complete([block, other]).tolist()
        return first or not second

    def publish(self, key: BlockKey, block: int) -> None:
        """Let a held block be found under ``key``, also in place of another, unless that has rows that this misses.

        The other is free then if nobody holds it.
        """
        before = self.index.insert(key, block)
        if before is None or not self._as_good(block, before):
            return
        self.index.promote(block)
        if not self.uses[before] and before not in self._device.away:
            self._device.let_go([before])

    def forget(self) -> None:
        """After a reset: nothing is found by key, and what was only cached is free."""
        self._device.let_go(self.index.clear())

    def assert_consistent(self, device: Sequence[int], host: Sequence[int]) -> None:
        """Raise ``AssertionError`` unless every block is free, cached, away or a sequence's, once, in each tier.

        ``device`` and ``host`` are the blocks of all sequences and holders, as often as they have them.
        """
        self.index.assert_consistent()
        counted = np.bincount(np.asarray(device, np.int64), minlength=self.uses.size)
        assert (self.uses == counted).all(), "the uses of device blocks differ from the sequences' blocks"
        assert (self.keeps >= 0).all(), "a device block is kept by fewer than none"
        assert (self.keeps <= self.uses).all(), "a device block is kept by more than have it"
        free, away = set(self._device.free), self._device.away.keys()
        idle = set(self.index.oldest(self.index.idle))
        held = set(np.flatnonzero(self.uses).tolist())
        assert len(free) == len(self._device.free), "a device block is free twice"
        parts = [*free, *away, *idle, *held]
        assert sorted(parts) == list(range(self.uses.size)), "a device block is lost or in two places"
        assert not any(self.index.indexed[block] for block in free), "a free block is indexed"
        everywhere = [*host, *self.host.free, *self.host.away]
        assert sorted(everywhere) == list(range(self._aux.host_blocks)), "a host block is lost or shared"

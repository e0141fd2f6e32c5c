"""Which blocks of a block manager are free, which are cached, and who gets the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from cache_manager.aux_blocks import AuxBlocks, TierName
from cache_manager.errors import BlockBusyError
from cache_manager.keys import BlockKey
from cache_manager.manager_counters import ManagerCounts
from cache_manager.ports import HitPolicy
from cache_manager.prefix_index import PrefixIndex


class BlockPool:
    """The blocks of ``aux`` that nobody holds: free ones, and cached ones that ``index`` finds by key.

    It takes and gives blocks, and tells ``aux`` when their rows are to be forgotten. That there is room is for the
    caller to see to, with :attr:`device_room` and :attr:`host_room`.
    """

    def __init__(self, aux: AuxBlocks, policy: HitPolicy, counts: ManagerCounts) -> None:
        self.index = PrefixIndex()
        self._aux = aux
        self._policy = policy
        self._counts = counts
        self._free = list(range(aux.device_blocks - 1, -1, -1))
        self._host_free = list(range(aux.host_blocks - 1, -1, -1))

    @property
    def device_room(self) -> int:
        """Blocks that :meth:`take` could give: free ones and cached ones that nobody holds."""
        return len(self._free) + self.index.idle

    @property
    def host_room(self) -> int:
        return len(self._host_free)

    # ---------------------------------------------------------------- giving

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest cached run of ``keys``; with ``gate``, of those whose rows are complete."""
        found = self.index.match(keys)
        if found and self._policy == "gate":
            complete = self._aux.complete(found)
            if not complete.all():
                self._counts.count("hits_cut_for_missing_rows")
                found = found[: int(np.argmin(complete))]
        return found

    def share(self, cached: Sequence[int], owner: str) -> None:
        """Let ``owner`` hold blocks that were matched: they are not evicted while it does."""
        self._aux.share(cached, owner)
        self.index.hold(cached)

    def take(self, count: int, owner: str | None) -> list[int]:
        """``count`` blocks that nobody holds, cached ones last; allocated to ``owner`` if there is one."""
        taken = []
        for _ in range(count):
            if self._free:
                taken.append(self._free.pop())
                continue
            block = self.index.evict()
            assert block is not None, "room was checked before"
            taken.append(block)
            self._counts.count("evicted_blocks")
        if owner is not None and taken:
            try:
                self._aux.allocate(taken, owner)
            except BaseException:
                self._free.extend(reversed(taken))
                raise
        return taken

    def next_host(self, count: int) -> list[int]:
        """The host blocks that :meth:`take_host` would take; they stay free if a move into them fails."""
        return self._host_free[: -count - 1 : -1]

    def take_host(self, count: int) -> None:
        del self._host_free[len(self._host_free) - count :]

    @contextmanager
    def giving_back(self, owner: str | None, taken: Sequence[int]) -> Iterator[None]:
        """Return what :meth:`take` gave if the body raises."""
        try:
            yield
        except BaseException:
            if owner is not None:
                self._aux.free(owner, taken)
            self.retire(taken, "device")
            raise

    # ---------------------------------------------------------------- getting back

    def retire(self, blocks: Sequence[int], tier: TierName) -> None:
        """Blocks that a sequence has let go: cached if they can be found by key, free otherwise, unless still held."""
        unheld = self._aux.unheld(blocks, tier)
        if tier == "host":
            self._aux.evict(unheld, "host")
            self._host_free.extend(unheld)
            return
        loose = self.index.release(reversed(unheld))
        self._free.extend(loose)
        with suppress(BlockBusyError):  # being stored by another thread; nobody can find its rows by key
            self._aux.evict(loose)

    def publish(self, key: BlockKey, block: int) -> None:
        """Let a held block be found under ``key``, also in place of one that misses rows, if it has them all."""
        if self.index.insert(key, block):
            return
        (earlier,) = self.index.match([key])
        first, second = self._aux.complete([earlier, block]).tolist()
        if first or not second:
            return
        self.index.remove(earlier)
        self.index.insert(key, block)
        self.retire([earlier], "device")

    def forget(self) -> None:
        """After a reset: nothing is found by key, and what was only cached is free."""
        self._free.extend(self.index.clear())

    def assert_consistent(self, held: set[int], host_held: Sequence[int]) -> None:
        """Raise ``AssertionError`` unless every block is free, cached or in ``held``, once, in each tier."""
        self.index.assert_consistent()
        free, idle = set(self._free), self.index.idle
        assert len(free) == len(self._free), "a device block is free twice"
        assert not free & held, "a device block is free and held"
        assert len(free) + idle + len(held) == self._aux.device_blocks, "a device block is lost"
        assert all(self.index.key(b) is None for b in free), "a free block is indexed"
        host = [*host_held, *self._host_free]
        assert sorted(host) == list(range(self._aux.host_blocks)), "a host block is lost or shared"


__all__ = ["BlockPool"]

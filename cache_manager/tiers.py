"""The tables of one set of blocks: the device's, and the host's where there are host blocks. One lock for all."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from cache_manager.errors import BlockStateError, InvalidInputError
from cache_manager.lock import Mistakes
from cache_manager.own_keys import OwnKeys
from cache_manager.ports import TierName
from cache_manager.regions import Memory, region_in
from cache_manager.spec import RecordLayout
from cache_manager.table import BlockTable


class Tiers:
    """A table for each tier that has blocks, as ``blocks`` says, over regions in ``memory``.

    Their rows are of the namespace of ``keys``. The tables are mended where a call was interrupted.
    """

    def __init__(
        self, blocks: dict[TierName, int], memory: Memory, layout: RecordLayout, keys: OwnKeys, mistakes: Mistakes
    ) -> None:
        self._keys = keys
        self._mistakes = mistakes
        self._lock = lock = mistakes.lock
        self._tables: dict[TierName, BlockTable] = {}
        try:
            for tier, n in blocks.items():
                if n:
                    region = region_in(memory, layout, n, tier, keys.chain.namespace)
                    self._tables[tier] = BlockTable(tier, region, lock)
        except BaseException:
            self.close()
            raise
        lock.mend = self._mend

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self._tables.values())

    def __getitem__(self, tier: TierName) -> BlockTable:
        """The tier's table; :class:`BlockStateError` after the end, :class:`InvalidInputError` for no such tier."""
        self._lock.check_open()
        table = self._tables.get(tier) if isinstance(tier, str) else None
        if table is None:
            raise InvalidInputError("tier", "'device', or 'host' with host_blocks > 0", repr(tier))
        return table

    @property
    def in_flight(self) -> int:
        """Steps and moves that have begun and not ended. The lock is held."""
        n = 0
        for table in self:
            n += len(table.steps)
            n += sum(not fence.over for fence in table.fences)
        return n

    def forget_all(self) -> None:
        for table in self:
            table.forget_all()

    def enter(self) -> None:
        """Rows that come from here on are of the present namespace of the keys, for readers in other processes too;
        none is readable."""
        fingerprint = self._keys.chain.namespace.fingerprint
        for table in self:
            table.region.enter(fingerprint)

    def _mend(self) -> None:
        """Forget all rows: a change was interrupted, or a loss could not be recorded. The lock is held."""
        for table in self:
            table.lose(None)
        self.enter()
        self._mistakes.report("interrupted_calls", 1, "a call was interrupted in the middle: all rows are forgotten")

    def check_still(self, *, jobs: int) -> None:
        """:class:`BlockStateError` while steps or moves, or these ``jobs``, are in flight. The lock is held."""
        moving = self.in_flight
        if moving or jobs:
            raise BlockStateError("close", "nothing in flight", f"{moving} steps and moves, {jobs} jobs")

    def close(self) -> None:
        """Give the memory back; idempotent. ``BufferError`` while a view of a region is alive."""
        for table in reversed(self._tables.values()):
            table.items.drop()
            try:
                table.region.close()
            except BufferError:
                gc.collect()  # a store that failed leaves its frames, and their views, in a cycle with the exception
                table.region.close()

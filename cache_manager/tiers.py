"""The tables of one set of blocks: the device's, and the host's where there are host blocks. One lock for all."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.lock import Lock
from cache_manager.ports import TierName
from cache_manager.regions import Memory, region_in
from cache_manager.spec import RecordLayout
from cache_manager.table import BlockTable


class Tiers:
    """A table for each tier that has blocks, as ``blocks`` says, over regions in ``memory``."""

    def __init__(
        self, blocks: dict[TierName, int], memory: Memory, layout: RecordLayout, namespace: Namespace, lock: Lock
    ) -> None:
        self._lock = lock
        self._tables: dict[TierName, BlockTable] = {}
        try:
            for tier, n in blocks.items():
                if n:
                    region = region_in(memory, layout, n, tier, namespace)
                    self._tables[tier] = BlockTable(tier, region, lock)
        except BaseException:
            self.close()
            raise

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
        return sum(len(table.steps) + sum(not fence.over for fence in table.fences) for table in self)

    def forget_all(self) -> None:
        for table in self:
            table.forget_all()

    def enter(self, namespace: Namespace) -> None:
        """Rows that come from here on are of this namespace, for readers in other processes too; none is readable."""
        for table in self:
            table.region.enter(namespace.fingerprint)

    def close(self) -> None:
        """Give the memory back; idempotent. ``BufferError`` while a view of a region is alive."""
        for table in reversed(self._tables.values()):
            table.items.drop()
            try:
                table.region.close()
            except BufferError:
                gc.collect()  # a store that failed leaves its frames, and their views, in a cycle with the exception
                table.region.close()

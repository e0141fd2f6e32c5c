"""Both tiers of one set of blocks: made together, asked for by name, given back together."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Literal

from cache_manager.checks import count_in_range
from cache_manager.errors import BlockStateError, ConfigError, InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.memory import check_region
from cache_manager.ports import Region, TierName
from cache_manager.regions.heap import HeapRegion
from cache_manager.regions.shared import SharedRegion
from cache_manager.spec import RecordLayout
from cache_manager.table import BlockTable, Origins

Memory = Literal["heap", "shared"] | Mapping[TierName, Region]
"""Where rows lie: this process's memory, SharedMemory that others may attach, or regions that the embedder made."""


class Tiers:
    """The device tier and, unless ``host_blocks`` is 0, the host tier; iterated in this order.

    Owns their regions, unless they were passed in. Once closed, whoever asks for a tier gets :class:`BlockStateError`.
    """

    __slots__ = ("_closed", "_device", "_host", "_lent")

    def __init__(
        self,
        layout: RecordLayout,
        namespace: Namespace,
        *,
        device_blocks: int,
        host_blocks: int,
        memory: Memory,
        owned_by_engine: bool = False,
    ) -> None:
        count_in_range(device_blocks, "device_blocks", 1)
        count_in_range(host_blocks, "host_blocks", 0)
        if memory not in ("heap", "shared") and not isinstance(memory, Mapping):
            raise ConfigError("memory", "'heap', 'shared' or regions by tier", repr(memory))
        self._closed = False
        self._lent = isinstance(memory, Mapping)
        draw = Origins()

        def table(tier: TierName, blocks: int) -> BlockTable:
            region = _region(layout, namespace, tier, blocks, memory)
            return BlockTable(tier, region, draw, owned_by_engine=owned_by_engine)

        self._device = table("device", device_blocks)
        self._host: BlockTable | None = None
        if host_blocks:
            try:
                self._host = table("host", host_blocks)
            except BaseException:
                self._give_back(self._device)
                raise

    @property
    def device(self) -> BlockTable:
        if self._closed:
            raise BlockStateError("AuxBlocks", "one that is open", "one that was closed")
        return self._device

    @property
    def host(self) -> BlockTable | None:
        return self._host if self.device else None

    def named(self, name: TierName) -> BlockTable:
        """:class:`InvalidInputError` for a host tier that there is not, or for another name."""
        if name == "device":
            return self.device
        if name != "host":
            raise InvalidInputError("tier", "'device' or 'host'", repr(name))
        if (host := self.host) is None:
            raise InvalidInputError("tier", "host_blocks > 0 for the host tier", 0)
        return host

    def __iter__(self) -> Iterator[BlockTable]:
        yield self.device
        if self._host is not None:
            yield self._host

    @property
    def steps(self) -> int:
        """Steps in flight, also of tiers that are closed."""
        return len(self._device.steps)

    def close(self) -> None:
        """Give the regions back; idempotent. ``BufferError`` while somebody else sees their memory: call it again."""
        self._closed = True
        for table in (self._host, self._device):
            if table is not None:
                self._give_back(table)

    def _give_back(self, table: BlockTable) -> None:
        table.view(drop=True)
        if self._lent:
            return
        try:
            table.region.close()
        except BufferError:
            # A store that failed leaves its frames, and their views of the rows, in a cycle with the exception.
            gc.collect()
            try:
                table.region.close()
            except BufferError:
                table.view()
                raise


def _region(layout: RecordLayout, namespace: Namespace, tier: TierName, blocks: int, memory: Memory) -> Region:
    if isinstance(memory, Mapping):
        if tier not in memory:
            raise ConfigError("memory", f"a region for the {tier} tier", "none")
        check_region(memory[tier], layout, blocks)
        return memory[tier]
    if memory == "heap":
        return HeapRegion(layout, blocks)
    return SharedRegion.create(layout, blocks, tier=tier, namespace=namespace.fingerprint)


__all__ = ["Memory", "Tiers"]

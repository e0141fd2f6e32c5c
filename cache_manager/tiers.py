"""Both tiers of one :class:`AuxBlocks`: made together, asked for by name, given back together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from cache_manager.checks import count_in_range
from cache_manager.errors import BlockStateError, ConfigError, InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.ports import Region
from cache_manager.regions.heap import HeapRegion
from cache_manager.regions.shared import SharedRegion
from cache_manager.spec import RecordLayout
from cache_manager.tier import Tier

TierName = Literal["device", "host"]
Memory = Literal["heap", "shared"]


class Tiers:
    """The device tier and, unless ``host_blocks`` is 0, the host tier; iterated in this order.

    Owns their regions. Once closed, whoever asks for a tier gets :class:`BlockStateError`.
    """

    __slots__ = ("_closed", "_device", "_host")

    def __init__(
        self, layout: RecordLayout, namespace: Namespace, *, device_blocks: int, host_blocks: int, memory: Memory
    ) -> None:
        count_in_range(device_blocks, "device_blocks", 1)
        count_in_range(host_blocks, "host_blocks", 0)
        if memory not in ("heap", "shared"):
            raise ConfigError("memory", "'heap' or 'shared'", repr(memory))

        def region(blocks: int, purpose: Literal["host", "swap"]) -> Region:
            if memory == "heap":
                return HeapRegion(layout, blocks)
            return SharedRegion.create(layout, blocks, purpose=purpose, namespace=namespace.fingerprint)

        self._closed = False
        self._device = Tier("device", region(device_blocks, "host"))
        self._host: Tier | None = None
        if host_blocks:
            try:
                self._host = Tier("host", region(host_blocks, "swap"))
            except BaseException:
                self._device.close()
                raise

    @property
    def device(self) -> Tier:
        if self._closed:
            raise BlockStateError("AuxBlocks", "one that is open", "one that was closed")
        return self._device

    @property
    def host(self) -> Tier | None:
        return self._host if self.device else None

    def named(self, name: TierName) -> Tier:
        """:class:`InvalidInputError` for a host tier that there is not, or for another name."""
        if name == "device":
            return self.device
        if name != "host":
            raise InvalidInputError("tier", "'device' or 'host'", repr(name))
        if (host := self.host) is None:
            raise InvalidInputError("tier", "host_blocks > 0 for the host tier", 0)
        return host

    def __iter__(self) -> Iterator[Tier]:
        yield self.device
        if self._host is not None:
            yield self._host

    def close(self) -> None:
        """Give the regions back; idempotent. ``BufferError`` while somebody else sees their memory: call it again."""
        self._closed = True
        for tier in (self._host, self._device):
            if tier is not None:
                tier.close()


__all__ = ["Memory", "TierName", "Tiers"]

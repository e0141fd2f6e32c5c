"""KV in SharedMemory, which the cache-transfer process copies: the engine's loop keeps the interpreter meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.ports import TierName
from cache_manager.regions import SharedRegion
from cache_manager.spec import RecordLayout
from cache_manager.transfer_manager import CacheTransferManager
from paged_engine.attention import KVShape, PagedKV
from paged_engine.request import EngineConfig

TIERS: Final[tuple[TierName, ...]] = ("device", "host")


class SharedKV(PagedKV):
    """:class:`PagedKV` on a CPU whose blocks are in two regions, of device and host; ``namespace`` is their owner's.

    A copy raises ``TransferProcessError`` when its process was lost, and another one is started: a block manager goes
    on as if there were no room to swap. Raises :class:`InvalidInputError` for blocks that a region would pad.
    """

    def __init__(self, shape: KVShape, config: EngineConfig, namespace: Namespace) -> None:
        super().__init__(shape, replace(config, device_blocks=0, host_blocks=0))
        layout = RecordLayout((self.spec,))
        if layout.nbytes != self.spec.block_nbytes:
            raise InvalidInputError("KV block", f"{layout.nbytes} bytes, or more", self.spec.block_nbytes)
        counts = {"device": config.device_blocks, "host": config.host_blocks}
        self.process = CacheTransferManager()
        self._regions = {
            tier: SharedRegion.create(layout, counts[tier], tier=tier, namespace=namespace.fingerprint)
            for tier in TIERS
            if counts[tier]
        }
        self.device = self._blocks("device", self.device)
        self.host = self._blocks("host", self.host)

    def _blocks(self, tier: TierName, none: torch.Tensor) -> torch.Tensor:
        """The tier's blocks, shaped as ``none`` of them."""
        region = self._regions.get(tier)
        return none if region is None else torch.from_numpy(region.rows).view(none.dtype).unflatten(1, none.shape[1:])

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        if len(sources):
            self.process.copy(self._regions[source], self._regions[target], sources, targets)
            self.moved_blocks += len(sources)

    def close(self) -> None:
        self.process.close()
        self.device = self.host = torch.empty(0)  # no view of a region is left
        for region in self._regions.values():
            region.close()

"""Where an engine's KV blocks lie, and what moves and stores them: the engine itself, or a process beside it."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.ports import StorageBackend, TierName
from cache_manager.regions import SharedRegion
from cache_manager.spec import RecordLayout
from cache_manager.transfer_manager import ApartSettings, CacheTransferManager
from paged_engine.engine.kv import KVShape, PagedKV
from paged_engine.engine.request import EngineConfig


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """A store for a cache-transfer process to open: its URL, and the limits of the process."""

    url: str
    settings: ApartSettings | None = None


AnyStore = StorageBackend | RemoteStore


class SharedKV(PagedKV):
    """KV in shared regions, by tier, that a cache-transfer process copies between."""

    def __init__(
        self, shape: KVShape, config: EngineConfig, regions: dict[TierName, SharedRegion], process: CacheTransferManager
    ) -> None:
        super().__init__(
            shape,
            block_tokens=config.block_tokens,
            device_blocks=config.device_blocks,
            host_blocks=config.host_blocks,
            regions=(regions["device"], regions.get("host")),
        )
        self._regions, self._process = regions, process

    def let_go(self) -> None:
        """Drop the views of the regions, so that they can be closed. Idempotent; nothing works after it."""
        for name in ("device", "host", "_layers"):
            vars(self).pop(name, None)
        gc.collect()

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._process.copy(self._regions[source], self._regions[target], sources, targets)


class EngineMemory:
    """The KV of one engine, and the store of its blocks.

    ``device`` is where the model's KV lies, the CPU if not given. With a :class:`RemoteStore` it lies in shared regions
    of the engine's, and a cache-transfer process copies it and has the store. :meth:`close` it after the ``AuxBlocks``
    and after the last user of ``kv``.
    """

    kv: PagedKV

    def __init__(
        self,
        shape: KVShape,
        config: EngineConfig,
        namespace: Namespace,
        store: AnyStore | None,
        device: torch.device | None = None,
    ) -> None:
        self._regions: dict[TierName, SharedRegion] = {}
        self._process: CacheTransferManager | None = None
        if not isinstance(store, RemoteStore):
            self.kv, self.store = PagedKV.of(shape, config, device=device), store
            return
        if config.memory != "shared":
            raise ConfigError("memory", "'shared' beside a cache-transfer process", repr(config.memory))
        if device is not None and device.type != "cpu":
            raise ConfigError("store", f"one of the engine's own for KV on {device}", "a process that has no GPU")
        self._process = CacheTransferManager(store.url, store.settings)
        try:
            self.store = self._process.store
            sizes: dict[TierName, int] = {"device": config.device_blocks, "host": config.host_blocks}
            layout, name = RecordLayout((shape.spec(config.block_tokens),)), namespace.fingerprint
            for tier, blocks in sizes.items():
                if blocks:
                    self._regions[tier] = SharedRegion.create(layout, blocks, tier=tier, namespace=name)
            self.kv = SharedKV(shape, config, self._regions, self._process)
        except BaseException:
            self.close()
            raise

    @property
    def process(self) -> CacheTransferManager:
        """The cache-transfer process; there is one with a :class:`RemoteStore` only."""
        assert self._process is not None
        return self._process

    def close(self) -> None:
        """End the process, which closes its store, and give the shared memory back."""
        if self._process is not None:
            self._process.close()
        if isinstance(kv := getattr(self, "kv", None), SharedKV):
            kv.let_go()
        for region in self._regions.values():
            region.close()


__all__ = ["AnyStore", "EngineMemory", "RemoteStore"]

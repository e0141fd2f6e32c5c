"""Where an engine's KV blocks lie, and what moves and stores them: the engine itself, or a process beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.ports import HitPolicy, Mover, Region, StorageBackend, TierName
from cache_manager.regions import SharedRegion
from cache_manager.spec import RecordLayout
from cache_manager.transfer_manager import CacheTransferManager, SharedPart
from kvroute.engine.kv import KVMover, KVShape, PagedKV
from kvroute.engine.request import EngineConfig
from kvroute.engine.stores import AnyStores, RemoteStores


class EngineMemory:
    """The KV of one engine, and what its ``AuxBlocks`` is to be made with so that KV and rows move together.

    ``device`` is where the model's KV lies, the CPU if not given. With :class:`RemoteStores` it lies in shared regions
    beside the rows', and a cache-transfer process moves and stores both. :meth:`close` it after the ``AuxBlocks`` and
    after the last user of ``kv``.
    """

    kv: PagedKV
    store: StorageBackend | None = None
    kv_mover: Mover | None = None
    mover: Callable[[Region, Region | None], Mover] | None = None

    def __init__(
        self,
        shape: KVShape,
        config: EngineConfig,
        namespace: Namespace,
        stores: AnyStores | None,
        policy: HitPolicy = "gate",
        device: torch.device | None = None,
    ) -> None:
        self._regions: list[SharedRegion] = []
        self._process: CacheTransferManager | None = None
        if not isinstance(stores, RemoteStores):
            self.kv = PagedKV.of(shape, config, device=device)
            self.store = stores.rows if stores else None
            self.kv_mover = KVMover(self.kv, stores.kv if stores else None)
            return
        if config.memory != "shared":
            raise ConfigError("memory", "'shared', to be seen by the cache-transfer process", repr(config.memory))
        if device is not None and device.type != "cpu":
            raise ConfigError(
                "stores", f"an engine's own for KV on {device}", "a cache-transfer process, which has no GPU"
            )
        layout = RecordLayout((shape.spec(config.block_tokens),))
        on_device = self._region(layout, config.device_blocks, "device", namespace)
        host = self._region(layout, config.host_blocks, "host", namespace) if config.host_blocks else None
        self.kv = PagedKV.of(shape, config, regions=(on_device, host))
        part = SharedPart("kv", on_device, host, stores.kv)
        self._process = CacheTransferManager(part, store=stores.rows, policy=policy, settings=stores.settings)
        self.mover = self._process.start

    @property
    def process(self) -> CacheTransferManager:
        """The cache-transfer process; there is one with :class:`RemoteStores` only."""
        assert self._process is not None
        return self._process

    def wait(self, timeout_s: float) -> bool:
        """Whether there was nothing to wait for; else wait for the process to be there again, ``timeout_s`` at most."""
        if self._process is None or self.process.running:
            return True
        self.process.wait(timeout_s)
        return False

    def close(self) -> None:
        """End the process, which closes its stores, and give the shared memory back."""
        if self._process is not None:
            self._process.close()
        if self._regions:
            del self.kv
            gc.collect()  # the tensors' views of the regions
        for region in self._regions:
            region.close()

    def _region(self, layout: RecordLayout, blocks: int, tier: TierName, namespace: Namespace) -> SharedRegion:
        region = SharedRegion.create(layout, blocks, tier=tier, namespace=namespace.fingerprint)
        self._regions.append(region)
        return region


__all__ = ["EngineMemory"]

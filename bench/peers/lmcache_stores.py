"""LMCache's ``LocalCPUBackend`` and ``LocalDiskBackend``, alone, on a machine without a GPU; nothing checked.

A put allocates a memory object, copies the record into it and submits it, as LMCache's engine does; a get copies the
record out of the memory object that it is answered with. The disk backend writes in four threads behind its caller:
the last put waits until all is written.
"""

from __future__ import annotations

import asyncio
import threading
import time
from importlib.metadata import version

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from bench.harness import Records, Turn, serve

TOKENS = 256
WRITTEN_S_MAX = 120.0


class LocalCPU:
    def __init__(self, records: Records, turn: Turn) -> None:
        self._shape = torch.Size([1, 1, TOKENS, records.nbytes // TOKENS])
        self._sources = [each.view(self._shape) for each in torch.from_numpy(records.sources)]
        self._targets = [each.view(self._shape) for each in torch.from_numpy(records.targets)]
        self._keys = [CacheEngineKey("bench", 1, 0, i, torch.uint8) for i in range(records.count)]
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True,
            max_local_cpu_size=2 * records.sources.nbytes / 2**30,
            local_disk=turn.directory,
            max_local_disk_size=2 * records.sources.nbytes / 2**30,
        )
        shape = (1, 1, TOKENS, 1, records.nbytes // TOKENS)
        self._config, self._metadata = config, LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, shape)
        self._cpu = LocalCPUBackend(config, self._metadata, dst_device="cpu")

    def put(self, start: int, stop: int) -> None:
        objects = self._filled(start, stop)
        self._cpu.batched_submit_put_task(self._keys[start:stop], objects)
        for each in objects:
            each.ref_count_down()

    def get(self, start: int, stop: int) -> None:
        for target, key in zip(self._targets, self._keys[start:stop], strict=True):
            found = self._cpu.get_blocking(key)
            target.copy_(found.tensor)
            found.ref_count_down()

    def flush(self) -> None: ...

    def close(self) -> None:
        self._cpu.close()

    def _filled(self, start: int, stop: int) -> list[MemoryObj]:
        objects = []
        for source in self._sources[start:stop]:
            each = self._cpu.allocate(self._shape, torch.uint8, MemoryFormat.KV_2LTD)
            each.tensor.copy_(source)
            objects.append(each)
        return objects


class LocalDisk(LocalCPU):
    def __init__(self, records: Records, turn: Turn) -> None:
        super().__init__(records, turn)
        self._last = records.count
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._disk = LocalDiskBackend(self._config, self._loop, self._cpu, dst_device="cpu", metadata=self._metadata)

    def put(self, start: int, stop: int) -> None:
        objects = self._filled(start, stop)
        self._disk.batched_submit_put_task(self._keys[start:stop], objects)
        for each in objects:
            each.ref_count_down()
        if stop == self._last:
            give_up_s = time.monotonic() + WRITTEN_S_MAX
            while self._disk.disk_worker.put_tasks:
                assert time.monotonic() < give_up_s, "the disk backend does not end its puts"
                time.sleep(0.0002)

    def get(self, start: int, stop: int) -> None:
        found = self._disk.batched_get_blocking(self._keys[start:stop])
        for target, each in zip(self._targets, found, strict=True):
            target.copy_(each.tensor)
            each.ref_count_down()

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        super().close()


if __name__ == "__main__":
    serve(f"LMCache {version('lmcache')}", {"LocalCPUBackend": LocalCPU, "LocalDiskBackend": LocalDisk})

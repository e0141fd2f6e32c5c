"""An external linker as stock SGLang has them: KV pages go to files and come back, and no rows go with them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker


class _Loaded:
    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, layer: int) -> None: ...


class FileLinker(UnifiedCacheLinker):
    """A file a page in the folder ``home``; pages to load are read when the pass begins."""

    layer_done_counter = _Loaded()

    def __init__(self, server_args: Any, params: Any, *, extra_config: Any, **_: Any) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.page, self.pools = params.page_size, {PoolName.KV: pool}
        self.buffers = [*pool.k_buffer, *pool.v_buffer]
        self.home = Path(extra_config["home"])
        self.queued: dict[str, Any] = {}
        self.done: deque[bool] = deque()

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        found = [(self.home / key).exists() for key in transfers[0].keys]
        return list(range(1, 1 + (found.index(False) if False in found else len(found))))

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        for key, slots in zip(transfers[0].keys, transfers[0].device_indices.split(self.page), strict=True):
            np.stack([each[slots].numpy() for each in self.buffers]).tofile(self.home / key)
        self.done.append(True)
        return True

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self.queued[rid] = transfers[0]
        return True

    def start_layer_wise_loading(self) -> int:
        for transfer in self.queued.values():
            for key, slots in zip(transfer.keys, transfer.device_indices.split(self.page), strict=True):
                page = torch.from_numpy(np.fromfile(self.home / key, np.float32))
                for buffer, each in zip(self.buffers, page.split(page.numel() // len(self.buffers)), strict=True):
                    buffer[slots] = each.reshape(self.page, *buffer.shape[1:])
        self.queued.clear()
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self.queued.pop(rid, None) is not None

    def num_completed_offloads(self) -> int:
        return len(self.done)

    def pop_completed_offload(self) -> bool:
        return self.done.popleft()

    def reset(self) -> None:
        self.done.clear()

    def close(self) -> None: ...

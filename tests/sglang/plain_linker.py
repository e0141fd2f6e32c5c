"""An external linker as stock SGLang has them: KV pages go to a store and come back, and no rows go with them."""

from __future__ import annotations

from collections import deque
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker


class _Loaded:
    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, layer: int) -> None: ...


class PlainLinker(UnifiedCacheLinker):
    """Pages in a dictionary."""

    layer_done_counter = _Loaded()

    def __init__(self, server_args: Any, params: Any, **_: Any) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.page, self.pools = params.page_size, {PoolName.KV: pool}
        self.buffers = [*pool.k_buffer, *pool.v_buffer]
        self.pages: dict[str, list[Any]] = {}
        self.done: deque[bool] = deque()

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        found = [key in self.pages for key in transfers[0].keys]
        return list(range(1, 1 + (found.index(False) if False in found else len(found))))

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        for key, slots in zip(transfers[0].keys, transfers[0].device_indices.split(self.page), strict=True):
            self.pages[key] = [each[slots].clone() for each in self.buffers]
        self.done.append(True)
        return True

    def load(self, rid: str, transfers: list[Any]) -> bool:
        for key, slots in zip(transfers[0].keys, transfers[0].device_indices.split(self.page), strict=True):
            for buffer, page in zip(self.buffers, self.pages[key], strict=True):
                buffer[slots] = page
        return True

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def num_completed_offloads(self) -> int:
        return len(self.done)

    def pop_completed_offload(self) -> bool:
        return self.done.popleft()

    def reset(self) -> None:
        self.done.clear()

    def close(self) -> None: ...

"""An external linker as stock SGLang has them: KV pages go to files and come back, and no rows go with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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
    """A file a page in the folder ``home``, and one for each window and state beside it; what is to be loaded is read
    when the pass begins."""

    layer_done_counter = _Loaded()

    def __init__(self, server_args: Any, params: Any, *, extra_config: Any, **_: Any) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        full = getattr(pool, "full_kv_pool", pool)
        self.pages, self.pools = {PoolName.KV: params.page_size}, {PoolName.KV: full}
        self.buffers: dict[Any, list[torch.Tensor]] = {PoolName.KV: [*full.k_buffer, *full.v_buffer]}
        if hasattr(pool, "swa_kv_pool"):
            windows = pool.swa_kv_pool
            self.pages[PoolName.SWA], self.pools[PoolName.SWA] = params.page_size, windows
            self.buffers[PoolName.SWA] = [*windows.k_buffer, *windows.v_buffer]
        if hasattr(pool, "mamba_pool"):
            states = pool.mamba_pool.mamba_cache
            self.pages[PoolName.MAMBA], self.pools[PoolName.MAMBA] = 1, pool.mamba_pool
            kinds = [state for state in (states.temporal, *states.conv) if state.numel()]
            self.buffers[PoolName.MAMBA] = [layer for state in kinds for layer in state]
        self.home = Path(extra_config["home"])
        self.queued: dict[str, list[Any]] = {}
        self.done: deque[bool] = deque()

    def file(self, transfer: Any, key: str) -> Path:
        return self.home / (key if transfer.name == PoolName.KV else f"{key}.{transfer.name.value}")

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        keys = transfers[0].keys
        found = [(self.home / key).exists() for key in keys]
        lengths = range(1, 1 + (found.index(False) if False in found else len(found)))
        for side in transfers[1:]:
            width = len(side.keys)
            there = [self.file(side, key).exists() for key in keys]
            lengths = [n for n in lengths if all(there[max(0, n - width) : n])]
        return list(lengths)

    def files(self, transfers: list[Any]) -> Iterator[tuple[Path, Any, list[torch.Tensor]]]:
        """Of each page, window and state: its file, its slots and the buffers that they are in."""
        for transfer in transfers:
            parts = transfer.device_indices.split(self.pages[transfer.name])
            for key, slots in zip(transfer.keys, parts, strict=True):
                yield self.file(transfer, key), slots, self.buffers[transfer.name]

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        for path, slots, buffers in self.files(transfers):
            torch.cat([buffer[slots].float().flatten() for buffer in buffers]).numpy().tofile(path)
        self.done.append(True)
        return True

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self.queued[rid] = transfers
        return True

    def start_layer_wise_loading(self) -> int:
        for transfers in self.queued.values():
            for path, slots, buffers in self.files(transfers):
                content = torch.from_numpy(np.fromfile(path, np.float32))
                sizes = [buffer[slots].numel() for buffer in buffers]
                for buffer, each in zip(buffers, content.split(sizes), strict=True):
                    buffer[slots] = each.reshape(len(slots), *buffer.shape[1:])
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

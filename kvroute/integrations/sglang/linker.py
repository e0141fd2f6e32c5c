"""SGLang's external linker: KV pages and their rows in a store of kvroute, or rows beside a linker that keeps KV."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolName  # type: ignore[import-not-found]
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker  # type: ignore[import-not-found]

from cache_manager.errors import ConfigError, KVRouteError
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.stored import PersistJob
from kvroute.connector.witness import KvFolder
from kvroute.integrations.sglang.capturer import capturer
from kvroute.integrations.sglang.rows import RoutedRows, logger


class PoolKV:
    """The KV of blocks: a page's keys and values, layer by layer."""

    def __init__(self, pool: Any, page: int) -> None:
        halves = [pool.k_buffer, pool.v_buffer] if hasattr(pool, "k_buffer") else [pool.kv_buffer]
        buffers = [each for layer in zip(*halves, strict=True) for each in layer]
        # [slots, ...] each, as [pages, bytes of a page]
        self._pages = [each.view(torch.uint8).reshape(each.shape[0] // page, -1) for each in buffers]
        self._ends = np.cumsum([each.shape[1] for each in self._pages]).tolist()
        shapes = [[str(each.dtype), *each.shape[1:]] for each in buffers]
        self.spec = AuxBlockDataSpec("kv", (self._ends[-1] // page,), "uint8", page, {"buffers": shapes})
        # What witnesses: the last layer; where it has 8 bits a value it tells too little, and all do.
        self.folder = KvFolder(self._pages if buffers[0].element_size() == 1 else self._pages[-len(halves) :])

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        for pages, end in zip(self._pages, self._ends, strict=True):
            into[:, end - pages.shape[1] : end] = pages[torch.from_numpy(blocks).to(pages.device)].cpu().numpy()

    def fill(self, blocks: NDArray[np.int64], given: NDArray[np.uint8]) -> None:
        for pages, end in zip(self._pages, self._ends, strict=True):
            part = torch.from_numpy(np.ascontiguousarray(given[:, end - pages.shape[1] : end]))
            pages[torch.from_numpy(blocks).to(pages.device)] = part.to(pages.device)


def _rows_and_kv(params: Any, components: Any) -> tuple[RoutedRows, PoolKV]:
    """Of this process; :class:`ConfigError` where there are no rows, and for layers that forget tokens."""
    if (found := capturer()) is None:
        raise ConfigError("KvrouteLinker", "--enable-return-routed-experts, and the plugin of kvroute", "no rows")
    if (names := sorted(str(getattr(each, "name", each)) for each in components)) != ["FULL"]:
        raise ConfigError("KvrouteLinker", "a model whose layers all attend to all tokens", names)
    return found.rows, PoolKV(params.token_to_kv_pool_allocator.get_kvcache(), params.page_size)


def beside(linker: Any, params: Any, components: Any) -> None:
    """From here on rows are stored and loaded beside the KV that ``linker`` keeps; without rows KV is no hit."""
    rows, kv = _rows_and_kv(params, components)
    rows.attach(folder=kv.folder)
    lookup, load, offload = linker.lookup, linker.load, linker.offload

    def looked_up(rid: str, transfers: list[Any]) -> list[int]:
        theirs: list[int] = lookup(rid, transfers)
        stored = rows.stored(transfers[0].keys) if theirs and rows.settings.rows else len(transfers[0].keys)
        return [pages for pages in theirs if pages <= stored]

    def loaded(rid: str, transfers: list[Any]) -> bool:
        if done := bool(load(rid, transfers)):
            rows.loaded(transfers[0].keys, rows.pages_of(transfers[0].device_indices))
        return done

    def offloaded(transfers: list[Any], session_id: str | None = None) -> bool:
        if done := bool(offload(transfers, session_id)):
            rows.keep(transfers[0].keys, rows.pages_of(transfers[0].device_indices))
        return done

    linker.lookup, linker.load, linker.offload = looked_up, loaded, offloaded


class KvrouteLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """KV and rows of a page are one record in the store. The scheduler's thread alone calls it.

    Pages are whole before a pass that reads them is launched, so no layer waits for its own.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        self.rows, kv = _rows_and_kv(params, components)
        self.rows.attach(kv=kv)
        self.forward_stream, self.layer_done_counter = forward_stream, self
        self.pools = {PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()}
        self._offloads: deque[list[PersistJob]] = deque()

    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, layer: int) -> None: ...

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefixes, in pages, that seem to be stored; only loading says whether they are sound."""
        return list(range(1, self.rows.stored(transfers[0].keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Fill these pages; ``False``, and SGLang computes them, unless every one has come."""
        keys, pages = transfers[0].keys, self.rows.pages_of(transfers[0].device_indices)
        with torch.cuda.stream(self.forward_stream):  # behind the passes that may still write these slots
            came = self.rows.fetch(keys, pages)
        return len(came) == len(keys) and all(came.values())

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """The pages are held by SGLang until the offload is over."""
        if not self.rows.weights.mixed:
            pages = self.rows.pages_of(transfers[0].device_indices)
            self._offloads.append(self.rows.keep(transfers[0].keys, pages))
        return not self.rows.weights.mixed

    def num_completed_offloads(self) -> int:
        """How many are over, the earliest first; the store works on copies, in threads."""
        self.rows.go_on()
        return [*(bool(begun) and begun[0].poll() for begun in self._offloads), False].index(False)

    def pop_completed_offload(self) -> bool:
        """Whether the pages are stored now."""
        try:
            return all(self._offloads.popleft()[0].result().values())
        except KVRouteError as error:
            logger.warning("pages were not stored: %s", error)
            return False

    def reset(self) -> None:
        """SGLang forgets its pages; jobs that have begun end by themselves, on copies."""
        self._offloads.clear()

    def close(self) -> None:
        self.reset()
        self.rows.close()


__all__ = ["KvrouteLinker", "PoolKV", "beside"]

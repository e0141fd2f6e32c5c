"""SGLang's external linker: KV pages and their rows in a store of kvroute, or rows beside a linker that keeps KV."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolName  # type: ignore[import-not-found]
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker  # type: ignore[import-not-found]

from cache_manager.errors import ConfigError, KVRouteError
from cache_manager.ports import TierName
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.witness import KvFolder
from kvroute.integrations.sglang.rows import Kept, capturer, logger

CLOSE_S: Final = 5.0


class PoolKV:
    """The KV of blocks: a page's keys and values, layer by layer."""

    def __init__(self, pool: Any, page: int) -> None:
        halves = [pool.k_buffer, pool.v_buffer] if hasattr(pool, "k_buffer") else [pool.kv_buffer]
        layers = [list(layer) for layer in zip(*halves, strict=True)]
        buffers = [each for layer in layers for each in layer]
        # [slots, ...] each, as [pages, bytes of a page]
        self._pages = [each.view(torch.uint8).reshape(each.shape[0] // page, -1) for each in buffers]
        nbytes = sum(each.shape[1] for each in self._pages)
        shapes = [[str(each.dtype), *each.shape[1:]] for each in buffers]
        self.spec = AuxBlockDataSpec(
            "kv", row_shape=(nbytes // page,), dtype="uint8", block_tokens=page, attrs={"buffers": shapes}
        )
        # One layer of 8 bits a value tells too little.
        self._witness = self._pages if buffers[0].element_size() == 1 else self._pages[-len(layers[-1]) :]

    def folder(self) -> KvFolder:
        """Of what witnesses: the last layer."""
        return KvFolder(self._witness)

    def copy(self, source: TierName, target: TierName, sources: NDArray[Any], targets: NDArray[Any]) -> None:
        raise ConfigError("SGLang's pages", "no moves between tiers of kvroute's", f"{source} to {target}")

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        at = 0
        for pages in self._pages:
            taken = pages[torch.from_numpy(blocks).to(pages.device)].cpu().numpy()
            into[:, at : at + taken.shape[1]] = taken
            at += taken.shape[1]

    def fill(self, blocks: NDArray[np.int64], given: NDArray[np.uint8]) -> None:
        at = 0
        for pages in self._pages:
            part = torch.from_numpy(np.ascontiguousarray(given[:, at : at + pages.shape[1]]))
            pages[torch.from_numpy(blocks).to(pages.device)] = part.to(pages.device)
            at += pages.shape[1]


class _Loaded:
    """Pages are whole before a pass that reads them is launched: no layer waits for its own."""

    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, layer: int) -> None: ...


class KvrouteLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """It is called by the scheduler's thread alone.

    With an ``inner`` linker that one keeps the KV, and says what is loaded and stored, as on ranks that have no rows;
    rows that do not come are missing. Without one KV and rows of a page are one record in the store.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any,
        forward_stream: Any = None,
        inner: Any = None,
    ) -> None:
        found = capturer()
        if found is None:
            raise ConfigError("KvrouteLinker", "--enable-return-routed-experts, and the plugin of kvroute", "no rows")
        if sorted(str(getattr(each, "name", each)) for each in components) != ["FULL"]:
            raise ConfigError(
                "KvrouteLinker", "a model whose layers all attend to all tokens", sorted(map(str, components))
            )
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        kv = PoolKV(pool, params.page_size)
        self.rows, self.inner, self.forward_stream = found.rows, inner, forward_stream
        self.pools = {PoolName.KV: pool} if inner is None else inner.pools
        self.layer_done_counter = _Loaded() if inner is None else inner.layer_done_counter
        self.rows.attach(kv=kv if inner is None else None, folder=None if inner is None else kv.folder())
        self._offloads: deque[Kept | None] = deque()  # None: of rows that are not stored

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefixes, in pages, whose KV seems to be stored, and whose rows; only loading says whether it is sound."""
        (transfer,) = transfers
        theirs = range(1, len(transfer.keys) + 1) if self.inner is None else self.inner.lookup(rid, transfers)
        if self.inner is not None and not self.rows.settings.rows:
            return list(theirs)
        stored = self.rows.stored(transfer.keys) if theirs else 0
        return [pages for pages in theirs if pages <= stored]

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Fill these pages; ``False``, and SGLang computes them: without an inner linker, unless every one has come."""
        (transfer,) = transfers
        self.rows.settle()
        pages = self.rows.pages_of(transfer.device_indices)
        with torch.cuda.stream(self.forward_stream):  # behind the passes that may still write these slots
            came = self.rows.fetch(transfer.keys, pages)
        if self.inner is None:
            return came
        self.rows.loaded(pages)
        return bool(self.inner.load(rid, transfers))

    def start_layer_wise_loading(self) -> int:
        return -1 if self.inner is None else int(self.inner.start_layer_wise_loading())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.inner is None or bool(self.inner.finish_layer_wise_loading(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        return self.inner is not None and bool(self.inner.cancel_queued_load(rid))

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """The pages are held by SGLang until the offload is over."""
        (transfer,) = transfers
        mixed = self.rows.weights.mixed
        if mixed if self.inner is None else not self.inner.offload(transfers, session_id):
            return False
        self.rows.settle()
        pages = self.rows.pages_of(transfer.device_indices)
        self._offloads.append(None if mixed else self.rows.keep(transfer.keys, pages))
        return True

    def num_completed_offloads(self) -> int:
        """How many are over, the earliest first; the store works on copies, in threads."""
        self.rows.store_kept()
        over = [kept is None or (kept.job is not None and kept.job.poll()) for kept in self._offloads]
        ours = over.index(False) if False in over else len(over)
        return ours if self.inner is None else min(ours, int(self.inner.num_completed_offloads()))

    def pop_completed_offload(self) -> bool:
        """Whether the pages are stored now."""
        theirs, kept = self.inner is None or bool(self.inner.pop_completed_offload()), self._offloads.popleft()
        try:
            return theirs and (kept is None or (kept.job is not None and all(kept.job.result().values())))
        except KVRouteError as error:
            logger.warning("pages were not stored: %s", error)
            return False

    def reset(self) -> None:
        """SGLang forgets its pages: what was not begun is not stored."""
        self.rows.drop_kept()
        for kept in self._offloads:
            if kept is not None and kept.job is not None:
                kept.job.cancel()
                kept.job.wait(CLOSE_S)
        self._offloads.clear()
        if self.inner is not None:
            self.inner.reset()

    def close(self) -> None:
        self.reset()
        if self.inner is not None:
            self.inner.close()
        self.rows.close()


__all__ = ["KvrouteLinker", "PoolKV"]

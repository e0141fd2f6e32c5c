"""KV pages and their rows in a store of kvroute, each page as one record: SGLang's external linker, of ours alone."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolName  # type: ignore[import-not-found]
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker  # type: ignore[import-not-found]

import kvroute
from cache_manager.errors import ConfigError, KVRouteError
from cache_manager.keys import BlockKey
from cache_manager.ports import TierName
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.stored import PersistJob
from kvroute.integrations.sglang.plugin import capturer

logger = logging.getLogger(__name__)

CLOSE_S: Final = 5.0


class PoolKV:
    """SGLang's device pool as the KV of blocks: a page's keys and values of every layer, one after the other."""

    def __init__(self, pool: Any, page: int) -> None:
        buffers = [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)
        # [slots, ...] each, as [pages, bytes of a page]
        self._pages = [each.view(torch.uint8).reshape(each.shape[0] // page, -1) for each in buffers]
        nbytes = sum(each.shape[1] for each in self._pages)
        shapes = [[str(each.dtype), *each.shape[1:]] for each in buffers]
        self.spec = AuxBlockDataSpec(
            "kv", row_shape=(nbytes // page,), dtype="uint8", block_tokens=page, attrs={"buffers": shapes}
        )

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


@dataclass(slots=True)
class _Offload:
    """Pages to store when the passes that were launched before are over, and their rows are there."""

    blocks: dict[BlockKey, int]
    generations: NDArray[np.int64]
    after: int
    job: PersistJob | None = None
    over: bool = False


class KvrouteLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One for each rank; it is called by the scheduler's thread alone."""

    layer_done_counter = _Loaded()

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        found = capturer()
        if found is None:
            raise ConfigError("KvrouteLinker", "--enable-return-routed-experts, and the plugin of kvroute", "no rows")
        if sorted(str(getattr(each, "name", each)) for each in components) != ["FULL"]:
            raise ConfigError(
                "KvrouteLinker", "a model whose layers all attend to all tokens", sorted(map(str, components))
            )
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.rows, self.page, self.forward_stream = found.rows, params.page_size, forward_stream
        self.pools = {PoolName.KV: pool}
        self._store = kvroute.open_store(found.rows.settings.store)
        self.aux = found.rows.attach(self._store, PoolKV(pool, params.page_size))
        self._offloads: deque[_Offload] = deque()

    def _blocks(self, transfers: list[Any], device: bool) -> dict[BlockKey, int]:
        (transfer,) = transfers
        keys = [self.aux.keys.adopt(str(each).encode()) for each in transfer.keys]
        slots = transfer.device_indices.cpu().numpy()[:: self.page] if device else np.zeros(len(keys), np.int64)
        return dict(zip(keys, (slots // self.page).tolist(), strict=True))

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefixes, in pages, of which every page seems to be stored; only loading says whether it is sound."""
        if self.rows.weights.mixed:
            return []
        try:
            there = self.aux.stored(list(self._blocks(transfers, device=False)))
        except KVRouteError as error:
            logger.warning("the store cannot be asked for pages of %s: %s", rid, error)
            return []
        first = there.index(False) if False in there else len(there)
        return list(range(1, first + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Fill these pages now; ``False``, and SGLang computes them, unless every page has come with its rows."""
        self.rows.settle()
        blocks = self._blocks(transfers, device=True)
        if self.rows.weights.mixed:
            return False
        try:
            with torch.cuda.stream(self.forward_stream):  # behind the passes that may still write these slots
                came = self.aux.restore(blocks, self.aux.generations(list(blocks.values())))
        except KVRouteError as error:
            logger.warning("pages of %s were not loaded: %s", rid, error)
            return False
        return all(came.values())

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """The pages are held by SGLang until the offload is over."""
        if self.rows.weights.mixed:
            return False
        self.rows.settle()
        blocks = self._blocks(transfers, device=True)
        self._offloads.append(_Offload(blocks, self.aux.generations(list(blocks.values())), self.rows.launched))
        return True

    def num_completed_offloads(self) -> int:
        """How many are over, the earliest first; the store works on copies, in threads."""
        self.aux.poll()
        done = 0
        for each in self._offloads:
            if not each.over and each.job is None and each.after <= self.rows.ended:
                each.job = self.aux.begin_persist(each.blocks, each.generations)
            each.over = each.over or (each.job is not None and each.job.poll())
            if not each.over:
                break
            done += 1
        return done

    def pop_completed_offload(self) -> bool:
        """Whether the pages are stored now."""
        job = self._offloads.popleft().job
        try:
            return job is not None and all(job.result().values())
        except KVRouteError as error:
            logger.warning("pages were not stored: %s", error)
            return False

    def reset(self) -> None:
        """SGLang forgets its pages: what was not begun is not stored."""
        for each in self._offloads:
            if each.job is not None:
                each.job.cancel()
                each.job.wait(CLOSE_S)
        self._offloads.clear()

    def close(self) -> None:
        self.reset()
        self.aux.close()
        self._store.close()


__all__ = ["KvrouteLinker", "PoolKV"]

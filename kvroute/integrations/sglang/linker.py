"""SGLang's external linker: it stores KV pages and rows in a store of kvroute, or rows beside a linker that keeps
KV."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import PoolName  # type: ignore[import-not-found]
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker  # type: ignore[import-not-found]

from cache_manager.errors import ConfigError, KVRouteError
from cache_manager.job import PersistJob
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.witness import KvFolder, witnesses
from kvroute.integrations.sglang.capturer import capturer
from kvroute.integrations.sglang.host_pages import halves_of
from kvroute.integrations.sglang.ranks import Ranks, least_of
from kvroute.integrations.sglang.rows import RoutedRows, logger

POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
"""SGLang's pools whose pages are keys and values, and nothing beside them: no scales, no index of sparse attention."""


class PoolKV:
    """The KV of blocks: a page's keys and values, layer by layer."""

    def __init__(self, pool: Any, page: int) -> None:
        layers = [list(layer) for layer in zip(*halves_of(pool), strict=True)]
        shapes = [[str(half.dtype), *half.shape[1:]] for layer in layers for half in layer]
        paged = [[half.view(torch.uint8).reshape(len(half) // page, -1) for half in layer] for layer in layers]
        self._pages = [half for layer in paged for half in layer]
        self._widths = [half.shape[1] for half in self._pages]
        self.spec = AuxBlockDataSpec("kv", (sum(self._widths) // page,), "uint8", page, {"buffers": shapes})
        self.folder = KvFolder(witnesses(paged, layers[0][0].element_size()))

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        indices = torch.from_numpy(blocks).to(self._pages[0].device)
        into[:] = torch.cat([pages[indices] for pages in self._pages], dim=1).cpu().numpy()

    def fill(self, blocks: NDArray[np.int64], kv: NDArray[np.uint8]) -> None:
        indices = torch.from_numpy(blocks).to(self._pages[0].device)
        parts = torch.tensor(kv, device=indices.device).split(self._widths, dim=1)
        for pages, part in zip(self._pages, parts, strict=True):
            pages[indices] = part


class Offloads:
    """Rows on their way to the store, the earliest first."""

    def __init__(self, rows: RoutedRows) -> None:
        self._rows = rows
        self._kept: deque[list[PersistJob] | None] = deque()
        self.clear = self._kept.clear

    def put(self, transfer: Any) -> None:
        """Offload these pages, which SGLang holds until that is over."""
        self._kept.append(self._rows.keep(transfer.keys, self._rows.pages_of(transfer.device_indices)))

    def over(self, *, stored: bool) -> int:
        """How many have begun, and so are copied, or with ``stored`` how many are stored."""
        self._rows.go_on()
        over = (jobs is None or (len(jobs) > 0 and (not stored or jobs[0].poll())) for jobs in self._kept)
        return [*over, False].index(False)

    def pop(self) -> list[PersistJob] | None:
        return self._kept.popleft()


def _rows_and_kv(params: Any, components: Any) -> tuple[RoutedRows, PoolKV]:
    """This process's rows and KV; :class:`ConfigError` if there are no rows, and for layers that forget tokens or read
    more of a page than keys and values."""
    current = capturer()
    if current is None:
        raise ConfigError("KvrouteLinker", "--enable-return-routed-experts, and the plugin of kvroute", "no rows")
    names = sorted(str(getattr(component, "name", component)) for component in components)
    if names != ["FULL"]:
        raise ConfigError("KvrouteLinker", "a model whose layers all attend to all tokens", names)
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    if type(pool).__name__ not in POOLS:
        raise ConfigError(
            "KvrouteLinker", f"pages of keys and values alone, in {' or '.join(POOLS)}", type(pool).__name__
        )
    return current.rows, PoolKV(pool, params.page_size)


class Beside:
    """Another project's linker, which keeps KV only, with rows beside it: KV without rows is not a hit.

    No offload is over before that of its rows has begun: only then may SGLang give the pages out again.
    """

    def __init__(self, theirs: Any, params: Any, components: Any) -> None:
        self._theirs = theirs
        self._rows, kv = _rows_and_kv(params, components)
        self._rows.attach(folder=kv.folder)
        self._offloads = Offloads(self._rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        theirs, keys = self._theirs.lookup(rid, transfers), transfers[0].keys
        stored = self._rows.stored(keys) if theirs else 0
        return [pages for pages in theirs if pages <= stored]

    def load(self, rid: str, transfers: list[Any]) -> bool:
        if done := bool(self._theirs.load(rid, transfers)):
            self._rows.loaded(transfers[0].keys, self._rows.pages_of(transfers[0].device_indices))
        return done

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        if done := bool(self._theirs.offload(transfers, session_id)):
            self._offloads.put(transfers[0])
        return done

    def num_completed_offloads(self) -> int:
        return min(int(self._theirs.num_completed_offloads()), self._offloads.over(stored=False))

    def pop_completed_offload(self) -> bool:
        self._offloads.pop()
        return bool(self._theirs.pop_completed_offload())

    def reset(self) -> None:
        self._offloads.clear()
        self._theirs.reset()


class KvrouteLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """KV and rows of a page are one record in the store. The scheduler's thread alone calls it.

    Pages are whole before a pass that reads them is launched, so no layer waits for its own. Each rank has a linker,
    with its part of the KV and all rows: see ``ranks.py``.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        self.rows, kv = _rows_and_kv(params, components)
        least = least_of(params.attn_tp_cache_group)
        self.rows.attach(kv=kv, ranks=least and Ranks(least))
        self.forward_stream, self.layer_done_counter = forward_stream, self
        self.pools = {PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()}
        self._offloads = Offloads(self.rows)

    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, layer: int) -> None: ...

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefixes, in pages, that seem to be stored; only loading verifies them."""
        return list(range(1, self.rows.stored(transfers[0].keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Fill these pages; ``False`` unless every one has come: then SGLang computes them."""
        with torch.cuda.stream(self.forward_stream):  # behind the passes that may still write these slots
            return self.rows.fill(transfers[0].keys, self.rows.pages_of(transfers[0].device_indices))

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Always queued, as on every other rank: pages that may not be stored are over at once, and not stored."""
        self._offloads.put(transfers[0])
        return True

    def num_completed_offloads(self) -> int:
        return self._offloads.over(stored=True)

    def pop_completed_offload(self) -> bool:
        """Whether the pages are stored now."""
        jobs = self._offloads.pop()
        if jobs is None:
            return False
        try:
            return all(origin for job in jobs for origin in job.result().values())
        except KVRouteError as error:
            logger.warning("pages were not stored: %s", error)
            return False

    def reset(self) -> None:
        """SGLang forgets its pages; jobs that have begun end by themselves, on copies."""
        self._offloads.clear()

    def close(self) -> None:
        self.reset()
        self.rows.close()


__all__ = ["Beside", "KvrouteLinker", "PoolKV"]

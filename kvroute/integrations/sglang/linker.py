"""SGLang's external linker: it stores KV pages and rows in a store of kvroute, or rows beside a linker that keeps
KV."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName  # type: ignore[import-not-found]
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker  # type: ignore[import-not-found]

from cache_manager.errors import ConfigError, KVRouteError
from cache_manager.job import PersistJob
from kvroute.connector.witness import KvFolder, witnesses
from kvroute.integrations.sglang.capturer import capturer
from kvroute.integrations.sglang.pools import FULL, Pools, halves_of, kv_bytes, kv_layers, pools_of
from kvroute.integrations.sglang.ranks import Ranks, least_of
from kvroute.integrations.sglang.rows import RoutedRows, SidePages, logger
from kvroute.integrations.sglang.sides import restorable


def device_folder(pool: Any, page: int) -> KvFolder:
    """A folder of SGLang's pages on the device."""
    layers = [[half.view(torch.uint8).flatten(1) for half in layer] for layer in kv_layers(pool, page)]
    return KvFolder(witnesses(layers, halves_of(pool)[0][0].element_size()))


def named(transfers: list[Any]) -> dict[str, Any]:
    """SGLang's transfers of a prefix by the names of their pools, that of the pages of all tokens first."""
    return {str(getattr(transfer.name, "value", transfer.name)): transfer for transfer in transfers}


class Offloads:
    """Rows on their way to the store, the earliest first."""

    def __init__(self, rows: RoutedRows) -> None:
        self._rows = rows
        self._kept: deque[list[PersistJob] | None] = deque()
        self.clear = self._kept.clear

    def put(self, transfer: Any, sides: list[SidePages] | None = None) -> None:
        """Offload these pages, and what ``sides`` keep of their end; SGLang holds all of it until that is over."""
        pages = self._rows.pages_of(transfer.device_indices)
        self._kept.append(self._rows.keep(transfer.keys, pages, sides or ()))

    def over(self, *, stored: bool) -> int:
        """How many have begun, and so are copied, or with ``stored`` how many are stored."""
        self._rows.go_on()

        def is_over(jobs: list[PersistJob] | None) -> bool:
            if jobs is None:
                return True
            return bool(jobs) and (not stored or all(job.poll() for job in jobs))

        return [*map(is_over, self._kept), False].index(False)

    def pop(self) -> list[PersistJob] | None:
        return self._kept.popleft()


def _rows_and_pools(params: Any, components: Any) -> tuple[RoutedRows, Pools]:
    """This process's rows and pools; :class:`ConfigError` if there are no rows, and for layers or pages that were not
    judged."""
    current = capturer()
    if current is None:
        raise ConfigError("KvrouteLinker", "--enable-return-routed-experts, and the plugin of kvroute", "no rows")
    return current.rows, pools_of(params, components, "KvrouteLinker")


class Beside:
    """Another project's linker, which keeps KV only, with rows beside it: KV without rows is not a hit.

    No offload is over before that of its rows has begun: only then may SGLang give the pages out again. Windows and
    states are that linker's: rows are those of the KV of layers that attend to all tokens, which shows what the layers
    before the last of them chose.
    """

    def __init__(self, theirs: Any, params: Any, components: Any) -> None:
        self._theirs = theirs
        self._rows, pools = _rows_and_pools(params, components)
        if not pools.is_last_full:
            raise ConfigError(
                "an external linker",
                "KvrouteLinker, or a model whose last layer attends to all tokens",
                "one with layers that forget behind it",
            )
        self._rows.attach(folder=device_folder(pools.full, params.page_size))
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
        self.rows, pools = _rows_and_pools(params, components)
        least = least_of(params.attn_tp_cache_group)
        kv = kv_bytes(pools.full, params.page_size, FULL)
        self.rows.attach(kv=kv, sides=pools.sides, ranks=least and Ranks(least))
        self.forward_stream, self.layer_done_counter = forward_stream, self
        self.pools = {PoolName(name): pool for name, pool in {FULL: pools.full, **pools.sides}.items()}
        self._offloads = Offloads(self.rows)

    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, layer: int) -> None: ...

    def _sides(self, transfers: list[Any]) -> list[SidePages]:
        """What windows and states keep of the end of these pages."""
        by_pool = named(transfers)
        sides = list[SidePages]()
        for name, side in self.rows.sides.items():
            if (transfer := by_pool.get(name)) is not None:
                tokens = side.aux.block_tokens
                blocks = transfer.device_indices.cpu().numpy()[::tokens] // tokens
                sides.append(SidePages(side, transfer.keys, blocks))
        return sides

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefixes, in pages, that seem to be stored; only loading verifies them."""
        by_pool = named(transfers)
        keys = by_pool[FULL].keys
        lengths = list(range(1, self.rows.stored(keys) + 1))
        for name in self.rows.sides:
            there = self.rows.stored_sides(name, keys[: len(lengths)])
            width = len(by_pool[name].keys) if name in by_pool else 0
            lengths = restorable(lengths, there, width) if width else []
        return lengths

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Fill these pages; ``False`` unless every one has come: then SGLang computes them."""
        with torch.cuda.stream(self.forward_stream):  # behind the passes that may still write these slots
            kv = named(transfers)[FULL]
            return self.rows.fill(kv.keys, self.rows.pages_of(kv.device_indices), self._sides(transfers))

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Always queued, as on every other rank: pages that may not be stored are over at once, and not stored."""
        self._offloads.put(named(transfers)[FULL], self._sides(transfers))
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


__all__ = ["Beside", "KvrouteLinker", "device_folder"]

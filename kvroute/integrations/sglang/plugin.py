"""Where SGLang is listened to: its routers, its allocator, its answers and its weights, by SGLang's own hooks."""

from __future__ import annotations

from typing import Any, Final

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector.answers import FIELD
from kvroute.connector.left import Tokens
from kvroute.connector.versions import AS_LOADED, version_of
from kvroute.integrations.sglang.rows import Capturer, RoutedRows, capturer, slots_of
from kvroute.integrations.sglang.settings import settings_of_engine
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import weights_digest

SRT: Final = "sglang.srt"
ALLOCATORS: Final = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
CONTROLLER: Final = f"{SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
UPDATES: Final = ("disk", "distributed", "tensor", "ipc")


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    managers, memory = f"{SRT}.managers", f"{SRT}.mem_cache.allocator"
    hooks = {
        f"{SRT}.state_capturer.routed_experts.RoutedExpertsCapturer.create": (_created, HookType.AFTER),
        f"{memory}.token.TokenToKVPoolAllocator.alloc": (_given, HookType.AFTER),
        f"{memory}.paged.PagedTokenToKVPoolAllocator.alloc": (_given, HookType.AFTER),
        f"{memory}.paged.PagedTokenToKVPoolAllocator.alloc_extend": (_extended, HookType.AFTER),
        f"{memory}.paged.PagedTokenToKVPoolAllocator.alloc_decode": (_extended, HookType.AFTER),
        f"{CONTROLLER}.__init__": (_hosted, HookType.AFTER),
        f"{CONTROLLER}.write": (_backed_up, HookType.AFTER),
        f"{CONTROLLER}.load": (_brought_back, HookType.AFTER),
        f"{CONTROLLER}.write_storage": (_stored, HookType.AFTER),
        f"{CONTROLLER}._storage_hit_query": (_found, HookType.AFTER),
        f"{SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache._handle_prefetch_result": (
            _prefetched,
            HookType.BEFORE,
        ),
        f"{SRT}.mem_cache.unified_cache.linker_factory.create_unified_cache_linker": (_linked, HookType.AFTER),
        f"{managers}.scheduler.Scheduler.flush_cache": (_flushed, HookType.AFTER),
        f"{managers}.scheduler.Scheduler.handle_update_weight_version": (_named, HookType.AFTER),
        f"{managers}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._maybe_collect_routed_experts": (_collected, HookType.AROUND),
    }
    updater = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    hooks |= {f"{updater}.update_weights_from_{each}": (_updated, HookType.AROUND) for each in UPDATES}
    for place, (hook, kind) in hooks.items():
        HookRegistry.register(place, hook, kind)


def _created(theirs: Any, *_: Any, model_config: Any, num_tokens: int, **__: Any) -> Capturer | None:
    """In the place of ``RoutedExpertsCapturer.create``, where SGLang returns routed experts: of the first rank's."""
    from sglang.srt.runtime_context import get_model, get_parallel, get_schedule  # type: ignore[import-not-found]

    if theirs is None or get_parallel().tp_rank:
        return None

    settings, page = settings_of_engine(), get_schedule().page_size
    spec = routing_spec_from_hf(model_config.hf_text_config, page)
    weights = settings.weights or weights_digest(model_config.model_path, str(model_config.revision or ""))
    name = f"{weights}/{model_config.dtype}/{get_model().kv_cache_dtype}/{model_config.quantization}"
    pages = -(-num_tokens // page) + 1
    return Capturer(theirs, RoutedRows(spec, pages, Namespace(name, AS_LOADED), settings))


def _given(slots: Any, allocator: Any, *_: Any, **__: Any) -> None:
    """Slots were given out, whole pages of them."""
    _told(slots, allocator, whole=True)


def _extended(slots: Any, allocator: Any, *_: Any, **__: Any) -> None:
    """Slots were given out, also in pages that a request had already."""
    _told(slots, allocator, whole=False)


def _told(slots: Any, allocator: Any, *, whole: bool) -> None:
    if slots is None or (found := capturer()) is None:
        return
    if type(allocator).__name__ not in ALLOCATORS:
        raise ConfigError("SGLang's allocator", " or ".join(ALLOCATORS), type(allocator).__name__)
    found.rows.given(slots, whole=whole)


def _hosted(_: Any, controller: Any, *__: Any, **___: Any) -> None:
    """There are pages on the host, and maybe a storage behind them."""
    from kvroute.integrations.sglang.linker import PoolKV

    if (found := capturer()) is not None:
        pool, kv = controller.mem_pool_host, controller.mem_pool_device_allocator.get_kvcache()
        folder = PoolKV(kv, pool.page_size).folder() if controller.enable_storage else None
        found.rows.attach(folder=folder, host_pages=-(-pool.size // pool.page_size) + 1)


def _backed_up(host_slots: Any, _: Any, device_indices: Any, *__: Any, **___: Any) -> None:
    if host_slots is not None and (found := capturer()) is not None:
        found.rows.backed_up(device_indices, host_slots)


def _brought_back(slots: Any, _: Any, host_indices: Any, *__: Any, **___: Any) -> None:
    if slots is not None and len(slots) and (found := capturer()) is not None:
        found.rows.brought_back(host_indices, slots)


def _stored(_: Any, _controller: Any, host_slots: Any, _tokens: Any, keys: Any = None, *__: Any, **___: Any) -> None:
    """Pages of the host go to the storage."""
    if (found := capturer()) is not None and found.rows.witness is not None and not found.rows.weights.mixed:
        found.rows.keep(keys, found.rows.pages_of(host_slots, host=True))


def _found(hit: Any, controller: Any, *_: Any) -> Any:
    """The storage has KV; what has no rows is cut off. Called by a thread of the controller's."""
    if (found := capturer()) is None or found.rows.witness is None or not found.rows.settings.rows:
        return hit
    keys, tokens = hit
    n = found.rows.stored(keys)
    return keys[:n], min(tokens, n * controller.page_size)


def _prefetched(tree: Any, operation: Any) -> None:
    """Pages have come to the host from the storage."""
    if (found := capturer()) is not None:
        n, slots = operation.completed_tokens, tree.ongoing_prefetch[operation.handle].host_indices
        found.rows.prefetched(operation.hash_value[: n // tree.page_size], slots[:n])


def _linked(linker: Any, *args: Any, config: Any, components: Any, forward_stream: Any = None, **_: Any) -> Any:
    """In the place of a linker that keeps KV only: one that keeps the rows beside it."""
    from kvroute.integrations.sglang.linker import KvrouteLinker

    if capturer() is None or isinstance(linker, KvrouteLinker):
        return linker
    more = {"components": components, "extra_config": config, "forward_stream": forward_stream}
    return KvrouteLinker(*args, **more, inner=linker)


def _collected(original: Any, processor: Any, req: Any) -> None:
    """A request is over: SGLang's field and kvroute's answer."""
    found = capturer()
    if found is None or not req.return_routed_experts:
        original(processor, req)
        return
    said = list(req.output_ids_through_stop)
    ids = [*req.origin_input_ids, *said]
    slots = slots_of(processor.req_to_token_pool, req.kv.req_pool_idx, len(ids) - 1)
    start = min(req.routed_experts_start_len, len(slots))
    tokens = Tokens(ids, len(req.origin_input_ids))
    req.routed_experts, told = found.rows.answer(req.rid, slots, start, tokens)
    if told is not None and said:
        beside = req.customized_info or {}
        req.customized_info = beside | {FIELD: [*(None for _ in said[1:]), told]}  # SGLang has one a token


def _updated(original: Any, updater: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
    """Weights were updated, or half of them: what is computed from here on is of others."""
    answer = original(updater, asked, *args, **kwargs)
    _changed(asked.weight_version if getattr(answer, "success", False) else None)
    return answer


def _named(_: Any, _scheduler: Any, asked: Any, *__: Any) -> None:
    _changed(asked.new_version)


def _changed(version: str | None) -> None:
    if (found := capturer()) is not None:
        found.rows.settle()
        found.rows.weights.changed(None if version is None else version_of(version))


def _flushed(done: Any, *_: Any, **__: Any) -> None:
    if done and (found := capturer()) is not None:
        found.rows.settle()
        found.rows.weights.forgotten()


__all__ = ["register_hooks"]

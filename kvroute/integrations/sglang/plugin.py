"""Where SGLang is listened to: its routers, its allocator, its answers and its weights, by SGLang's own hooks."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt import runtime_context as context  # type: ignore[import-not-found]
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector.versions import AS_LOADED, version_of
from kvroute.integrations.sglang.capturer import Capturer, capturer
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.integrations.sglang.settings import settings_of_engine
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import weights_digest

ALLOCATORS: Final = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")


def register_hooks() -> None:
    memory, managers = "sglang.srt.mem_cache", "sglang.srt.managers"
    paged = f"{memory}.allocator.paged.PagedTokenToKVPoolAllocator"
    controller = f"{memory}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
    parts = f"{managers}.scheduler_components"
    updater = f"{parts}.weight_updater.SchedulerWeightUpdaterManager.update_weights_from"
    for place, hook in {
        "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.create": _created,
        f"{memory}.allocator.token.TokenToKVPoolAllocator.alloc": _given,
        f"{paged}.alloc": _given,
        f"{paged}.alloc_extend": _given,
        f"{paged}.alloc_decode": _given,
        f"{controller}.__init__": _hosted,
        f"{controller}.write": _backed_up,
        f"{controller}.load": _brought_back,
        f"{controller}.write_storage": _stored,
        f"{controller}._storage_hit_query": _found,
        f"{memory}.unified_cache.linker_factory.create_unified_cache_linker": _linked,
        f"{managers}.scheduler.Scheduler.flush_cache": _flushed,
        f"{managers}.scheduler.Scheduler.handle_update_weight_version": _named,
        **{f"{updater}_{each}": _updated for each in ("disk", "distributed", "tensor", "ipc")},
    }.items():
        HookRegistry.register(place, hook, HookType.AFTER)
    tree = f"{memory}.unified_radix_cache.UnifiedRadixCache"
    HookRegistry.register(f"{tree}._handle_prefetch_result", _prefetched, HookType.BEFORE)
    collect = f"{parts}.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts"
    HookRegistry.register(collect, _collects, HookType.BEFORE)


def _created(theirs: Any, *_: Any, model_config: Any, num_tokens: int, **__: Any) -> Capturer | None:
    """In the place of ``RoutedExpertsCapturer.create``, where SGLang returns routed experts: of the first rank's."""
    if theirs is None or context.get_parallel().tp_rank:
        return None
    settings, page = settings_of_engine(), context.get_schedule().page_size
    spec = routing_spec_from_hf(model_config.hf_text_config, page)
    weights = settings.weights or weights_digest(model_config.model_path, str(model_config.revision or ""))
    name = f"{weights}/{model_config.dtype}/{context.get_model().kv_cache_dtype}/{model_config.quantization}"
    return Capturer(theirs, RoutedRows(spec, -(-num_tokens // page) + 1, Namespace(name, AS_LOADED), settings))


def _given(slots: Any, allocator: Any, *_: Any, **__: Any) -> None:
    """Slots were given out."""
    if slots is None or (found := capturer()) is None:
        return
    if type(allocator).__name__ not in ALLOCATORS:
        raise ConfigError("SGLang's allocator", " or ".join(ALLOCATORS), type(allocator).__name__)
    found.rows.given(slots)


def _hosted(_: Any, controller: Any, *__: Any, **___: Any) -> None:
    """There are pages on the host, and maybe a storage behind them."""
    from kvroute.integrations.sglang.linker import PoolKV

    if (found := capturer()) is not None:
        pool, kv = controller.mem_pool_host, controller.mem_pool_device_allocator.get_kvcache()
        folder = PoolKV(kv, pool.page_size).folder if controller.enable_storage else None
        found.rows.attach(folder=folder, host_pages=-(-pool.size // pool.page_size) + 1)


def _backed_up(host_slots: Any, _: Any, device_indices: Any, *__: Any, **___: Any) -> None:
    if host_slots is not None and (found := capturer()) is not None:
        found.rows.backed_up(device_indices, host_slots)


def _brought_back(slots: Any, _: Any, host_indices: Any, *__: Any, **___: Any) -> None:
    if slots is not None and len(slots) and (found := capturer()) is not None:
        found.rows.brought_back(host_indices, slots)


def _stored(_: Any, _controller: Any, host_slots: Any, _tokens: Any, keys: Any = None, *__: Any, **___: Any) -> None:
    """Pages of the host go to the storage."""
    if (found := capturer()) is not None and found.rows.witness is not None:
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


def _linked(linker: Any, _: Any, params: Any, *, components: Any, **__: Any) -> None:
    """A linker that keeps KV only has rows beside it from here on."""
    from kvroute.integrations.sglang.linker import KvrouteLinker, beside

    if capturer() is not None and not isinstance(linker, KvrouteLinker):
        beside(linker, params, components)


def _collects(_: Any, req: Any) -> None:
    """A request is over, and its rows are about to be asked for."""
    if (found := capturer()) is not None:
        found.req = req


def _updated(answer: Any, _: Any, asked: Any, *__: Any, **___: Any) -> None:
    """Weights were updated, or half of them: what is computed from here on is of others."""
    _changed(asked.weight_version if getattr(answer, "success", False) else None)


def _named(_: Any, _scheduler: Any, asked: Any, *__: Any) -> None:
    _changed(asked.new_version)


def _changed(version: str | None) -> None:
    if (found := capturer()) is not None:
        found.rows.weights.changed(None if version is None else version_of(version))


def _flushed(done: Any, *_: Any, **__: Any) -> None:
    if done and (found := capturer()) is not None:
        found.rows.weights.forgotten()


__all__ = ["register_hooks"]

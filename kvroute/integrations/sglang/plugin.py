"""kvroute's hooks in SGLang, registered by SGLang's own means: on routers, caches, answers and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from sglang.srt import runtime_context as context  # type: ignore[import-not-found]
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

from cache_manager.keys import Namespace
from kvroute.connector.versions import AS_LOADED, version_of
from kvroute.integrations.sglang.rows import Capturer, RoutedRows, capturer
from kvroute.integrations.sglang.settings import settings_of_engine
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import weights_digest


@cache
def register_hooks() -> None:
    """Once in a process, however many installed packages name the plugin."""
    memory, managers = "sglang.srt.mem_cache", "sglang.srt.managers"
    controller = f"{memory}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
    parts = f"{managers}.scheduler_components"
    updater = f"{parts}.weight_updater.SchedulerWeightUpdaterManager.update_weights_from"
    create = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.create"
    HookRegistry.register(create, _created, HookType.AFTER)
    after: dict[str, Callable[..., Any]] = {
        f"{controller}.__init__": _hosted,
        f"{controller}.write": _backed_up,
        f"{controller}.load": _brought_back,
        f"{controller}.write_storage": _stored,
        f"{controller}._storage_hit_query": _found,
        f"{memory}.unified_cache.linker_factory.create_unified_cache_linker": _linked,
        f"{managers}.scheduler.Scheduler.flush_cache": _flushed,
        f"{managers}.scheduler.Scheduler.handle_update_weight_version": _named,
        **{f"{updater}_{each}": _updated for each in ("disk", "distributed", "tensor", "ipc")},
    }
    before: dict[str, Callable[..., Any]] = {
        f"{memory}.unified_radix_cache.UnifiedRadixCache._handle_prefetch_result": _prefetched,
        f"{parts}.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts": _collects,
    }
    for kind, hooks in {HookType.AFTER: after, HookType.BEFORE: before}.items():
        for place, hook in hooks.items():
            HookRegistry.register(place, _followed(hook), kind)


def _followed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, called only if this process has rows: with the capturer, then SGLang's answer and arguments."""

    def called(*args: Any, **named: Any) -> Any:
        return None if (found := capturer()) is None else hook(found, *args, **named)

    return called


def _created(theirs: Any, *_: Any, model_config: Any, num_tokens: int, **__: Any) -> Capturer | None:
    """Replaces the result of ``RoutedExpertsCapturer.create`` on the first rank, if SGLang returns routed experts."""
    if theirs is None or context.get_parallel().tp_rank:
        return None
    settings, page = settings_of_engine(), context.get_schedule().page_size
    spec = routing_spec_from_hf(model_config.hf_text_config, page)
    weights = settings.weights or weights_digest(model_config.model_path, str(model_config.revision or ""))
    name = f"{weights}/{model_config.dtype}/{context.get_model().kv_cache_dtype}/{model_config.quantization}"
    return Capturer(theirs, RoutedRows(spec, -(-num_tokens // page) + 1, Namespace(name, AS_LOADED), settings))


def _hosted(found: Capturer, _: Any, controller: Any, *__: Any, **___: Any) -> None:
    """SGLang has pages on the host, and maybe a storage behind them."""
    from kvroute.integrations.sglang.linker import host_folder

    pool = getattr(controller.mem_pool_host, "anchor_entry", None)
    pool = controller.mem_pool_host if pool is None else pool.host_pool
    folder = host_folder(pool) if controller.enable_storage else None
    found.rows.attach(folder=folder, host_pages=-(-pool.size // pool.page_size) + 1)


def _backed_up(found: Capturer, host_slots: Any, _: Any, device_indices: Any, *__: Any, **___: Any) -> None:
    if host_slots is not None:
        found.rows.copied(found.rows.pages_of(device_indices), found.rows.pages_of(host_slots, host=True))


def _brought_back(found: Capturer, slots: Any, _: Any, host_indices: Any, *__: Any, **___: Any) -> None:
    if slots is not None and len(slots):
        found.rows.copied(found.rows.pages_of(host_indices, host=True), found.rows.pages_of(slots))


def _stored(found: Capturer, *asked: Any, **_: Any) -> None:
    """Pages of the host go to the storage."""
    if found.rows.folder is not None:
        _id, _controller, host_slots, _tokens, keys, *_more = asked
        found.rows.keep(keys, found.rows.pages_of(host_slots, host=True))


def _found(found: Capturer, hit: Any, controller: Any, *_: Any) -> Any:
    """The storage has KV: cut off the part without rows. The controller's thread calls it."""
    if found.rows.folder is None:
        return hit
    keys, tokens = hit
    n = found.rows.stored(keys)
    return keys[:n], min(tokens, n * controller.page_size)


def _prefetched(found: Capturer, tree: Any, operation: Any) -> None:
    """Pages have come to the host from the storage."""
    if n := operation.completed_tokens // tree.page_size if found.rows.folder is not None else 0:
        slots = tree.ongoing_prefetch[operation.handle].host_indices[: n * tree.page_size]
        found.rows.loaded(operation.hash_value[:n], found.rows.pages_of(slots, host=True))


def _linked(_: Capturer, linker: Any, __: Any, params: Any, *, components: Any, **___: Any) -> Any:
    """Give a linker that keeps KV only rows beside it."""
    from kvroute.integrations.sglang.linker import Beside, KvrouteLinker

    return linker if isinstance(linker, KvrouteLinker) else Beside(linker, params, components)


def _collects(found: Capturer, _: Any, req: Any) -> None:
    """A request is over, and SGLang is about to ask for its rows."""
    found.req = req


def _updated(found: Capturer, answer: Any, _: Any, asked: Any, *__: Any, **___: Any) -> None:
    """Weights were updated, perhaps partly: later rows are of other weights."""
    version = asked.weight_version if getattr(answer, "success", False) else None
    found.rows.weights.changed(None if version is None else version_of(version))


def _named(found: Capturer, _: Any, __: Any, asked: Any, *___: Any) -> None:
    found.rows.weights.changed(version_of(asked.new_version))


def _flushed(found: Capturer, done: Any, *_: Any, **__: Any) -> None:
    if done:
        found.rows.weights.forgotten()


__all__ = ["register_hooks"]

"""kvroute's hooks in SGLang: on routers, caches, answers and weights. ``plugin.py`` puts them in place, all or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from cache_manager.keys import Namespace
from kvroute.connector.answers import FIELD
from kvroute.connector.settings import Common
from kvroute.connector.started import started
from kvroute.connector.versions import AS_LOADED, version_of
from kvroute.integrations.sglang import versions
from kvroute.integrations.sglang.refusals import supported
from kvroute.integrations.sglang.routers import routed_layers
from kvroute.integrations.sglang.rows import Capturer, RoutedRows, capturer
from kvroute.integrations.sglang.settings import settings_of_arguments
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import configuration_digest, weights_digest

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]

COMPUTES: Final = (
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "model_impl",
    "quantization_param_path",
    "modelopt_quant",
    "rl_quant_profile",
    "enable_tf32_matmul",
    "is_embedding",
)
"""SGLang's arguments that change the weights or what is computed with them, beside the model's configuration."""


def _after(hook: Hook) -> Hook:
    """SGLang's function, then the hook with the capturer, the result and the arguments, if this process has rows.

    The hook's result is the function's, unless it is ``None``.
    """

    def wrapper(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        rows = capturer()
        changed = None if rows is None else hook(rows, result, *args, **named)
        return result if changed is None else changed

    return wrapper


def _before(hook: Hook) -> Hook:
    """The hook with the capturer and the arguments, if this process has rows; then SGLang's function."""

    def wrapper(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        rows = capturer()
        if rows is not None:
            hook(rows, *args, **named)
        return function(*args, **named)

    return wrapper


def _created(create: Callable[..., Any], runner: Any, *args: Any, **named: Any) -> None:
    """``ModelRunner.init_routed_experts_capturer``: ours on the first rank, if SGLang returns routed experts."""
    import sglang  # type: ignore[import-not-found]

    create(runner, *args, **named)
    theirs = versions.experts_capturer()
    if theirs is None or isinstance(theirs, Capturer) or not versions.first_rank():
        return
    arguments, page = versions.arguments(), versions.page_size()
    settings = settings_of_arguments(arguments)
    supported(arguments, settings)
    spec = routing_spec_from_hf(runner.model_config.hf_text_config, page)
    captured = routed_layers(runner.model, spec.attrs["layer_ids"])
    name = namespace_name(runner.model_config, arguments, settings)
    pages = -(-versions.host_tokens(theirs) // page) + 1
    versions.without_host_buffer(theirs)
    rows = RoutedRows(spec, pages, Namespace(name, AS_LOADED), settings)
    versions.set_experts_capturer(Capturer(theirs, rows))
    line = started(
        f"SGLang {sglang.__version__}",
        spec,
        settings,
        captured=captured,
        blocks=pages,
        carrier=carrier_of(arguments),
        version=AS_LOADED,
    )
    logger.info("%s", line)


def carrier_of(arguments: Any) -> str:
    """What brings KV from outside, and rows beside it."""
    if getattr(arguments, "enable_unified_cache_external_linker", False):
        return "linker"
    return "hierarchical cache" if getattr(arguments, "enable_hierarchical_cache", False) else "none"


def namespace_name(model_config: Any, arguments: Any, settings: Common) -> str:
    """Names the weights and the effective configuration: engines that differ in either never share a key.

    Adapters are not in it: with a store they are refused.
    """
    revision = getattr(model_config.hf_config, "_commit_hash", None) or model_config.revision or ""
    weights = settings.weights or weights_digest(model_config.model_path, str(revision))
    chosen = {name: getattr(arguments, name, None) for name in COMPUTES}
    computed = configuration_digest(
        model_config.hf_config.to_dict(),
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        kv_cache_dtype=versions.kv_cache_dtype(),
        **chosen,
    )
    return f"{weights}/{computed}"


def _begins(found: Capturer, *_: Any, **__: Any) -> None:
    found.begin()


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


def _sends(_: Capturer, __: Any, reqs: list[Any], *___: Any, **____: Any) -> None:
    """Answers go out together, up to 0.5.14 with one list of entries for each key, which is as long as the number of
    answers that have the key: so each has ours, or none."""
    informed = [req for req in reqs if FIELD in (req.customized_info or {})]
    for req in reqs if informed else ():
        req.customized_info = {FIELD: [], **(req.customized_info or {})}


def _updated(found: Capturer, answer: Any, _: Any, asked: Any, *__: Any, **___: Any) -> None:
    """Weights were updated, perhaps partly: later rows are of other weights."""
    version = asked.weight_version if getattr(answer, "success", False) else None
    found.rows.weights.changed(None if version is None else version_of(version))


def _named(found: Capturer, _: Any, __: Any, asked: Any, *___: Any) -> None:
    found.rows.weights.changed(version_of(asked.new_version))


def _flushed(found: Capturer, done: Any, *_: Any, **__: Any) -> None:
    if done:
        found.rows.weights.forgotten()


HOOKS: Final[Mapping[str, Hook]] = {
    "created": _created,
    "hosted": _after(_hosted),
    "backed_up": _after(_backed_up),
    "brought_back": _after(_brought_back),
    "stored": _after(_stored),
    "found": _after(_found),
    "linked": _after(_linked),
    "flushed": _after(_flushed),
    "named": _after(_named),
    "updated_disk": _after(_updated),
    "updated_distributed": _after(_updated),
    "updated_tensor": _after(_updated),
    "updated_ipc": _after(_updated),
    "prefetched": _before(_prefetched),
    "collects": _before(_collects),
    "begins": _before(_begins),
    "sends": _before(_sends),
}
"""By the names of :data:`versions.PLACES`."""

__all__ = ["HOOKS"]

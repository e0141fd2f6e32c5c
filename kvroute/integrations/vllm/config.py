"""Which of vLLM's configurations are supported; others are refused by name."""

from __future__ import annotations

from typing import Any, Final

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector.pages import page_name
from kvroute.connector.settings import Engine, Settings
from kvroute.connector.versions import AS_LOADED
from kvroute.integrations.vllm.versions import TESTED, drafts_by_model, minor
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import weights_digest

WHOLE_REQUESTS: Final = tuple(f"{each}Connector" for each in ("Nixl", "NixlPull", "NixlPush", "Mooncake", "MoRIIO"))
"""Connectors that move a request's KV whole, from one engine to another: hits are not cut, and rows go beside it."""


def settings_of(transfer: Any) -> Settings:
    """``kv_connector_extra_config["kvroute"]`` of vLLM's ``KVTransferConfig``."""
    return Settings.of(transfer.kv_connector_extra_config.get("kvroute", {}))


def engine_of(config: Any, cache: Any, inner: str) -> Engine:
    """``config`` and ``cache`` are vLLM's ``VllmConfig`` and ``KVCacheConfig``.

    Raises :class:`ConfigError` for unsupported configurations, :class:`SpecError` for a model without experts.
    """
    settings, model = settings_of(config.kv_transfer_config), config.model_config
    refuse(config, cache, settings)
    spec = routing_spec_from_hf(model.hf_text_config, cache.kv_cache_groups[0].kv_cache_spec.block_size)
    pages = page_name(spec) in cache.kv_cache_groups[0].layer_names
    if settings.carrier == "layer" and (settings.store or not pages):
        wanted = "no store, and a model with a layer of rows (the plugin of kvroute, an architecture that it knows)"
        raise ConfigError("settings.carrier 'layer'", wanted, f"{model.architectures}, store {settings.store!r}")
    transfer = settings.carrier == "transfer" or (settings.carrier == "auto" and inner in WHOLE_REQUESTS)
    if transfer and inner not in WHOLE_REQUESTS:
        raise ConfigError(
            "settings.carrier 'transfer'", f"a connector that moves whole requests, {WHOLE_REQUESTS}", inner
        )
    if transfer and settings.store:
        wanted = "none where prefill lends rows to decode, or carrier 'connector'"
        raise ConfigError("settings.store", wanted, settings.store)
    version = AS_LOADED if settings.weights_version is None else settings.weights_version
    weights = settings.weights or weights_digest(model.model, str(model.revision or ""))
    precision = f"{model.dtype}/{config.cache_config.cache_dtype}/{model.quantization}"
    return Engine(
        settings,
        spec,
        Namespace(f"{weights}/{precision}", version),
        blocks=cache.num_blocks,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        witness=settings.witness if settings.store and inner != "Connector" else "off",
        pages=pages,
        transfer=transfer,
        drafts=drafts_by_model(config.speculative_config),
        gate=inner not in WHOLE_REQUESTS,
    )


def refuse(config: Any, cache: Any, settings: Settings) -> None:
    """Raise :class:`ConfigError` naming the first unsupported feature of the engine."""
    import vllm  # type: ignore[import-not-found]

    model, parallel, kv = config.model_config, config.parallel_config, cache.kv_cache_groups[0].kv_cache_spec
    version = minor(vllm.__version__)
    lossy, hashed = _lossy(kv, model.max_model_len), getattr(cache, "hash_block_size", None)
    contexts = parallel.decode_context_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    own = (model, getattr(config, "aux_output_config", None))
    for wanted, got in {
        f"vLLM {' or '.join(TESTED)}, or settings.untested={version!r}": version not in (*TESTED, settings.untested),
        "one KV cache group (a hybrid model has more; --disable-hybrid-kv-cache-manager makes one of windows and full "
        "attention)": len(cache.kv_cache_groups) > 1,
        f"KV of all tokens, or max_model_len within the window, not {', '.join(lossy)}": bool(lossy),
        "a hash for each whole block": hashed not in (None, kv.block_size),
        "no pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "no data parallelism": parallel.data_parallel_size > 1,
        "no context parallelism": contexts > 1,
        "no dual-batch overlap": getattr(parallel, "enable_dbo", False),
        "prompts of tokens (embeddings all have the same ids)": getattr(model, "enable_prompt_embeds", False),
        "no routed experts of vLLM's own (one hook a router)": any(
            getattr(place, "enable_return_routed_experts", False) for place in own
        ),
        "a store that other processes can read": settings.store.startswith("memory:"),
    }.items():
        if got:
            raise ConfigError("vLLM with kvroute", wanted, f"vLLM {vllm.__version__} as it is configured")


def _lossy(kv: Any, tokens_max: int) -> list[str]:
    """The specs of a KV cache group that give up KV of earlier tokens, and their rows with it.

    A spec of full attention keeps all KV, even if a layer reads only a window of it.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # type: ignore[import-not-found]

    found = dict[str, None]()
    for spec in getattr(kv, "kv_cache_specs", {"": kv}).values():
        full = isinstance(spec, FullAttentionSpec) and not hasattr(spec, "rswa_window")
        if not full and not (isinstance(spec, SlidingWindowSpec) and spec.sliding_window >= tokens_max):
            found[type(spec).__name__] = None
    return list(found)


__all__ = ["engine_of", "refuse", "settings_of"]

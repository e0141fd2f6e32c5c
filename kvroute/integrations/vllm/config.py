"""Which of vLLM's configurations are supported; others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector.carriers import ByKey, ByPairs, ByTransfer, Carrier, NoCarrier
from kvroute.connector.engine import Engine
from kvroute.connector.limits import Limits
from kvroute.connector.mtp import mtp_spec
from kvroute.connector.settings import RANK, Settings
from kvroute.connector.stages import stage_spec
from kvroute.connector.versions import AS_LOADED
from kvroute.integrations.vllm.layers import own_layers
from kvroute.integrations.vllm.refusals import refuse_arguments
from kvroute.integrations.vllm.versions import TESTED, drafts_by_model, minor
from kvroute.integrations.vllm.weights import refuse_weights
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import configuration_digest, weights_digest

WHOLE_REQUESTS: Final = tuple(f"{name}Connector" for name in ("Nixl", "NixlPull", "NixlPush", "Mooncake", "MoRIIO"))
"""Connectors that move a request's KV whole, from one engine to another: hits are not cut, and rows go beside it."""
KV_NAMES: Final = ("remote_engine_id", "remote_request_id", "transfer_id")
"""Fields of ``kv_transfer_params`` by which those connectors find one request's KV: a ticket repeats them."""
OF_GROUPS: Final = (
    "Connector",
    "OffloadingConnector",
    "NixlConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "MultiConnector",
)
"""Connectors around which a model with several KV cache groups was judged."""
OF_STAGES: Final = ("Connector", "OffloadingConnector")
"""Connectors around which pipeline parallelism was judged."""
CHOICES: Final = (
    "dtype",
    "quantization",
    "quantization_config",
    "model_impl",
    "model_class_overrides",
    "disable_sliding_window",
)
"""Fields of vLLM's ``ModelConfig`` that change what is computed with the same files."""
ENGINE_LIMITS: Final = Limits()
"""Of every engine of vLLM."""


def kv_names(request: Any, answered: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What names a request's KV: in decode's request, or in prefill's with what the inner connector ``answered``."""
    parameters: Mapping[str, Any] = request.kv_transfer_params or {}
    if answered is not None:
        name = parameters.get("transfer_id")
        parameters = answered
        if not str(name).endswith(request.request_id):  # MoRIIO's does, of a client that gives no name
            parameters = {"transfer_id": name, **answered}
    names = {name: parameters.get(name) for name in KV_NAMES}
    return {name: str(value)[-256:] for name, value in names.items() if value}


def settings_of(transfer: Any) -> Settings:
    """``kv_connector_extra_config["kvroute"]`` of vLLM's ``KVTransferConfig``."""
    return Settings.of(transfer.kv_connector_extra_config.get("kvroute", {}))


def engine_of(config: Any, cache: Any, inner: str, places: int = 0) -> Engine:
    """``config`` and ``cache`` are vLLM's ``VllmConfig`` and ``KVCacheConfig``; the connector ``inner`` says of so many
    ``places`` on the host what it copies there.

    Raises :class:`ConfigError` for unsupported configurations, :class:`SpecError` for a model without experts.
    """
    settings = settings_of(config.kv_transfer_config)
    model = config.model_config
    refuse_shared_files(config.parallel_config, settings)
    settings = settings.of_rank(config.parallel_config.data_parallel_rank)
    refuse(config, cache, settings, inner)
    layers = model.get_total_num_hidden_layers()
    number = kv_group_of(cache, model.max_model_len, layers)
    groups = cache.kv_cache_groups
    block_tokens = groups[number].kv_cache_spec.block_size
    spec = routing_spec_from_hf(model.hf_text_config, block_tokens)
    carrier = carrier_of(settings, inner, cuts=len(groups) == 1, places=places)
    refuse_stages(config, cache, carrier, inner)
    if settings.mtp:
        refuse_mtp(config, cache, inner)
    if settings.routing_weights:
        refuse_weights(config)
    version = AS_LOADED
    if settings.weights_version is not None:
        version = settings.weights_version
    weights = settings.weights
    if not weights:
        home = getattr(model, "model_weights", "") or model.model
        weights = weights_digest(home, str(model.revision or ""))
    namespace = Namespace(f"{weights}/{computation(config)}", version)
    return Engine(
        settings,
        spec,
        namespace,
        blocks=cache.num_blocks,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        carrier=carrier,
        drafts=drafts_by_model(config.speculative_config),
        hashes=max(1, spec.block_tokens // hashed_tokens(config, cache)),
        group=number,
        shares_blocks=len(groups) > 1,
        stages=config.parallel_config.pipeline_parallel_size,
        mtp=mtp_spec(spec) if settings.mtp else None,
        limits=ENGINE_LIMITS,
    )


def stage_of(config: Any, engine: Engine) -> Engine | None:
    """``engine`` as this worker's stage of the pipeline has it: with rows of its own layers. ``None``: no layer of the
    stage has a router. vLLM divides the model's layers by the same function."""
    if engine.stages == 1:
        return engine
    from vllm.distributed.parallel_state import get_pp_group  # type: ignore[import-not-found]
    from vllm.distributed.utils import get_pp_indices  # type: ignore[import-not-found]

    group = get_pp_group()
    layers = config.model_config.get_total_num_hidden_layers()
    first, stop = get_pp_indices(layers, group.rank_in_group, group.world_size)
    spec = stage_spec(engine.spec, range(first, stop))
    return None if spec is None else replace(engine, spec=spec)


def check_children(config: Any, connector: Any) -> None:
    """Raise :class:`ConfigError` for connectors inside a MultiConnector that do not bear several KV cache groups: vLLM
    makes one group for these if it knows the outer connector by its own name."""
    bear = getattr(connector, "all_children_support_hma", None)
    if bear is None or config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    if not bear(config.kv_transfer_config):
        wanted = "connectors that bear several KV cache groups (SupportsHMA), or --disable-hybrid-kv-cache-manager"
        raise ConfigError("connectors", wanted, f"others inside {connector.__name__}")


def kv_group_of(cache: Any, tokens_max: int, layers: int) -> int:
    """The KV cache group whose blocks rows go with: the first one that keeps the KV of all tokens of a request, in the
    model that has so many ``layers``.

    Blocks of all groups are of one pool, so that each has one life at a time, in one group. A group of a draft model
    alone is not taken: its slots are of other tokens. Raises :class:`ConfigError` if there is none.
    """
    lossy = dict[str, None]()
    names = [name for group in cache.kv_cache_groups for name in group.layer_names]
    own = set(own_layers(names, layers))
    for number, group in enumerate(cache.kv_cache_groups):
        if own.isdisjoint(group.layer_names):
            continue
        gives_up = _lossy(group.kv_cache_spec, tokens_max)
        if not gives_up:
            return number
        lossy |= dict.fromkeys(gives_up)
    wanted = f"a KV cache group with the KV of all tokens, or max_model_len within a window, not {', '.join(lossy)}"
    raise ConfigError("vLLM with kvroute", wanted, f"{len(cache.kv_cache_groups)} groups without")


def hashed_tokens(config: Any, cache: Any) -> int:
    """For how many tokens vLLM makes a hash: those of a block, or, beside several groups, fewer or more."""
    groups = cache.kv_cache_groups
    if len(groups) == 1:
        return int(groups[0].kv_cache_spec.block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # type: ignore[import-not-found]

    tokens: int = resolve_kv_cache_block_sizes(cache, config)[1]
    return tokens


def carrier_of(settings: Settings, inner: str, *, cuts: bool = True, places: int = 0) -> Carrier:
    """How rows arrive beside the KV that the connector ``inner`` brings; ``places``: on the host, of which the
    connector says what it copies there.

    ``cuts``: a hit of this connector may be cut; else it is taken whole or not at all. Raises :class:`ConfigError` for
    settings that do not fit together.
    """
    whole = inner in WHOLE_REQUESTS
    transfer = settings.carrier == "transfer" or (settings.carrier == "auto" and whole)
    if transfer and not whole:
        wanted = f"a connector that moves whole requests, {WHOLE_REQUESTS}"
        raise ConfigError("settings.carrier 'transfer'", wanted, inner)
    if transfer and settings.store:
        wanted = "none where prefill lends rows to decode, or carrier 'connector'"
        raise ConfigError("settings.store", wanted, settings.store)
    if transfer:
        return ByTransfer()
    if settings.store:
        witness = "off" if inner == "Connector" else _witness(settings)
        return ByKey(witness, gate=not whole, cuts=cuts)
    if places and settings.carrier == "auto":
        return ByPairs(places)
    return NoCarrier()


def _witness(settings: Settings) -> Literal["missing", "flagged"]:
    """What is said of the last router's choice where KV comes from elsewhere with its rows."""
    if settings.witness != "auto":
        return settings.witness
    if settings.field:
        wanted = "'missing' (an answer whose KV came from elsewhere has no field) or 'flagged' (it has, unproved there)"
        raise ConfigError("settings.witness", f"{wanted}, beside a field and a store", "neither")
    return "missing"


def refuse(config: Any, cache: Any, settings: Settings, inner: str) -> None:
    """Raise :class:`ConfigError` naming the first unsupported feature of the engine, whose KV the connector ``inner``
    keeps."""
    import vllm  # type: ignore[import-not-found]

    version = minor(vllm.__version__)
    judged = version in (*TESTED, settings.untested)
    groups = cache.kv_cache_groups
    connectors = ", ".join(f"Kvroute{name}" for name in OF_GROUPS)
    on_host = any(getattr(group, "host_resident", False) for group in groups)
    replayed = any(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) for group in groups)
    model = config.model_config
    layers = model.get_total_num_hidden_layers()
    number = kv_group_of(cache, model.max_model_len, layers)
    block = groups[number].kv_cache_spec.block_size
    hashed = hashed_tokens(config, cache)
    stores = bool(settings.store)
    for wanted, refused in {
        f"vLLM {' or '.join(TESTED)}, or settings.untested={version!r}": not judged,
        f"one KV cache group (a hybrid model has more), or a connector that was judged with several, {connectors}": len(
            groups
        )
        > 1
        and inner not in OF_GROUPS,
        "one pool of blocks for all KV cache groups": on_host,
        "no bounded replay of windows (--no-swa-bounded-replay): tokens of a hit would be routed again": replayed,
        f"no store, or a hash for each block of {block} tokens, not one for {hashed}": stores and block % hashed,
        "a store that other processes can read, not memory: alone": stores and not settings.reads,
    }.items():
        if refused:
            raise ConfigError("vLLM with kvroute", wanted, f"vLLM {vllm.__version__} as it is configured")
    refuse_arguments(config)


def refuse_shared_files(parallel: Any, settings: Settings) -> None:
    """Raise :class:`ConfigError` for one store of files that several data-parallel ranks would write."""
    if parallel.data_parallel_size > 1 and settings.writes and settings.shares_files:
        wanted = f"a directory for each data-parallel rank, such as file:///var/lib/kvroute/{RANK}"
        raise ConfigError("vLLM with kvroute: store", wanted, settings.store)


def refuse_stages(config: Any, cache: Any, carrier: Carrier, inner: str) -> None:
    """Raise :class:`ConfigError` naming the first feature of the engine that was not judged beside pipeline
    parallelism, if it has that."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size == 1:
        return
    connectors = ", ".join(f"Kvroute{name}" for name in OF_STAGES)
    brings = not isinstance(carrier, (NoCarrier, ByPairs))
    hosts = getattr(parallel, "nnodes", 1)
    for wanted, refused in {
        f"one of {connectors}: others were not judged": inner not in OF_STAGES,
        "no store or transfer of rows: each brings the rows of all layers to one worker": brings,
        "one KV cache group: a stage may have no layer of another one": len(cache.kv_cache_groups) > 1,
        "no drafts: not judged": config.speculative_config is not None,
        "no data parallelism: not judged": parallel.data_parallel_size > 1,
        "all stages on the scheduler's host: rows of others would have to be sent to it": hosts > 1,
    }.items():
        if refused:
            got = f"pipeline_parallel_size={parallel.pipeline_parallel_size} as it is configured"
            raise ConfigError("vLLM with kvroute and pipeline parallelism", wanted, got)


def refuse_mtp(config: Any, cache: Any, inner: str) -> None:
    """Raise :class:`ConfigError` naming the first feature of the engine that was not judged beside rows of an MTP
    layer."""
    speculative = config.speculative_config
    method = getattr(speculative, "method", None)
    draft_model = getattr(speculative, "draft_model_config", None)
    draft = getattr(draft_model, "hf_config", None)
    layers = getattr(draft, "num_nextn_predict_layers", None) or getattr(draft, "n_predict", None)
    has_graphs = getattr(config, "use_v2_model_runner", False) or config.device_config.device_type != "cpu"
    parallel = config.parallel_config
    for wanted, refused in {
        "drafts of MTP (speculative_config, method 'mtp')": method != "mtp",
        "one MTP layer: vLLM's drafts repeat the first one, and no token that stands goes through others": layers != 1,
        "a CPU with the V1 runner: passes in a device's graphs were not judged": has_graphs,
        "KvrouteConnector: MTP rows do not go along with KV from elsewhere": inner != "Connector",
        "one KV cache group": len(cache.kv_cache_groups) > 1,
        "one rank: several were not judged": parallel.world_size > 1 or parallel.data_parallel_size > 1,
    }.items():
        if refused:
            raise ConfigError("vLLM with kvroute: mtp", wanted, "mtp=True as vLLM is configured")


def computation(config: Any) -> str:
    """32 hex digits that differ between engines of the same files that compute differently.

    They cover the model's effective configuration, with ``hf_overrides`` and an edited ``config.json``, and vLLM's own
    choices. vLLM's ``VllmConfig`` is read, and the model's configuration once more from where vLLM had it: a model that
    is built fills in its own copy, in the workers alone, and all processes have to agree.
    """
    import vllm.envs as envs  # type: ignore[import-not-found]

    model = config.model_config
    load = config.load_config
    effective = _effective(model)
    chosen = {name: _plain(getattr(model, name, None)) for name in CHOICES}
    long_rope = "longrope" in str(effective)  # it has other factors for engines of long sequences
    return configuration_digest(
        effective,
        **chosen,
        kv_cache_dtype=config.cache_config.cache_dtype,
        load_format=_plain(load.load_format),
        loader=_plain(load.model_loader_extra_config),
        lora_dtype=_plain(getattr(config.lora_config, "lora_dtype", None)),
        max_model_len=model.max_model_len if long_rope else None,
        routing=getattr(envs, "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", ""),
    )


def _effective(model: Any) -> Mapping[str, Any]:
    """The model's configuration as vLLM's ``ModelConfig`` made it: from the files, then with its overrides."""
    from vllm.transformers_utils.config import get_config  # type: ignore[import-not-found]

    overrides = model.hf_overrides or {}
    flat: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    if not callable(overrides):
        nested = {key: value for key, value in overrides.items() if isinstance(value, dict)}
        flat = {key: value for key, value in overrides.items() if key not in nested}
    revision = getattr(model, "_hf_config_revision", None) or model.revision
    effective = get_config(
        model.hf_config_path or model.model,
        model.trust_remote_code,
        revision,
        model.code_revision,
        model.config_format,
        hf_overrides_kw=flat,
        hf_overrides_fn=overrides if callable(overrides) else None,
        token=model.hf_token,
    )
    model._apply_dict_overrides(effective, nested)
    return dict(effective.to_dict())


def _plain(value: Any) -> Any:
    """``value`` of vLLM's as the digest takes it: its own classes of settings by their fields."""
    is_plain = value is None or isinstance(value, (bool, int, float, str, Mapping))
    return value if is_plain else str(value)


def _lossy(kv: Any, tokens_max: int) -> list[str]:
    """The specs of a KV cache group that give up KV of earlier tokens, and their rows with it, or that have no slot for
    each token: a state of several tokens.

    A spec of full attention keeps all KV, even if a layer reads only a window of it.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # type: ignore[import-not-found]

    lossy = dict[str, None]()
    for spec in getattr(kv, "kv_cache_specs", {"": kv}).values():
        per_state = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
        name = type(spec).__name__
        full = isinstance(spec, FullAttentionSpec) and not hasattr(spec, "rswa_window")
        if isinstance(spec, SlidingWindowSpec):
            full = full or spec.sliding_window >= tokens_max
        if per_state != 1:
            lossy[f"{name} of {per_state} tokens a state"] = None
        elif not full:
            lossy[name] = None
    return list(lossy)


__all__ = [
    "OF_GROUPS",
    "carrier_of",
    "check_children",
    "computation",
    "engine_of",
    "kv_group_of",
    "kv_names",
    "refuse",
    "settings_of",
]

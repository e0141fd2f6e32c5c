"""What the operator says, what the engine is, and which engines are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import msgspec

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from kvroute.integrations.vllm.pages import page_name
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import weights_digest

TESTED: Final = ("0.32", "0.33")
"""Versions of vLLM that rows were judged on: 0.32 by the tests, 0.33's Python over 0.32's native code by hand."""
WHOLE_REQUESTS: Final = ("Nixl", "Mooncake", "MoRIIO", "P2pNccl")
"""Connectors that move a request's KV whole: a hit of theirs cannot be cut back."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config["kvroute"]``."""

    store: str = ""  # URL of the rows' store, written by the worker; "": rows end with their blocks
    reader: str = ""  # URL by which the scheduler asks that store; by default the same, with mode=read for files
    rollouts: str = "response:"  # URL of the rollout store where routes are left; "": nowhere
    weights: str = ""  # names the weights; by default a digest of where they are, their sizes, times and samples
    weights_version: int = 0
    hits: Literal["auto", "gate", "mask"] = "auto"  # KV without rows is cut off a hit, or kept and its rows are missing
    # Rows that come for loaded KV are compared with it. It does not say what the last router chose: that is "missing"
    # from the routes, or there and "flagged" in the answer. "off" compares nothing: rows depend on tokens alone.
    witness: Literal["missing", "flagged", "off"] = "missing"
    # What carries rows to other engines: the "connector" with its store; a "layer" of the model's paged KV, in which
    # they go wherever the KV goes; "auto" is the layer where there is no store and the model can have one.
    carrier: Literal["connector", "layer", "auto"] = "connector"
    strict: bool = False  # mistakes of bookkeeping raise: for tests
    untested: str = ""  # go on with this version of vLLM, which was not tested: "0.34"

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Self:
        try:
            return msgspec.convert(extra.get("kvroute", {}), cls)
        except msgspec.ValidationError as error:
            raise ConfigError("kv_connector_extra_config.kvroute", "settings of docs/vllm.md", str(error)) from error

    @property
    def reads(self) -> str:
        """The URL of a reader of the store."""
        files = self.store.startswith("file:")
        return self.reader or (self.store.partition("?")[0] + "?mode=read" if files else self.store)

    @property
    def writes(self) -> bool:
        return bool(self.store) and "mode=read" not in self.store


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine at hand, as far as rows are concerned."""

    settings: Settings
    layout: RecordLayout  # its first spec is that of routing
    namespace: Namespace
    blocks: int
    max_tokens: int  # of one step
    gate: bool
    pages: bool  # rows are in a layer of the KV
    witness: Literal["missing", "flagged", "off"]  # "off" too where no KV is loaded

    @property
    def spec(self) -> AuxBlockDataSpec:
        return self.layout.specs[0]

    @property
    def tokens(self) -> int:
        """Of one block."""
        return self.layout.block_tokens

    @property
    def unseen(self) -> bool:
        """Whether a witness leaves out what the last router chose: no later layer has KV."""
        last: int = self.spec.attrs["layer_ids"][-1]
        return self.witness != "off" and last == self.spec.attrs["num_layers"] - 1

    @classmethod
    def of(cls, config: Any, cache: Any, inner: str) -> Self:
        """``config`` and ``cache`` are vLLM's ``VllmConfig`` and ``KVCacheConfig``.

        Raises :class:`ConfigError` for what is not followed, :class:`SpecError` for a model without experts.
        """
        settings, model = Settings.of(config.kv_transfer_config.kv_connector_extra_config), config.model_config
        refuse(config, cache, settings)
        spec = routing_spec_from_hf(model.hf_text_config, cache.kv_cache_groups[0].kv_cache_spec.block_size)
        pages = page_name(spec) in cache.kv_cache_groups[0].layer_names
        if settings.carrier == "layer" and (settings.store or not pages):
            wanted = "no store, and a model with a layer of rows (the plugin of kvroute, an architecture that it knows)"
            raise ConfigError("settings.carrier 'layer'", wanted, f"{model.architectures}, store {settings.store!r}")
        weights = settings.weights or weights_digest(model.model, str(model.revision or ""))
        precision = f"{model.dtype}/{config.cache_config.cache_dtype}/{model.quantization}"
        return cls(
            settings,
            RecordLayout((spec,)),
            Namespace(f"{weights}/{precision}", weights_version=settings.weights_version),
            blocks=cache.num_blocks,
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            witness=settings.witness if settings.store and inner != "Connector" else "off",
            pages=pages,
            gate=settings.hits == "gate" or (settings.hits == "auto" and not inner.startswith(WHOLE_REQUESTS)),
        )


def refuse(config: Any, cache: Any, settings: Settings) -> None:
    """Raise :class:`ConfigError` naming the first thing about the engine that is not followed."""
    import vllm  # type: ignore[import-not-found]

    model, parallel, kv = config.model_config, config.parallel_config, cache.kv_cache_groups[0].kv_cache_spec
    version = ".".join(vllm.__version__.split(".")[:2])
    window, hashed = getattr(kv, "sliding_window", None) or model.max_model_len, getattr(cache, "hash_block_size", None)
    contexts = parallel.decode_context_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    own = (model, getattr(config, "aux_output_config", None))
    for wanted, got in {
        f"vLLM {' or '.join(TESTED)}, or settings.untested={version!r}": version not in (*TESTED, settings.untested),
        "one KV cache group, not a hybrid model's": len(cache.kv_cache_groups) > 1,
        "attention to all tokens, or max_model_len within its window": window < model.max_model_len,
        "a hash for each whole block": hashed not in (None, kv.block_size),
        "no pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "no data parallelism": parallel.data_parallel_size > 1,
        "no context parallelism": contexts > 1,
        "no dual-batch overlap": getattr(parallel, "enable_dbo", False),
        "no routed experts of vLLM's own (one hook a router)": any(
            getattr(place, "enable_return_routed_experts", False) for place in own
        ),
        "a store that other processes can read": settings.store.startswith("memory:"),
    }.items():
        if got:
            raise ConfigError("vLLM with kvroute", wanted, f"vLLM {vllm.__version__} as it is configured")


__all__ = ["TESTED", "Engine", "Settings", "refuse"]

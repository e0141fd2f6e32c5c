"""vLLM's arguments that change how often, in which order or with how many tokens a router is called.

Each is in :data:`ARGUMENTS`, refused or with the reason why rows stay right; ``docs/vllm.md`` has the same table. A
test fails if ``ParallelConfig`` or ``SchedulerConfig`` has a field that nobody looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from cache_manager.errors import ConfigError


class Argument(NamedTuple):
    """One argument of vLLM, and how kvroute takes it."""

    text: str  # what is wanted instead, or why rows are right
    refused: Callable[[Any], bool] | None = None  # whether this value is refused; None: every value is taken

    @property
    def verdict(self) -> str:
        """As the page has it."""
        return f"refused: {self.text}" if self.refused else self.text


def _many(value: Any) -> bool:
    return value is not None and value > 1


def _set(value: Any) -> bool:
    return bool(value)


RUN: Final = "tested"
LOGICAL: Final = "read: the hook comes before the map to physical experts, which writes another tensor"
OWN_TOKENS: Final = "each data-parallel rank has the rows of its own tokens: [layouts](#data-and-expert-parallelism)"
JUDGED_DRAFTS: Final = "tested with `ngram`, a draft model, MTP and EAGLE-3; none of a draft's routers is hooked"
PADDING: Final = "judged on a GPU: a step takes as many rows as it has tokens, and rows of padding have no slot"

ARGUMENTS: Final[dict[str, Argument]] = {
    "parallel_config.pipeline_parallel_size": Argument(
        RUN + " with two stages; refused beside what was not judged: [stages](#pipeline-parallelism)"
    ),
    "parallel_config.data_parallel_size": Argument(OWN_TOKENS),
    "parallel_config.prefill_context_parallel_size": Argument("no context parallelism (prefill)", _many),
    "parallel_config.decode_context_parallel_size": Argument("no context parallelism", _many),
    "parallel_config.enable_dbo": Argument("no dual-batch overlap: each half calls every router", _set),
    "parallel_config.ubatch_size": Argument("no microbatches: each calls every router", _many),
    "parallel_config.enable_elastic_ep": Argument("a fixed number of ranks, no elastic expert parallelism", _set),
    "parallel_config.enable_fault_tolerance": Argument("no ranks that are dropped while the engine runs", _set),
    "parallel_config.distributed_executor_backend": Argument(
        "`mp`, `uni` or `ray`, not `external_launcher`: each rank would have a scheduler, and only the first has rows",
        lambda value: value == "external_launcher" or "ExternalLauncher" in getattr(value, "__name__", ""),
    ),
    "parallel_config.tensor_parallel_size": Argument(RUN + ": the first rank has the rows"),
    "parallel_config.nnodes": Argument("not run: the first rank and the scheduler have to share a host"),
    "parallel_config.enable_expert_parallel": Argument(OWN_TOKENS),
    "parallel_config.all2all_backend": Argument(OWN_TOKENS),
    "parallel_config.enable_hc_sp": Argument("read: does not reach the experts"),
    "parallel_config.enable_eplb": Argument(LOGICAL),
    "parallel_config.eplb_config": Argument(LOGICAL),
    "parallel_config.expert_placement_strategy": Argument(LOGICAL),
    "parallel_config.worker_cls": Argument("not run with other workers than vLLM's"),
    "parallel_config.worker_extension_cls": Argument(
        "not run; a call of its methods makes the weights' version unknown"
    ),
    "scheduler_config.scheduler_cls": Argument(
        "vLLM's own scheduler", lambda value: value is not None and "vllm.v1.core.sched." not in _module(value)
    ),
    "scheduler_config.async_scheduling": Argument(RUN + " with two batches under way"),
    "scheduler_config.enable_chunked_prefill": Argument(RUN),
    "scheduler_config.max_num_batched_tokens": Argument(RUN + ": it sizes the buffer of ids"),
    "scheduler_config.max_num_scheduled_tokens": Argument("read: at most `max_num_batched_tokens`"),
    "scheduler_config.long_prefill_token_threshold": Argument("read: chunks"),
    "scheduler_config.long_prefill_token_threshold_adaptive": Argument("read: chunks"),
    "scheduler_config.disable_hybrid_kv_cache_manager": Argument(RUN + " with gpt-oss, with it and without"),
    "scheduler_config.policy": Argument(RUN + " with `fcfs`; preemption is the same call"),
    "scheduler_config.stream_interval": Argument("read: how often an answer is sent"),
    "scheduler_config.is_multimodal_model": Argument("read: only a language model's routers have layers of the rows"),
    "model_config.enable_prompt_embeds": Argument("prompts of tokens (embeddings all have the same ids)", _set),
    "model_config.enable_return_routed_experts": Argument("no routed experts of vLLM's own (one hook a router)", _set),
    "aux_output_config.enable_return_routed_experts": Argument(
        "no routed experts of vLLM's own (one hook a router)", _set
    ),
    "model_config.enable_trace_replay": Argument("read: a step computes the tokens that the trace says"),
    "model_config.disable_cascade_attn": Argument("read: attention alone"),
    "model_config.enable_sleep_mode": Argument(RUN + ": rows have no version after it"),
    "cache_config.kv_sharing_fast_prefill": Argument("no fast prefill: some layers would route fewer tokens", _set),
    "cache_config.enable_prefix_caching": Argument(RUN),
    "cache_config.mamba_cache_mode": Argument(
        "states in mode `align` or `none`: `all`, which earlier releases have, was not judged",
        lambda value: value == "all",
    ),
    "cache_config.swa_bounded_replay": Argument("refused with models that replay windows"),
    "compilation_config.cudagraph_mode": Argument(PADDING),
    "compilation_config.cudagraph_capture_sizes": Argument(PADDING),
    "speculative_config": Argument(JUDGED_DRAFTS),
    "lora_config": Argument(
        "judged with adapters of attention; read of experts: vLLM's layer is around the one with the hook; "
        "an adapter's name and path are in the keys of blocks"
    ),
    "diffusion_config": Argument("tokens that are computed once, no diffusion", lambda value: value is not None),
}
"""By vLLM's configuration and field."""


def _module(scheduler: Any) -> str:
    """``scheduler`` is vLLM's setting: a class, or its qualified name."""
    return scheduler if isinstance(scheduler, str) else f"{scheduler.__module__}.{scheduler.__name__}"


def refuse_arguments(config: Any) -> None:
    """Raise :class:`ConfigError` for the first argument of ``config``, vLLM's ``VllmConfig``, that is refused.

    A field that this release of vLLM does not have is ``None``.
    """
    for name, argument in ARGUMENTS.items():
        value = config
        for part in name.split("."):
            value = getattr(value, part, None)
        if argument.refused is not None and argument.refused(value):
            raise ConfigError("vLLM with kvroute", argument.text, f"{name.split('.')[-1]}={value!r}")


__all__ = ["ARGUMENTS", "Argument", "refuse_arguments"]

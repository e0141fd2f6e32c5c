"""What differs between vLLM's releases: which were judged, which names have to be there, and how older ones are asked.

The law: every name that kvroute takes or replaces in vLLM is in :data:`NAMES` and is looked up before anything is
hooked. A release without one of them is refused by that name, whatever the setting ``untested`` says.

Nothing here imports vLLM before it is called: ``kvroute doctor`` reads the table where vLLM may be broken or absent.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

from cache_manager.errors import ConfigError
from kvroute.integrations.judged import Judged

WAYS: Final[Mapping[str, str]] = {
    "tests": "`make test-vllm`",
    "smoke": "`make smoke-vllm`",
    "live": "`make test-trainers-live`",
    "GPU": "GPU",
    "by hand": "by hand",
}
"""How a release was judged, as a page says it."""
_OLDER: Final = "its Python over 0.32.0's native code; a router chooses, as on a GPU"
JUDGED: Final = (
    Judged("0.24.0", ("smoke", "live"), "2026-11-29", _OLDER),
    Judged("0.25.1", ("smoke",), "2026-11-30", _OLDER),
    Judged("0.26.0", ("smoke",), "2026-11-30", _OLDER),
    Judged("0.30.0", ("smoke", "live"), "2026-11-29"),
    Judged("0.31.0", ("by hand",), "2026-11-29", "`make smoke-vllm-0.31.0`"),
    Judged("0.32.0", ("tests",), "2026-11-28"),
    Judged("0.33.0", ("smoke",), "2026-11-30", "its Python over 0.32.0's native code"),
)
"""The releases that kvroute works with, oldest first."""


def minor(version: str) -> str:
    """``"0.32"`` of ``"0.32.0"``: kvroute takes a release whose minor version was judged."""
    return ".".join(version.split(".")[:2])


TESTED: Final = tuple(minor(judged.version) for judged in JUDGED)
"""The minor versions of :data:`JUDGED`."""
PREFERRED: Final = minor(next(judged.version for judged in JUDGED if "tests" in judged.how))
"""The minor version to install: all tests run on it."""

PREFIX: Final = "Kvroute"
"""Connectors of kvroute have names that begin so."""
NAMES: Final[Mapping[str, str]] = {
    "vllm": "__version__",
    "vllm.config:VllmConfig": (
        "kv_transfer_config model_config cache_config scheduler_config parallel_config compilation_config "
        "speculative_config instance_id use_v2_model_runner"
    ),
    "vllm.config:ModelConfig": (
        "hf_text_config model revision dtype quantization use_mla max_model_len enable_prompt_embeds "
        "get_total_num_hidden_layers"
    ),
    "vllm.config:CacheConfig": "block_size cache_dtype prefix_caching_hash_algo",
    "vllm.config:ParallelConfig": (
        "pipeline_parallel_size data_parallel_size decode_context_parallel_size prefill_context_parallel_size "
        "data_parallel_rank enable_dbo"
    ),
    "vllm.config:SchedulerConfig": "max_num_batched_tokens",
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.config:KVTransferConfig": "kv_connector kv_connector_extra_config",
    "vllm.config:SpeculativeConfig": "method",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": "_registry get_connector_class_by_name",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "register_kv_caches get_handshake_metadata bind_connector_metadata handle_preemptions "
        "start_load_kv wait_for_layer_load save_kv_layer wait_for_save build_connector_worker_meta get_finished "
        "get_block_ids_with_load_errors set_xfer_handshake_metadata_pp_aware on_new_request "
        "get_num_new_matched_tokens update_state_after_alloc update_connector_output build_connector_meta "
        "request_finished get_kv_connector_stats build_kv_connector_stats build_prom_metrics shutdown"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": "request_finished_all_groups",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats": "reset aggregate reduce is_empty",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": "observe per_engine_labelvalues",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "Counter Histogram",
    "vllm.distributed.parallel_state": "get_tp_group get_pp_group",
    "vllm.distributed.utils": "get_pp_indices",
    "vllm.engine.arg_utils:EngineArgs": "create_engine_config kv_transfer_config",
    "vllm.envs": "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    "vllm.forward_context": "get_forward_context",
    "vllm.forward_context:DPMetadata": "local_sizes",
    "vllm.forward_context:ForwardContext": "slot_mapping dp_metadata",
    "vllm.lora.request:LoRARequest": "lora_int_id",
    "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter": "set_capture_fn",
    "vllm.model_executor.layers.fused_moe.router.zero_expert_router": "fused_topk_bias ZeroExpertRouter",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": "do_naive_dispatch_combine",
    "vllm.v1.core.block_pool:BlockPool": "get_new_blocks reset_prefix_cache",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool coordinator get_blocks free pop_blocks_for_free",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
        "allocate_new_blocks allocate_external_computed_blocks"
    ),
    "vllm.outputs:RequestOutput": "add",
    "vllm.sampling_params:SamplingParams": "routed_experts_prompt_start extra_args",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens kv_connector_metadata",
    "vllm.v1.core.sched.scheduler:Scheduler": "kv_cache_manager connector requests update_from_output finish_requests",
    "vllm.v1.engine": "FinishReason.ERROR",
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id new_token_ids new_logprobs finish_reason kv_transfer_params routed_experts"
    ),
    "vllm.v1.engine:EngineCoreOutputs": "outputs scheduler_stats finished_requests",
    "vllm.v1.engine.core:EngineCore": (
        "vllm_config scheduler step step_with_batch_queue collective_rpc add_lora pause_scheduler resume_scheduler"
    ),
    "vllm.v1.engine.core:EngineCoreProc": "output_queue pause_scheduler resume_scheduler",
    "vllm.v1.engine.async_llm:AsyncLLM": "__init__",
    "vllm.v1.engine.output_processor:OutputProcessor": "add_request process_outputs request_states",
    "vllm.v1.engine.output_processor:RequestState": (
        "make_request_output routed_experts_chunks prompt_len detokenizer parent_req request_index queue"
    ),
    "vllm.v1.kv_cache_interface": "FullAttentionSpec SlidingWindowSpec.sliding_window",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_groups",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta finished_recving",
    "vllm.v1.request:Request": (
        "request_id num_tokens num_computed_tokens all_token_ids num_prompt_tokens sampling_params block_hashes "
        "kv_transfer_params status is_finished skip_reading_prefix_cache resumable"
    ),
    "vllm.v1.request:RequestStatus": "FINISHED_ABORTED FINISHED_ERROR",
}
"""By module, or module and class: what kvroute takes, replaces or overrides there."""


@cache
def resolve() -> None:
    """Look up all of :data:`NAMES`. Raises :class:`ConfigError` that lists the absent ones; nothing has been changed.

    Call it before the first hook. A release that has them all is asked once.
    """
    absent = list(lacking(NAMES))
    if absent:
        import vllm  # type: ignore[import-not-found]

        wanted = f"a release with every name that kvroute hooks; judged were {', '.join(TESTED)}"
        raise ConfigError("vLLM", wanted, f"vLLM {vllm.__version__} without {', '.join(absent)}")


def older_calls(base: Any) -> dict[str, Any]:
    """Methods of a connector around ``base`` for releases up to 0.28, which ask for arrived KV by another name."""
    if hasattr(base, "get_transfer_results"):
        return {}

    def get_finished(self: Any, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = base.get_finished(self, finished_req_ids)
        rows = self.worker_rows
        return sent, rows.arrived(received or set()) if rows else received

    return {"get_finished": get_finished}


def let_versions_be_given(core: Any) -> None:
    """Give vLLM's ``EngineCore`` the call ``set_weight_version`` of 0.30, where it has none yet.

    Its front ends have none either: the client's ``call_utility_async("set_weight_version", "17")`` reaches it.
    """
    if not hasattr(core, "set_weight_version"):

        def set_weight_version(_core: Any, _weight_version: str) -> None:
            """Who hears of versions hooks this call; nobody else asks for them in these releases."""

        core.set_weight_version = set_weight_version


def names_blocks_at_random(algorithm: str) -> bool:
    """Whether vLLM gives blocks other hashes in each process; ``algorithm`` is its ``prefix_caching_hash_algo``.

    Up to 0.26 the first hash is a random number, later with a weak algorithm alone; ``PYTHONHASHSEED`` replaces it.
    """
    if "PYTHONHASHSEED" in os.environ:
        return False
    from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]

    if not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        return True
    return algorithm.startswith("xxhash")


def drafts_by_model(speculative: Any) -> bool:
    """Whether a draft model runs beside the model; ``speculative`` is vLLM's configuration of it, or ``None``."""
    return speculative is not None and speculative.method not in ("ngram", "ngram_gpu")


def routing_sink(config: Any, capture: Callable[[Any], None]) -> Any:
    """What a kernel that routes inside writes its choices to. Raises :class:`ConfigError` before 0.32."""
    place = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
    for absent in lacking({place: "RoutedExpertsSink"}):
        raise ConfigError("a kernel that routes inside", "vLLM 0.32 or later; --moe-backend selects another", absent)
    return import_module(place).RoutedExpertsSink(config, capture)


def lacking(names: Mapping[str, str]) -> Iterator[str]:
    """The names that this process's vLLM has not, each with its module."""
    for place, wanted in names.items():
        module, _, kind = place.partition(":")
        try:
            owner: Any = import_module(module)
        except ModuleNotFoundError as error:
            if not (error.name and f"{module}.".startswith(f"{error.name}.")):
                raise  # the module is there, and something that it needs is not
            yield module
            continue
        if kind:
            owner = getattr(owner, kind, None)
        for name in wanted.split():
            if owner is None or not _has(owner, name):
                yield f"{place}.{name}" if kind else f"{place}:{name}"


def _has(owner: Any, path: str) -> bool:
    """Whether ``owner``, a module or a class, or an object of that class has the attribute."""
    name, _, inner_path = path.partition(".")
    if hasattr(owner, name):
        return not inner_path or _has(getattr(owner, name), inner_path)
    return not inner_path and isinstance(owner, type) and any(name in _of_objects(kind) for kind in owner.__mro__)


def _of_objects(kind: type) -> set[str]:
    """The attributes of a class's objects: its declared fields, and those that its ``__init__`` names."""
    declared = {*vars(kind).get("__annotations__", {}), *vars(kind).get("__slots__", ())}
    code = getattr(inspect.unwrap(vars(kind).get("__init__", object.__init__)), "__code__", None)
    return declared | set(code.co_names if code is not None else ())


__all__ = [
    "JUDGED",
    "NAMES",
    "PREFERRED",
    "TESTED",
    "WAYS",
    "drafts_by_model",
    "lacking",
    "let_versions_be_given",
    "minor",
    "names_blocks_at_random",
    "older_calls",
    "resolve",
    "routing_sink",
]

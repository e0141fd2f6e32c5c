"""vLLM's own configurations: what nobody looked at, and what names an engine's computation."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm.config
from vllm.engine.arg_utils import EngineArgs

from kvroute.integrations.vllm.config import computation
from kvroute.integrations.vllm.refusals import ARGUMENTS

Model = Callable[..., Path]
KINDS = {
    "parallel_config": vllm.config.ParallelConfig,
    "scheduler_config": vllm.config.SchedulerConfig,
    "model_config": vllm.config.ModelConfig,
    "cache_config": vllm.config.CacheConfig,
    "compilation_config": vllm.config.CompilationConfig,
    "aux_output_config": vllm.config.VllmConfig,
}
UNRELATED = frozenset(
    [
        "assigned_physical_gpu_ids",
        "cp_kv_cache_interleave_size",
        "cpu_distributed_timeout_seconds",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_index",
        "data_parallel_master_ip",
        "data_parallel_master_port",
        "data_parallel_rank",
        "data_parallel_rank_local",
        "data_parallel_rpc_port",
        "data_parallel_size_local",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
        "dcp_q_replicate",
        "disable_chunked_mm_input",
        "disable_custom_all_reduce",
        "disable_nccl_for_dp_synchronization",
        "distributed_timeout_seconds",
        "dp_sync_interval",
        "elastic_ep_max_dp_size",
        "enable_batch_sharded_sampling",
        "enable_ep_weight_filter",
        "enable_shm_tensor_arena",
        "encoder_cache_size",
        "fault_tolerance_config",
        "is_moe_model",
        "master_addr",
        "master_port",
        "max_num_active_seqs",
        "max_num_encoder_input_tokens",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "node_rank",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "placement_group",
        "prefill_schedule_interval",
        "rank",
        "ray_runtime_env",
        "ray_workers_use_nsight",
        "runner_type",
        "scheduler_reserve_full_isl",
        "watermark",
        "world_size",
    ]
)
"""Fields that choose addresses, limits of time and memory, or details of what is refused."""


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", ["parallel_config", "scheduler_config"])
def test_every_field_was_looked_at(name: str) -> None:
    """Goal: a new release's argument that changes the calls of routers does not come unseen. Method: vLLM's own fields
    beside the table; both ways, so that neither list keeps a field that is gone."""
    known = {key.split(".")[1] for key in ARGUMENTS if key.startswith(f"{name}.")}
    public = {field for field in fields(KINDS[name]) if not field.startswith("_")}
    assert public - known - UNRELATED == set()
    assert known - public == set()


def test_no_name_of_the_lists_is_misspelled() -> None:
    assert fields(KINDS["parallel_config"]) | fields(KINDS["scheduler_config"]) >= UNRELATED
    for argument in ARGUMENTS:
        first, *rest = argument.split(".")
        assert first in fields(vllm.config.VllmConfig)
        if rest and rest[0] != "enable_return_routed_experts":  # it has moved between releases
            assert rest[0] in fields(KINDS[first])


def made(home: Path, **arguments: Any) -> Any:
    return EngineArgs(
        **{"model": str(home), "max_model_len": 512, "dtype": "float32", **arguments}
    ).create_engine_config()


CHANGES: dict[str, dict[str, Any]] = {
    "another theta": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}},
    "a flat override": {"hf_overrides": {"rms_norm_eps": 0.5}},
    "a function that overrides": {"hf_overrides": lambda config: config.update({"rms_norm_eps": 0.25}) or config},
    "weights of no file": {"load_format": "dummy"},
    "precision": {"dtype": "bfloat16"},
    "precision of KV": {"kv_cache_dtype": "fp8_e4m3"},
    "a quantization at load": {"dtype": "bfloat16", "quantization": "fp8"},
    "transformers' own model": {"model_impl": "transformers"},
    "options of the loader": {"model_loader_extra_config": {"enable_multithread_load": True}},
}


def test_what_changes_the_computation_changes_its_name(model: Model, tmp_path: Path) -> None:
    """Goal: engines that compute differently with one checkpoint never share a key. Method: vLLM's own configurations,
    one thing changed; an edited file; simulated routing."""
    home = model("qwen3_moe")
    names = {"as it is": computation(made(home))}
    names |= {change: computation(made(home, **arguments)) for change, arguments in CHANGES.items()}
    edited = tmp_path / "edited"
    shutil.copytree(home, edited)
    assert computation(made(edited)) == names["as it is"], "a path is no part of it"
    config = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(config | {"norm_topk_prob": not config["norm_topk_prob"]}))
    names["an edited file"] = computation(made(edited))
    assert len(set(names.values())) == len(names), names


def test_simulated_routing_has_a_name_of_its_own(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(model("qwen3_moe"))
    before = computation(config)
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    assert computation(config) != before


def test_what_changes_no_computation_leaves_the_name(model: Model) -> None:
    """Goal: engines of one deployment still share. Method: sizes, graphs and names that clients see."""
    home = model("qwen3_moe")
    others = made(
        home,
        max_model_len=256,
        max_num_seqs=3,
        enforce_eager=True,
        served_model_name="other",
        enable_chunked_prefill=False,
    )
    assert computation(others) == computation(made(home))


def test_all_processes_of_an_engine_give_one_name(model: Model, tmp_path: Path) -> None:
    """Goal: a worker that has built its model agrees with the scheduler. Method: the pickled configuration in another
    process, where the model's code has filled in its own copy."""
    config = made(model("qwen3_moe"), hf_overrides={"rms_norm_eps": 0.5})
    pickled = tmp_path / "config"
    pickled.write_bytes(pickle.dumps(config))
    config.model_config.hf_config.rope_parameters["rope_theta"] = 5.0
    script = (
        "import pathlib, pickle, sys; from kvroute.integrations.vllm.config import computation; "
        "print(computation(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "3"}
    command = [sys.executable, "-c", script, str(pickled)]
    other = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert other.stdout.split()[-1:] == [computation(config)], other.stderr[-2000:]

"""A plugin for vLLM's processes in experiments with several ranks: it counts the layouts of ids that routers see.

Each process writes its counts to ``$KVROUTE_LAYOUTS/PID`` while it runs. With ``KVROUTE_GATHER=before`` every layer
gathers its tokens before its router, by vLLM's own code for kernels that cannot do it themselves. With
``KVROUTE_SHARDS=yes`` tensor-parallel ranks divide sequences for their experts without a second data-parallel rank,
too: otherwise that takes four GPUs. On a CPU the plugin supplies what stock vLLM lacks there: two collectives, and a
kernel that leaves experts of other ranks out. The entry point is :func:`register`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def register() -> None:
    """In each of vLLM's processes, before it builds a model."""
    from vllm.platforms import current_platform

    if "KVROUTE_LAYOUTS" in os.environ:
        _count_layouts(Path(os.environ["KVROUTE_LAYOUTS"]))
    if os.environ.get("KVROUTE_GATHER") == "before":
        _gather_before()
    if os.environ.get("KVROUTE_SHARDS") == "yes":
        _divide_sequences()
    if current_platform.is_cpu():
        _complete_cpu()


def _receive_eagerly() -> None:
    """A stage behind another receives into a buffer that vLLM makes where it profiles: on a CPU, compiled models."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    initialize = CPUModelRunner.initialize_kv_cache
    if hasattr(initialize, "receives"):
        return

    @wraps(initialize)
    def initialized(runner: Any, *arguments: Any, **named: Any) -> None:
        initialize(runner, *arguments, **named)
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    initialized.receives = True  # type: ignore[attr-defined]
    CPUModelRunner.initialize_kv_cache = initialized


def _count_layouts(directory: Path) -> None:
    from kvroute.integrations.vllm import layouts

    own_part, seen = layouts.own_part, Counter[str]()
    if hasattr(own_part, "counted"):
        return

    @wraps(own_part)
    def counting(ids: int, sizes: Any, place: Any, *, gathered: bool) -> Any:
        part = own_part(ids, sizes, place, gathered=gathered)
        name = f"{'before' if gathered else 'behind'} the router, {'whole' if place.shards == 1 else 'in shards'}"
        name += "" if sizes and len(set(sizes)) == 1 else ", of several sizes"
        name += ", in a graph" if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() else ""
        seen[name if part is not None else f"unknown: {ids} ids, {sizes}, {place}, {gathered}"] += 1
        (directory / str(os.getpid())).write_text(json.dumps(seen))
        return part

    counting.counted = True  # type: ignore[attr-defined]
    layouts.own_part = counting


def layouts_seen(directory: Path) -> dict[str, int]:
    """The counts of all processes that wrote into ``directory``."""
    seen = Counter[str]()
    for path in directory.iterdir():
        seen.update(json.loads(path.read_text()))
    return dict(seen)


def _gather_before() -> None:
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    def whole(use_monolithic: bool, **_: Any) -> Any:
        return all2all_utils.make_moe_prepare_and_finalize_no_dp_ep(use_monolithic)

    def before(runner: Any) -> bool:
        return bool(runner.moe_config.dp_size > 1 or runner.moe_config.is_sequence_parallel)

    all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep = whole
    MoERunner.do_naive_dispatch_combine = property(before)


def _divide_sequences() -> None:
    from vllm.config import ParallelConfig

    def divides(config: Any) -> bool:
        return bool(config.enable_expert_parallel and config.tensor_parallel_size > 1)

    ParallelConfig.use_sequence_parallel_moe = property(divides)


def _complete_cpu() -> None:
    """Stock vLLM 0.32 starts several ranks or stages on a CPU, and ends in their first pass."""
    _receive_eagerly()
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.platforms.cpu import CpuPlatform

    apply = CPUUnquantizedExperts.apply
    if hasattr(apply, "completed"):
        return
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    decide = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def forks(cls: type, config: Any) -> None:
        """Engine cores and workers are forked, as beside a GPU: a spawned one imports everything, for ten seconds."""
        decide(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(forks)  # type: ignore[assignment]

    @wraps(apply)
    def local(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel reads beyond its experts: it gets local ids, and weight 0 for experts of other ranks."""
        given = dict(zip(("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"), args, strict=False))
        more = list(args[len(given) :])
        given |= kwargs
        expert_map = given.get("expert_map", more[2] if len(more) > 2 else None)
        if expert_map is not None:
            ids = expert_map[given["topk_ids"].long()]
            given["topk_weights"] = torch.where(ids >= 0, given["topk_weights"], 0.0)
            given["topk_ids"] = ids.clamp(min=0).to(given["topk_ids"].dtype)
        names = ("activation", "global_num_experts", "expert_map", "a1q_scale", "a2_scale")
        names += ("workspace13", "workspace2", "expert_tokens_meta", "apply_router_weight_on_input")
        return apply(self, **given, **dict(zip(names, more, strict=False)))

    local.completed = True  # type: ignore[attr-defined]
    CPUUnquantizedExperts.apply = local


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(input_, list | tuple):
        return [_all_gatherv(self, part, dim, sizes) for part in input_]
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:  # noqa: ARG001 - vLLM's call
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    whole = input_.clone().contiguous()
    distributed.all_reduce(whole, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return whole[start : start + sizes[self.rank_in_group]].contiguous()


__all__ = ["layouts_seen", "register"]

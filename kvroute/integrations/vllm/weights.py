"""The weights by which vLLM's kernels count the chosen experts, taken from where a router hands them over.

A router's hook gets ids alone. Its ``select_experts`` returns ``(weights, ids)``, of one computation, to vLLM's
``MoERunner``, which gives both to the kernel as they are. Where that runner then multiplies the experts' output by the
model's scaling factor, the weight that counts is the product, and that is handed on. A hook keeps what it is handed
until the pass is over, in a CUDA graph's memory too, so that no later layer of the pass has the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

import torch

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.integrations.vllm import zero_experts
from kvroute.integrations.vllm.routers import of_the_model
from kvroute.integrations.vllm.versions import lacking

ROUTER: Final = "vllm.model_executor.layers.fused_moe.router.fused_moe_router:FusedMoERouter"
RUNNER: Final = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"
WEIGHTS_NAMES: Final = {ROUTER: "select_experts", RUNNER: "router routed_experts routed_scaling_factor"}
"""What is taken or replaced in vLLM for routing weights alone."""
DEVICES: Final = ("cpu", "cuda")
"""vLLM's types of devices on which routing weights were judged."""


def refuse_weights(config: Any) -> None:
    """Raise :class:`ConfigError` naming the first feature of the engine that was not judged beside routing weights, or
    what this release lacks; ``config`` is vLLM's ``VllmConfig``."""
    absent = list(lacking(WEIGHTS_NAMES))
    if absent:
        wanted = "a release of vLLM whose routers hand over weights: 0.32"
        raise ConfigError("settings.routing_weights", wanted, f"none of {absent}")
    parallel = config.parallel_config
    for wanted, refused in {
        "a CPU or CUDA: no other device was judged": config.device_config.device_type not in DEVICES
        or torch.version.hip is not None,
        "no pipeline, data or expert parallelism: not judged": parallel.pipeline_parallel_size > 1
        or parallel.data_parallel_size > 1
        or getattr(parallel, "enable_expert_parallel", False),
        "no drafts: not judged": config.speculative_config is not None,
    }.items():
        if refused:
            raise ConfigError(
                "vLLM with kvroute: routing_weights", wanted, "routing_weights=True as vLLM is configured"
            )


def bind_weights(
    modules: Mapping[str, Any], spec: AuxBlockDataSpec, first: str, hook_of: Callable[[int], Callable[[Any], None]]
) -> None:
    """Have ``hook_of(layer)`` called with the weights ``[tokens, top_k]`` of each router, beside its ids' own hook;
    arguments else as for :func:`~kvroute.integrations.vllm.routers.bind`, after which it is called.

    Raises :class:`ConfigError` for a layer whose weights are not those of its ids, before any is hooked: a kernel that
    routes inside, experts without vLLM's runner, and weights that count an expert's input.
    """
    found = list[tuple[Any, float, Callable[[Any], None]]]()
    for name, layer, number in of_the_model(modules, spec, first):
        if number not in spec.attrs["layer_ids"]:
            continue
        check_weights_of(name, layer)
        found.append((layer.router, float(layer.routed_scaling_factor), hook_of(number)))
    for router, scale, keep in found:
        router.select_experts = telling(router.select_experts, scale, keep)


def check_weights_of(name: str, layer: Any) -> None:
    """Raise :class:`ConfigError` unless the kernel of ``layer`` counts its experts' outputs by what its router says."""
    experts = getattr(layer, "routed_experts", None)
    if experts is None or not hasattr(getattr(layer, "router", None), "select_experts"):
        wanted = "a layer of vLLM's runner, whose router hands over weights"
        raise ConfigError(f"weights of {name}", wanted, type(layer).__name__)
    if getattr(experts.quant_method, "is_monolithic", False):
        wanted = "a router before the kernel; --moe-backend selects another"
        raise ConfigError(f"weights of {name}", wanted, f"{type(experts.quant_method).__name__}, which routes inside")
    if type(layer.router).__name__ == zero_experts.ZERO_EXPERT_ROUTER:  # the kernel is given 0, and the layer adds them
        wanted = "a router whose experts all compute, by the weights that the kernel is given"
        raise ConfigError(f"weights of {name}", wanted, zero_experts.ZERO_EXPERT_ROUTER)
    if getattr(experts, "apply_router_weight_on_input", False):
        raise ConfigError(f"weights of {name}", "weights that count an expert's output", "some that count its input")


def telling(select: Callable[..., Any], scale: float, keep: Callable[[Any], None]) -> Callable[..., Any]:
    """``select``, a router's ``select_experts``, which also gives ``keep`` its weights, times ``scale``."""

    @wraps(select)
    def select_experts(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = select(*args, **kwargs)
        keep(weights if scale == 1.0 else weights * scale)
        return weights, ids

    return select_experts


__all__ = ["WEIGHTS_NAMES", "bind_weights", "refuse_weights"]

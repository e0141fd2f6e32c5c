"""Hooks on the choices of vLLM's Mixture-of-Experts layers: on a router, or on a kernel that routes inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cache_manager.errors import ConfigError


def hook(name: str, layer: Any, capture: Callable[[Any], None]) -> bool:
    """Have ``capture`` called with the ids ``[tokens, top_k]`` that ``layer`` chooses in each pass.

    ``False``: the layer has no choice to make. :class:`ConfigError` names a kernel that does not reveal its choices:
    its layer's rows would always be missing. The three ways are those of vLLM's ``bind_routed_experts_capturer``.
    """
    if hasattr(layer, "capture_fn"):  # experts that do without vLLM's runner
        layer.capture_fn = capture
        return True
    experts, router = getattr(layer, "routed_experts", None), getattr(layer, "router", None)
    method = getattr(experts, "quant_method", None)
    if experts is not None and getattr(method, "is_monolithic", False):
        kernel = getattr(getattr(getattr(method, "moe_kernel", None), "impl", None), "fused_experts", None)
        if kernel is None or not getattr(kernel, "supports_routing_replay_capture", bool)():
            got = f"{type(method if kernel is None else kernel).__name__}, which routes inside and does not say how"
            wanted = "a kernel that says which experts it chose; --moe-backend selects another"
            raise ConfigError(f"experts of {name}", wanted, got)
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer  # type: ignore[import-not-found]

        experts.routing_sink = routed_experts_capturer.RoutedExpertsSink(kernel.moe_config, capture)
        return True
    if not hasattr(router, "set_capture_fn"):
        return False
    router.set_capture_fn(capture)  # type: ignore[union-attr]
    return True


__all__ = ["hook"]

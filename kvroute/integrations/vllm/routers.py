"""Hooks on the choices of vLLM's Mixture-of-Experts layers: on a router, or on a kernel that routes inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.integrations.vllm import versions


def bind(modules: Mapping[str, Any], spec: AuxBlockDataSpec, hook_of: Callable[[int], Callable[[Any], None]]) -> None:
    """Hook each router of the model, but not those of a draft model or of layers behind the model's own.

    ``modules`` are vLLM's by name. :class:`ConfigError` unless just the spec's layers have one router each: where the
    spec knows of none, its routes would say that the layer is dense.
    """
    wanted, bound = spec.attrs["layer_ids"], dict[int, str]()
    for name, module in modules.items():
        layer = getattr(module, "layer_id", None)
        if layer is None or "draft" in name or not 0 <= layer < spec.attrs["num_layers"]:
            continue
        if not hook(name, module, hook_of(layer) if layer in wanted else lambda _: None):
            continue
        if layer not in wanted:
            raise ConfigError("routers", f"none in layer {layer}, which the model's configuration calls dense", name)
        if layer in bound:
            raise ConfigError("routers", f"one of layer {layer}", f"{bound[layer]} and {name}")
        bound[layer] = name
    if len(bound) != len(wanted):
        got = f"{sorted(bound)}; vLLM has no named layer for the experts of the others"
        raise ConfigError("routers with a hook", f"layers {list(wanted)}", got)


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
        experts.routing_sink = versions.routing_sink(kernel.moe_config, capture)
        return True
    if not hasattr(router, "set_capture_fn"):
        return False
    router.set_capture_fn(capture)  # type: ignore[union-attr]
    return True


__all__ = ["bind", "hook"]

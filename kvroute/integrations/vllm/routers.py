"""Hooks on the choices of vLLM's Mixture-of-Experts layers: on a router, or on a kernel that routes inside.

:data:`ROUTERS` has what the hook sees of every class that routes, beside what the kernel uses; ``docs/vllm.md`` has the
same table. Any other class is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.integrations.vllm import layouts, versions, zero_experts
from kvroute.integrations.vllm.layers import is_own, root_of
from kvroute.integrations.vllm.layouts import RankPlace


class JudgedRouter(NamedTuple):
    """A class that routes."""

    sees: str  # what its hook gets
    how: str  # how that was judged against what the kernel uses
    wanted: str = ""  # what is wanted instead of a class that is refused

    @property
    def verdict(self) -> str:
        """As the page has it."""
        return f"refused: {self.wanted}" if self.wanted else self.how


TOP_K_IDS: Final = "the top-k ids, before the map to physical experts; renormalisation changes weights alone"
PADDING_ROWS: Final = "; -1 in rows of padding, which have no slot"
SHARED: Final = "refused with fused shared experts, whose ids follow the top-k"
UNSHARED: Final = "no shared experts among the ids (`VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0`)"
ROUTERS: Final[dict[str, JudgedRouter]] = {
    "CPURouter": JudgedRouter(TOP_K_IDS, "tested: plain, grouped, biased, a function, DeepSeek-V4's with hash layers"),
    "FusedTopKRouter": JudgedRouter(TOP_K_IDS + PADDING_ROWS, "tested; by reading the one of engines judged on a GPU"),
    "FusedTopKBiasRouter": JudgedRouter(TOP_K_IDS + PADDING_ROWS + "; hash routing too", f"tested; {SHARED}"),
    "GroupedTopKRouter": JudgedRouter(
        TOP_K_IDS + PADDING_ROWS, f"tested; by reading the one of engines judged on a GPU; {SHARED}"
    ),
    "CustomRoutingRouter": JudgedRouter(TOP_K_IDS, "tested"),
    "RoutingSimulatorRouter": JudgedRouter("the simulated ids, which the kernel uses", "tested"),
    zero_experts.ZERO_EXPERT_ROUTER: JudgedRouter(
        "the top-k ids, before experts that compute nothing become 0, and before that map", "tested"
    ),
    "AiterSharedRoutedFusedMoERouter": JudgedRouter("shared experts' ids behind the top-k", "read", UNSHARED),
    "DeepseekV4MegaMoEExperts": JudgedRouter("the top-k ids that its kernel is given, before that map", "read"),
    "KimiK3MegaMoEExperts": JudgedRouter("the top-k ids that its kernel is given, before that map", "read"),
}
"""By class: vLLM's routers, and experts that do without vLLM's runner and report what they are given."""


def bind(
    modules: Mapping[str, Any],
    spec: AuxBlockDataSpec,
    hook_of: Callable[[int], Callable[[Any], None]],
    first: str,
    place: RankPlace | None = None,
) -> int:
    """Hook each router of the model, but none of a draft model; how many. ``first`` is the name of a layer of the
    model: see :mod:`kvroute.integrations.vllm.layers`.

    ``modules`` are vLLM's by name; ``place`` is that of :func:`model_place`. :class:`ConfigError` unless just the
    spec's layers have one router each, of a class of :data:`ROUTERS`: where the spec knows of none, its routes would
    say that the layer is dense.
    """
    wanted = spec.attrs["layer_ids"]
    bound = dict[int, str]()
    for name, module, layer in of_the_model(modules, spec, first):
        check(name, module)
        keep = hook_of(layer) if layer in wanted else lambda _: None
        if place is not None:
            keep = layouts.hook_of(name, module, place, keep)
        if not hook(name, module, keep):
            continue
        if layer not in wanted:
            dense = f"none in layer {layer}, which the model's configuration calls dense"
            raise ConfigError("routers", dense, name)
        if layer in bound:
            both = f"{bound[layer]} and {name}"
            raise ConfigError("routers", f"one of layer {layer}", both)
        bound[layer] = name
    if len(bound) != len(wanted):
        got = f"{sorted(bound)}; vLLM has no named layer for the experts of the others"
        raise ConfigError("routers with a hook", f"layers {list(wanted)}", got)
    return len(bound)


def model_place(
    config: Any, modules: Mapping[str, Any], spec: AuxBlockDataSpec, first: str, tensor_rank: int
) -> RankPlace | None:
    """This rank's place among those that the model's routed layers exchange tokens with; see :mod:`.layouts`.

    ``first`` is the name of a layer of the model, as for :func:`bind`.
    """
    named = of_the_model(modules, spec, first)
    layers = {name: module for name, module, _ in named if _routes(module)}
    return layouts.place_of(config, layers, tensor_rank)


def bind_mtp(modules: Mapping[str, Any], spec: AuxBlockDataSpec, first: str, hook_of: Callable[[], Any]) -> None:
    """Hook the router of the draft's MTP layer with what ``hook_of`` returns; arguments else as for :func:`bind`, of
    the model. :class:`ConfigError` unless the draft has one router, of a class of :data:`ROUTERS`."""
    root = root_of(first)
    layers = spec.attrs["num_layers"]
    bound = list[str]()
    for name, module in modules.items():
        layer = getattr(module, "layer_id", None)
        if layer is None or is_own(name, root, layers):
            continue
        check(name, module)
        if hook(name, module, hook_of()):
            bound.append(name)
    if len(bound) != 1:
        raise ConfigError("settings.mtp", "a draft with one router", bound or "one of dense layers")


def of_the_model(modules: Mapping[str, Any], spec: AuxBlockDataSpec, first: str) -> Iterator[tuple[str, Any, int]]:
    """The modules of the model's own layers, by name, and their layers."""
    root = root_of(first)
    layers = spec.attrs["num_layers"]
    for name, module in modules.items():
        layer = getattr(module, "layer_id", None)
        if layer is not None and is_own(name, root, layers):
            yield name, module, layer


def _routes(module: Any) -> bool:
    """Whether the layer has a choice to make."""
    return any(hasattr(module, name) for name in ("capture_fn", "routed_experts", "router"))


def check(name: str, layer: Any) -> None:
    """Raise :class:`ConfigError` unless :data:`ROUTERS` says that the hook of ``layer`` sees what its kernel uses.

    A kernel that routes inside is not asked here: :func:`hook` asks it.
    """
    router = getattr(layer, "router", None)
    experts = getattr(layer, "routed_experts", None)
    method = getattr(experts, "quant_method", None)
    routes_inside = getattr(method, "is_monolithic", False)
    source = layer if hasattr(layer, "capture_fn") else router
    if source is None or (source is router and routes_inside):
        return
    kind = type(source).__name__
    judged = ROUTERS.get(kind)
    if judged is None:
        raise ConfigError(f"router of {name}", "a class whose hook was judged", kind)
    if judged.wanted:
        raise ConfigError(f"router of {name}", judged.wanted, kind)
    if getattr(experts, "expert_substitution", None) is not None:
        wanted = "experts that are all there: for others vLLM writes over the ids that a hook was given"
        raise ConfigError(f"experts of {name}", wanted, type(experts).__name__)
    shared = getattr(source, "num_fused_shared_experts", 0)
    if shared:
        raise ConfigError(f"router of {name}", UNSHARED, f"{kind} with {shared}")


def hook(name: str, layer: Any, capture: Callable[[Any], None]) -> bool:
    """Have ``capture`` called with the ids ``[tokens, top_k]`` that ``layer`` chooses in each pass.

    ``False``: the layer has no choice to make. :class:`ConfigError` names a kernel that does not reveal its choices:
    its layer's rows would always be missing. The three ways are those of vLLM's ``bind_routed_experts_capturer``.
    """
    if hasattr(layer, "capture_fn"):  # experts that do without vLLM's runner
        layer.capture_fn = capture
        return True
    experts = getattr(layer, "routed_experts", None)
    router = getattr(layer, "router", None)
    method = getattr(experts, "quant_method", None)
    if experts is not None and getattr(method, "is_monolithic", False):
        moe_kernel = getattr(method, "moe_kernel", None)
        implementation = getattr(moe_kernel, "impl", None)
        kernel = getattr(implementation, "fused_experts", None)
        says = getattr(kernel, "supports_routing_replay_capture", bool)
        if kernel is None or not says():
            silent = method if kernel is None else kernel
            got = f"{type(silent).__name__}, which routes inside and does not say how"
            wanted = "a kernel that says which experts it chose; --moe-backend selects another"
            raise ConfigError(f"experts of {name}", wanted, got)
        experts.routing_sink = versions.routing_sink(kernel.moe_config, capture)
        return True
    if not hasattr(router, "set_capture_fn"):
        return False
    if type(router).__name__ == zero_experts.ZERO_EXPERT_ROUTER:
        capture = zero_experts.hook_as_chosen(capture)
    router.set_capture_fn(capture)  # type: ignore[union-attr]
    return True


__all__ = ["ROUTERS", "bind", "bind_mtp", "check", "hook", "model_place", "of_the_model"]

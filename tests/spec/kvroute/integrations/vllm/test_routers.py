"""Which of vLLM's layers are hooked: exactly those that the rows have a place for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute import routing_spec
from kvroute.integrations.vllm import zero_experts
from kvroute.integrations.vllm.routers import ROUTERS, bind

SPEC = routing_spec(num_experts=8, top_k=2, layer_ids=[1, 3], num_layers=4, block_tokens=4)
ONE_LAYER = routing_spec(num_experts=8, top_k=2, layer_ids=[1], num_layers=4, block_tokens=4)
RIGHT = {
    "layers.0.attn": 0,
    "layers.1.mlp": 1,
    "layers.3.mlp": 3,
    "draft_model.layers.0.mlp": 0,
    "draft_model.layers.3.mlp": 3,
    "eagle_layers.3.mlp": 3,
    "mtp.layers.0.mlp": 0,
    "mtp.layers.1.mlp": 1,
    "mtp.layers.4.mlp": 4,
    "layers.4.mlp": 4,
}


HOOK_OF: Any = lambda layer: lambda _: layer  # noqa: E731 - a hook that says its layer


class DeepseekV4MegaMoEExperts:
    """Under the name of vLLM's experts that report what they are given."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id
        self.capture_fn: Any = None


def router_named(kind: str, **fields: Any) -> Any:
    """A layer with a router of this class."""
    hooked = {"set_capture_fn": lambda self, capture: setattr(self, "capture", capture)}
    router = type(kind, (), hooked)()
    for name, value in fields.items():
        setattr(router, name, value)
    return SimpleNamespace(layer_id=1, router=router)


def bound(layers: dict[str, int]) -> dict[str, Any]:
    """Modules by name with what is hooked to them; those of attention have no choice to make."""
    modules = {
        name: SimpleNamespace(layer_id=layer) if name.endswith("attn") else DeepseekV4MegaMoEExperts(layer)
        for name, layer in layers.items()
    }
    bind(modules, SPEC, HOOK_OF, "layers.0.attn")
    return {name: each.capture_fn(None) for name, each in modules.items() if getattr(each, "capture_fn", None)}


def test_every_router_of_the_model_is_hooked_and_no_other() -> None:
    assert bound(RIGHT) == {"layers.1.mlp": 1, "layers.3.mlp": 3}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (RIGHT | {"layers.2.mlp": 2}, "routers: wanted none in layer 2, which .* calls dense, got layers.2.mlp"),
        (RIGHT | {"layers.1.more": 1}, "routers: wanted one of layer 1, got layers.1.mlp and layers.1.more"),
        (
            {"layers.1.mlp": 1, "draft_model.layers.1.mlp": 1, "draft_model.layers.3.mlp": 3},
            r"routers with a hook: wanted layers \[1, 3\], got \[1\]; vLLM has no named layer",
        ),
        ({"layers.1.mlp": 1}, r"routers with a hook: wanted layers \[1, 3\], got \[1\]; vLLM has no named layer"),
    ],
)
def test_a_router_without_rows_and_rows_without_a_router_are_refused(layers: dict[str, int], message: str) -> None:
    """Goal: a layer that chooses is never told as dense. Method: a router where the configuration has none; two of a
    layer; one too few, whether a draft model has one with that number or not."""
    with pytest.raises(ConfigError, match=message):
        bound(layers)


ONE = routing_spec(num_experts=8, top_k=2, layer_ids=[1], num_layers=4, block_tokens=4)


NEEDS_VLLM = zero_experts.ZERO_EXPERT_ROUTER
HOOKED = [kind for kind, judged in ROUTERS.items() if not judged.wanted and kind != NEEDS_VLLM]


@pytest.mark.parametrize("kind", HOOKED)
def test_a_judged_router_is_hooked(kind: str) -> None:
    layer = router_named(kind, num_fused_shared_experts=0)
    bind({"layers.1.mlp": layer}, ONE, HOOK_OF, "layers.0.attn")
    assert layer.router.capture(None) == 1


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "AiterSharedRoutedFusedMoERouter",
            {},
            "no shared experts among the ids.*, got AiterSharedRoutedFusedMoERouter",
        ),
        ("GroupedTopKRouter", {"num_fused_shared_experts": 1}, "no shared experts.*, got GroupedTopKRouter with 1"),
        ("FusedTopKBiasRouter", {"num_fused_shared_experts": 2}, "no shared experts.*, got FusedTopKBiasRouter with 2"),
        ("RouterOfTomorrow", {}, "a class whose hook was judged, got RouterOfTomorrow"),
    ],
)
def test_a_router_whose_hook_sees_other_ids_is_refused_by_name(kind: str, fields: dict[str, Any], message: str) -> None:
    """Goal: no row of ids that the kernel does not use, and the reason is the router. Method: shared experts among the
    ids, a class that nobody judged; nothing is hooked."""
    layer = router_named(kind, **fields)
    with pytest.raises(ConfigError, match=message) as refusal:
        bind({"layers.1.mlp": layer}, ONE, HOOK_OF, "layers.0.attn")
    assert refusal.value.field == "router of layers.1.mlp"
    assert not hasattr(layer.router, "capture")


def test_experts_that_write_over_the_ids_of_their_router_are_refused() -> None:
    """Goal: ids are the router's own, though a hook's tensor is read when the pass is over. Method: vLLM 0.33's experts
    of a pruned checkpoint, which put other numbers into that tensor, and whole ones."""
    layer = router_named("FusedTopKRouter")
    for substitution in (None, object()):
        layer.routed_experts = SimpleNamespace(quant_method=None, expert_substitution=substitution)
        if substitution is None:
            bind({"layers.1.mlp": layer}, ONE_LAYER, HOOK_OF, "layers.0.attn")
            continue
        with pytest.raises(ConfigError, match=r"experts of layers.1.mlp: wanted experts that are all there"):
            bind({"layers.1.mlp": layer}, ONE_LAYER, HOOK_OF, "layers.0.attn")

"""Which of vLLM's layers are hooked: exactly those that the rows have a place for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute import routing_spec
from kvroute.integrations.vllm.routers import bind

SPEC = routing_spec(num_experts=8, top_k=2, layer_ids=[1, 3], num_layers=4, block_tokens=4)
RIGHT = {"layers.0.attn": 0, "layers.1.mlp": 1, "layers.3.mlp": 3, "draft_model.layers.0.mlp": 0, "mtp.layers.4.mlp": 4}


def bound(layers: dict[str, int]) -> dict[str, Any]:
    """Modules by name with what is hooked to them; those of attention have no choice to make."""
    modules = {
        name: SimpleNamespace(layer_id=layer, **({} if name.endswith("attn") else {"capture_fn": None}))
        for name, layer in layers.items()
    }
    bind(modules, SPEC, lambda layer: lambda _: layer)
    return {name: each.capture_fn(None) for name, each in modules.items() if getattr(each, "capture_fn", None)}


def test_every_router_of_the_model_is_hooked_and_no_other() -> None:
    assert bound(RIGHT) == {"layers.1.mlp": 1, "layers.3.mlp": 3}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (RIGHT | {"layers.2.mlp": 2}, "routers: wanted none in layer 2, which .* calls dense, got layers.2.mlp"),
        (RIGHT | {"other.1.mlp": 1}, "routers: wanted one of layer 1, got layers.1.mlp and other.1.mlp"),
        ({"layers.1.mlp": 1}, r"routers with a hook: wanted layers \[1, 3\], got \[1\]; vLLM has no named layer"),
    ],
)
def test_a_router_without_rows_and_rows_without_a_router_are_refused(layers: dict[str, int], message: str) -> None:
    """Goal: a layer that chooses is never told as dense. Method: a router where the configuration has none; two of a
    layer; one too few."""
    with pytest.raises(ConfigError, match=message):
        bound(layers)

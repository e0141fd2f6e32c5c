"""Where vLLM's weights are taken: from each router of the model, beside the ids that it returns with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache_manager.errors import ConfigError
from kvroute.capture.step_weights import StepWeights
from kvroute.integrations.vllm.weights import bind_weights
from kvroute.routing import routing_spec

SPEC = routing_spec(16, 2, (1, 2), num_layers=3, block_tokens=4)
FIRST = "model.layers.0.self_attn"


class Router:
    """One that counts the first two experts, each by the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def select_experts(self, hidden_states: torch.Tensor, *, router_logits: Any = None) -> tuple[Any, Any]:
        self.calls += 1
        tokens = len(hidden_states)
        return torch.full((tokens, 2), float(self.calls)), torch.tensor([[0, 1]] * tokens)


def layer_of(number: int, scale: float = 1.0, **experts: Any) -> Any:
    """A layer as vLLM's runner is one."""
    method = SimpleNamespace(is_monolithic=experts.pop("monolithic", False))
    routed = SimpleNamespace(quant_method=method, apply_router_weight_on_input=False, **experts)
    return SimpleNamespace(layer_id=number, router=Router(), routed_experts=routed, routed_scaling_factor=scale)


def modules_of(*layers: Any) -> dict[str, Any]:
    return {f"model.layers.{layer.layer_id}.mlp.experts": layer for layer in layers}


def test_a_router_tells_what_its_kernel_gets() -> None:
    """Goal: the runner gets what the router returned, and the rows have what counts in the layer's output. Method: a
    layer whose output is scaled and one whose is not; a draft's router is let alone."""
    first, second, draft = layer_of(1, scale=2.5), layer_of(2), layer_of(3)
    weights = StepWeights(SPEC)
    bind_weights(modules_of(first, second, draft), SPEC, FIRST, weights.hook)
    weights.begin()
    for layer in (first, second, draft):
        given, ids = layer.router.select_experts(torch.zeros(3, 8), router_logits=None)
        assert (given.tolist(), ids.tolist()) == ([[1.0, 1.0]] * 3, [[0, 1]] * 3)
    found = weights.take(3)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[[2.5, 2.5], [1.0, 1.0]]] * 3


def test_weights_of_another_kind_are_refused() -> None:
    """Goal: a weight of a row is of its id, and counts an expert's output. Method: a kernel that routes inside, experts
    without a router that hands over weights, a router whose kernel is given 0 for experts that compute nothing, and
    weights of an expert's input: each refused by name, and no router of the model is hooked."""
    idle = layer_of(2)
    idle.router = type("ZeroExpertRouter", (Router,), {})()
    inputs = layer_of(2)
    inputs.routed_experts.apply_router_weight_on_input = True
    whole = SimpleNamespace(layer_id=2, capture_fn=None)
    for wrong, wanted in (
        (layer_of(2, monolithic=True), "a router before the kernel; .*, which routes inside"),
        (whole, "a layer of vLLM's runner, whose router hands over weights, got SimpleNamespace"),
        (idle, "a router whose experts all compute, .*, got ZeroExpertRouter"),
        (inputs, "weights that count an expert's output, got some that count its input"),
    ):
        first = layer_of(1)
        with pytest.raises(ConfigError, match=f"weights of model.layers.2.mlp.experts: wanted {wanted}"):
            bind_weights(modules_of(first, wrong), SPEC, FIRST, StepWeights(SPEC).hook)
        assert "select_experts" not in vars(first.router)

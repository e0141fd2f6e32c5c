"""Experts whose ids come another way than from vLLM's routers, in vLLM's own layers and kernels' frame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engines import prompts
from torch import nn
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource, RoutedExpertsSink
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

import kvroute
from kvroute.integrations.vllm.routers import hook

Start = Any  # conftest's Engines
Model = Callable[..., Path]


class RoutesInside(modular_kernel.FusedMoEExpertsMonolithic):
    """Mixtral's experts in one call with their routing, as kernels of GPUs have it."""

    tells: ClassVar[bool] = True
    expects_unquantized_inputs = True

    def supports_routing_replay_capture(self) -> bool:
        return self.tells

    @staticmethod
    def activation_format() -> Any:
        return modular_kernel.FusedMoEActivationFormat.Standard

    def apply(self, hidden_states: Any, w1: Any, w2: Any, router_logits: Any, *_: Any, **more: Any) -> Any:
        weights, ids = router_logits.float().softmax(-1).topk(self.moe_config.experts_per_token)
        weights = weights / weights.sum(-1, keepdim=True)
        if (told := more.get("routing_replay_out")) is not None:
            told.copy_(ids)
        gate, up = torch.einsum("th,tkih->tki", hidden_states, w1[ids]).chunk(2, -1)
        return torch.einsum("tki,tkhi,tk->th", nn.functional.silu(gate) * up, w2[ids], weights)


for _name in RoutesInside.__abstractmethods__:  # of which vLLM asks to choose among kernels
    setattr(RoutesInside, _name, staticmethod(lambda *_: True))
RoutesInside.__abstractmethods__ = frozenset()


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> type[RoutesInside]:
    """Layers without quantisation have this kernel."""
    made = UnquantizedFusedMoEMethod.__init__

    def chooses(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.experts_cls = RoutesInside

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "__init__", chooses)
    return RoutesInside


@pytest.mark.usefixtures("inside")
def test_rows_of_a_kernel_that_routes_inside(engine: Start, model: Model) -> None:
    """Goal: rows of ids that were not chosen by a router of vLLM. Method: a kernel that reports its choice; plain, and
    prefix hits."""
    made = engine(model("mixtral"))
    asked = prompts(50, 10, 33, 1, shared=100)
    for _ in range(2):
        outputs = made.ask(asked)
        made.assert_right(outputs)
    assert min(output.num_cached_tokens for output in outputs) >= 96
    context = made.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    kernels = [each for each in context.values() if hasattr(each, "routed_experts")]
    assert len(kernels) == 3
    assert all(isinstance(each.routed_experts.routing_sink, RoutedExpertsSink) for each in kernels)
    assert not made.kept.missing


def test_a_kernel_that_routes_inside_without_reporting_is_refused(
    engine: Start, model: Model, inside: type[RoutesInside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no engine all of whose rows are missing. Method: the same kernel, silent; it is named, with its layer."""
    monkeypatch.setattr(inside, "tells", False)
    with pytest.raises(kvroute.ConfigError, match=r"layers\.0\..*wanted a kernel that says .*got RoutesInside"):
        engine(model("mixtral"))


def test_experts_that_do_without_a_runner_are_hooked() -> None:
    """Goal: vLLM's third way, of experts with a callback of their own. Method: a module that vLLM accepts as such; and
    one of none of the three kinds."""

    class Source(nn.Module):
        layer_id = 3
        capture_fn: Any = None

    source, seen = Source(), list[Any]()
    assert isinstance(source, RoutedExpertsCaptureSource)
    assert hook("layers.3", source, seen.append)
    source.capture_fn(torch.zeros(2, 4))
    assert len(seen) == 1
    assert not hook("layers.3.attn", nn.Linear(1, 1), seen.append)

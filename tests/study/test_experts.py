"""The padded experts against transformers' own loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.replay_study import models
from bench.replay_study.experts import PADDED, install
from bench.replay_study.models import build_trained, experts_implementation
from bench.replay_study.options import FAMILIES, SCALES

CPU = torch.device("cpu")


def experts_of(family: str) -> Any:
    """The experts of the last routed layer of a model of the study."""
    model = build_trained(SCALES["small"], family, 0, CPU)
    return [module for name, module in model.named_modules() if name.endswith(".experts")][-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spread", ["all", "two"])
def test_padded_experts_are_the_loop(family: str, spread: str) -> None:
    """Goal: padding changes no value and no gradient, with experts that nobody chose too. Method: random rows, or the
    same two experts for every token; answers and the gradients of states, scores and weights against the loop."""
    install()
    experts = experts_of(family)
    count, hidden = len(experts.gate_up_proj), experts.gate_up_proj.shape[2]
    torch.manual_seed(1)
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(23)])
    if spread == "two":
        chosen = torch.tensor([[count - 1, 1]]).repeat(23, 1)
    found = []
    for name in ("eager", PADDED):
        torch.manual_seed(2)
        states = torch.randn(23, hidden, requires_grad=True)
        scores = torch.rand(23, 2, requires_grad=True)
        experts.config._experts_implementation = name
        answer = experts(states, chosen, scores)
        wanted = (states, scores, experts.gate_up_proj, experts.down_proj)
        found.append((answer, *torch.autograd.grad(answer.square().sum(), wanted)))
    for loop, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, loop, atol=1e-5, rtol=1e-4)


def test_without_grouped_products_experts_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no machine falls back to a loop over experts. Method: a torch whose grouped products do not work."""

    def refused(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("not for this dtype")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", refused, raising=False)
    assert experts_implementation(CPU, torch.float32) == PADDED
    model = models.build_trained(SCALES["tiny"], "qwen3_moe", 0, CPU)
    assert model.config._experts_implementation == PADDED
    assert bool(torch.isfinite(model(input_ids=torch.arange(6)[None]).logits).all())

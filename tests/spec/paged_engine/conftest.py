"""One thread: the matrices are small, and tests may run beside others."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from rollouts import model_of
from torch import nn

torch.set_num_threads(1)


@cache
def _model(name: str) -> nn.Module:
    model = model_of(name, seed=0)
    for each, weight in model.named_parameters():
        if each.endswith("sinks"):  # one of its own for each head, else heads could be mixed up
            weight.copy_(torch.linspace(-2, 2, len(weight)))
    return model


@pytest.fixture
def qwen() -> nn.Module:
    return _model("qwen3_moe")


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", "olmoe", "mixtral", "afmoe", "gpt_oss"])
def any_model(request: pytest.FixtureRequest) -> nn.Module:
    """Models: a plain one, one with a dense first layer and latent attention, other routers; windows, and gpt-oss
    sinks."""
    return _model(request.param)

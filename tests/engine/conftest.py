"""One thread: the matrices are small, and tests may run beside others."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from kvroute.engine.models import build_model
from kvroute.engine.text import VOCAB_SIZE

torch.set_num_threads(1)


@cache
def _model(name: str) -> nn.Module:
    return build_model(name, seed=0, vocab_size=VOCAB_SIZE)


@pytest.fixture
def qwen() -> nn.Module:
    return _model("qwen3_moe")


@pytest.fixture(params=["qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """The models that the engine promises to run: one plain, one with a dense first layer and latent attention."""
    return _model(request.param)


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", "olmoe", "mixtral"])
def any_model(request: pytest.FixtureRequest) -> nn.Module:
    return _model(request.param)

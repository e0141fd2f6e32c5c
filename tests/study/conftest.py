"""One thread: the matrices are small, and tests may run beside others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.replay_study.options import SCALES, Learning, Reinforcement, Scale

torch.set_num_threads(1)

MINUTE = replace(
    SCALES["tiny"],
    draws=2,
    measured=2,
    learning=Learning(steps=3, batch=8, learning_rate=1e-3),
    reinforcement=Reinforcement(steps=2, prompts=2, samples=4, updates=2, learning_rate=1e-4, seeds=2),
)


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> Scale:
    """A scale called ``minute``, through which a study runs in a few seconds."""
    monkeypatch.setitem(SCALES, "minute", MINUTE)
    return MINUTE

"""Engine and trainer of the study: rows and probabilities belong to the tokens they are said to belong to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.replay_study.mismatch import log_ratios
from bench.replay_study.models import build_engines, build_trained, load_weights
from bench.replay_study.options import FAMILIES, SCALES, Scale
from bench.replay_study.rollout import Rollout, Rollouts
from bench.replay_study.trainer import Mode, Trainer, replayed

CPU = torch.device("cpu")


def sides(name: str, family: str, *, exact: bool = False) -> tuple[Scale, Any, Rollout, Trainer]:
    """A scale's trainer and engine; with ``exact`` the engine keeps float32."""
    scale = SCALES[name]
    trained = build_trained(scale, family, 0, CPU)
    engines = build_engines(trained)
    if exact:
        engines = engines.to(torch.float32)
    load_weights(engines, trained)
    rollout = Rollout(engines)
    trainer = Trainer(trained, learning_rate=1e-3, micro_batch=5, dtype="float32")
    return scale, trained, rollout, trainer


def rolled_out(scale: Scale, rollout: Rollout, count: int = 12, seed: int = 0) -> Rollouts:
    prompts = scale.task.prompts(count, np.random.default_rng(seed))
    rollouts = rollout(prompts, scale.task.length, seed)
    np.testing.assert_array_equal(rollouts.tokens[:, : rollouts.prompt_tokens], prompts)
    return rollouts


CASES = [("small", family) for family in FAMILIES] + [("tiny", "qwen3_moe")]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_an_exact_engine_agrees_with_the_trainer(name: str, family: str) -> None:
    """Goal: no figure comes from rows or probabilities of another token. Method: an engine in float32; its
    distributions and experts are the trainer's, position by position, up to rounding."""
    scale, _, rollout, trainer = sides(name, family, exact=True)
    rollouts = rolled_out(scale, rollout)
    found = trainer.score(rollouts, None)
    torch.testing.assert_close(found.log_probs, rollouts.behaviour, atol=2e-3, rtol=0)
    same = (found.used.sort(-1).values == rollouts.rolled().sort(-1).values).all(-1)
    assert float(same.double().mean()) > 0.99
    assert found.log_probs.shape == (12, scale.task.length, scale.task.vocab_size)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_replay_uses_the_experts_that_it_is_given(name: str, family: str) -> None:
    """Goal: R3 means the engine's experts, R2 the old policy's, also when the weights have moved on. Method: the
    experts of the trainer's pass, taken by hooks, after an update that changes its own choice."""
    scale, _, rollout, trainer = sides(name, family)
    rollouts = rolled_out(scale, rollout)
    old = trainer.score(rollouts, None)
    step(trainer, rollouts, old.log_probs)
    assert not torch.equal(trainer.score(rollouts, None).used, old.used)
    assert replayed(Mode.NONE, rollouts, old) is None
    for mode, wanted in ((Mode.R2, old.used), (Mode.R3, rollouts.rolled())):
        routes = replayed(mode, rollouts, old)
        assert routes is not None
        assert torch.equal(trainer.score(rollouts, routes).used, wanted)


def step(trainer: Trainer, rollouts: Rollouts, old: torch.Tensor, sign: float = 1.0) -> Any:
    advantages = torch.full((len(rollouts.tokens),), sign)
    order = torch.arange(len(rollouts.tokens))
    return trainer.reinforce(rollouts, advantages, old, None, order=order, updates=2, clip=0.2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_update_follows_the_advantage(sign: float) -> None:
    """Goal: what was better becomes likelier, what was worse less likely. Method: one batch, all of one advantage."""
    scale, _, rollout, trainer = sides("tiny", "qwen3_moe")
    rollouts = rolled_out(scale, rollout)
    old = trainer.score(rollouts, None).log_probs
    update = step(trainer, rollouts, old, sign)
    moved = log_ratios(trainer.score(rollouts, None).log_probs, old, rollouts.answers)
    assert sign * float(moved.mean()) > 0
    assert 0 < update.clip_fraction < 1
    assert update.moved > 0
    assert update.gradient_norm > 0


def test_a_trainer_can_round_its_passes() -> None:
    """Goal: bfloat16 passes keep float32 weights and gradients. Method: its results are near, its weights are not
    rounded, and a step changes them by less than bfloat16 can tell."""
    scale, trained, rollout, trainer = sides("tiny", "qwen3_moe")
    rollouts = rolled_out(scale, rollout)
    whole = trainer.score(rollouts, rollouts.rolled()).log_probs
    rounding = Trainer(trained, learning_rate=1e-6, micro_batch=5, dtype="bfloat16")
    rounded = rounding.score(rollouts, rollouts.rolled()).log_probs
    assert 0 < float((rounded - whole).abs().max()) < 0.2
    before = [weight.clone() for weight in trained.parameters()]
    step(rounding, rollouts, rounded)
    assert {weight.dtype for weight in trained.parameters()} == {torch.float32}
    assert any(not torch.equal(a, b) for a, b in zip(before, trained.parameters(), strict=True))


def test_rollouts_depend_on_their_seed_and_on_nothing_else() -> None:
    scale, _, rollout, _ = sides("tiny", "qwen3_moe")
    first, again, other = (rolled_out(scale, rollout, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.answers, other.answers)

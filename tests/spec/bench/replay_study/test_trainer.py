"""Engine and trainer of the study: rows and probabilities belong to the right tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.replay_study.models import PADDED, build_engines, build_trained, load_weights
from bench.replay_study.rollout import Rollout, Rollouts
from bench.replay_study.scales import SCALES
from bench.replay_study.trainer import Mode, Trainer, differing_routes, k3, log_ratios, measure, replayed

CPU = torch.device("cpu")


SCALE = SCALES["tiny"]


def trained() -> Any:
    return build_trained(SCALE.shape, SCALE.task.vocab_size, 0, CPU)


def sides(*, exact: bool = False) -> tuple[Any, Rollout, Trainer]:
    """A trainer's model and its engine; with ``exact`` the engine keeps float32."""
    model = trained()
    engines = build_engines(model)
    if exact:
        engines = engines.to(torch.float32)
    load_weights(engines, model)
    return model, Rollout(engines), Trainer(model, learning_rate=1e-3, micro_batch=5)


def rolled_out(rollout: Rollout, count: int = 12, seed: int = 0) -> Rollouts:
    prompts = SCALE.task.prompts(count, np.random.default_rng(seed))
    rollouts = rollout(prompts, SCALE.task.length, seed)
    np.testing.assert_array_equal(rollouts.tokens[:, : rollouts.prompt_tokens], prompts)
    return rollouts


def test_an_exact_engine_agrees_with_the_trainer() -> None:
    """Goal: no figure comes from rows or probabilities of another token. Method: an engine in float32; its
    distributions and experts are the trainer's, position by position, up to rounding."""
    _, rollout, trainer = sides(exact=True)
    rollouts = rolled_out(rollout)
    found = trainer.score(rollouts, None)
    torch.testing.assert_close(found.log_probs, rollouts.behaviour, atol=2e-3, rtol=0)
    same = (found.used.sort(-1).values == rollouts.rolled().sort(-1).values).all(-1)
    assert float(same.double().mean()) > 0.99
    assert found.log_probs.shape == (12, SCALE.task.length, SCALE.task.vocab_size)


def test_replay_uses_the_experts_that_it_is_given() -> None:
    """Goal: R3 means the engine's experts, R2 the old policy's, also when the weights have moved on. Method: the
    experts of the trainer's pass, taken by hooks, after an update that changes its own choice."""
    _, rollout, trainer = sides()
    rollouts = rolled_out(rollout)
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
    """Goal: better answers become likelier, worse ones less likely. Method: one batch, all of one advantage."""
    _, rollout, trainer = sides()
    rollouts = rolled_out(rollout)
    old = trainer.score(rollouts, None).log_probs
    update = step(trainer, rollouts, old, sign)
    moved = log_ratios(trainer.score(rollouts, None).log_probs, old, rollouts.answers)
    assert sign * float(moved.mean()) > 0
    assert 0 < update.clip_fraction < 1
    assert update.moved > 0
    assert update.gradient_norm > 0


def test_learning_can_round_its_passes() -> None:
    """Goal: bfloat16 passes keep float32 weights and gradients. Method: the loss of a step is near that of a float32
    pass and not equal, and the step changes the weights by less than bfloat16 can tell."""
    losses, tokens = list[float](), torch.as_tensor(SCALE.task.demonstrations(6, 0.1, np.random.default_rng(0)))
    for rounded in (False, True):
        model, _, trainer = sides()
        before = [weight.clone() for weight in model.parameters()]
        losses.append(float(trainer.learn(tokens, SCALE.task.prompt_tokens, 1e-6, rounded=rounded)))
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert 0 < abs(losses[0] - losses[1]) < 0.2


@pytest.mark.parametrize("spread", [False, True])
def test_padded_experts_are_the_loop(spread: bool) -> None:
    """Goal: padding changes no value and no gradient, also with experts that no token chose. Method: the same two
    experts for every token, or random ones; answers and the gradients of states, scores and weights against
    transformers'."""
    experts: Any = [module for name, module in trained().named_modules() if name.endswith(".experts")][-1]
    count, hidden = len(experts.gate_up_proj), experts.gate_up_proj.shape[2]
    torch.manual_seed(1)
    chosen = torch.rand(23, count).topk(2).indices if spread else torch.tensor([[count - 1, 1]]).repeat(23, 1)
    found = []
    for name in ("eager", PADDED):
        torch.manual_seed(2)
        states, scores = torch.randn(23, hidden, requires_grad=True), torch.rand(23, 2, requires_grad=True)
        experts.config._experts_implementation = name
        answer = experts(states, chosen, scores)
        wanted = (states, scores, experts.gate_up_proj, experts.down_proj)
        found.append((answer, *torch.autograd.grad(answer.square().sum(), wanted)))
    for loop, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, loop, atol=1e-5, rtol=1e-4)


# Figures ----------------------------------------------------------------------------------------------------------


def some_routes(seed: int) -> torch.Tensor:
    return torch.rand(6, 3, 9, generator=torch.Generator().manual_seed(seed)).topk(4).indices


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(0, 2))
def test_figures_are_of_distances_between_policies_and_between_sets(seed: int, token: int, layer: int) -> None:
    """Goal: k3 and KL are one quantity, zero from a policy to itself; routes differ as sets. Method: the estimate of
    each token of the vocabulary, weighted by how often the engine would have sampled it, adds up to the divergence; one
    expert of one row is changed."""
    draw = torch.Generator().manual_seed(seed)
    policy, behaviour = torch.randn(2, 3, 4, 5, generator=draw).mul(2).log_softmax(-1)
    tokens, routes, d = torch.zeros(3, 4, dtype=torch.int64), some_routes(seed), (policy - behaviour).double()
    expected = (behaviour.double().exp() * k3(d)).sum(-1).mean()
    assert measure(policy, behaviour, tokens, routes, routes)["kl"] == pytest.approx(float(expected), rel=1e-5)
    assert bool((k3(d) >= 0).all())
    same = measure(policy, policy, tokens, routes, routes.flip(-1))
    assert same.pop("tokens") == 12
    assert set(same.values()) == {0.0}
    other = routes.flip(-1).clone()
    other[token, layer, 0] = next(e for e in range(9) if e not in routes[token, layer].tolist())
    assert differing_routes(routes, other).nonzero().tolist() == [[token, layer]]


def test_extremes_are_counted_beyond_e2_and_beyond_2() -> None:
    """Goal: the two thresholds are |d| > 2 and a ratio outside [1/2, 2]. Method: ratios made to lie between."""
    ratios = torch.tensor([1.0, 1.9, 1 / 1.9, 2.1, 1 / 2.1, 7.3, 1 / 7.3, 7.5])
    behaviour = torch.full((1, 8, 2), math.log(0.05))
    policy = behaviour + ratios.log()[None, :, None]
    found = measure(policy, behaviour, torch.zeros(1, 8, dtype=torch.int64), some_routes(0), some_routes(0))
    assert (found["beyond_2"], found["beyond_e2"]) == (5 / 8, 1 / 8)

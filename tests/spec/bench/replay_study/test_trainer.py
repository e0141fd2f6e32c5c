"""Engine and trainer of the study: rows and probabilities belong to the right tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.replay_study.models import DENSE, PADDED, build_engines, build_trained, load_weights
from bench.replay_study.rollout import Rollout, Rollouts
from bench.replay_study.rows import Replayed
from bench.replay_study.scales import DEEPSEEK, FAMILIES, QWEN, SCALES
from bench.replay_study.trainer import (
    QUANTILES,
    Trainer,
    clipped,
    differing_routes,
    k3,
    log_ratios,
    measure,
    turn_gains,
)

CPU = torch.device("cpu")


SCALE = SCALES["tiny"]
TASK = SCALE.short


def sides(family: str = QWEN, *, exact: bool = False) -> tuple[Any, Rollout, Trainer]:
    """A trainer's model and its engine; with ``exact`` the engine keeps float32."""
    model = build_trained(family, SCALE.shapes[family], TASK.vocab_size, 0, CPU)
    engines = build_engines(model)
    torch.manual_seed(3)
    for name, buffer in model.named_buffers():  # the engine gets them with the weights
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.05)
    if exact:
        engines = engines.to(torch.float32)
    load_weights(engines, model)
    return model, Rollout(engines), Trainer(model, learning_rate=1e-3, micro_tokens=5 * TASK.sequence)


def rolled_out(rollout: Rollout, count: int = 12, seed: int = 0) -> Rollouts:
    prompts = TASK.prompts(count, np.random.default_rng(seed))
    rollouts = rollout(prompts, TASK.answer_tokens, seed)
    np.testing.assert_array_equal(rollouts.tokens[:, : rollouts.prompt_tokens], prompts)
    return rollouts


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_engine_agrees_with_the_trainer(family: str) -> None:
    """Goal: no figure comes from rows or probabilities of another token. Method: an engine in float32, which decodes
    token by token with attention and experts of its own; its distributions and experts are the trainer's, position by
    position, up to rounding, also of a second batch in the same memory."""
    _, rollout, trainer = sides(family, exact=True)
    for seed in (0, 1):
        rollouts = rolled_out(rollout, seed=seed)
        found = trainer.score(rollouts, None)
        torch.testing.assert_close(found.log_probs, rollouts.behaviour, atol=1e-5, rtol=0)
        assert not differing_routes(found.used, rollouts.rolled()).any()
        assert found.log_probs.shape == (12, TASK.answer_tokens, TASK.vocab_size)


def test_tokens_are_drawn_from_the_distribution_that_is_returned() -> None:
    """Goal: importance ratios are of the policy that sampled. Method: many answers to one prompt; how often each
    token came first, against its probability."""
    _, rollout, _ = sides()
    prompts = np.repeat(TASK.prompts(1, np.random.default_rng(0)), 4000, axis=0)
    rollouts = rollout(prompts, 1, 0)
    wanted = rollouts.behaviour[0, 0].exp()
    came = torch.bincount(rollouts.answers[:, 0], minlength=TASK.vocab_size) / 4000
    assert float((came - wanted).abs().max()) < 0.03
    assert len(torch.unique(rollouts.answers)) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_uses_the_experts_that_it_is_given(family: str) -> None:
    """Goal: replay means the engine's experts, also when the weights have moved on. Method: the experts of the
    trainer's pass, taken by hooks, after an update that changes its own choice."""
    _, rollout, trainer = sides(family)
    rollouts = rolled_out(rollout)
    old = trainer.score(rollouts, None)
    step(trainer, rollouts, old.log_probs)
    assert not torch.equal(trainer.score(rollouts, None).used, old.used)
    assert torch.equal(trainer.score(rollouts, Replayed(rollouts.rolled())).used.long(), rollouts.rolled())


def test_weights_are_changed_midway() -> None:
    """Goal: the second half of an answer is of the newer weights. Method: an exact engine; its distributions are those
    of a trainer with the older weights up to the middle, and not behind it."""
    model, rollout, trainer = sides(exact=True)
    prompts = TASK.prompts(6, np.random.default_rng(0))
    first = rollout(prompts, TASK.answer_tokens, 0)
    older = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def midway() -> None:
        step(trainer, first, first.behaviour)
        load_weights(rollout.model, model)

    both = rollout(prompts, TASK.answer_tokens, 0, midway)
    model.load_state_dict(older)
    apart = (trainer.score(both, None).log_probs - both.behaviour).abs().amax((0, 2))
    half = (TASK.sequence - 1) // 2 - TASK.prompt_tokens + 1
    assert float(apart[:half].max()) < 1e-5
    assert float(apart[half:].min()) > 1e-5


def step(trainer: Trainer, rollouts: Rollouts, old: torch.Tensor, sign: float = 1.0) -> Any:
    gains = torch.full(rollouts.answers.shape, sign)
    order = torch.arange(len(rollouts.tokens))
    return trainer.reinforce(rollouts, gains, old, None, order=order, updates=2, clip=0.2)


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
    losses, tokens = list[float](), torch.as_tensor(TASK.demonstrations(6, 0.1, np.random.default_rng(0)))
    for rounded in (False, True):
        model, _, trainer = sides()
        before = [weight.clone() for weight in model.parameters()]
        losses.append(float(trainer.learn(tokens, TASK.prompt_tokens, 1e-6, rounded=rounded)))
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert 0 < abs(losses[0] - losses[1]) < 0.2


def test_biases_balance_routers_that_have_them() -> None:
    """Goal: experts that were chosen less become likelier. Method: one step; each bias moves against its load, which
    is counted from the trainer's own pass."""
    model, _, trainer = sides(DEEPSEEK)
    tokens = torch.as_tensor(TASK.demonstrations(6, 0.1, np.random.default_rng(0)))
    routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    before = [router.e_score_correction_bias.clone() for router in routers]
    assert len(routers) == 3
    counts = list[torch.Tensor]()
    hooks = [
        router.register_forward_hook(
            lambda _m, _i, answer: counts.append(torch.bincount(answer[2].flatten(), minlength=16))
        )
        for router in routers
    ]
    trainer.learn(tokens, TASK.prompt_tokens, 1e-6)
    for hook in hooks:
        hook.remove()
    for router, bias, count in zip(routers, before, counts, strict=True):
        moved = (router.e_score_correction_bias - bias).sign()
        assert torch.equal(moved, (count.float().mean() - count).sign())


@pytest.mark.parametrize("spread", [False, True])
def test_padded_and_dense_experts_are_the_loop(spread: bool) -> None:
    """Goal: padding changes no value and no gradient, also with experts that no token chose. Method: the same two
    experts for every token, or random ones; answers and the gradients of states, scores and weights against
    transformers'."""
    model, _, _ = sides()
    experts: Any = [module for name, module in model.named_modules() if name.endswith(".experts")][-1]
    count, hidden = len(experts.gate_up_proj), experts.gate_up_proj.shape[2]
    torch.manual_seed(1)
    chosen = torch.rand(23, count).topk(2).indices if spread else torch.tensor([[count - 1, 1]]).repeat(23, 1)
    found = []
    for name in ("eager", PADDED, DENSE):
        torch.manual_seed(2)
        states, scores = torch.randn(23, hidden, requires_grad=True), torch.rand(23, 2, requires_grad=True)
        experts.config._experts_implementation = name
        answer = experts(states, chosen, scores)
        wanted = (states, scores, experts.gate_up_proj, experts.down_proj)
        found.append((answer, *torch.autograd.grad(answer.square().sum(), wanted)))
    for loop, padded, dense in zip(*found, strict=True):
        torch.testing.assert_close(padded, loop, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(dense, loop, atol=1e-5, rtol=1e-4)


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
    gains = torch.randn(3, 4, generator=draw)
    expected = (behaviour.double().exp() * k3(d)).sum(-1).mean()
    found = measure(policy, behaviour, tokens, gains, routes, routes, 0.2)
    assert found["kl"] == pytest.approx(float(expected), rel=1e-5)
    assert bool((k3(d) >= 0).all())
    same = measure(policy, policy, tokens, gains, routes, routes.flip(-1), 0.2)
    assert same.pop("tokens") == 12
    assert {same.pop(f"ratio_{share:g}") for share in QUANTILES} == {1.0}
    assert set(same.values()) == {0.0}
    other = routes.flip(-1).clone()
    other[token, layer, 0] = next(e for e in range(9) if e not in routes[token, layer].tolist())
    assert differing_routes(routes, other).nonzero().tolist() == [[token, layer]]


def test_extremes_are_counted_beyond_e2_and_beyond_2() -> None:
    """Goal: the two thresholds are |d| > 2 and a ratio outside [1/2, 2]. Method: ratios made to lie between."""
    ratios = torch.tensor([1.0, 1.9, 1 / 1.9, 2.1, 1 / 2.1, 7.3, 1 / 7.3, 7.5])
    behaviour = torch.full((1, 8, 2), math.log(0.05))
    policy = behaviour + ratios.log()[None, :, None]
    found = measure(
        policy, behaviour, torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8), some_routes(0), some_routes(0), 0.2
    )
    assert (found["beyond_2"], found["beyond_e2"]) == (5 / 8, 1 / 8)
    # A token with an advantage is clipped above 1.2 only.
    assert found["clip_fraction"] == 4 / 8
    assert found["ratio_0.001"] == pytest.approx(1 / 7.3)
    assert found["ratio_0.999"] == pytest.approx(7.5)


def test_advantages_are_of_the_same_turn_and_prompt() -> None:
    """Goal: a turn is compared with its like only. Method: by hand; equal rewards have no advantage."""
    rewards = torch.tensor([[0.0, 5.0], [1.0, 5.0], [10.0, 7.0], [10.0, 3.0]], dtype=torch.float64)
    wanted = [[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
    torch.testing.assert_close(turn_gains(rewards, 2), torch.tensor(wanted, dtype=torch.float64), atol=1e-5, rtol=0)


def test_what_is_clipped_has_no_gradient() -> None:
    """Goal: the clipped share is that of PPO. Method: the gradient of its objective is zero there, and only there."""
    d = torch.tensor([-0.5, -0.1, 0.1, 0.5]).repeat(2, 1).requires_grad_(True)
    gains = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
    ratio = d.exp()
    torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).sum().backward()
    assert d.grad is not None
    assert clipped(d.detach(), gains, 0.2).tolist() == (d.grad == 0).tolist()
    assert clipped(d.detach(), gains, 0.2).tolist() == [[False, False, False, True], [True, False, False, False]]

"""What is computed from the numbers: the figures of the mismatch, their intervals, and the task."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.replay_study.mismatch import differing_routes, k3, log_ratios, measure
from bench.replay_study.results import Measured, Results, Run, Step
from bench.replay_study.statistics import STUDENT_T_975, Interval
from bench.replay_study.summary import difference, interval, ratio
from bench.replay_study.task import Task

seeds = st.integers(0, 2**32 - 1)


def two_policies(seed: int, batch: int = 3, answer: int = 4, vocabulary: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    policy, behaviour = torch.randn(2, batch, answer, vocabulary, generator=draw).mul(2).log_softmax(-1)
    return policy, behaviour


def some_routes(seed: int, tokens: int = 6, layers: int = 3, experts: int = 9, top_k: int = 4) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, experts, generator=draw).topk(top_k).indices


@given(seeds)
def test_k3_estimates_the_divergence(seed: int) -> None:
    """Goal: k3 and KL are one quantity. Method: the estimate of each token of the vocabulary, weighted by how often
    the engine would have sampled it, adds up to the divergence."""
    policy, behaviour = two_policies(seed)
    every = torch.arange(policy.shape[-1]).expand(3, 4, -1)
    d = (policy - behaviour).double()
    expected = (behaviour.double().exp() * k3(d)).sum(-1).mean()
    found = measure(policy, behaviour, every[..., 0], some_routes(seed), some_routes(seed))
    assert found.kl == pytest.approx(float(expected), rel=1e-5)
    assert bool((k3(d) >= 0).all())


@given(seeds)
def test_a_policy_is_no_distance_from_itself(seed: int) -> None:
    policy, _ = two_policies(seed)
    routes = some_routes(seed)
    found = measure(policy, policy, torch.zeros(3, 4, dtype=torch.int64), routes, routes.flip(-1))
    assert found.tokens == 12
    values = (found.kl, found.k3, found.beyond_e2, found.beyond_2, found.tokens_differing, found.routers_differing)
    assert values == (0.0,) * 6


def test_extremes_are_counted_beyond_e2_and_beyond_2() -> None:
    """Goal: the two thresholds are |d| > 2 and a ratio outside [1/2, 2]. Method: ratios made to lie between."""
    ratios = torch.tensor([1.0, 1.9, 1 / 1.9, 2.1, 1 / 2.1, 7.3, 1 / 7.3, 7.5])
    behaviour = torch.full((1, 8, 2), math.log(0.05))
    policy = behaviour + ratios.log()[None, :, None]
    found = measure(policy, behaviour, torch.zeros(1, 8, dtype=torch.int64), some_routes(0), some_routes(0))
    assert (found.beyond_2, found.beyond_e2) == (5 / 8, 1 / 8)
    expected = ratios.log()
    torch.testing.assert_close(log_ratios(policy, behaviour, torch.zeros(1, 8, dtype=torch.int64))[0], expected)


@given(seeds, st.integers(0, 5), st.integers(0, 2))
def test_routes_differ_as_sets(seed: int, token: int, layer: int) -> None:
    """Goal: the order of experts is no difference, one other expert is. Method: change one row's expert."""
    one = some_routes(seed)
    other = one[..., torch.randperm(one.shape[-1])].clone()
    assert not bool(differing_routes(one, other).any())
    other[token, layer, 0] = next(e for e in range(9) if e not in one[token, layer].tolist())
    assert differing_routes(one, other).nonzero().tolist() == [[token, layer]]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=25), st.floats(-5, 5), st.floats(0.1, 10))
def test_an_interval_moves_and_stretches_with_its_values(values: list[float], shift: float, scale: float) -> None:
    found, moved = Interval.of(values), Interval.of([scale * v + shift for v in values])
    assert moved.mean == pytest.approx(scale * found.mean + shift, abs=1e-6)
    assert moved.half == pytest.approx(scale * found.half, abs=1e-6)
    assert found.low <= found.mean <= found.high


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    """Goal: 95 % means 95 %. Method: 4,000 samples of three normal values; the share of intervals with the mean."""
    draw = np.random.default_rng(0)
    covered = [abs(found.mean) <= found.half for found in map(Interval.of, draw.normal(size=(4000, 3)).tolist())]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    assert list(STUDENT_T_975) == sorted(STUDENT_T_975, reverse=True)
    assert math.isinf(Interval.of([1.0]).half)


@given(seeds, st.integers(2, 12), st.integers(1, 7))
def test_right_answers_are_the_prompt_in_order(seed: int, symbols: int, length: int) -> None:
    """Goal: the reward is what it says. Method: answers hold the prompt's symbols, and earn all of the reward."""
    task = Task(symbols, length)
    prompts = task.prompts(20, np.random.default_rng(seed))
    answers = task.answers(prompts)
    np.testing.assert_array_equal(np.sort(answers), np.sort(prompts[:, 2:-1]))
    whole = np.concatenate([prompts, answers], axis=1)
    assert whole.shape == (20, task.sequence_tokens)
    assert task.rewards(whole).tolist() == [1.0] * 20
    whole[:, -1] = -1
    assert task.rewards(whole).tolist() == pytest.approx([1 - 1 / length] * 20)
    clean = task.demonstrations(5, 0.0, np.random.default_rng(seed))
    assert task.rewards(clean).tolist() == [1.0] * 5
    assert whole[:, :-1].max() < task.vocab_size


def results_of(kl_by_mode: dict[str, list[float]], *, seeds_differ: bool = True) -> Results:
    rows = [
        Measured("f", n if seeds_differ else 0, 0 if seeds_differ else n, "before", mode, {"kl": kl})
        for mode, values in kl_by_mode.items()
        for n, kl in enumerate(values)
    ]
    return Results({}, measured=rows)


@pytest.mark.parametrize("seeds_differ", [True, False])
@pytest.mark.parametrize(
    ("with_it", "halved"),
    [([0.3, 0.31, 0.29], True), ([0.9, 0.91, 0.89], False), ([0.45, 0.55, 0.5], None)],
)
def test_halved_is_said_only_of_a_whole_interval(with_it: list[float], halved: bool | None, seeds_differ: bool) -> None:
    found = ratio(results_of({"none": [1.0, 1.0, 1.0], "r3": with_it}, seeds_differ=seeds_differ), "f", "r3")
    assert found is not None
    assert found.halved is halved
    assert found.low <= found.mean <= found.high


def test_batches_of_one_model_among_several_are_one_value() -> None:
    """Goal: batches of the same weights are not taken for independent ones. Method: two models, two batches each."""
    rows = [Measured("f", seed, draw, "before", "none", {"kl": seed + draw}) for seed in (0, 10) for draw in (0, 2)]
    found = interval(Results({}, measured=rows), "f", "before", "none", "kl")
    assert found == Interval.of([1.0, 11.0])
    assert interval(Results({}), "f", "before", "none", "kl") is None


def test_policy_gradients_are_compared_seed_by_seed() -> None:
    def run(mode: str, seed: int, reward: float) -> Run:
        return Run("f", mode, seed, [Step(0, reward, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)])

    runs = [run("none", 0, 0.1), run("r3", 0, 0.2), run("none", 1, 0.5), run("r3", 1, 0.6), run("r3", 2, 9.0)]
    found = difference(Results({}, runs=runs), "r3", "reward", slice(-5, None))
    assert found is not None
    assert (found.mean, found.half, found.count) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-9), 2)

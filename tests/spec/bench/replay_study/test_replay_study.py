"""``python -m bench.replay_study`` as a user runs it, and checks of its numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay_study.__main__ import RESULTS, main, replay_study
from bench.replay_study.results import (
    LABELS,
    Interval,
    Measured,
    Results,
    Run,
    Step,
    difference,
    print_results,
    verdict,
)
from bench.replay_study.scales import SCALES, Learning, Options, Reinforcement, Scale, Task
from bench.replay_study.study import Study

MINUTE = replace(
    SCALES["tiny"],
    draws=2,
    measured=2,
    learning=Learning(steps=3, batch=8, learning_rate=1e-3),
    reinforcement=Reinforcement(steps=2, prompts=2, samples=4, updates=2, learning_rate=1e-4, seeds=2),
)
"""A study of it takes a few seconds."""


def check(results: Results, scale: Scale) -> None:
    """Every figure is present and finite, and those that replay must make zero are zero."""
    assert results.complete
    kinds = {(m.when, m.mode) for m in results.measured}
    assert kinds == {(w, m) for w in ("before", "after") for m in ("none", "r2", "r3")}
    assert len(results.measured) == len(kinds) * scale.draws
    for measured in results.measured:
        assert measured.figures.keys() == {*LABELS, "tokens"}
        assert all(math.isfinite(value) and value >= 0 for value in measured.figures.values())
        if measured.mode == "r3":
            assert measured.figures["tokens_differing"] == measured.figures["routers_differing"] == 0
    seeds = range(scale.reinforcement.seeds)
    assert {(run.mode, run.seed) for run in results.runs} == {(m, seed) for m in ("none", "r3") for seed in seeds}
    for step in (step for run in results.runs for step in run.steps):
        assert 0 <= step.reward <= 1
        assert 0 <= step.clip_fraction <= 1
        assert step.kl >= 0


@pytest.mark.whole
def test_a_quick_study_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the command does what it says. Method: run it; its numbers and words; and they are shown again."""
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    results = Results.read(tmp_path / RESULTS)
    check(results, SCALES["quick"])
    # Engine and trainer differ without replay, or there was nothing to study.
    assert any(m.figures["tokens_differing"] > 0 for m in results.measured if m.mode == "none")
    assert results.learned[0].reward_after > 2 * results.setting["chance"]
    text = capsys.readouterr().out
    assert "R3 leaves" in text
    assert "R3 less no replay" in text
    assert main(["--from", str(tmp_path / RESULTS)]) == 0
    assert capsys.readouterr().out in text


def study(path: Path, **options: Any) -> Results:
    return replay_study(Options(MINUTE, **options), "minute", path, [].append)


def test_an_accelerators_way_on_a_cpu(tmp_path: Path) -> None:
    """Goal: the path of ``--device cuda`` works. Method: on a CPU, with a limit in time."""
    results = study(tmp_path, minutes=0.1)
    check(results, MINUTE)
    assert min(len(run.steps) for run in results.runs) >= 1


def test_the_same_options_find_the_same(tmp_path: Path) -> None:
    """Goal: a study can be repeated. Method: twice; everything but the seconds is equal."""

    def numbers(name: str) -> Any:
        study(tmp_path / name, seed=3)
        found = json.loads((tmp_path / name / RESULTS).read_text())
        for part in [found, *found["learned"], *(step for run in found["runs"] for step in run["steps"])]:
            part.pop("seconds")
        return found

    assert numbers("one") == numbers("two")


def test_an_interrupted_study_keeps_its_results(tmp_path: Path) -> None:
    """Goal: results so far are never lost. Method: end it in its second policy gradient; the file is shown."""

    def cut_off(what: str) -> None:
        if "seed 0, step 0" in what and "r3" in what:
            raise KeyboardInterrupt

    running = Study(Options(MINUTE), {"chance": 0.1}, tmp_path / RESULTS, cut_off)
    with pytest.raises(KeyboardInterrupt):
        running.run()
    kept = Results.read(tmp_path / RESULTS)
    assert (kept.complete, len(kept.measured), [len(run.steps) for run in kept.runs]) == (False, 12, [2, 1])
    said: list[str] = []
    print_results(kept, said.append)
    assert "interrupted" in said[-1]
    assert not list(tmp_path.glob("*.part"))


# What the numbers come to ----------------------------------------------------------------------------------------


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    """Goal: 95 % means 95 %. Method: 4,000 samples of three normal values; the share of intervals with the mean."""
    draw = np.random.default_rng(0)
    covered = [abs(found.mean) <= found.half for found in map(Interval.of, draw.normal(size=(4000, 3)).tolist())]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    assert math.isinf(Interval.of([1.0]).half)


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 7))
def test_right_answers_are_the_prompt_in_order(seed: int, symbols: int, length: int) -> None:
    """Goal: the reward is what it says. Method: answers hold the prompt's symbols, and earn all of the reward."""
    task = Task(symbols, length)
    prompts = task.prompts(20, np.random.default_rng(seed))
    answers = task.answers(prompts)
    np.testing.assert_array_equal(np.sort(answers), np.sort(prompts[:, 2:-1]))
    whole = np.concatenate([prompts, answers], axis=1)
    assert whole.shape == (20, task.prompt_tokens + length)
    assert task.rewards(whole).tolist() == [1.0] * 20
    whole[:, -1] = -1
    assert task.rewards(whole).tolist() == pytest.approx([1 - 1 / length] * 20)
    assert task.rewards(task.demonstrations(5, 0.0, np.random.default_rng(seed))).tolist() == [1.0] * 5
    assert whole[:, :-1].max() < task.vocab_size


@pytest.mark.parametrize(
    ("with_it", "said"),
    [([0.3, 0.31, 0.29], "at least halved"), ([0.9, 0.91, 0.89], "not halved"), ([0.45, 0.55, 0.5], "do not decide")],
)
def test_halved_needs_the_whole_interval(with_it: list[float], said: str) -> None:
    rows = [
        Measured("f", 0, n, "before", mode, {"kl": kl})
        for mode, values in (("none", [1.0] * 3), ("r3", with_it))
        for n, kl in enumerate(values)
    ]
    assert said in verdict(Results({}, measured=rows))


def test_policy_gradients_are_compared_seed_by_seed() -> None:
    def run(mode: str, seed: int, reward: float) -> Run:
        return Run("f", mode, seed, [Step(0, reward, *[0.0] * 7)])

    runs = [run("none", 0, 0.1), run("r3", 0, 0.2), run("none", 1, 0.5), run("r3", 1, 0.6), run("r3", 2, 9.0)]
    found = difference(Results({}, runs=runs), "r3", "reward", slice(-5, None))
    assert found is not None
    assert (found.mean, found.half) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-9))

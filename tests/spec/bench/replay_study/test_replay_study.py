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
    Learned,
    Measured,
    Results,
    Run,
    Step,
    difference,
    merged,
    print_results,
    ratio,
    times,
)
from bench.replay_study.rows import Labels, Rows
from bench.replay_study.scales import (
    DEEPSEEK,
    DENOMINATORS,
    FAMILIES,
    QWEN,
    SCALES,
    Learning,
    Options,
    Reinforcement,
    Scale,
    Task,
)
from bench.replay_study.study import TRAINED, Study
from cache_manager.errors import InvalidInputError

MINUTE = replace(
    SCALES["tiny"],
    long=Task(symbols=4, rules=2, prompt_tokens=4, turns=3, turn_tokens=4),
    short=Task(symbols=4, rules=2, prompt_tokens=4, turns=2, turn_tokens=4),
    measured=1,
    samples=2,
    lags=(0, 2),
    learning=Learning(steps=4, batch=4, learning_rate=1e-3),
    reinforcement=Reinforcement(steps=2, prompts=1, samples=4, updates=2, learning_rate=1e-4),
    seeds=1,
)
"""A study of it takes a few seconds."""


def check(results: Results, scale: Scale, families: tuple[str, ...] = FAMILIES) -> None:
    """Every figure is present and finite, and those that replay must make zero are zero."""
    assert results.complete
    kinds = {(lag, rows.value, "all") for lag in scale.lags for rows in Rows}
    kinds |= {(max(scale.lags), labels.value, part) for labels in Labels for part in ("older", "newer")}
    seeds = range(scale.seeds)
    found = [(m.family, m.seed, (m.lag, m.rows, m.part)) for m in results.measured]
    assert len(found) == len(set(found))
    assert set(found) == {(family, seed, kind) for family in families for seed in seeds for kind in kinds}
    for measured in results.measured:
        assert measured.figures.keys() == {*LABELS, "tokens"}
        assert all(math.isfinite(value) and value >= 0 for value in measured.figures.values())
        own = (measured.rows, measured.part) == (Labels.BY_VERSION, "newer")
        if own or measured.rows in (Rows.RIGHT, Labels.ONE):
            assert measured.figures["tokens_differing"] == measured.figures["routers_differing"] == 0
    runs = [(run.family, run.rows, run.old, run.seed) for run in results.runs]
    assert sorted(runs) == sorted(
        (f, r.value, o, s) for f in families for r in TRAINED for o in DENOMINATORS for s in seeds
    )
    for step in (step for run in results.runs for step in run.steps):
        assert 0 <= step.reward <= 1
        assert 0 <= step.clip_fraction <= 1
        assert step.kl >= 0


@pytest.mark.whole
def test_a_quick_study_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the command does what it says. Method: run it; its numbers and words; and they are shown again. Two runs,
    one a family, are one study."""
    for family in FAMILIES:
        assert main(["--quick", "--family", family, "--out", str(tmp_path / family)]) == 0
    files = [tmp_path / family / RESULTS for family in FAMILIES]
    results = merged([Results.read(path) for path in files])
    check(results, SCALES["quick"])
    # Engine and trainer differ without replay, or there was nothing to study.
    assert any(m.figures["tokens_differing"] > 0 for m in results.measured if m.rows == Rows.NONE)
    capsys.readouterr()
    assert main(["--from", *map(str, files)]) == 0
    text = capsys.readouterr().out
    for family in FAMILIES:
        assert f"Mismatch, {family}, the same weights" in text
        assert f"Policy gradient, {family}, ratio to the trainer's" in text
    # Rows of other tokens are worse than none, in each model.
    for family in FAMILIES:
        for rows in (Rows.EVICTED, Rows.SHIFTED, Rows.ZEROS):
            worse = ratio(results, family, 0, rows, Rows.NONE)
            assert worse is not None
            assert worse.mean > math.log(2)
        better = ratio(results, family, 0, Rows.RIGHT, Rows.NONE)
        assert better is not None
        assert better.mean < 0


def study(path: Path, **options: Any) -> Results:
    said: list[str] = []
    return replay_study(Options(MINUTE, **options), "minute", path, said.append)


def test_an_accelerators_way_on_a_cpu(tmp_path: Path) -> None:
    """Goal: the path of ``--device cuda`` works. Method: on a CPU, with a limit in time."""
    results = study(tmp_path, minutes=0.2)
    check(results, MINUTE)
    assert min(len(run.steps) for run in results.runs) >= 1


def test_the_same_options_find_the_same(tmp_path: Path) -> None:
    """Goal: a study can be repeated, also in phases. Method: twice, the second time from the weights that the first
    kept; everything but the seconds is equal."""

    def numbers(name: str, phases: tuple[str, ...]) -> Any:
        study(tmp_path / name, seed=3, families=(QWEN,), phases=phases, state=str(tmp_path / "state"))
        found = json.loads((tmp_path / name / RESULTS).read_text())
        for part in [found, *found["learned"], *(step for run in found["runs"] for step in run["steps"])]:
            part.pop("seconds")
        return found

    whole = numbers("one", ("mismatch", "training"))
    assert len(whole["learned"]) == 1
    assert numbers("two", ("mismatch",))["measured"] == whole["measured"]
    assert numbers("three", ("training",))["runs"] == whole["runs"]


def test_an_interrupted_study_keeps_its_results(tmp_path: Path) -> None:
    """Goal: results so far are never lost. Method: end it in its second policy gradient; the file is shown."""

    def cut_off(what: str) -> None:
        if "step 0" in what and "right" in what:
            raise KeyboardInterrupt

    running = Study(Options(MINUTE, families=(DEEPSEEK,)), {"chance": 0.1}, tmp_path / RESULTS, cut_off)
    with pytest.raises(KeyboardInterrupt):
        running.run()
    kept = Results.read(tmp_path / RESULTS)
    assert (kept.complete, len(kept.measured), [len(run.steps) for run in kept.runs]) == (False, 20, [2, 1])
    said: list[str] = []
    print_results(kept, said.append)
    assert "interrupted" in said[-1]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.whole
def test_curves_of_one_ratio_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a part of policy gradient can be run by itself. Method: one ratio, two steps; two parts are one study."""
    common = ["--quick", "--family", QWEN, "--seeds", "1", "--phase", "training", "--steps", "2"]
    for old in DENOMINATORS:
        assert main([*common, "--ratio", old, "--out", str(tmp_path / old)]) == 0
    capsys.readouterr()
    whole = merged([Results.read(tmp_path / old / RESULTS) for old in DENOMINATORS])
    found = {(run.old, run.rows): len(run.steps) for run in whole.runs}
    assert found == {(old, rows.value): 2 for old in DENOMINATORS for rows in TRAINED}


def test_the_ratio_divides_by_the_probabilities_that_it_names(tmp_path: Path) -> None:
    """Goal: curves of the two ratios are of two computations. Method: one optimizer step for all rollouts of a step, so
    that the policy has not moved: its distance from the trainer's probabilities is nothing, and from the engine's that
    of the mismatch. In the tables, each ratio has its own."""
    once = replace(MINUTE, reinforcement=replace(MINUTE.reinforcement, steps=1, updates=1))
    options = Options(once, families=(QWEN,), phases=("training",))
    said: list[str] = []
    results = replay_study(options, "minute", tmp_path, said.append)
    evicted = {run.old: run.steps[0] for run in results.runs if run.rows == Rows.EVICTED}
    assert evicted["engine"].kl == pytest.approx(evicted["trainer"].kl)
    assert evicted["engine"].moved == pytest.approx(evicted["engine"].kl, rel=1e-2)
    assert evicted["trainer"].moved < 1e-2 * evicted["trainer"].kl
    titles = [line for text in said for line in text.splitlines() if line.startswith("Policy gradient, ")]
    assert [title.partition("ratio to the ")[2].partition("'s")[0] for title in titles] == list(DENOMINATORS)


@pytest.mark.parametrize(
    "options",
    [
        ["--seeds", "0"],
        ["--minutes", "0"],
        ["--steps", "0"],
        ["--family", "gpt"],
        ["--phase", "all"],
        ["--ratio", "old"],
    ],
)
def test_bad_options_are_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert options[0] in capsys.readouterr().err


def test_results_of_one_study_only_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: no table mixes what does not belong together, or counts a model twice. Method: other sizes; the same model
    again; another phase of it, whose weights were learnt again."""

    def part(scale: str, seed: int, *, measured: bool) -> Results:
        learned = Learned(QWEN, seed, 1, 1, 1.0, 1.0, 0.0, 1.0)
        one = Measured(QWEN, seed, 0, "none", "all", {"kl": 1.0})
        return Results(
            {"scale": scale},
            [learned],
            [one] if measured else [],
            [] if measured else [Run(QWEN, "none", "engine", seed)],
        )

    both = merged([part("a", 0, measured=True), part("a", 1, measured=True), part("a", 0, measured=False)])
    assert (len(both.learned), len(both.measured), len(both.runs)) == (2, 2, 1)
    for wrong in ([part("a", 0, measured=True), part("b", 1, measured=True)], [part("a", 0, measured=True)] * 2):
        with pytest.raises(InvalidInputError):
            merged(wrong)
    (tmp_path / "old.json").write_text('{"format": "kvroute replay-study 1"}')
    assert main(["--from", str(tmp_path / "old.json")]) == 2
    assert "kvroute replay-study 2" in capsys.readouterr().err


# What the numbers come to ----------------------------------------------------------------------------------------


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    """Goal: 95 % means 95 %. Method: 4,000 samples of three normal values; the share of intervals with the mean."""
    draw = np.random.default_rng(0)
    covered = [abs(found.mean) <= found.half for found in map(Interval.of, draw.normal(size=(4000, 3)).tolist())]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    assert math.isinf(Interval.of([1.0]).half)


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 4), st.integers(1, 4))
def test_right_answers_walk_by_the_rule_of_the_prompt(seed: int, symbols: int, rules: int, turns: int) -> None:
    """Goal: the reward is what it says. Method: demonstrations without errors earn all of it; a wrong symbol costs its
    own step, and no later one, because the walk goes on from there; a token that is no symbol costs the next, too."""
    task = Task(symbols, rules, prompt_tokens=4, turns=turns, turn_tokens=3)
    draw = np.random.default_rng(seed)
    whole = task.demonstrations(20, 0.0, draw)
    assert whole.shape == (20, task.sequence)
    assert whole.max() < task.vocab_size
    assert task.rewards(whole).tolist() == [[1.0] * turns] * 20
    facts = task.facts()
    assert np.sort(facts, axis=1).tolist() == [list(range(symbols))] * rules
    lost = task.demonstrations(20, 0.5, draw)
    by_hand = [[facts[row[1] - 1 - symbols][row[i - 1] - 1] == row[i] - 1 for i in range(4, len(row))] for row in lost]
    assert task.right(lost).tolist() == by_hand
    whole[:, 4] = 0
    assert task.rewards(whole)[:, 0].tolist() == pytest.approx([1 / 3] * 20)
    assert task.cached_tokens == 4 + 3 * (turns - 1)


def test_figures_are_compared_seed_by_seed() -> None:
    """Goal: a ratio's interval is that of the pairs. Method: weights that differ a hundredfold, with one ratio."""
    rows = [
        Measured(QWEN, seed, 0, mode, "all", {"kl": kl * factor})
        for mode, factor in (("none", 3.0), ("right", 1.0))
        for seed, kl in enumerate([1.0, 10.0, 100.0])
    ]
    found = ratio(Results({}, measured=rows), QWEN, 0, "none", "right")
    assert found is not None
    assert times(found) == "3 times (3 to 3)"
    assert ratio(Results({}, measured=rows), DEEPSEEK, 0, "none", "right") is None


def test_policy_gradients_are_compared_seed_by_seed() -> None:
    def run(rows: str, seed: int, reward: float) -> Run:
        return Run(QWEN, rows, "engine", seed, [Step(0, reward, *[0.0] * 8)])

    runs = [run("right", 0, 0.1), run("none", 0, 0.2), run("right", 1, 0.5), run("none", 1, 0.6), run("none", 2, 9.0)]
    found = difference(runs, "none", "right", "reward", slice(-5, None))
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.half == pytest.approx(0.0, abs=1e-9)
    # A run that was cut off is compared with as much of the other.
    runs[0].steps.append(Step(1, 0.9, *[0.0] * 8))
    assert difference(runs, "none", "right", "reward", slice(-1, None)) == found

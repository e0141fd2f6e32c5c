"""``kvroute replay-study`` as a person runs it."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.replay_study.__main__ import main
from bench.replay_study.command import RESULTS, replay_study, show_study
from bench.replay_study.mismatch import FIGURES
from bench.replay_study.options import SCALES, Scale, StudyOptions
from bench.replay_study.results import Results
from bench.replay_study.study import Study
from cache_manager.errors import ConfigError, InvalidInputError


def check(results: Results, scale: Scale) -> None:
    """Every figure is there, finite, and what replay is to make zero is zero."""
    kinds = {(m.family, m.when, m.mode) for m in results.measured}
    assert kinds == {(f, w, m) for f in scale.families for w in ("before", "after") for m in ("none", "r2", "r3")}
    assert len(results.measured) == len(kinds) * scale.weights * scale.draws
    for measured in results.measured:
        assert measured.figures.keys() == {*FIGURES, "tokens"}
        assert all(math.isfinite(value) and value >= 0 for value in measured.figures.values())
        assert (measured.figures["routers_differing"] == 0) == (measured.figures["tokens_differing"] == 0)
        if measured.mode == "r3":
            assert measured.figures["tokens_differing"] == 0
    assert {(run.mode, run.seed) for run in results.runs} == {
        (mode, seed) for mode in scale.reinforcement.modes for seed in range(scale.reinforcement.seeds)
    }
    for step in (step for run in results.runs for step in run.steps):
        assert 0 <= step.reward <= 1
        assert 0 <= step.clip_fraction <= 1
        assert step.kl >= 0


@pytest.mark.whole
def test_a_quick_study_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the command does what it says, on the small engine. Method: run it; its numbers, pictures and words."""
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    results, scale = Results.read(tmp_path / RESULTS), SCALES["quick"]
    assert results.complete
    check(results, scale)
    # Engine and trainer differ without replay, or there was nothing to study.
    assert any(m.figures["tokens_differing"] > 0 for m in results.measured if m.mode == "none")
    rewards, chance = [each.reward_after for each in results.learned], results.setting["chance"]
    assert min(rewards) > 1.5 * chance
    assert sum(rewards) / len(rewards) > 2 * chance
    for picture in ("mismatch.png", "policy-gradient.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "R3 leaves" in text
    assert "the paper's figures, not ours" in text
    assert "R3 less no replay" in text


def test_an_accelerators_way_on_a_cpu(minute: Scale, tmp_path: Path) -> None:
    """Goal: the path of ``--device cuda`` works. Method: the same on a CPU, with a limit in time and passes in
    bfloat16; and what it wrote is shown again."""
    console = Console(file=io.StringIO(), width=120)
    options = StudyOptions(scale="minute", minutes=0.1, trainer_dtype="bfloat16", out=tmp_path)
    assert replay_study(options, console) == 0
    results = Results.read(tmp_path / RESULTS)
    assert results.complete
    check(results, minute)
    counts = {len(run.steps) for run in results.runs}
    assert min(counts) >= 1
    again = Console(file=io.StringIO(), width=120)
    assert show_study(tmp_path / RESULTS, tmp_path / "again", again) == 0
    first, second = console.file.getvalue(), again.file.getvalue()  # type: ignore[attr-defined]
    assert (
        first[first.index("Supervised learning") :].replace(str(tmp_path), "")[:4000]
        == (second[second.index("Supervised learning") :].replace(str(tmp_path), "")[:4000])
    )


def test_the_module_is_the_command() -> None:
    """Goal: ``python -m kvroute`` is ``kvroute``, and ``python -m bench.replay_study`` the study. Method: help."""
    for module, said in (("kvroute", "demo-pd"), ("bench.replay_study", "--trainer-dtype")):
        ran = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True, timeout=60
        )
        assert said in ran.stdout
        assert ran.stdout.startswith(f"usage: {'' if module == 'kvroute' else 'python -m '}{module}")


class CutOff:
    """A teller that ends the study in the middle of its second policy gradient."""

    def __init__(self) -> None:
        self.begun = list[str]()

    def begin(self, what: str, total: int) -> None:
        assert total > 0
        self.begun.append(what)

    def on(self, status: str) -> None:
        if sum("policy gradient" in what for what in self.begun) == 2:
            raise KeyboardInterrupt

    def end(self) -> None:
        assert self.begun


@pytest.mark.usefixtures("minute")
def test_a_study_that_is_cut_off_keeps_what_it_has(tmp_path: Path) -> None:
    """Goal: nothing that was found is lost. Method: end it in the middle; the file has all before, and is shown."""
    options = StudyOptions(scale="minute", out=tmp_path)
    study = Study(
        options, {"chance": 0.1, "scale": "minute", "hardware": "", "torch": ""}, tmp_path / RESULTS, CutOff()
    )
    with pytest.raises(KeyboardInterrupt):
        study.run()
    kept = Results.read(tmp_path / RESULTS)
    assert not kept.complete
    assert len(kept.measured) == 12
    assert [len(run.steps) for run in kept.runs] == [2, 1]
    console = Console(file=io.StringIO(), width=120)
    assert show_study(tmp_path / RESULTS, tmp_path, console) == 0
    assert "cut off" in console.file.getvalue()  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.usefixtures("minute")
@pytest.mark.parametrize(("phase", "measured", "runs"), [("mismatch", 12, 0), ("policy-gradient", 0, 4)])
def test_phases_are_left_out(phase: str, measured: int, runs: int, tmp_path: Path) -> None:
    """Goal: what an earlier run measured need not be measured again. Method: each phase alone after learning."""
    console = Console(file=io.StringIO(), width=120)
    options = StudyOptions(scale="minute", phases=("learning", phase), out=tmp_path)
    assert replay_study(options, console) == 0
    found = Results.read(tmp_path / RESULTS)
    assert found.complete
    assert (len(found.learned), len(found.measured), len(found.runs)) == (1, measured, runs)


def test_the_same_options_find_the_same(minute: Scale, tmp_path: Path) -> None:
    """Goal: a study can be repeated. Method: twice; everything but the seconds is equal."""

    def numbers(name: str) -> Any:
        console = Console(file=io.StringIO(), width=120)
        replay_study(StudyOptions(scale="minute", seed=3, out=tmp_path / name), console)
        found = json.loads((tmp_path / name / RESULTS).read_text())
        for part in [found, *found["learned"], *(step for run in found["runs"] for step in run["steps"])]:
            part.pop("seconds")
        return found

    first = numbers("one")
    assert first == numbers("two")
    assert len(first["runs"]) == 2 * minute.reinforcement.seeds


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"device": "tpu"}, "--device"),
        ({"scale": "huge"}, "--scale"),
        ({"device": "cuda", "scale": "small"}, "--scale"),
        ({"minutes": 0.0}, "--minutes"),
        ({"minutes": math.nan}, "--minutes"),
        ({"seed": -1}, "--seed"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"trainer_dtype": "float16"}, "--trainer-dtype"),
        ({"phases": ("policy-gradient",)}, "--phases"),
        ({"phases": ("learning", "other")}, "--phases"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StudyOptions(**flags)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "kvroute replay-study 1"}', '{"format": "other"}'])
def test_other_files_are_not_results(text: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="replay-study"):
        Results.read(path)
    with pytest.raises(InvalidInputError, match="none"):
        Results.read(tmp_path / "none.json")

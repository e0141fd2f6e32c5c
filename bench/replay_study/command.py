"""``python -m bench.replay_study``: run it, or read what an earlier run found; say what it is."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.replay_study.models import experts_implementation
from bench.replay_study.options import StudyOptions, TrainerDtype
from bench.replay_study.report import print_results
from bench.replay_study.results import Results
from cache_manager.errors import ConfigError

RESULTS = "replay-study.json"
THREADS = 1
"""On a CPU. More would spend their time waiting for each other: the matrices are small."""


def replay_study(options: StudyOptions, console: Console) -> int:
    """Run the study; write its numbers and pictures to ``options.out`` and print them. The exit status."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cpu: torch sees no accelerator", options.device)
    if options.device == "cpu":
        torch.set_num_threads(THREADS)
    path = _directory(options.out) / RESULTS
    setting = _setting(options)
    scale = options.sizes
    console.print(
        f"scale {options.scale_name} on {setting['hardware']}: {', '.join(scale.families)}; "
        f"engine in bfloat16, trainer in {options.trainer_dtype}"
    )
    from bench.replay_study.study import Study

    with _Bars(console) as bars:
        results = Study(options, setting, path, bars).run()
    console.print(f"{results.seconds:.0f} seconds; numbers: {path}")
    return _show(results, options.out, console)


def show_study(path: Path, out: Path, console: Console) -> int:
    """Print and draw what an earlier run wrote to ``path``."""
    results = Results.read(path)
    setting = results.setting
    console.print(f"{path}: scale {setting['scale']} on {setting['hardware']}, torch {setting['torch']}")
    return _show(results, _directory(out), console)


def _show(results: Results, out: Path, console: Console) -> int:
    print_results(results, console)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no pictures: matplotlib is not installed (pip install 'kvroute\\[plot]')")
        return 0
    from bench.replay_study.plots import plot_mismatch, plot_reinforced

    for draw, picture, found in (
        (plot_mismatch, out / "mismatch.png", bool(results.measured)),
        (plot_reinforced, out / "policy-gradient.png", any(run.steps for run in results.runs)),
    ):
        if found:
            draw(results, picture)
            console.print(f"picture: {picture}")
    return 0


def _setting(options: StudyOptions) -> dict[str, Any]:
    """Where and with which sizes: what a reader of the numbers must know."""
    import transformers

    cuda = options.device == "cuda"
    return {
        "scale": options.scale_name,
        "seed": options.seed,
        "minutes": options.minutes,
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()}), {THREADS} thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "engine_dtype": "bfloat16",
        "trainer_dtype": options.trainer_dtype,
        "engine_experts": _experts(options, "bfloat16"),
        "trainer_experts": _experts(options, options.trainer_dtype),
        "phases": list(options.phases),
        "chance": options.sizes.task.chance,
        "sizes": asdict(options.sizes),
    }


def _experts(options: StudyOptions, dtype: TrainerDtype) -> str:
    return experts_implementation(torch.device(options.device), getattr(torch, dtype))


def _directory(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", "a directory that can be written", f"{path} ({error.strerror})") from error
    return path


class _Bars:
    """A progress bar for each thing that is done; a line each where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", style="dim"),
            console=console,
            disable=not console.is_terminal,
        )

    def begin(self, what: str, total: int) -> None:
        self._task = self._progress.add_task(what, total=total, status="")

    def on(self, status: str) -> None:
        assert self._task is not None, "begin() comes first"
        if status:
            self._progress.update(self._task, status=status)
        self._progress.advance(self._task)

    def end(self) -> None:
        """It is done, however many steps there was time for."""
        assert self._task is not None, "begin() comes first"
        task = self._progress.tasks[self._task]
        self._progress.update(self._task, total=task.completed)
        if not self._console.is_terminal:
            status, steps = task.fields["status"], int(task.completed)
            self._console.print(f"{task.description}: {steps} steps, {task.elapsed or 0:.0f} s {status}".rstrip())
        self._task = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


__all__ = ["RESULTS", "replay_study", "show_study"]

"""Pictures of a study. Needs matplotlib, which is imported where it is used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.replay_study.paper import PAPER
from bench.replay_study.report import LABELS, NAMES
from bench.replay_study.results import Results
from bench.replay_study.statistics import Interval
from bench.replay_study.summary import by_step, families, interval, modes

COLOURS = {"none": "#c44e52", "r2": "#dd8452", "r3": "#4c72b0"}
BAR = 0.27
PANELS = (
    ("reward", "reward of the rollouts"),
    ("loss", "loss"),
    ("clip_fraction", "clip fraction"),
    ("kl", "KL of engine and trainer (k3)"),
)


def plot_mismatch(results: Results, path: Path) -> None:
    """A PNG of the mismatch by family and mode, the paper's figures as dotted lines."""
    from matplotlib.figure import Figure

    shown = families(results)
    figure = Figure(figsize=(max(9.0, 2.4 * len(shown) + 5), 4.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("kl", "beyond_2", "tokens_differing"), strict=True):
        for place, mode in enumerate(COLOURS):
            found = [interval(results, family, "before", mode, name) for family in shown]
            _bars(axes, place, mode, found)
        for mode in COLOURS:
            if (name, mode) in PAPER:
                value, text = PAPER[name, mode]
                axes.axhline(value, color=COLOURS[mode], linestyle=":", linewidth=1)
                axes.annotate(f"paper, {NAMES[mode]}: {text}", (0, value), fontsize=7, va="bottom")
        axes.set_xticks(range(len(shown)), shown, rotation=20)
        axes.set_title(LABELS[name], fontsize=10)
        if name != "kl":
            axes.set_ylim(bottom=0.0)
    _logarithmic(figure.axes[0], [m.figures["kl"] for m in results.measured if m.when == "before"])
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def plot_reinforced(results: Results, path: Path) -> None:
    """A PNG of policy gradient step by step: means over seeds, and each seed's own line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for mode in modes(results):
            runs = [run for run in results.runs if run.mode == mode and run.steps]
            mean = [found.mean for found in by_step(runs, name)]
            axes.plot(range(len(mean)), mean, color=COLOURS[mode], label=f"{NAMES[mode]}, mean of {len(runs)}")
            for run in runs:
                values = [float(getattr(step, name)) for step in run.steps]
                axes.plot(range(len(values)), values, color=COLOURS[mode], alpha=0.3, linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
    _logarithmic(figure.axes[3], [step.kl for run in results.runs for step in run.steps])
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _logarithmic(axes: Any, values: list[float]) -> None:
    """A logarithmic axis, where there is anything to show on one: equal policies have a KL of zero."""
    if any(value > 0 for value in values):
        axes.set_yscale("log")


def _bars(axes: Any, place: int, mode: str, found: list[Interval | None]) -> None:
    at = [n + (place - 1) * BAR for n in range(len(found))]
    means = [each.mean if each else 0.0 for each in found]
    halves = [each.half if each and math.isfinite(each.half) else 0.0 for each in found]
    # On a logarithmic axis a bar cannot go below zero: the lower arm ends at a hundredth of the mean.
    lower = [min(half, 0.99 * mean) for half, mean in zip(halves, means, strict=True)]
    axes.bar(at, means, BAR, yerr=[lower, halves], color=COLOURS[mode], label=NAMES[mode], capsize=2)


__all__ = ["plot_mismatch", "plot_reinforced"]

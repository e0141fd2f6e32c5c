"""The findings as tables for people. Whatever was found is printed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from bench.replay_study.paper import PAPER, REMARKS, SOURCE
from bench.replay_study.results import Results
from bench.replay_study.statistics import Interval
from bench.replay_study.summary import difference, families, interval, modes, over_steps, ratio
from bench.replay_study.trainer import Mode

LABELS = {
    "kl": "KL(engine || trainer)",
    "k3": "the same, k3 estimate",
    "beyond_e2": "tokens with |d| > 2",
    "beyond_2": "tokens with |d| > ln 2",
    "tokens_differing": "tokens with any expert differing",
    "routers_differing": "routers with any expert differing",
}
SHARES = ("beyond_e2", "beyond_2", "tokens_differing", "routers_differing", "reward", "clip_fraction")
NAMES = {"none": "no replay", "r2": "R2", "r3": "R3"}
TITLES = {
    "before": "Mismatch of engine and trainer, weights equal",
    "after": "Mismatch after one batch's updates of the trainer: the update's own effect is in it",
}
ENDS = 4
"""Steps at the beginning and the end of policy gradient that are averaged."""


def print_results(results: Results, console: Console) -> None:
    """All tables, and a sentence for each family."""
    console.print(_learned(results))
    for when in ("before", "after"):
        console.print(_mismatch(results, when))
    for sentence in verdicts(results):
        console.print(sentence)
    if modes(results):
        console.print(_reinforced(results))
        for sentence in differences(results):
            console.print(sentence)
    console.print("d = log p(trainer) - log p(engine) of a sampled token; ± is a 95 % interval", style="dim")
    for remark in (f"{SOURCE}:", *REMARKS):
        console.print(remark, style="dim")
    if not results.complete:
        console.print("[yellow]the study was cut off: this is what it had[/]")


def verdicts(results: Results) -> Iterator[str]:
    """Whether R3 halves the mismatch, a sentence a family."""
    for family in families(results):
        found = ratio(results, family, Mode.R3.value)
        if found is None:
            yield f"{family}: a KL of zero, nothing to compare"
            continue
        words = {True: "at least halved", False: "not halved", None: "these seeds do not decide whether it is halved"}
        bounds = f"{100 * found.low:.0f} to {100 * found.high:.0f}" if found.high < 1e3 else "one seed: no interval"
        yield f"{family}: R3 leaves {100 * found.mean:.0f} % of the KL ({bounds}): {words[found.halved]}"


def differences(results: Results) -> Iterator[str]:
    """How policy gradient differs with replay from without, on the same prompts."""
    for mode in modes(results):
        if mode == Mode.NONE:
            continue
        found = difference(results, mode, "reward", slice(-ENDS, None))
        if found is not None:
            yield f"{NAMES[mode]} less no replay, reward of the last {ENDS} steps: {shown(found, 'reward')}"


def _learned(results: Results) -> Table:
    table = Table(title="Supervised learning")
    for column in ("model", "weights", "parameters", "steps", "loss", "reward before", "after", "by chance"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for each in results.learned:
        table.add_row(
            each.family,
            str(each.seed),
            f"{each.parameters:,}",
            str(each.steps),
            f"{each.loss:.3f}",
            f"{each.reward_before:.3f}",
            f"{each.reward_after:.3f}",
            f"{results.setting['chance']:.3f}",
        )
    return table


def _mismatch(results: Results, when: str) -> Table:
    table = Table(title=TITLES[when])
    table.add_column("model")
    table.add_column("what")
    for mode in Mode:
        table.add_column(NAMES[mode.value], justify="right")
    if when == "before":
        table.add_column("the paper's, none; R3", justify="right", style="dim")
    for family in families(results):
        for number, (figure, label) in enumerate(LABELS.items()):
            cells = [shown(interval(results, family, when, mode.value, figure), figure) for mode in Mode]
            if when == "before":
                cells.append("; ".join(PAPER[key][1] for mode in ("none", "r3") if (key := (figure, mode)) in PAPER))
            table.add_row("" if number else family, label, *cells)
        table.add_section()
    return table


def _reinforced(results: Results) -> Table:
    family = results.runs[0].family
    table = Table(title=f"Policy gradient, {family}: means over seeds")
    table.add_column("what")
    by_mode = {mode: [run for run in results.runs if run.mode == mode and run.steps] for mode in modes(results)}
    for mode, runs in by_mode.items():
        counts = sorted({len(run.steps) for run in runs})
        table.add_column(f"{NAMES[mode]}\n{len(runs)} seeds, {'-'.join(map(str, counts))} steps", justify="right")
    rows = [
        (f"reward, first {ENDS} steps", "reward", slice(None, ENDS)),
        (f"reward, last {ENDS} steps", "reward", slice(-ENDS, None)),
        ("loss", "loss", slice(None)),
        ("clip fraction", "clip_fraction", slice(None)),
        ("KL of engine and trainer, k3", "kl", slice(None)),
        ("KL of old and new policy, k3", "moved", slice(None)),
        ("gradient norm", "gradient_norm", slice(None)),
        ("tokens with any expert differing", "tokens_differing", slice(None)),
        ("seconds a step", "seconds", slice(None)),
    ]
    for label, figure, steps in rows:
        table.add_row(label, *(shown(over_steps(runs, figure, steps), figure) for runs in by_mode.values()))
    return table


def shown(found: Interval | None, figure: str) -> str:
    """A mean with its interval, as a share or as a number."""
    if found is None:
        return "-"
    half = "" if math.isinf(found.half) else found.half
    if figure in SHARES:
        return f"{100 * found.mean:.2f} %" if half == "" else f"{100 * found.mean:.2f} ± {100 * half:.2f} %"
    return f"{found.mean:.2e}" if half == "" else f"{found.mean:.2e} ± {half:.0e}"


__all__ = ["LABELS", "NAMES", "print_results", "shown", "verdicts"]

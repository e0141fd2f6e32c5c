"""The results as tables. Every result is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from bench.harness import Table
from bench.replay_study.results import Interval, Results, difference, figures, over_steps, ratio
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
STEPS = (
    (f"reward, first {ENDS} steps", "reward", slice(None, ENDS)),
    (f"reward, last {ENDS} steps", "reward", slice(-ENDS, None)),
    ("loss", "loss", slice(None)),
    ("clip fraction", "clip_fraction", slice(None)),
    ("KL of engine and trainer, k3", "kl", slice(None)),
    ("KL of old and new policy, k3", "moved", slice(None)),
    ("gradient norm", "gradient_norm", slice(None)),
    ("tokens with any expert differing", "tokens_differing", slice(None)),
    ("seconds a step", "seconds", slice(None)),
)


def print_results(results: Results, say: Callable[[str], object]) -> None:
    """Print all tables, and whether R3 halves the mismatch."""
    columns = ("model", "weights", "parameters", "steps", "loss", "reward before", "after")
    learned = Table("Supervised learning", columns)
    for each in results.learned:
        cells = (str(each.seed), f"{each.parameters:,}", str(each.steps))
        rewards = (f"{number:.3f}" for number in (each.loss, each.reward_before, each.reward_after))
        learned.row(each.family, *cells, *rewards)
    say(learned.text() + "\n")
    say(f"by chance the reward is {results.setting['chance']:.3f}")
    for when in TITLES:
        say(_mismatch(results, when).text() + "\n")
    for sentence in (verdict(results), *_reinforced(results, say)):
        say(sentence)
    say("d = log p(trainer) - log p(engine) of a sampled token; ± is a 95 % interval")
    if not results.complete:
        say("the study was interrupted: these are its results so far")


def verdict(results: Results) -> str:
    """Whether R3 halves the mismatch."""
    found, half = ratio(results, Mode.R3.value), math.log(0.5)
    if found is None:
        return "no KL to compare"
    undecided = found.low <= half < found.high
    words = "these batches do not decide whether it is" if undecided else "at least" if found.high <= half else "not"
    low, mean, high = (100 * math.exp(min(each, 700.0)) for each in (found.low, found.mean, found.high))
    bounds = f"{low:.0f} to {high:.0f}" if math.isfinite(found.half) else "one batch: no interval"
    return f"R3 leaves {mean:.0f} % of the KL ({bounds}): {words} halved"


def _mismatch(results: Results, when: str) -> Table:
    table = Table(TITLES[when], ["what", *(NAMES[mode.value] for mode in Mode)])
    for figure, label in LABELS.items():
        values = [figures(results, when, mode.value, figure) for mode in Mode]
        table.row(label, *(shown(Interval.of(each) if each else None, figure) for each in values))
    return table


def _reinforced(results: Results, say: Callable[[str], object]) -> Iterator[str]:
    """Print the table of policy gradient; yields for each mode a sentence on its difference, on the same prompts."""
    modes = list(dict.fromkeys(run.mode for run in results.runs if run.steps))
    by_mode = {mode: [run for run in results.runs if run.mode == mode and run.steps] for mode in modes}
    heads = []
    for mode, runs in by_mode.items():
        counts = sorted({len(run.steps) for run in runs})
        heads.append(f"{NAMES[mode]}: {len(runs)} seeds, {'-'.join(map(str, counts))} steps")
    table = Table("Policy gradient: means over seeds", ["what", *heads])
    for label, figure, steps in STEPS:
        table.row(label, *(shown(over_steps(runs, figure, steps), figure) for runs in by_mode.values()))
    if modes:
        say(table.text() + "\n")
    for mode in modes:
        found = difference(results, mode, "reward", slice(-ENDS, None)) if mode != Mode.NONE else None
        if found is not None:
            yield f"{NAMES[mode]} less no replay, reward of the last {ENDS} steps: {shown(found, 'reward')}"


def shown(found: Interval | None, figure: str) -> str:
    """A mean with its interval, as a share or as a number."""
    if found is None:
        return "-"
    alone = math.isinf(found.half)
    if figure in SHARES:
        return f"{100 * found.mean:.2f} %" if alone else f"{100 * found.mean:.2f} ± {100 * found.half:.2f} %"
    return f"{found.mean:.2e}" if alone else f"{found.mean:.2e} ± {found.half:.0e}"

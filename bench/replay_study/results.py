"""The results of a study: numbers, means with intervals, and all of it as tables.

They are written after every step, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from bench.harness import Table
from bench.replay_study.trainer import Mode
from cache_manager.errors import InvalidInputError

FORMAT: Final = "kvroute replay-study 1"
STUDENT_T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom (any table of the distribution)."""
NORMAL_975: Final = 1.960


@dataclass(frozen=True, slots=True)
class Learned:
    """Supervised learning of one model: mean rewards of rollouts before and after, and the mean of its last losses."""

    family: str
    seed: int
    parameters: int
    steps: int
    seconds: float
    loss: float
    reward_before: float
    reward_after: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch of rollouts in one mode.

    ``when`` is "before" (trainer and engine have the same weights) or "after" (the trainer has been updated on these
    rollouts, and is compared with the engine that sampled them). ``figures`` are those of
    :func:`~bench.replay_study.trainer.measure`.
    """

    family: str
    seed: int
    draw: int
    when: str
    mode: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of policy gradient: rollouts, then an update.

    ``kl`` is the k3 estimate of the mismatch between engine and trainer before the update, ``moved`` that of the update
    itself, ``clip_fraction`` the share of tokens that the clip left out of it.
    """

    step: int
    reward: float
    loss: float
    clip_fraction: float
    kl: float
    moved: float
    gradient_norm: float
    tokens_differing: float
    seconds: float


@dataclass(slots=True)
class Run:
    """Policy gradient from one start in one mode."""

    family: str
    mode: str
    seed: int
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """Everything of one study. ``setting`` says where and with which sizes it ran; ``complete`` whether it ended."""

    setting: dict[str, Any]
    learned: list[Learned] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    def write(self, path: Path) -> None:
        """Replace ``path`` with these results, atomically."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of :meth:`write`; :class:`InvalidInputError` for anything else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise KeyError("format")
            found["learned"] = [Learned(**each) for each in found["learned"]]
            found["measured"] = [Measured(**each) for each in found["measured"]]
            found["runs"] = [Run(**{**run, "steps": [Step(**s) for s in run["steps"]]}) for run in found["runs"]]
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError("results", f"a file of {FORMAT!r}", f"{path} ({error!r})") from error


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % confidence interval. One value has no interval: ``half`` is infinite."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Student's t interval of the mean of independent ``values``; at least one.

        >>> Interval.of([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.4843...)
        """
        count, mean = len(values), math.fsum(values) / len(values)
        if count == 1:
            return cls(mean, math.inf)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
        quantile = STUDENT_T_975[count - 2] if count - 2 < len(STUDENT_T_975) else NORMAL_975
        return cls(mean, quantile * deviation / math.sqrt(count))

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def figures(results: Results, when: str, mode: str, figure: str) -> list[float]:
    """A figure for each batch of rollouts, in their order."""
    found = [m for m in results.measured if (m.when, m.mode) == (when, mode)]
    return [m.figures[figure] for m in sorted(found, key=lambda m: m.draw)]


def ratio(results: Results, mode: str) -> Interval | None:
    """The logarithm of the KL in ``mode`` over that without replay, batch by batch; ``None`` if all pairs have a zero.

    The mismatch is at least halved if the whole interval is below ``log(0.5)``.
    """
    sides = (figures(results, "before", name, "kl") for name in (mode, "none"))
    logs = [math.log(with_it / without) for with_it, without in zip(*sides, strict=False) if with_it and without]
    return Interval.of(logs) if logs else None


def over_steps(runs: Sequence[Run], figure: str, steps: slice) -> Interval | None:
    """A figure's mean over some of the steps of each run."""
    chosen = [[float(getattr(step, figure)) for step in run.steps[steps]] for run in runs]
    means = [math.fsum(values) / len(values) for values in chosen if values]
    return Interval.of(means) if means else None


def difference(results: Results, mode: str, figure: str, steps: slice) -> Interval | None:
    """A figure of policy gradient in ``mode`` minus that without replay, seed by seed, on the same prompts."""
    found = {(run.mode, run.seed): over_steps([run], figure, steps) for run in results.runs}
    pairs = [(mine, found.get(("none", seed))) for (name, seed), mine in found.items() if name == mode]
    differences = [with_it.mean - without.mean for with_it, without in pairs if with_it and without]
    return Interval.of(differences) if differences else None


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

"""The results of a study: numbers, means with intervals, and all of it as tables.

They are written after every step, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from bench.harness import Table
from bench.replay_study.rows import Labels, Rows
from bench.replay_study.trainer import QUANTILES
from cache_manager.errors import InvalidInputError

FORMAT: Final = "kvroute replay-study 2"
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
    """One batch of rollouts of one model, scored by a trainer that is ``lag`` optimizer steps ahead of the engine.

    ``rows`` is what it replayed, one of :class:`~bench.replay_study.rows.Rows`; ``part`` is "all". In rollouts of two
    versions, the trainer's weights and some that are ``lag`` steps older, ``rows`` is one of
    :class:`~bench.replay_study.rows.Labels`, and ``part`` says which version sampled the tokens: "older" or "newer".
    ``figures`` are those of :func:`~bench.replay_study.trainer.measure`.
    """

    family: str
    seed: int
    lag: int
    rows: str
    part: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of policy gradient: rollouts, then an update.

    ``kl`` is the k3 estimate of the mismatch between engine and trainer before the update, ``beyond_2`` the share of
    tokens whose ratio is outside [1/2, 2] then, ``moved`` the k3 estimate of the policy's distance from the ratio's
    denominator, ``clip_fraction`` the share of tokens that the clip left out of the update.
    """

    step: int
    reward: float
    loss: float
    clip_fraction: float
    kl: float
    beyond_2: float
    moved: float
    gradient_norm: float
    tokens_differing: float
    seconds: float


@dataclass(slots=True)
class Run:
    """Policy gradient from one start with one kind of rows. ``old`` is whose probabilities the ratio divides by:
    "engine", or "trainer", which computes them with the same rows."""

    family: str
    rows: str
    old: str
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


def merged(parts: Sequence[Results]) -> Results:
    """Results of several runs at one scale as one; :class:`InvalidInputError` for another scale, or one model twice."""
    whole = parts[0]
    for part in parts[1:]:
        for field_name in ("scale", "sizes", "hardware"):
            mine, theirs = (_without_amounts(each.setting.get(field_name)) for each in (whole, part))
            if mine != theirs:
                raise InvalidInputError(f"{field_name} of results", f"one: {mine}", theirs)
        held: list[Learned | Measured | Run] = [*whole.learned, *whole.measured, *whole.runs]
        added: list[Measured | Run] = [*part.measured, *part.runs]
        known = {_key(each) for each in held}
        twice = [_key(each) for each in added if _key(each) in known]
        if twice:
            raise InvalidInputError("results", "each model once", twice[0])
        # The same weights may be learnt again for another phase.
        learned = [each for each in part.learned if _key(each) not in known]
        whole = Results(
            whole.setting,
            whole.learned + learned,
            whole.measured + part.measured,
            whole.runs + part.runs,
            whole.seconds + part.seconds,
            whole.complete and part.complete,
        )
    return whole


def _without_amounts(setting: Any) -> Any:
    """A setting without what says how much was run: the numbers of seeds, and of steps of policy gradient."""
    if not isinstance(setting, dict):
        return setting
    return {
        name: _without_amounts(part) for name, part in setting.items() if name not in ("seeds", "reinforcement")
    } | {"reinforcement": {n: p for n, p in setting.get("reinforcement", {}).items() if n != "steps"}}


def _key(each: Learned | Measured | Run) -> tuple[Any, ...]:
    match each:
        case Measured():
            return each.family, each.seed, each.lag, each.rows, each.part
        case Run():
            return each.family, each.seed, each.rows, each.old
        case _:
            return each.family, each.seed


def figures(results: Results, family: str, lag: int, rows: str, part: str, figure: str) -> list[float]:
    """A figure for each seed, in their order."""
    wanted = (family, lag, rows, part)
    found = [m for m in results.measured if (m.family, m.lag, m.rows, m.part) == wanted]
    return [m.figures[figure] for m in sorted(found, key=lambda m: m.seed)]


def ratio(results: Results, family: str, lag: int, rows: str, others: str, figure: str = "kl") -> Interval | None:
    """The logarithm of a figure with ``rows`` over that with ``others``, seed by seed; ``None`` if all pairs have a
    zero."""
    sides = (figures(results, family, lag, each, "all", figure) for each in (rows, others))
    logs = [math.log(one / other) for one, other in zip(*sides, strict=False) if one and other]
    return Interval.of(logs) if logs else None


def over_steps(runs: Sequence[Run], figure: str, steps: slice) -> Interval | None:
    """A figure's mean over some of the steps of each run."""
    chosen = [[float(getattr(step, figure)) for step in run.steps[steps]] for run in runs]
    means = [math.fsum(values) / len(values) for values in chosen if values]
    return Interval.of(means) if means else None


def difference(runs: Sequence[Run], rows: str, others: str, figure: str, steps: slice) -> Interval | None:
    """A figure of policy gradient with ``rows`` minus that with ``others``, seed by seed, on the same prompts; over
    some of the steps that both have."""
    found = {(run.rows, run.seed): run.steps for run in runs}
    differences = list[float]()
    for (name, seed), mine in found.items():
        theirs = found.get((others, seed))
        if name == rows and theirs:
            both = min(len(mine), len(theirs))
            means = [over_steps([Run("", "", "", 0, part[:both])], figure, steps) for part in (mine, theirs)]
            differences += [one.mean - other.mean for one, other in [means] if one and other]
    return Interval.of(differences) if differences else None


LABELS = {
    "kl": "KL(engine || trainer)",
    "k3": "the same, k3 estimate",
    **{f"ratio_{share:g}": f"ratio, quantile {share:g}" for share in QUANTILES},
    "beyond_2": "ratio outside [1/2, 2]",
    "beyond_e2": "ratio outside [e^-2, e^2]",
    "clip_fraction": "clipped",
    "tokens_differing": "tokens with any expert differing",
    "routers_differing": "routers with any expert differing",
}
SHARES = ("beyond_e2", "beyond_2", "tokens_differing", "routers_differing", "reward", "clip_fraction")
NAMES: dict[str, str] = {
    Rows.NONE: "no replay",
    Rows.RIGHT: "right rows",
    Rows.MISSING: "wrong ones missing",
    Rows.EVICTED: "after eviction",
    Rows.PROMPT: "same, prompt only",
    Rows.SHIFTED: "shifted by one",
    Rows.ZEROS: "zeros for missing",
    Labels.BY_VERSION: "rows of its weights",
    Labels.ONE: "one label",
}
ENDS = 4
"""Steps at the beginning and the end of policy gradient that are averaged."""
STEPS = (
    (f"reward, first {ENDS} steps", "reward", slice(None, ENDS)),
    (f"reward, last {ENDS} steps", "reward", slice(-ENDS, None)),
    ("loss", "loss", slice(None)),
    ("clipped", "clip_fraction", slice(None)),
    ("KL of engine and trainer, k3", "kl", slice(None)),
    ("ratio of these outside [1/2, 2]", "beyond_2", slice(None)),
    ("KL of policy and denominator, k3", "moved", slice(None)),
    ("gradient norm", "gradient_norm", slice(None)),
    ("tokens with any expert differing", "tokens_differing", slice(None)),
    ("seconds a step", "seconds", slice(None)),
)


def print_results(results: Results, say: Callable[[str], object]) -> None:
    """Print all tables, and what replay and its mistakes change."""
    columns = ("model", "weights", "parameters", "steps", "loss", "reward before", "after")
    learned = Table("Supervised learning", columns)
    for each in results.learned:
        cells = (str(each.seed), f"{each.parameters:,}", str(each.steps))
        rewards = (f"{number:.3f}" for number in (each.loss, each.reward_before, each.reward_after))
        learned.row(each.family, *cells, *rewards)
    say(learned.text() + "\n")
    say(f"by chance the reward is {results.setting['chance']:.3f}")
    families = list(dict.fromkeys(each.family for each in results.measured))
    for family in families:
        lags = sorted({m.lag for m in results.measured if (m.family, m.part) == (family, "all")})
        for lag in lags:
            say(_mismatch(results, family, lag).text() + "\n")
            for sentence in _compared(results, family, lag):
                say(sentence)
            say("")
        say(_versions(results, family).text() + "\n")
    keys = list(dict.fromkeys((run.family, run.old) for run in results.runs if run.steps))
    for family, old in keys:
        for text in _reinforced([r for r in results.runs if (r.family, r.old) == (family, old) and r.steps]):
            say(text)
    say("ratio = p(trainer) / p(engine) of a sampled token; ± is a 95 % interval over weights (seeds)")
    if not results.complete:
        say("the study was interrupted: these are its results so far")


def _mismatch(results: Results, family: str, lag: int) -> Table:
    ahead = "the same weights" if lag == 0 else f"the trainer {lag} optimizer steps ahead"
    table = Table(f"Mismatch, {family}, {ahead}", ["what", *(NAMES[rows] for rows in Rows)])
    for figure, label in LABELS.items():
        values = [figures(results, family, lag, rows.value, "all", figure) for rows in Rows]
        table.row(label, *(shown(Interval.of(each) if each else None, figure) for each in values))
    return table


def _compared(results: Results, family: str, lag: int) -> Iterator[str]:
    """How many times the KL of right rows each has, seed by seed."""
    for rows in Rows:
        found = ratio(results, family, lag, rows.value, Rows.RIGHT.value)
        if found is not None and rows is not Rows.RIGHT:
            yield f"{NAMES[rows]}: {times(found)} the KL with right rows"


def times(found: Interval) -> str:
    """A ratio and its interval, of their logarithms.

    >>> times(Interval(math.log(2), math.log(2)))
    '2 times (1 to 4)'
    """
    low, mean, high = (math.exp(min(each, 700.0)) for each in (found.low, found.mean, found.high))
    bounds = f"{low:.3g} to {high:.3g}" if math.isfinite(found.half) else "one seed: no interval"
    return f"{mean:.3g} times ({bounds})"


def _versions(results: Results, family: str) -> Table:
    found = [m for m in results.measured if m.family == family and m.part != "all"]
    lag = max((m.lag for m in found), default=0)
    parts = [(part, labels) for part in ("older", "newer") for labels in Labels]
    heads = [f"{part}: {NAMES[labels]}" for part, labels in parts]
    title = f"Answers of two versions, {family}: the second half sampled with the trainer's weights, {lag} steps newer"
    table = Table(title, ["what", *heads])
    for figure, label in LABELS.items():
        values = [figures(results, family, lag, labels.value, part, figure) for part, labels in parts]
        table.row(label, *(shown(Interval.of(each) if each else None, figure) for each in values))
    return table


def _reinforced(runs: Sequence[Run]) -> Iterator[str]:
    """The table of policy gradient of one family, and each kind of rows' differences from right ones."""
    kinds = list(dict.fromkeys(run.rows for run in runs))
    # What one run had no time for is left out of all.
    common = min(len(run.steps) for run in runs)
    runs = [replace(run, steps=run.steps[:common]) for run in runs]
    by_rows = {rows: [run for run in runs if run.rows == rows] for rows in kinds}
    heads = [f"{NAMES[rows]}: {len(of_rows)} seeds, {common} steps" for rows, of_rows in by_rows.items()]
    title = f"Policy gradient, {runs[0].family}, ratio to the {runs[0].old}'s probabilities: means over seeds"
    table = Table(title, ["what", *heads])
    for label, figure, steps in STEPS:
        table.row(label, *(shown(over_steps(of_rows, figure, steps), figure) for of_rows in by_rows.values()))
    yield table.text() + "\n"
    for rows in kinds:
        found = difference(runs, rows, Rows.RIGHT.value, "reward", slice(-ENDS, None))
        if found is not None and rows != Rows.RIGHT:
            yield f"{NAMES[rows]} less right rows, reward of the last {ENDS} steps: {shown(found, 'reward')}"
    yield ""


def shown(found: Interval | None, figure: str) -> str:
    """A mean with its interval, as a share or as a number."""
    if found is None:
        return "-"
    alone = math.isinf(found.half)
    if figure in SHARES:
        return f"{100 * found.mean:.2f} %" if alone else f"{100 * found.mean:.2f} ± {100 * found.half:.2f} %"
    if figure.startswith("ratio"):
        return f"{found.mean:.3g}" if alone else f"{found.mean:.3g} ± {found.half:.1g}"
    return f"{found.mean:.2e}" if alone else f"{found.mean:.2e} ± {found.half:.0e}"

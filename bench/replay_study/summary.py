"""What the numbers of a study come to: means with intervals, and whether replay halves the mismatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.replay_study.results import Measured, Results, Run, Step
from bench.replay_study.statistics import Interval


def interval(results: Results, family: str, when: str, mode: str, figure: str) -> Interval | None:
    """A figure's mean over independent batches; ``None`` when nothing was measured."""
    values = [value for _, value in _by_origin(results, family, when, mode, figure)]
    return Interval.of(values) if values else None


def _by_origin(results: Results, family: str, when: str, mode: str, figure: str) -> list[tuple[tuple[int, int], float]]:
    """One value for each origin of chance: for each model, or for each batch where there is but one model."""
    found = [m for m in results.measured if (m.family, m.when, m.mode) == (family, when, mode)]
    one_model = len({m.seed for m in found}) == 1
    groups: dict[tuple[int, int], list[Measured]] = {}
    for each in found:
        groups.setdefault((each.seed, each.draw if one_model else 0), []).append(each)
    return [
        (origin, math.fsum(m.figures[figure] for m in group) / len(group)) for origin, group in sorted(groups.items())
    ]


@dataclass(frozen=True, slots=True)
class Ratio:
    """What share of the KL without replay is left with it: a geometric mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def halved(self) -> bool | None:
        """Whether the mismatch is at least halved; ``None`` when the interval has a half in it."""
        return None if self.low <= 0.5 < self.high else self.high <= 0.5


def ratio(results: Results, family: str, mode: str) -> Ratio | None:
    """The KL in ``mode`` over that without replay, batch by batch; ``None`` when one of them is zero or missing."""
    pairs = zip(
        _by_origin(results, family, "before", mode, "kl"),
        _by_origin(results, family, "before", "none", "kl"),
        strict=False,
    )
    logs = [math.log(with_it / without) for (_, with_it), (_, without) in pairs if with_it > 0 and without > 0]
    if not logs:
        return None
    found = Interval.of(logs)
    return Ratio(math.exp(found.mean), math.exp(found.low), math.exp(min(found.high, 700.0)))


def by_step(runs: Sequence[Run], figure: str) -> list[Interval]:
    """A figure of policy gradient step by step, over the runs that have got as far as the shortest."""
    steps = min((len(run.steps) for run in runs), default=0)
    return [Interval.of([float(getattr(run.steps[n], figure)) for run in runs]) for n in range(steps)]


def over_steps(runs: Sequence[Run], figure: str, steps: slice) -> Interval | None:
    """A figure's mean over some of the steps of each run."""
    chosen: list[list[Step]] = [run.steps[steps] for run in runs if run.steps[steps]]
    if not chosen:
        return None
    return Interval.of([math.fsum(float(getattr(s, figure)) for s in part) / len(part) for part in chosen])


def difference(results: Results, mode: str, figure: str, steps: slice) -> Interval | None:
    """A figure of policy gradient in ``mode`` less that without replay, seed by seed: both had the same prompts."""
    found = {(run.mode, run.seed): over_steps([run], figure, steps) for run in results.runs}
    pairs = [
        (with_it, without)
        for (name, seed), with_it in found.items()
        if name == mode and with_it and (without := found.get(("none", seed)))
    ]
    return Interval.of([with_it.mean - without.mean for with_it, without in pairs]) if pairs else None


def families(results: Results) -> list[str]:
    """Those with anything measured, in the order of the study."""
    return list(dict.fromkeys(m.family for m in results.measured))


def modes(results: Results) -> list[str]:
    """Those of the policy-gradient runs that have a step, in the order of the study."""
    return list(dict.fromkeys(run.mode for run in results.runs if run.steps))


__all__ = ["Ratio", "by_step", "difference", "families", "interval", "modes", "over_steps", "ratio"]

"""Counts and times from an engine's processes, for an exporter. Pure, except for the clock."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from kvroute.connector.limits import LIMITS, Limits

logger = logging.getLogger(__name__)

EVENTS: Final = "kvroute:events_total"
WITHOUT_ROWS: Final = "kvroute:tokens_without_rows_total"
FIELDLESS: Final = "kvroute:answers_without_field_total"
SECONDS: Final = "kvroute:seconds"
METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    EVENTS: (
        "What kvroute has counted, by tier: blocks, store, transfer, rollouts, answers or ranks.",
        ("tier", "event"),
    ),
    WITHOUT_ROWS: ("Tokens whose rows are missing, by cause.", ("cause",)),
    FIELDLESS: ("Answers that have no routed_experts because a row is missing, by cause.", ("cause",)),
    SECONDS: ("Seconds of a persist, a restore, a transfer, and of an answer's wait for its rows.", ("what",)),
}
"""By name of each metric: its help text, and its labels beside the engine's own."""
WHAT: Final = ("persist", "restore", "transfer", "answer")
BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

PAGE: Final = "docs/missing-rows.md#causes"
"""What an operator finds there: each cause, and what helps."""
NO_IDS: Final = "ids that no router can choose, or KV that could not be loaded"

Taken = dict[str, dict[str, Any]]
"""By metric: the growth of counters, by labels joined with ``/``; lists of times, by ``what``."""


class Meter:
    """``look()`` returns the present counters of each tier, a number or a dataclass of numbers by name.

    Any thread may count; one at a time takes.
    """

    def __init__(
        self,
        look: Callable[[], Mapping[str, Any]],
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self.missing = Counter[str]()
        """Tokens without rows since the start, by cause."""
        self._look = look
        self._missing_before = Counter[str]()
        self._fieldless = Counter[str]()
        self._counting = threading.Lock()  # guards the two: several threads miss tokens, another one takes
        self._before: dict[str, int] = {}
        self._times: deque[tuple[str, float]] = deque(maxlen=limits.times_max)
        self._next_s = 0.0

    def took(self, kind: str, seconds: float) -> None:
        self._times.append((kind, seconds))

    def miss(self, reason: str, tokens: int) -> None:
        """Count ``tokens`` without rows by the cause in ``reason``, which ends at a colon; log the first of each."""
        if not tokens:
            return
        cause = reason.partition(":")[0]  # behind it there may be an address, which a client has sent
        with self._counting:
            if cause not in self.missing and len(self.missing) >= self._limits.causes_max:
                cause = "other"
            first = cause not in self.missing
            self.missing[cause] += tokens
        if first:
            logger.warning("%d tokens have no rows: %s; further ones are counted; see %s", tokens, reason, PAGE)

    def lose_field(self, reason: str) -> None:
        """Count an answer without its field, by the cause in ``reason``."""
        cause = reason.partition(":")[0].partition(";")[0]
        with self._counting:
            known = cause in self._fieldless or len(self._fieldless) < self._limits.causes_max
            self._fieldless[cause if known else "other"] += 1

    def take(self) -> Taken | None:
        """What has happened since the last call; ``None`` if that was less than ``metrics_s`` ago, or nothing has."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + self._limits.metrics_s
        counted = dict(_flat(self._look()))
        grown = dict[str, int]()
        for name, n in counted.items():
            growth = n - self._before.get(name, 0)
            if growth > 0:
                grown[name] = growth
        times: dict[str, list[float]] = {}
        while self._times:
            kind, seconds = self._times.popleft()
            times.setdefault(kind, []).append(seconds)
        with self._counting:
            missing = self.missing - self._missing_before
            self._missing_before = self.missing.copy()
            fieldless = self._fieldless
            self._fieldless = Counter[str]()
        self._before = counted
        taken: Taken = {EVENTS: grown, WITHOUT_ROWS: dict(missing), FIELDLESS: dict(fieldless), SECONDS: times}
        return taken if any(taken.values()) else None


class Exported:
    """:data:`METRICS` among an engine's own, made of its two ``kinds``, a counter and a histogram of Prometheus.

    ``labels`` are the names of the engine's labels, which stand before kvroute's.
    """

    def __init__(
        self,
        kinds: tuple[Callable[..., Any], Callable[..., Any]],
        labels: Sequence[str],
    ) -> None:
        counter, histogram = kinds
        self._metrics: dict[str, Any] = {}
        for name, (text, own) in METRICS.items():
            described = {"name": name, "documentation": text, "labelnames": [*labels, *own]}
            self._metrics[name] = histogram(**described, buckets=BUCKETS_S) if name == SECONDS else counter(**described)

    def observe(self, taken: Taken, values: Sequence[Any]) -> None:
        """Add what a meter has taken; ``values`` are those of the engine's labels."""
        for name, growth in taken.items():
            for label, amounts in growth.items():
                _, own_labels = METRICS[name]
                own_values = label.split("/", len(own_labels) - 1)
                metric = self._metrics[name].labels(*values, *own_values)
                if name != SECONDS:
                    metric.inc(amounts)
                    continue
                for seconds in amounts:
                    metric.observe(seconds)


def merged(first: Taken, second: Taken) -> Taken:
    """The sum of two takes, of two times or processes."""
    total = {name: dict(counts) for name, counts in first.items()}
    for name, counts in second.items():
        sums = total.setdefault(name, {})
        for label, more in counts.items():
            sums[label] = sums[label] + more if label in sums else more
    return total


def _flat(counters: Any, *names: str) -> list[tuple[str, int]]:
    """The whole numbers in ``counters``, by tier and name, without numbers of the moment (``in_flight``)."""
    if is_dataclass(counters) and not isinstance(counters, type):
        counters = asdict(counters)
    if isinstance(counters, Mapping):
        return [count for key, value in counters.items() for count in _flat(value, *names, key)]
    tier, *path = names
    if not isinstance(counters, int) or path[-1].endswith("in_flight"):
        return []
    return [(f"{tier}/{'.'.join(path)}", counters)]


__all__ = [
    "BUCKETS_S",
    "EVENTS",
    "FIELDLESS",
    "METRICS",
    "NO_IDS",
    "SECONDS",
    "WHAT",
    "WITHOUT_ROWS",
    "Exported",
    "Meter",
    "Taken",
    "merged",
]

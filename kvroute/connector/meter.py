"""Counts and times from an engine's processes, for an exporter. Pure, except for the clock."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

logger = logging.getLogger(__name__)

EVENTS: Final = "kvroute:events_total"
MISSING: Final = "kvroute:tokens_without_rows_total"
FIELDLESS: Final = "kvroute:answers_without_field_total"
SECONDS: Final = "kvroute:seconds"
METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    EVENTS: ("What kvroute has counted, by tier: blocks, store or transfer.", ("tier", "event")),
    MISSING: ("Tokens whose rows are missing, by cause.", ("cause",)),
    FIELDLESS: ("Answers that have no routed_experts because a row is missing, by cause.", ("cause",)),
    SECONDS: ("Seconds of a persist, a restore, a transfer, and of an answer's wait for its rows.", ("what",)),
}
"""By name of each metric: its help text, and its labels beside the engine's own."""
WHAT: Final = ("persist", "restore", "transfer", "answer")
BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

PAGE: Final = "docs/missing-rows.md#causes"
"""What an operator finds there: each cause, and what helps."""
NO_IDS: Final = "ids that no router can choose, or KV that could not be loaded"

EVERY_S: Final = 1.0
"""Shortest time between two readings of the counters: there are a hundred."""
CAUSES_MAX: Final = 32
"""Causes that have a label of their own; later ones are ``other``."""
TIMES_MAX: Final = 4096
"""Most times that wait to be taken; older ones are dropped."""

Taken = dict[str, dict[str, Any]]
"""By metric: the growth of counters, by labels joined with ``/``; lists of times, by ``what``."""


class Meter:
    """``look()`` returns the present counters of each tier, a number or a dataclass of numbers by name.

    Any thread may count; one at a time takes.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self.missing = Counter[str]()
        """Tokens without rows since the start, by cause."""
        self._look, self._missing_before = look, Counter[str]()
        self._fieldless = Counter[str]()
        self._counting = threading.Lock()  # guards the two: several threads miss tokens, another one takes
        self._before: dict[str, int] = {}
        self._times: deque[tuple[str, float]] = deque(maxlen=TIMES_MAX)
        self._next_s = 0.0

    def took(self, what: str, seconds: float) -> None:
        self._times.append((what, seconds))

    def miss(self, reason: str, tokens: int) -> None:
        """Count ``tokens`` without rows by the cause in ``reason``, which ends at a colon; log the first of each."""
        if not tokens:
            return
        cause = reason.partition(":")[0]  # behind it there may be an address, which a client has sent
        with self._counting:
            if cause not in self.missing and len(self.missing) >= CAUSES_MAX:
                cause = "other"
            first = cause not in self.missing
            self.missing[cause] += tokens
        if first:
            logger.warning("%d tokens have no rows: %s; further ones are counted; see %s", tokens, reason, PAGE)

    def lose_field(self, reason: str) -> None:
        """Count an answer without its field, by the cause in ``reason``."""
        cause = reason.partition(":")[0].partition(";")[0]
        with self._counting:
            known = cause in self._fieldless or len(self._fieldless) < CAUSES_MAX
            self._fieldless[cause if known else "other"] += 1

    def take(self) -> Taken | None:
        """What has happened since the last call; ``None`` if that was less than ``EVERY_S`` ago, or nothing has."""
        if (now_s := time.monotonic()) < self._next_s:
            return None
        self._next_s = now_s + EVERY_S
        counted = dict(_flat(self._look()))
        grown = {name: n - self._before.get(name, 0) for name, n in counted.items() if n > self._before.get(name, 0)}
        times: dict[str, list[float]] = {}
        while self._times:
            what, seconds = self._times.popleft()
            times.setdefault(what, []).append(seconds)
        with self._counting:
            missing, self._missing_before = self.missing - self._missing_before, self.missing.copy()
            fieldless, self._fieldless = self._fieldless, Counter[str]()
        self._before = counted
        taken: Taken = {EVENTS: grown, MISSING: dict(missing), FIELDLESS: dict(fieldless), SECONDS: times}
        return taken if any(taken.values()) else None


def merged(first: Taken, second: Taken) -> Taken:
    """The sum of two takes, of two times or processes."""
    found = {name: dict(each) for name, each in first.items()}
    for name, each in second.items():
        of = found.setdefault(name, {})
        for label, more in each.items():
            of[label] = of[label] + more if label in of else more
    return found


def _flat(of: Any, *names: str) -> list[tuple[str, int]]:
    """The whole numbers in ``of``, by tier and name, without numbers of the moment (``in_flight``)."""
    if is_dataclass(of) and not isinstance(of, type):
        of = asdict(of)
    if isinstance(of, Mapping):
        return [each for key, value in of.items() for each in _flat(value, *names, key)]
    tier, *rest = names
    return [(f"{tier}/{'.'.join(rest)}", of)] if isinstance(of, int) and not rest[-1].endswith("in_flight") else []


__all__ = [
    "BUCKETS_S",
    "EVENTS",
    "FIELDLESS",
    "METRICS",
    "MISSING",
    "NO_IDS",
    "SECONDS",
    "WHAT",
    "Meter",
    "Taken",
    "merged",
]

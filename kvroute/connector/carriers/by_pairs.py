"""Rows by pairs: an engine that keeps KV on its host says which block it copies to which place there, and back.

Places are blocks of the table behind the engine's own, so that a row has one law wherever it lies: a place begins a
life when KV is copied to it, and what has become of its rows since then does not arrive. Nothing is proved by the KV,
because rows go where the engine's own messages say that the KV goes, in the engine's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_manager.errors import ConfigError
from kvroute.connector.carriers.port import (
    NO_PAIRS,
    Admission,
    Carrier,
    Moves,
    Pairs,
    SchedulerParts,
    SchedulerSide,
    WorkerParts,
    WorkerSide,
)
from kvroute.witness import Run


@dataclass(frozen=True, slots=True)
class ByPairs(Carrier):
    """Rows go along with copies to ``places`` blocks on the host."""

    places: int

    def scheduler(self, parts: SchedulerParts) -> SchedulerSide:
        return _Scheduler(parts)

    def worker(self, parts: WorkerParts) -> WorkerSide:
        return _Worker(self.places)


class _Scheduler(SchedulerSide):
    def __init__(self, parts: SchedulerParts) -> None:
        self._feed = parts.feed
        self._places = parts.places
        self._size = parts.spec.block_tokens
        self._due = NO_PAIRS  # what the engine copies to its host before its next step
        self._hits: dict[str, int] = {}  # tokens of requests that were admitted since the last step, whose KV is there

    def attach(self, greeting: Any) -> None:
        """A stage with fewer layers than the first one has more places, as its KV is smaller; they stay empty."""
        if greeting < len(self._places):
            wanted = f"{len(self._places)} at least, as the scheduler has"
            raise ConfigError("places on the host", wanted, f"{greeting} in a worker")

    def admitted(self, admission: Admission) -> Run | None:
        if admission.external:
            self._hits[admission.request.request_id] = admission.first * self._size + admission.external
        return None

    def leave(self, moves: Moves) -> None:
        self._keep(self._due)
        self._keep(moves.kept)
        self._due = moves.kept_later

    def _keep(self, pairs: Pairs) -> None:
        if len(pairs):
            places = pairs[:, 1] + self._places.start
            self._feed.renew(places)
            self._feed.copy(np.stack([pairs[:, 0], places], axis=1))

    def enter(self, moves: Moves) -> None:
        """Behind a hit's last token a block on the host may have rows of the tokens that another request had there."""
        for load in moves.loads:
            if not len(load.pairs):
                continue
            starts = (load.first + np.arange(len(load.pairs))) * self._size
            rows = np.clip(self._hits.get(load.request_id, 0) - starts, 0, self._size)
            places = load.pairs[:, 1] + self._places.start
            self._feed.copy(np.stack([places, load.pairs[:, 0]], axis=1), rows.tolist())
        self._hits.clear()


class _Worker(WorkerSide):
    def __init__(self, places: int) -> None:
        self._places = places

    @property
    def greeting(self) -> int:
        """How many places the worker has."""
        return self._places


__all__ = ["ByPairs"]

"""The routes of a request that has ended, cut from the rows of its computations. Pure: the rows have been read.

A journal (:mod:`kvroute.journal`) decides which computation's row a client gets: a token keeps the row that it was
sampled with. If that is missing, it gets the row that was computed again, if all rows of both times are of the same
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.computations import Computation, labels_of, same_weights_from
from kvroute.connector.end import End
from kvroute.connector.left import settled
from kvroute.journal import RequestJournal
from kvroute.routes import Layout, Routes, RoutingWeights, spans
from kvroute.routes.routes import checked_routes

Unproved = list[list[int]]
"""Positions ``[start, stop)`` at which the last router's choice is not proved."""


class CutRows(NamedTuple):
    """What a request's computations make."""

    routes: Routes
    unproved: Unproved
    weights: RoutingWeights | None = None  # beside the ids of the routes, where they were read


@dataclass(frozen=True, slots=True)
class Cutting:
    """How rows of ``spec`` become routes; ``flagged`` is the operator's choice for the last router's unproved ids."""

    spec: AuxBlockDataSpec
    flagged: bool
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout.of(self.spec))

    def routes(self, end: End) -> CutRows:
        """The routes of the request, and where they are unproved. The arrays of its rows are taken over."""
        assert end.last is not None, "begun"
        if not end.kept:
            routes, unseen = self._routes_of(end.last)
            read = end.last.read_weights
            if read is None:
                return CutRows(routes, unseen)
            return CutRows(routes, unseen, RoutingWeights(routes, read.values))
        assert end.request_tokens is not None, "an end with kept rows has tokens"
        journal = RequestJournal(self.spec)
        longest = max(computation.stop for computation in end.computations)
        unproved = np.zeros(longest, np.bool_)
        weights: NDArray[np.float32] | None = None
        if end.last.read_weights is not None:
            weights = np.full((longest, *self.spec.row_shape), np.nan, np.float32)
        for count, computation in enumerate(end.computations):
            routes, unseen = self._routes_of(computation)
            same_from = same_weights_from(end.kept[:count], computation)
            positions = journal.record(routes, same_from=same_from)
            flags = spans.flags(unseen, longest)
            unproved[positions] = flags[positions]
            read = computation.read_weights
            if weights is not None and read is not None:
                weights[positions] = read.values[positions - computation.start]
            sampled = end.request_tokens.ids[: computation.stop + 1]
            journal.settle(sampled)
        stop = min(longest, journal.stop)
        start = min(end.start, stop)
        runs = spans.runs(unproved[start:stop])
        unseen = [[start + first, start + last] for first, last in runs]
        routes = journal.routes(start, stop)
        if weights is None:
            return CutRows(routes, unseen)
        return CutRows(routes, unseen, RoutingWeights(routes, weights[start:stop]))

    def _routes_of(self, computation: Computation) -> tuple[Routes, Unproved]:
        """The routes of one computation, and where they are unproved."""
        rows = computation.rows
        assert rows is not None, "read"
        start = computation.start
        labels = labels_of(computation)
        routes = checked_routes(self.layout, rows.values, rows.valid, start, labels)
        if computation.by_kv is None:
            return routes, []
        return settled(routes, computation.by_kv[start:], flagged=self.flagged)


__all__ = ["Cutting", "Unproved"]

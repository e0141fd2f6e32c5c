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
            return CutRows(routes, unseen, None if read is None else RoutingWeights(routes, read.values))
        assert end.request_tokens is not None, "an end with kept rows has tokens"
        journal = RequestJournal(self.spec)
        unproved = np.zeros(max(computation.stop for computation in end.computations), np.bool_)
        weights: NDArray[np.float32] | None = None
        if end.last.read_weights is not None:
            weights = np.full((len(unproved), *self.spec.row_shape), np.nan, np.float32)
        for count, computation in enumerate(end.computations):
            routes, unseen = self._routes_of(computation)
            positions = journal.record(routes, same_from=same_weights_from(end.kept[:count], computation))
            unproved[positions] = spans.flags(unseen, len(unproved))[positions]
            if weights is not None and computation.read_weights is not None:
                weights[positions] = computation.read_weights.values[positions - computation.start]
            journal.settle(end.request_tokens.ids[: computation.stop + 1])
        stop = min(len(unproved), journal.stop)
        start = min(end.start, stop)
        unseen = [[start + first, start + last] for first, last in spans.runs(unproved[start:stop])]
        routes = journal.routes(start, stop)
        return CutRows(routes, unseen, None if weights is None else RoutingWeights(routes, weights[start:stop]))

    def _routes_of(self, computation: Computation) -> tuple[Routes, Unproved]:
        """The routes of one computation, and where they are unproved."""
        rows = computation.rows
        assert rows is not None, "read"
        routes = checked_routes(self.layout, rows.values, rows.valid, computation.start, labels_of(computation))
        if computation.by_kv is None:
            return routes, []
        return settled(routes, computation.by_kv[computation.start :], flagged=self.flagged)


__all__ = ["Cutting", "Unproved"]

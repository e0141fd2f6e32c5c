"""What a request has computed when it loses its blocks, by a preemption or at its end, and how that is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.settings import VERSION
from kvroute.connector.stages import RowsView
from kvroute.routes import spans
from kvroute.routes.spans import WeightsSpan
from kvroute.routing import ROUTING_WEIGHTS


@dataclass(slots=True, eq=False)
class Computation:
    """The rows of the positions ``[start, stop)`` that a request has when it loses its blocks.

    ``blocks [n]`` have them from position 0 on, in these ``lives [n]``, or spare ones that have taken their place.
    """

    blocks: NDArray[np.int64]
    lives: NDArray[np.int64]
    start: int
    stop: int
    steps: list[tuple[int, int]]  # the worker's that write rows: number, and the first position that each may write
    weights: int  # a number that changes when the weights may have changed
    version: int | None  # of the weights, if all rows have the same
    mixed: bool  # if not, the rows have labels
    by_kv: NDArray[np.bool_] | None = None  # [stop], rows matched by KV, which cannot prove the last router's choice
    rows: Rows | None = None
    versions: Rows | int | None = None
    read_stop: int = 0  # the positions before it have been read, of blocks that were given out before all was written
    read: Rows | None = None
    read_labels: Rows | None = None
    read_weights: Rows | None = None  # routing weights of the same positions, where these are wanted
    block_ids: frozenset[int] = frozenset()  # the blocks that are still to be read
    spares: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.read_stop = self.start
        self.block_ids = frozenset(self.blocks.tolist())


def unsure_from(computation: Computation, through: float) -> int:
    """The first position whose row a worker that is ``through`` with this step may still write."""
    return min((start for number, start in computation.steps if number > through), default=computation.stop)


def appended(before: Rows | None, more: Rows) -> Rows:
    if before is None:
        return more
    return Rows(np.concatenate([before.values, more.values]), np.concatenate([before.valid, more.valid]))


def read_whole(
    view: RowsView,
    spec: AuxBlockDataSpec,
    computations: Sequence[Computation],
    *,
    weights: bool = False,
) -> None:
    """Read what is still to be read of these computations: one read of many takes little longer than a read of one."""
    read_until(view, spec, [(computation, computation.stop) for computation in computations], weights=weights)
    for computation in computations:
        computation.rows = computation.read
        computation.versions = computation.read_labels if computation.mixed else computation.version


def read_until(
    view: RowsView,
    spec: AuxBlockDataSpec,
    stops: Sequence[tuple[Computation, int]],
    *,
    weights: bool = False,
) -> None:
    """Read what is still to be read of each computation before that position; with their ``weights``, a row that lacks
    one of both is missing."""
    size = spec.block_tokens
    mixed = [(computation, stop) for computation, stop in stops if computation.mixed]
    labels = rows_until(view, mixed, VERSION, size)
    rows = rows_until(view, stops, spec.name, size)
    if weights:
        for (computation, _), ids, more in zip(
            stops, rows, rows_until(view, stops, ROUTING_WEIGHTS, size), strict=True
        ):
            ids.valid[~more.valid] = False
            computation.read_weights = appended(computation.read_weights, more)
    for (computation, _), more in zip(mixed, labels, strict=True):
        computation.read_labels = appended(computation.read_labels, more)
    for (computation, stop), more in zip(stops, rows, strict=True):
        computation.read = appended(computation.read, more)
        computation.read_stop = stop


def rows_until(
    view: RowsView,
    stops: Sequence[tuple[Computation, int]],
    name: str,
    size: int,
) -> list[Rows]:
    """The rows of the spec ``name`` that :func:`read_until` reads, of each computation; blocks have ``size`` tokens."""
    if not stops:
        return []
    parts = [slice(computation.read_stop // size, -(-stop // size)) for computation, stop in stops]
    blocks = np.concatenate([computation.blocks[part] for (computation, _), part in zip(stops, parts, strict=True)])
    lives = np.concatenate([computation.lives[part] for (computation, _), part in zip(stops, parts, strict=True)])
    rows = view.read(name, blocks, generations=lives)
    rows_of = list[Rows]()
    first = 0
    for (computation, stop), part in zip(stops, parts, strict=True):
        before = first - part.start * size
        own = slice(before + computation.read_stop, before + stop)
        rows_of.append(Rows(rows.values[own], rows.valid[own]))
        first += (part.stop - part.start) * size
    return rows_of


def same_weights_from(earlier: Sequence[Computation], computation: Computation) -> int:
    """The first position whose token was sampled with the weights of this computation, or with none before it."""
    stops = (before.stop for before in earlier if before.weights != computation.weights or before.mixed)
    return max(stops, default=0)


def labels_of(computation: Computation) -> Sequence[WeightsSpan]:
    """The versions of a computation's rows; a missing row has none."""
    rows = computation.rows
    versions = computation.versions
    assert rows is not None, "read"
    if isinstance(versions, Rows):
        positions = np.where(versions.valid, versions.values.astype(np.int64), spans.UNKNOWN)
        return spans.from_positions(positions, computation.start)
    if versions is None:
        return ()
    first = computation.start
    return [(first + start, first + stop, versions) for start, stop in spans.runs(rows.valid)]


__all__ = [
    "Computation",
    "appended",
    "labels_of",
    "read_until",
    "read_whole",
    "rows_until",
    "same_weights_from",
    "unsure_from",
]

"""What a request has computed when it loses its blocks, by a preemption or at its end, and what is read of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.publish import Rows
from kvroute.routes import spans
from kvroute.routes.spans import WeightsSpan


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


__all__ = ["Computation", "appended", "labels_of", "same_weights_from", "unsure_from"]

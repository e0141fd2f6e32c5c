"""What goes from the thread that schedules to the thread that sends: which rows the outputs of a step get.

Nearly all outputs are :class:`Steady`: their rows follow on those of their last outputs. They have no object each:
there may be 256 of them every 6 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_manager.publish import Rows
from kvroute.connector.tickets import MissingSpan


@dataclass(slots=True, eq=False)
class Batch:
    """Rows of a step's outputs, one after the other: ``slots [n]`` in the lives ``[n]`` of their blocks."""

    number: int  # of the worker's last step that writes one of them
    slots: NDArray[np.int64]
    lives: NDArray[np.int64]
    blocks: frozenset[int]
    doubted: NDArray[np.bool_] | None = None  # [n], the last router's choice is not proved: counts as missing
    rows: Rows | None = None  # when they have been read,
    whole: bool = False  # and whether none of them is missing
    spares: list[int] = field(default_factory=list)
    handed: bool = False  # the steps were under way when their request was preempted, and an output has a piece of them


@dataclass(slots=True)
class Piece:
    """The part of a batch that belongs to one output, from ``first_row`` on: rows of positions ``[start, stop)``."""

    name: str
    start: int
    stop: int
    batch: Batch | None = None  # none: there are no rows to read, for the reason in ``lost``
    first_row: int = 0
    last: bool = False  # the request has ended
    lost: str = ""
    why: Mapping[int, str] = field(default_factory=dict)  # reasons for rows that did not come, by block


@dataclass(slots=True)
class Steady:
    """The outputs of a step whose rows follow on those of their last outputs: all of ``batch``, one after the other."""

    names: list[str]
    stops: list[int]  # behind the last position of each,
    counts: list[int]  # and how many positions it has
    batch: Batch

    def pieces(self) -> list[Piece]:
        places = accumulate(self.counts, initial=0)
        outputs = zip(self.names, self.stops, self.counts, places, strict=False)
        return [Piece(name, stop - n, stop, self.batch, place) for name, stop, n, place in outputs]


class StepRows(NamedTuple):
    """The rows of a step's outputs: of each output alone, and of the steady ones."""

    pieces: list[Piece]
    steady: Steady | None
    taken_s: float  # on the monotonic clock

    def batches(self) -> list[Batch]:
        """Those of all outputs."""
        batches = {piece.batch: None for piece in self.pieces if piece.batch is not None}
        if self.steady is not None:
            batches[self.steady.batch] = None
        return list(batches)


@dataclass(slots=True)
class Outcome:
    """What an output gets: ``rows [stop - start, layers, top_k]``, or the gaps for which the request gets none."""

    piece: Piece
    rows: NDArray[np.generic] | None
    gaps: Sequence[MissingSpan] = ()


__all__ = ["Batch", "Outcome", "Piece", "Steady", "StepRows"]

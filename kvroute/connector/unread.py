"""Rows of requests that have lost their blocks, until they are read: in their blocks, or in spare ones.

The law. Rows stay readable until their block is given out again. If a computation's rows have not been read by then,
they are read at that moment; if the worker has not written all of them yet, it copies their blocks to spare ones. What
a computation's ``rows`` name has been read, and stays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from cache_manager.errors import RowError
from cache_manager.publish import Rows
from kvroute.connector.computations import Computation, read_until, read_whole, unsure_from
from kvroute.connector.engine import Engine
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.stages import RowsView


class Seen(NamedTuple):
    """What has been read of a computation: ``rows`` and ``labels`` of the positions before ``stop``."""

    rows: Rows | None
    labels: Rows | None
    stop: int
    whole: bool  # all of it


class RowsToRead(Protocol):
    """What a process that stores rollouts needs of rows that this one may not have read: see :class:`UnreadRows`."""

    def source(self) -> tuple[list[tuple[str, list[int]]], bytes]: ...
    def seen(self, groups: Sequence[Sequence[Computation]]) -> Sequence[Sequence[Seen] | RowError]: ...
    def read(self, computations: Iterable[Computation]) -> None: ...


class UnreadRows:
    """The computations whose rows are still to be read. Any thread may call it; ``spares`` are the scheduler's."""

    def __init__(self, engine: Engine, spares: SpareBlocks) -> None:
        self._engine = engine
        self._weights = engine.settings.routing_weights
        self._spares = spares
        self._lock = threading.Lock()
        self._view: RowsView | None = None
        self._late = False
        self._unread: dict[Computation, None] = {}
        self.news = 0
        """How many computations have been read, or are of no use any more."""

    def __len__(self) -> int:
        return len(self._unread)

    def attach(self, view: RowsView, *, late: bool) -> None:
        """See :class:`~kvroute.connector.stages.RowsReader`."""
        with self._lock:
            self._view = view
            self._late = late

    def keep(self, computation: Computation) -> None:
        """Its request has lost its blocks, or is about to."""
        with self._lock:
            self._unread[computation] = None

    def drop(self, computations: Iterable[Computation]) -> None:
        """Nobody reads these any more."""
        with self._lock:
            for computation in computations:
                self._over(computation)

    def given(self, blocks: Sequence[int], step: int) -> None:
        """These blocks begin new lives. The worker learns of that, and of the copies, with this ``step``."""
        if not self._unread:
            return
        new = set(blocks)
        with self._lock:
            for computation in list(self._unread):
                is_hit = not new.isdisjoint(computation.block_ids)
                if not is_hit and not computation.spares:
                    continue
                through = self._through()
                if written(computation, through):
                    self._read(
                        [computation]
                    )  # also what was kept for a request that goes on: its spares are for others
                elif is_hit:
                    self._read_sure(computation, through)
                    self._take_over(computation, blocks, step)

    def forgotten(self) -> None:
        """All rows are about to be forgotten: read those that are written; the others become missing."""
        with self._lock:
            for computation in list(self._unread):
                unsure = unsure_from(computation, self._through())
                self._read([computation])
                for rows in (computation.rows, computation.versions):
                    if isinstance(rows, Rows):
                        rows.valid[max(0, unsure - computation.start) :] = False
                        rows.values[~rows.valid] = np.array(-1).astype(rows.values.dtype)  # the form of a missing row

    def read(self, computations: Iterable[Computation]) -> None:
        """Read the rows of these, as far as the worker has written them; what had been read before stays as it is."""
        with self._lock:
            through = self._through()
            unread = [computation for computation in computations if computation.rows is None]
            self._read([computation for computation in unread if written(computation, through)])

    def read_or_raise(self, computations: Iterable[Computation]) -> None:
        """:meth:`read`; :class:`RowError` if the worker has not written all of them."""
        for computation in computations:
            self.read([computation])
            if computation.rows is None:
                raise self._behind()

    def seen(self, groups: Sequence[Sequence[Computation]]) -> list[list[Seen] | RowError]:
        """What has been read of each computation of each group; :class:`RowError` for a group of which the worker has
        not written all rows.

        What has not been read lies in blocks now, in their lives.
        """
        with self._lock:
            through = self._through()
            return [self._seen(computations, through) for computations in groups]

    def source(self) -> tuple[list[tuple[str, list[int]]], bytes]:
        """The regions that rows are in, ``(name, layer_ids)`` each, and the namespace that they are read in."""
        assert self._view is not None, "the handshake comes before the first request"
        return self._view.regions, self._view.namespace

    def _behind(self) -> RowError:
        wanted = f"written by the worker within {self._engine.limits.answer_s} s"
        return RowError("rows", wanted, "a worker that is behind")

    @contextmanager
    def still(self) -> Iterator[float]:
        """The last step that the worker has finished; for the ``with`` block no block is given out.

        A computation that is :func:`written` there stays so: when its blocks are given out, its rows are read.
        """
        with self._lock:
            yield self._through()

    # ---------------------------------------------------------------- held: _lock

    def _through(self) -> float:
        """The last step that the worker has finished."""
        assert self._view is not None, "the handshake comes before the first request"
        return self._view.generation(self._engine.clock) if self._late else float("inf")

    def _seen(
        self,
        computations: Sequence[Computation],
        through: float,
    ) -> list[Seen] | RowError:
        seen = list[Seen]()
        for computation in computations:
            if computation.rows is not None:
                labels = computation.versions if isinstance(computation.versions, Rows) else None
                seen.append(Seen(computation.rows, labels, computation.stop, True))
            elif written(computation, through):
                seen.append(Seen(computation.read, computation.read_labels, computation.read_stop, False))
            else:
                return self._behind()
        return seen

    def _read_sure(self, computation: Computation, through: float) -> None:
        """Read the rows of whole blocks that no step writes any more."""
        size = self._engine.tokens
        stop = min(unsure_from(computation, through), computation.stop) // size * size
        if stop > computation.read_stop:
            assert self._view is not None, "through() has asked it"
            read_until(self._view, self._engine.spec, [(computation, stop)], weights=self._weights)

    def _take_over(
        self,
        computation: Computation,
        blocks: Sequence[int],
        step: int,
    ) -> None:
        """Spare blocks for what is still to be read of these ``blocks``, as far as there are any."""
        size = self._engine.tokens
        first = computation.read_stop // size
        places = (first + np.flatnonzero(np.isin(computation.blocks[first:], blocks))).tolist()
        spares = self._spares.take_over([int(computation.blocks[place]) for place in places])
        for place in places:
            spare = spares.get(int(computation.blocks[place]))
            if spare is None:
                continue  # its rows are missing
            computation.blocks[place], computation.lives[place] = spare
            computation.spares.append(spare[0])
        computation.block_ids = frozenset(computation.blocks[first:].tolist())
        if spares:
            computation.steps.append((step, places[0] * size))

    def _read(self, computations: Sequence[Computation]) -> None:
        assert self._view is not None, "the handshake comes before the first request"
        read_whole(self._view, self._engine.spec, computations, weights=self._weights)
        for computation in computations:
            self._over(computation)

    def _over(self, computation: Computation) -> None:
        """Nothing is read of its blocks any more."""
        self.news += 1
        self._unread.pop(computation, None)
        self._spares.free(computation.spares)
        computation.spares = []


def written(computation: Computation, through: float) -> bool:
    """Whether a worker that is ``through`` with this step has written all rows."""
    for number, _ in computation.steps:  # noqa: SIM110 - a generator costs as much again, of hundreds of requests
        if number > through:
            return False
    return True


__all__ = ["Seen", "UnreadRows", "written"]

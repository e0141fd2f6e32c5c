"""The ends of requests, on threads of their own: rows are read, bound to their tokens and left for clients.

The law. However a request ends, it leaves one :class:`End`. That has a :class:`Computation` for each time that the
request has lost its blocks: by preemptions, and at its end. A journal (:mod:`kvroute.journal`) decides which of their
rows a client gets: a token keeps the row that it was sampled with. If that is missing, it gets the row that was
computed again, if all rows of both times are of the same weights. A request that is aborted before it has been
computed again leaves the rows of the tokens that it has.

The scheduling thread says which blocks a request had, and goes on: it waits neither for the worker nor for a store.
Rows stay readable until their block is given out again. If a request's rows have not been read by then, they are read
at that moment; if the worker has not written all of them yet, it copies their blocks to spare ones.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from cache_manager.errors import KVRouteError, RowError
from cache_manager.feed import BlockFeed
from cache_manager.publish import Rows
from kvroute.connector.answers import ERROR, FIELD
from kvroute.connector.computations import Computation, appended, labels_of, same_weights_from, unsure_from
from kvroute.connector.engine import Engine
from kvroute.connector.key import Key
from kvroute.connector.left import LeftRoutes, Tokens, settled
from kvroute.connector.settings import VERSION
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.stages import RowsView
from kvroute.connector.tickets import gaps_of
from kvroute.journal import RequestJournal
from kvroute.routes import Layout, Routes, spans

logger = logging.getLogger(__name__)

ClientData = dict[str, Any]
"""A client's data beside its answer."""


class PendingAnswer(Future[ClientData]):
    """The future of a client's data. All answers told together have a ``value`` before the first of them is done."""

    value: ClientData | None = None

    def tell(self) -> None:
        if self.set_running_or_notify_cancel():  # else whoever waited has cancelled it
            self.set_result(self.value)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class End:
    """What a request leaves: its computations, what is known when it is forgotten, and what its client waits for."""

    kept: list[Computation] = field(default_factory=list)  # with which tokens were sampled before preemptions, in order
    # With SchedulerRows.forget:
    rows_stop: int = sys.maxsize  # no later positions have rows: those behind KV that has not come are never compared
    steps: Sequence[tuple[int, int]] = ()  # that computed or joined it: number, and the first position each may write
    why: Mapping[int, str] = field(default_factory=dict)  # by block whose rows another engine lent and did not all come
    # With SchedulerRows.finished:
    key: Key = field(default_factory=lambda: Key(""))
    last: Computation | None = None
    request_tokens: Tokens | None = None
    start: int = 0  # the first position whose row its client wants
    answer: PendingAnswer = field(default_factory=PendingAnswer)
    give_up_s: float = 0.0
    failure: str = ""  # why it is left before its rows are known to be written

    @property
    def computations(self) -> list[Computation]:
        """All of them, in order."""
        return self.kept if self.last is None else [*self.kept, self.last]


class Ends:
    """Leaves the rows of ended requests in ``left``, which it owns; ``feed`` and ``spares`` are the scheduler's.

    The scheduling thread calls it; all methods but :meth:`close` return at once.
    """

    def __init__(self, engine: Engine, left: LeftRoutes, feed: BlockFeed, spares: SpareBlocks) -> None:
        self._engine = engine
        self._left = left
        self._feed = feed
        self._limits = engine.limits
        self._view: RowsView | None = None
        self._late = False
        self._closed = False
        self._layout = Layout.of(engine.spec)
        self._lock = threading.Condition(threading.Lock())
        self._unread: dict[Computation, None] = {}
        self._news = False  # for the thread: something was read, or has ended
        self._over_for_all = False  # the thread has ended: nobody is told anything by it any more
        self._waiting: dict[End, None] = {}  # for the thread
        self._pending: dict[End, None] = {}  # begun, and not yet told
        self._spares = spares
        self._thread = threading.Thread(target=self._run, name="kvroute-ends", daemon=True)
        self._thread.start()

    def attach(self, view: RowsView, *, late: bool) -> None:
        """Rows are in ``view`` from here on; if ``late``, the worker may write them when their request is done."""
        with self._lock:
            self._view = view
            self._late = late

    def begins(self, key: Key) -> None:
        """A request of this key is under way."""
        self._left.begins(key)

    def keep(self, end: End, computation: Computation) -> None:
        """The request loses its blocks, and is computed again."""
        end.kept.append(computation)
        with self._lock:
            self._unread[computation] = None

    def begin(self, end: End, last: Computation) -> PendingAnswer:
        """The request is done: the future of its client's data, done when its rows have been left or cannot be."""
        end.give_up_s = time.monotonic() + self._limits.answer_s
        with self._lock:
            alive = not self._over_for_all
            room = len(self._pending) < self._limits.ends_max
            if alive and room:
                end.last = last
                self._pending[end] = None
                if not self._waiting:  # else the thread is at work, or looks again in a moment
                    self._lock.notify()
                self._unread[last] = self._waiting[end] = None
                self._news = True
        if not alive:
            return self.refused(end, RowError("rows", "a thread of kvroute that leaves them", "none: it has ended"))
        if not room:
            wanted = f"{self._limits.ends_max} at most, for the rollout store to take"
            return self.refused(end, RowError("requests that are done", wanted, "more"))
        return end.answer

    def drop(self, end: End) -> None:
        """Nobody will ask for its rows."""
        with self._lock:
            for computation in end.computations:
                self._over(computation)

    def unanswered(self, end: End) -> None:
        """The request is done, and its client is told nothing."""
        self.drop(end)
        self._left.unanswered(end.key)

    def refused(self, end: End, error: RowError) -> PendingAnswer:
        """The request is done, and its client is told why it has no routes."""
        self.drop(end)
        end.answer.value = self._left.fail(end.key, error)
        end.answer.tell()
        return end.answer

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
                if self._written(computation, through):
                    self._read(
                        [computation]
                    )  # also what was kept for a request that goes on: its spares are for others
                elif is_hit:
                    self._read_sure(computation, through)
                    self._take_over(computation, blocks, step)

    def _read_sure(self, computation: Computation, through: float) -> None:
        """Read the rows of whole blocks that no step writes any more."""
        size = self._engine.tokens
        stop = min(unsure_from(computation, through), computation.stop) // size * size
        if stop > computation.read_stop:
            self._read_until([(computation, stop)])

    def _take_over(self, computation: Computation, blocks: Sequence[int], step: int) -> None:
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

    def close(self) -> None:
        """Leave the remaining rows, and close the store."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(2 * self._limits.answer_s)
        self._left.close()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while ends := self._ready_or_failed():
                self._read_together(computation for end in ends for computation in end.computations)
                for end in ends:
                    end.answer.value = self._leave(end)
                for end in ends:
                    end.answer.tell()
                del end, ends  # an idle thread keeps no end alive
        finally:  # whatever ends the thread: those who wait for it are told
            self._end_all()

    def _ready_or_failed(self) -> list[End]:
        """:meth:`_ready`; if that raises, all ends that wait: their clients are told why they have no routes."""
        try:
            return self._ready()
        except Exception as error:
            logger.exception("rows of requests cannot be read")
            with self._lock:
                ends = list(self._waiting)
                self._waiting = {}
            for end in ends:
                end.failure = repr(error)
            return ends

    def _end_all(self) -> None:
        with self._lock:
            self._over_for_all = True
            ends = list(self._pending)
            self._waiting = {}
            self._pending = {}
        for end in ends:
            why = {str(end.key.choice): "rows: the thread that leaves them has ended"}
            end.answer.value = end.answer.value or {FIELD: {ERROR: why}}
            if not end.answer.done():
                end.answer.tell()

    def _ready(self) -> list[End]:
        """Ends whose rows are written, or that have waited long enough; waits until there are some. None: closed.

        A request's last step is done on the device, because its sampled token is here, unless the request was aborted:
        then the worker may still run it. A row that is already there proves nothing: it may be a rejected draft's, not
        yet replaced.
        """
        before: float | None = None
        with self._lock:
            while self._waiting or not self._closed:
                if not self._waiting:
                    self._lock.wait()
                    continue
                through = self._through()
                now_s = time.monotonic()
                # hundreds that wait for one step are not looked at one by one until something has happened
                if self._news or through != before or next(iter(self._waiting)).give_up_s < now_s:
                    self._news = False
                    before = through
                    whole = (end for end in self._waiting if end.give_up_s < now_s or self._whole(end, through))
                    ends = list(islice(whole, self._limits.burst_max))
                    for end in ends:
                        del self._waiting[end]
                    if ends:
                        return ends
                self._lock.wait(self._limits.end_poll_s)
        return []

    def _read_together(self, computations: Iterable[Computation]) -> None:
        """Read the rows that are written: one read of many computations takes little longer than a read of one."""
        with self._lock:
            try:
                through = self._through()
                unread = [computation for computation in computations if computation.rows is None]
                self._read([computation for computation in unread if self._written(computation, through)])
            except Exception:  # each is read by itself, and its client told why that fails
                logger.exception("the rows of requests cannot be read together")

    def _leave(self, end: End) -> ClientData:
        """Leave the routes if possible; the client's data. Raises nothing, because an answer waits."""
        why = {str(end.key.choice): "rows: they could not be left, nor could the reason be told"}
        data: ClientData = {FIELD: {ERROR: why}}
        try:
            data = self._client_data(end)
        except Exception:
            logger.exception("rows of request %s are lost", end.key.text)
        self.drop(end)
        with self._lock:
            del self._pending[end]
        return data

    def _client_data(self, end: End) -> ClientData:
        why: KVRouteError
        try:
            if end.failure:
                raise RowError("rows", "those that the worker has written", end.failure)
            routes, unseen = self._routes(end)
            gaps = gaps_of(routes.missing, end.why, self._engine.tokens) if end.why else []
            return self._left.leave(end.key, routes, end.request_tokens, unseen, gaps)
        except KVRouteError as error:
            why = error
        except Exception as error:
            logger.exception("rows of request %s are lost", end.key.text)
            why = RowError("rows", "left for the client", repr(error))
        self._left.void(end.key, end.request_tokens, self._layout)
        return self._left.fail(end.key, why)

    def _routes(self, end: End) -> tuple[Routes, list[list[int]]]:
        """The routes of the request, and the positions at which the last router's choice is not proved."""
        assert end.last is not None, "begun"
        if not end.kept:
            return self._routes_of(end.last)
        assert end.request_tokens is not None, "an end with kept rows has tokens"
        journal = RequestJournal(self._engine.spec)
        unproved = np.zeros(max(computation.stop for computation in end.computations), np.bool_)
        for count, computation in enumerate(end.computations):
            routes, unseen = self._routes_of(computation)
            positions = journal.record(routes, same_from=same_weights_from(end.kept[:count], computation))
            unproved[positions] = spans.flags(unseen, len(unproved))[positions]
            journal.settle(end.request_tokens.ids[: computation.stop + 1])
        stop = min(len(unproved), journal.stop)
        start = min(end.start, stop)
        unseen = [[start + first, start + last] for first, last in spans.runs(unproved[start:stop])]
        return journal.routes(start, stop), unseen

    def _routes_of(self, computation: Computation) -> tuple[Routes, list[list[int]]]:
        """The routes of one computation, and the positions at which the last router's choice is not proved."""
        rows = self._rows(computation)
        routes = Routes.checked(self._layout, rows.values, rows.valid, computation.start, labels_of(computation))
        if computation.by_kv is None:
            return routes, []
        return settled(routes, computation.by_kv[computation.start :], flagged=self._engine.carrier.flagged)

    def _rows(self, computation: Computation) -> Rows:
        with self._lock:
            if computation.rows is None:
                if not self._written(computation, self._through()):
                    wanted = f"written by the worker within {self._limits.answer_s} s"
                    raise RowError("rows", wanted, "a worker that is behind")
                self._read([computation])
            assert computation.rows is not None, "read"
            return computation.rows

    # ---------------------------------------------------------------- held: _lock

    def _whole(self, end: End, through: float) -> bool:
        unread = [computation for computation in end.computations if computation.rows is None]
        return all(self._written(computation, through) for computation in unread)

    def _written(self, computation: Computation, through: float) -> bool:
        """Whether a worker that is ``through`` with this step has written all rows."""
        return through >= max((number for number, _ in computation.steps), default=0)

    def _through(self) -> float:
        """The last step that the worker has finished."""
        assert self._view is not None, "the handshake comes before the first request"
        return self._view.generation(self._engine.clock) if self._late else float("inf")

    def _read(self, computations: Sequence[Computation]) -> None:
        self._read_until([(computation, computation.stop) for computation in computations])
        for computation in computations:
            computation.rows = computation.read
            computation.versions = computation.read_labels if computation.mixed else computation.version
            self._over(computation)

    def _read_until(self, stops: Sequence[tuple[Computation, int]]) -> None:
        """Read what is still to be read of each computation before that position."""
        mixed = [(computation, stop) for computation, stop in stops if computation.mixed]
        labels = self._rows_until(mixed, VERSION)
        rows = self._rows_until(stops, self._engine.spec.name)
        for (computation, _), more in zip(mixed, labels, strict=True):
            computation.read_labels = appended(computation.read_labels, more)
        for (computation, stop), more in zip(stops, rows, strict=True):
            computation.read = appended(computation.read, more)
            computation.read_stop = stop

    def _rows_until(self, stops: Sequence[tuple[Computation, int]], name: str) -> list[Rows]:
        if not stops:
            return []
        assert self._view is not None
        size = self._engine.tokens
        parts = [slice(computation.read_stop // size, -(-stop // size)) for computation, stop in stops]
        blocks = np.concatenate([computation.blocks[part] for (computation, _), part in zip(stops, parts, strict=True)])
        lives = np.concatenate([computation.lives[part] for (computation, _), part in zip(stops, parts, strict=True)])
        rows = self._view.read(name, blocks, generations=lives)
        rows_of = list[Rows]()
        first = 0
        for (computation, stop), part in zip(stops, parts, strict=True):
            before = first - part.start * size
            own = slice(before + computation.read_stop, before + stop)
            rows_of.append(Rows(rows.values[own], rows.valid[own]))
            first += (part.stop - part.start) * size
        return rows_of

    def _over(self, computation: Computation) -> None:
        """Nothing is read of its blocks any more."""
        self._news = True
        self._unread.pop(computation, None)
        self._spares.free(computation.spares)
        computation.spares = []


__all__ = ["End", "Ends", "PendingAnswer"]

"""The ends of requests, on threads of their own: rows are read, bound to their tokens and left for clients.

The scheduling thread says which blocks a request had, and goes on: it waits neither for the worker nor for a store.
Rows stay readable until their block is given out again. If a request's rows have not been read by then, they are read
at that moment; if the worker has not written all of them yet, it copies their blocks to spare ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvroute
from cache_manager.errors import KVRouteError, RowError
from cache_manager.feed import BlockFeed
from cache_manager.publish import Rows
from kvroute.connector.answers import ERROR, FIELD
from kvroute.connector.engine import Engine
from kvroute.connector.key import Key
from kvroute.connector.left import LeftRoutes, Tokens, settled
from kvroute.connector.settings import VERSION
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.tickets import gaps_of
from kvroute.routes import Layout, Routes
from kvroute.routes.spans import UNKNOWN, WeightsSpan, from_positions, runs

logger = logging.getLogger(__name__)

Told = dict[str, Any]
"""A client's data beside its answer."""


class Answer(Future[Told]):
    """The future of a client's data. All answers told together have a ``value`` before the first of them is done."""

    value: Told | None = None

    def tell(self) -> None:
        if self.set_running_or_notify_cancel():  # else whoever waited has cancelled it
            self.set_result(self.value)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class End:
    """A request that is done. Its rows are those of the positions ``[start, stop)``, in ``blocks`` from position 0."""

    key: Key
    blocks: NDArray[np.int64]
    lives: NDArray[np.int64]
    start: int
    stop: int
    steps: list[tuple[int, int]]  # the worker's that write rows: number, and the first position that each may write
    weights: int  # a number that changes when the weights may have changed
    version: int | None  # of the weights, if all rows have the same
    mixed: bool  # if not, the rows have labels
    of: Tokens | None = None
    kept: Sequence[End] = ()  # rows that tokens were sampled with before preemptions, in order
    by_kv: NDArray[np.bool_] | None = None  # [stop], rows matched by KV, which cannot prove the last router's choice
    why: Mapping[int, str] = field(default_factory=dict)  # of blocks whose rows did not all come
    told: Answer = field(default_factory=Answer)
    give_up_s: float = 0.0
    rows: Rows | None = None
    versions: Rows | int | None = None
    held: frozenset[int] = frozenset()  # the same blocks
    spares: list[int] = field(default_factory=list)
    failure: str = ""  # why it is ended before its rows are known to be written

    def __post_init__(self) -> None:
        self.held = frozenset(self.blocks.tolist())


class Ends:
    """Leaves the rows of finished requests in ``left``, which it owns; ``feed`` and ``spares`` are the scheduler's.

    The scheduling thread calls it; all methods but :meth:`close` return at once.
    """

    def __init__(self, engine: Engine, left: LeftRoutes, feed: BlockFeed, spares: SpareBlocks) -> None:
        self._engine, self._left, self._feed = engine, left, feed
        self._limits = engine.limits
        self._view: kvroute.RegionView | None = None
        self._late = False
        self._closed = False
        self._layout = Layout.of(engine.spec)
        self._lock = threading.Condition(threading.Lock())
        self._unread: dict[End, None] = {}
        self._news = False  # for the thread: something was read, or has ended
        self._over_for_all = False  # the thread has ended: nobody is told anything by it any more
        self._waiting: dict[End, None] = {}  # for the thread
        self._pending: dict[End, None] = {}  # begun, and not yet told
        self._spares = spares
        self._thread = threading.Thread(target=self._run, name="kvroute-ends", daemon=True)
        self._thread.start()

    def attach(self, view: kvroute.RegionView, *, late: bool) -> None:
        """Rows are in ``view`` from here on; if ``late``, the worker may write them when their request is done."""
        with self._lock:
            self._view, self._late = view, late

    def begins(self, key: Key) -> None:
        """A request of this key is under way."""
        self._left.begins(key)

    def begin(self, end: End) -> Answer:
        """The request is done: the future of its client's data, done when its rows have been left or cannot be."""
        end.give_up_s = time.monotonic() + self._limits.answer_s
        with self._lock:
            alive, room = not self._over_for_all, len(self._pending) < self._limits.ends_max
            if alive and room:
                self._pending[end] = None
                if not self._waiting:  # else the thread is at work, or looks again in a moment
                    self._lock.notify()
                self._unread[end] = self._waiting[end] = None
                self._news = True
        if not alive:
            error = RowError("rows", "a thread of kvroute that leaves them", "none: it has ended")
            return self.refused(end.key, error, end.kept)
        if not room:
            wanted = f"{self._limits.ends_max} at most, for the rollout store to take"
            error = RowError("requests that are done", wanted, "more")
            return self.refused(end.key, error, end.kept)
        return end.told

    def keep(self, end: End) -> None:
        """The request will be computed again, and the end given to :meth:`begin` names this one in ``kept``."""
        with self._lock:
            self._unread[end] = None

    def drop(self, kept: Iterable[End]) -> None:
        """Nobody will ask for what was kept."""
        with self._lock:
            for each in kept:
                self._over(each)

    def unanswered(self, kept: Iterable[End], key: Key) -> None:
        """The request is done, and its client is told nothing."""
        self.drop(kept)
        self._left.unanswered(key)

    def refused(self, key: Key, error: RowError, kept: Sequence[End]) -> Answer:
        """The request is done, and its client is told why it has no routes."""
        self.drop(kept)
        told = Answer()
        told.value = self._left.fail(key, error)
        told.tell()
        return told

    def given(self, blocks: Sequence[int], step: int) -> None:
        """These blocks begin new lives. The worker learns of that, and of the copies, with this ``step``."""
        if not self._unread:
            return
        new = set(blocks)
        with self._lock:
            for end in list(self._unread):
                if new.isdisjoint(end.held):
                    continue
                if self._written(end, self._through()):
                    self._read([end])
                    continue
                hit = np.flatnonzero(np.isin(end.blocks, blocks)).tolist()
                taken = self._spares.take_over([int(end.blocks[at]) for at in hit])  # the others' rows are missing
                for at in hit:
                    if (spare := taken.get(int(end.blocks[at]))) is not None:
                        end.blocks[at], end.lives[at] = spare
                        end.spares.append(spare[0])
                if taken:
                    end.held = frozenset(end.blocks.tolist())
                    end.steps.append((step, 0))

    def forgotten(self) -> None:
        """All rows are about to be forgotten: read those that are written; the others become missing."""
        with self._lock:
            for end in list(self._unread):
                through = self._through()
                self._read([end])
                unsure = min((start for number, start in end.steps if number > through), default=end.stop)
                for rows in (end.rows, end.versions):
                    if isinstance(rows, Rows):
                        rows.valid[max(0, unsure - end.start) :] = False
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
                self._read_together(each for end in ends for each in (end, *end.kept))
                for end in ends:
                    end.told.value = self._leave(end)
                for end in ends:
                    end.told.tell()
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
                ends, self._waiting = list(self._waiting), {}
            for end in ends:
                end.failure = repr(error)
            return ends

    def _end_all(self) -> None:
        with self._lock:
            self._over_for_all = True
            ends = list(self._pending)
            self._waiting, self._pending = {}, {}
        for end in ends:
            why = {str(end.key.choice): "rows: the thread that leaves them has ended"}
            end.told.value = end.told.value or {FIELD: {ERROR: why}}
            if not end.told.done():
                end.told.tell()

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
                through, now_s = self._through(), time.monotonic()
                # hundreds that wait for one step are not looked at one by one until something has happened
                if self._news or through != before or next(iter(self._waiting)).give_up_s < now_s:
                    self._news, before = False, through
                    whole = (end for end in self._waiting if end.give_up_s < now_s or self._whole(end, through))
                    if found := list(islice(whole, self._limits.burst_max)):
                        for end in found:
                            del self._waiting[end]
                        return found
                self._lock.wait(self._limits.end_poll_s)
        return []

    def _read_together(self, ends: Iterable[End]) -> None:
        """Read the rows that are written: one read of many ends takes little longer than a read of one."""
        with self._lock:
            try:
                through = self._through()
                self._read([each for each in ends if each.rows is None and self._written(each, through)])
            except Exception:  # each is read by itself, and its client told why that fails
                logger.exception("the rows of requests cannot be read together")

    def _leave(self, end: End) -> Told:
        """Leave the routes if possible; the client's data. Raises nothing, because an answer waits."""
        why = {str(end.key.choice): "rows: they could not be left, nor could the reason be told"}
        told: Told = {FIELD: {ERROR: why}}
        try:
            told = self._client_data(end)
        except Exception:
            logger.exception("rows of request %s are lost", end.key.text)
        self.drop((end, *end.kept))
        with self._lock:
            del self._pending[end]
        return told

    def _client_data(self, end: End) -> Told:
        why: KVRouteError
        try:
            if end.failure:
                raise RowError("rows", "those that the worker has written", end.failure)
            routes, unseen = self._routes(end)
            gaps = gaps_of(routes.missing, end.why, self._engine.tokens) if end.why else []
            return self._left.leave(end.key, routes, end.of, unseen, gaps)
        except KVRouteError as error:
            why = error
        except Exception as error:
            logger.exception("rows of request %s are lost", end.key.text)
            why = RowError("rows", "left for the client", repr(error))
        self._left.void(end.key, end.of, self._layout)
        return self._left.fail(end.key, why)

    def _routes(self, end: End) -> tuple[Routes, list[list[int]]]:
        """The routes of the request, and the positions at which the last router's choice is not proved.

        A position that a token was sampled with before a preemption keeps its row of that time; if that is missing, it
        gets the row that was computed again, if all rows of both times are of the same weights.
        """
        rows, unseen = self._rows(end), list[list[int]]()
        found = Routes.checked(self._layout, rows.values, rows.valid, end.start, _labels(end))
        if end.by_kv is not None:
            found, unseen = settled(found, end.by_kv[end.start :], flagged=self._engine.carrier.flagged)
        for kept in reversed(end.kept):
            assert end.of is not None, "an end with kept rows has tokens"
            if kept.stop <= found.start:
                continue
            before, trusted = self._routes(kept)
            before = before.slice(found.start, min(kept.stop, found.stop))
            again = list(before.missing) if kept.weights == end.weights and not kept.mixed else []
            parts = [(start, stop) for start, stop in [*again, (before.stop, found.stop)] if start < stop]
            unseen = _within(trusted, [(before.start, before.stop)]) + _within(unseen, parts)
            found = before.merge(*(found.slice(*part) for part in parts), tokens=end.of.ids)
        return found, unseen

    def _rows(self, end: End) -> Rows:
        with self._lock:
            if end.rows is None:
                if not self._written(end, self._through()):
                    wanted = f"written by the worker within {self._limits.answer_s} s"
                    raise RowError("rows", wanted, "a worker that is behind")
                self._read([end])
            assert end.rows is not None, "read"
            return end.rows

    # ---------------------------------------------------------------- held: _lock

    def _whole(self, end: End, through: float) -> bool:
        return all(each.rows is not None or self._written(each, through) for each in (end, *end.kept))

    def _written(self, end: End, through: float) -> bool:
        """Whether a worker that is ``through`` with this step has written all rows of the end."""
        return through >= max((number for number, _ in end.steps), default=0)

    def _through(self) -> float:
        """The last step that the worker has finished."""
        assert self._view is not None, "the handshake comes before the first request"
        return self._view.generation(self._engine.clock) if self._late else float("inf")

    def _read(self, ends: Sequence[End]) -> None:
        found = self._rows_of(ends, self._engine.spec.name)
        mixed = [end for end in ends if end.mixed]
        labels = dict(zip(mixed, self._rows_of(mixed, VERSION), strict=True))
        for end, rows in zip(ends, found, strict=True):
            end.rows, end.versions = rows, labels.get(end, end.version)
            self._over(end)

    def _rows_of(self, ends: Sequence[End], name: str) -> list[Rows]:
        if not ends:
            return []
        assert self._view is not None
        size, found, at = self._engine.tokens, list[Rows](), 0
        held = [slice(end.start // size, -(-end.stop // size)) for end in ends]
        blocks, lives = (
            np.concatenate([each[part] for each, part in zip(of, held, strict=True)])
            for of in ([end.blocks for end in ends], [end.lives for end in ends])
        )
        rows = self._view.read(name, blocks, generations=lives)
        for end, part in zip(ends, held, strict=True):
            mine = slice(at + end.start - part.start * size, at + end.stop - part.start * size)
            found.append(Rows(rows.values[mine], rows.valid[mine]))
            at += (part.stop - part.start) * size
        return found

    def _over(self, end: End) -> None:
        """Nothing is read of its blocks any more."""
        self._news = True
        self._unread.pop(end, None)
        self._spares.free(end.spares)
        end.spares = []


def _labels(end: End) -> Sequence[WeightsSpan]:
    """The versions of the end's rows; a missing row has none."""
    assert end.rows is not None, "read"
    told, there = end.versions, end.rows.valid
    if isinstance(told, Rows):
        return from_positions(np.where(told.valid, told.values.astype(np.int64), UNKNOWN), end.start)
    if told is None:
        return ()
    return [(end.start + first, end.start + stop, told) for first, stop in runs(there)]


def _within(spans: Sequence[Sequence[int]], parts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The parts of ``spans`` that lie in ``parts``, all of positions."""
    both = ([max(a, start), min(b, stop)] for start, stop in parts for a, b in spans)
    return [[start, stop] for start, stop in both if start < stop]


__all__ = ["Answer", "End", "Ends"]

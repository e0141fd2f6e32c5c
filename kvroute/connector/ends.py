"""The ends of requests, on threads of their own: rows are read, bound to their tokens and left for clients.

The thread that schedules says which blocks a request had, and goes on: it waits neither for the worker nor for a store.
Rows stay readable until their block is given out again. Of a request whose rows have not been read by then, they are
read at that moment, or, where the worker has not written all of them yet, the worker copies its blocks to spare ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvroute
from cache_manager.errors import KVRouteError, RowError
from cache_manager.feed import BlockFeed
from cache_manager.publish import Rows
from kvroute.connector.answers import ERROR, FIELD
from kvroute.connector.behind import Behind
from kvroute.connector.left import LeftRoutes, Tokens, settled
from kvroute.connector.settings import VERSION, Engine
from kvroute.connector.tickets import gaps_of
from kvroute.routes import Routes

logger = logging.getLogger(__name__)

LATE_S: Final = 10.0
"""How long rows are waited for that a worker, which waits for a device, has not written yet."""
POLL_S: Final = 500e-6
ENDS_MAX: Final = 4096
"""Requests that are done and have not left their rows yet; a further one has no rows."""

Told = dict[str, Any]
"""What goes to a client beside its answer."""


@dataclass(slots=True, eq=False)
class End:
    """A request that is done. Its rows are those of the positions ``[start, stop)``, in ``blocks`` from position 0."""

    name: str  # what the client calls it
    blocks: NDArray[np.int64]
    lives: NDArray[np.int64]
    start: int
    stop: int
    steps: list[tuple[int, int]]  # of the worker that write rows: number, and the first position that it may write
    weights: int  # a number that is another one when the weights may be others
    version: int | None  # of the weights, where all rows are of one
    mixed: bool  # else the rows are labelled
    group: str | None = None  # of requests that are told together
    of: Tokens | None = None
    kept: Sequence[End] = ()  # what tokens were sampled with before it was preempted, in order
    by_kv: NDArray[np.bool_] | None = None  # [stop], rows matched by KV, which cannot prove the last router's choice
    why: Mapping[int, str] = field(default_factory=dict)  # of blocks whose rows did not all come
    told: Future[Told] = field(default_factory=Future)
    rows: Rows | None = None
    versions: Rows | int | None = None
    spares: list[int] = field(default_factory=list)
    void: bool = False  # another request of this name has begun: what is left is deleted


class Ends:
    """Leaves the rows of requests that are done in ``left``, which it owns; ``feed`` is the scheduler's.

    All but :meth:`close` return at once, to the thread that schedules.
    """

    def __init__(self, engine: Engine, left: LeftRoutes, feed: BlockFeed) -> None:
        self._engine, self._left, self._feed = engine, left, feed
        self._view: kvroute.RegionView | None = None
        self._late = False
        self._stuck_at = -1.0  # the step that a late worker was through with when it was waited for in vain
        self._lock = threading.Lock()
        self._unread: dict[End, None] = {}
        self._pending: dict[str, list[End]] = {}  # by name
        self._spares = list(engine.spares)
        self._ends, self._rooms = Behind("kvroute-ends"), Behind("kvroute-rooms")

    def attach(self, view: kvroute.RegionView, *, late: bool) -> None:
        """Rows are in ``view`` from here on; if ``late``, the worker may write them when their request is done."""
        with self._lock:
            self._view, self._late = view, late

    def make_room(self, name: str, group: str | None) -> Future[None]:
        """Delete what earlier requests of this name have left, and are leaving; done when it is."""
        done = Future[None]()
        with self._lock:
            earlier = list(self._pending.get(name, ()))

        def cleared() -> None:
            try:
                wait([end.told for end in earlier], 2 * LATE_S)
                for end in earlier:
                    end.void = True
                self._left.make_room(name, group)
            finally:
                done.set_result(None)

        if not earlier and self._left.has_room(name):
            cleared()  # which asks no store of another process, and takes no lock of another's
        else:
            self._rooms.put(cleared)
        return done

    def begin(self, end: End) -> Future[Told]:
        """The request is done: what its client is told, when its rows have been left or cannot be."""
        with self._lock:
            if len(self._pending) >= ENDS_MAX:
                error = RowError("requests that are done", f"{ENDS_MAX} at most, for the rollout store to take", "more")
                return self.refused(end.name, error, end.group)
            self._pending.setdefault(end.name, []).append(end)
            self._unread[end] = None
        self._ends.put(lambda: self._leave(end))
        return end.told

    def keep(self, end: End) -> None:
        """The request will be computed again, and :meth:`begin` names this among what it has ``kept``."""
        with self._lock:
            self._unread[end] = None

    def refused(self, name: str, error: RowError, group: str | None) -> Future[Told]:
        """The request is done, and its client is told why it has no routes."""
        told = Future[Told]()
        told.set_result(self._left.fail(name, error, group))
        return told

    def given(self, blocks: Sequence[int], step: int) -> None:
        """These blocks have other rows from here on. The worker hears of it with this ``step``, and of the copies."""
        if not self._unread:
            return
        new = set(blocks)
        with self._lock:
            for end in list(self._unread):
                if new.isdisjoint(end.blocks.tolist()):
                    continue
                if self._written(end):
                    self._read(end)
                    continue
                hit = np.flatnonzero(np.isin(end.blocks, blocks))
                end.spares += (spares := [self._spares.pop() for _ in range(min(hit.size, len(self._spares)))])
                if at := hit[: len(spares)].tolist():  # rows of the others are missing
                    lives = self._feed.renew(spares)
                    self._feed.copy(list(zip(end.blocks[at].tolist(), spares, strict=True)))
                    end.blocks[at], end.lives[at] = spares, lives
                    end.steps.append((step, 0))

    def forgotten(self) -> None:
        """All rows are about to be forgotten: those that are written are read before, and others are missing."""
        with self._lock:
            for end in list(self._unread):
                through = self._through()
                self._read(end)
                unsure = min((start for number, start in end.steps if number > through), default=end.stop)
                for rows in (end.rows, end.versions):
                    if isinstance(rows, Rows):
                        rows.valid[max(0, unsure - end.start) :] = False
                        rows.values[~rows.valid] = np.array(-1).astype(rows.values.dtype)  # as what is missing is

    def close(self) -> None:
        """Leave what is to be left, and close the store."""
        for thread in (self._rooms, self._ends):
            thread.close(2 * LATE_S)
        self._left.close()

    # ---------------------------------------------------------------- the thread

    def _leave(self, end: End) -> None:
        told: Told = {FIELD: {ERROR: {end.name: "rows: they could not be left, nor could the reason be told"}}}
        try:
            told = self._told(end)
            if end.void:
                self._left.make_room(end.name, end.group)
        finally:  # an answer that waits for this must come
            with self._lock:
                self._over(end)
                self._pending[end.name].remove(end)
                if not self._pending[end.name]:
                    del self._pending[end.name]
            end.told.set_result(told)

    def _told(self, end: End) -> Told:
        """What its client is told, whose routes are left if they can be."""
        try:
            routes, unseen = self._routes(end)
            gaps = gaps_of(routes.missing, end.why, self._engine.tokens)
            return self._left.leave(end.name, routes, end.of, end.group, unseen, gaps)
        except KVRouteError as error:
            return self._left.fail(end.name, error, end.group)
        except Exception as error:
            logger.exception("rows of request %s are lost", end.name)
            return self._left.fail(end.name, RowError("rows", "left for the client", repr(error)), end.group)

    def _routes(self, end: End) -> tuple[Routes, list[list[int]]]:
        """The routes of the request, and the positions at which its last router is taken on trust.

        A position that a token was sampled with before the request was preempted has its row of then; where that is
        missing, the one that was computed again, if by the same weights.
        """
        rows, unseen = self._wait(end), list[list[int]]()
        found = Routes.from_rows(self._engine.spec, rows, end.start, weights_version=end.versions, checked=True)
        if end.by_kv is not None:
            found, unseen = settled(found, end.by_kv[end.start :], flagged=self._engine.witness == "flagged")
        for kept in reversed(end.kept):
            assert end.of is not None, "who asks by tokens says them"
            if kept.stop <= found.start:
                continue
            before, trusted = self._routes(kept)
            before = before.slice(found.start, min(kept.stop, found.stop))
            again = list(before.missing) if kept.weights == end.weights else []
            parts = [(start, stop) for start, stop in [*again, (before.stop, found.stop)] if start < stop]
            unseen = _within(trusted, [(before.start, before.stop)]) + _within(unseen, parts)
            found = before.merge(*(found.slice(*part) for part in parts), tokens=end.of.ids)
        return found, unseen

    def _wait(self, end: End) -> Rows:
        """The rows, when the worker is through with the step that wrote the last.

        Its device is done with that, since what it sampled is here, unless the request is aborted: the worker hears of
        it when we do. A row that is there already says nothing: a draft's was, before that of the token which took its
        place. After :data:`LATE_S` it is a :class:`RowError`, and at once for others until the worker has got on.
        """
        give_up_s = time.monotonic() + LATE_S
        while True:
            with self._lock:
                if end.rows is None and self._written(end):
                    self._read(end)
                if end.rows is not None:
                    return end.rows
                through = self._through()
            if through == self._stuck_at or time.monotonic() > give_up_s:
                self._stuck_at = through
                raise RowError("rows", f"written by the worker within {LATE_S} s", "a worker that is behind")
            time.sleep(POLL_S)

    # ---------------------------------------------------------------- held: _lock

    def _written(self, end: End) -> bool:
        """Whether the worker is through with all that it writes of the rows."""
        return self._through() >= max((number for number, _ in end.steps), default=0)

    def _through(self) -> float:
        """The last step that the worker is through with."""
        assert self._view is not None, "the handshake comes before the first request"
        return int(self._view.generations([self._engine.clock])[0]) if self._late else float("inf")

    def _read(self, end: End) -> None:
        assert self._view is not None
        read, where = self._view.read, (end.blocks, end.start, end.stop)
        end.rows, end.versions = read(self._engine.spec.name, *where, generations=end.lives), end.version
        if end.mixed:
            end.versions = read(VERSION, *where, generations=end.lives)
        elif end.version is not None and not end.rows.valid.all():  # a row that is missing has none
            end.versions = Rows(np.full(end.rows.valid.size, end.version, np.uint32), end.rows.valid)
        self._over(end)

    def _over(self, end: End) -> None:
        """Nothing is read of its blocks any more."""
        self._unread.pop(end, None)
        self._spares += end.spares
        end.spares = []


def _within(spans: Sequence[Sequence[int]], parts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """What of ``spans`` of positions lies in ``parts``."""
    both = ([max(a, start), min(b, stop)] for start, stop in parts for a, b in spans)
    return [[start, stop] for start, stop in both if start < stop]


__all__ = ["End", "Ends"]

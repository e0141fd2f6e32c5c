"""The ends of requests, on a thread of their own: rows are taken when they are written, and their clients told.

The law. However a request ends, it leaves one :class:`~kvroute.connector.end.End`. That has a ``Computation`` for each
time that the request has lost its blocks: by preemptions, and at its end. A request that is aborted before it has been
computed again leaves the rows of the tokens that it has.

The scheduling thread says which blocks a request had, and goes on: it waits neither for the worker nor for a store.
Until rows have been read :mod:`~kvroute.connector.unread` keeps them; a
:class:`~kvroute.connector.takers.RolloutTaker` cuts routes from them and leaves these for clients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

from cache_manager.errors import KVRouteError, RowError
from kvroute.connector.computations import Computation
from kvroute.connector.end import ClientData, End, PendingAnswer
from kvroute.connector.fields import ERROR, FIELD
from kvroute.connector.key import Key
from kvroute.connector.left import LeftRoutes
from kvroute.connector.limits import Limits
from kvroute.connector.stages import RowsView
from kvroute.connector.takers import RolloutTaker, TakerOutcome
from kvroute.connector.unread import UnreadRows, written

logger = logging.getLogger(__name__)

REFUSED_MAX: Final = 4096
"""Refused requests of which the thread has not heard; beyond them the oldest are forgotten."""


class Ends:
    """Has the rows of ended requests left by ``taker``, which it owns, and makes their clients' data with ``left``.

    ``took`` hears the seconds from an end to its answer.
    The scheduling thread calls it; all methods but :meth:`close` return at once.
    """

    def __init__(
        self,
        limits: Limits,
        left: LeftRoutes,
        unread: UnreadRows,
        taker: RolloutTaker,
        took: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._limits = limits
        self._left = left
        self._unread = unread
        self._taker = taker
        self._took = took
        self._closed = False
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)  # the same: a condition takes three times as long to enter
        self._over_for_all = False  # the thread has ended: nobody is told anything by it any more
        self._waiting: dict[End, None] = {}  # for the thread
        self._pending: dict[End, None] = {}  # begun, and not yet told
        self._begun = 0  # how many ends, so far
        self._refused: deque[End] = deque(maxlen=REFUSED_MAX)  # whose keys may have routes of earlier requests
        self._thread = threading.Thread(target=self._run, name="kvroute-ends", daemon=True)
        self._thread.start()

    def attach(self, view: RowsView, *, late: bool) -> None:
        """Rows are in ``view`` from here on; if ``late``, the worker may write them when their request is done."""
        self._unread.attach(view, late=late)

    @property
    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """The present counters of who leaves rollouts."""
        return {"rollouts": self._taker.counters}

    def begins(self, key: Key) -> None:
        """A request of this key is under way."""
        self._left.begins(key)

    def keep(self, end: End, computation: Computation) -> None:
        """The request loses its blocks, and is computed again."""
        end.kept.append(computation)
        self._unread.keep(computation)

    def begin(self, end: End, last: Computation) -> PendingAnswer:
        """The request is done: the future of its client's data, done when its rows have been left or cannot be."""
        end.give_up_s = time.monotonic() + self._limits.answer_s
        self._unread.keep(last)
        with self._mutex:
            end.last = last
            alive = not self._over_for_all
            room = len(self._pending) < self._limits.ends_max
            if alive and room:
                self._pending[end] = None
                if not self._waiting:  # else the thread is at work, or looks again in a moment
                    self._lock.notify()
                self._waiting[end] = None
                self._begun += 1
        if not alive:
            return self.refused(end, RowError("rows", "a thread of kvroute that leaves them", "none: it has ended"))
        if not room:
            wanted = f"{self._limits.ends_max} at most, for the rollout store to take"
            return self.refused(end, RowError("requests that are done", wanted, "more"))
        return end.answer

    def drop(self, end: End) -> None:
        """Nobody will ask for its rows."""
        self._unread.drop(end.computations)

    def unanswered(self, end: End) -> None:
        """The request is done, and its client is told nothing."""
        self.drop(end)
        self._left.unanswered(end.key)

    def refused(self, end: End, error: RowError) -> PendingAnswer:
        """The request is done, and its client is told why it has no routes."""
        self.drop(end)
        end.answer.value = self._left.fail(end.key, error)
        end.answer.tell()
        if end.key.of_client:
            unread = End(key=end.key, request_tokens=end.request_tokens, failure=str(error))
            with self._mutex:
                self._refused.append(unread)
                self._lock.notify()
        return end.answer

    def given(self, blocks: Sequence[int], step: int) -> None:
        """These blocks begin new lives. The worker learns of that, and of the copies, with this ``step``."""
        self._unread.given(blocks, step)

    def forgotten(self) -> None:
        """All rows are about to be forgotten: read those that are written; the others become missing."""
        self._unread.forgotten()

    def close(self) -> None:
        """Leave the remaining rows, and close the taker."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join(2 * self._limits.answer_s)
        self._taker.close()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while (ends := self._ready_or_failed()) is not None:
                self._forget_earlier()
                if not ends:
                    continue
                outcomes = self._outcomes(ends)
                for end, outcome in zip(ends, outcomes, strict=True):
                    end.answer.value = self._client_data(end, outcome)
                self._over(ends)
                now_s = time.monotonic()
                for end in ends:
                    self._took(now_s - end.give_up_s + self._limits.answer_s)
                    end.answer.tell()
                del end, ends, outcomes, outcome  # an idle thread keeps no end alive
        finally:  # whatever ends the thread: those who wait for it are told
            self._end_all()

    def _forget_earlier(self) -> None:
        """Have routes of earlier requests under the keys of refused ones forgotten. Before ends that came later."""
        with self._mutex:
            refused = list(self._refused)
            self._refused.clear()
        if refused:
            self._outcomes(refused)  # each leaves nothing, for the reason that its client knows

    def _ready_or_failed(self) -> list[End] | None:
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

    def _ready(self) -> list[End] | None:
        """Ends whose rows are written, or that have waited long enough; waits until there are some, or one is refused.
        ``None``: closed.

        A request's last step is done on the device, because its sampled token is here, unless the request was aborted:
        then the worker may still run it. A row that is already there proves nothing: it may be a rejected draft's, not
        yet replaced.
        """
        before: tuple[float, int, int] | None = None
        with self._lock:
            while self._waiting or self._refused or not self._closed:
                if not self._waiting:
                    if self._refused:
                        return []
                    self._lock.wait()
                    continue
                now_s = time.monotonic()
                with self._unread.still() as through:  # what is written by now stays so
                    # hundreds that wait for one step are not looked at one by one until something has happened
                    seen = through, self._unread.news, self._begun
                    ends = list[End]()
                    if seen != before or next(iter(self._waiting)).give_up_s < now_s:
                        before = seen
                        whole = (end for end in self._waiting if end.give_up_s < now_s or _whole(end, through))
                        ends = list(islice(whole, self._taker.burst_max))
                for end in ends:
                    del self._waiting[end]
                if ends or self._refused:
                    return ends
                self._lock.wait(self._limits.end_poll_s)
        return None

    def _outcomes(self, ends: Sequence[End]) -> list[TakerOutcome]:
        """What each of ``ends`` has left. Raises nothing, because answers wait."""
        try:
            return self._taker.take(ends, self._unread)
        except Exception as error:
            logger.exception("rows of requests are lost")
            why = RowError("rows", "left for the client", repr(error))
            return [why for _ in ends]

    def _client_data(self, end: End, outcome: TakerOutcome) -> ClientData:
        """The client's data. Raises nothing, because an answer waits."""
        try:
            if isinstance(outcome, KVRouteError):
                return self._left.fail(end.key, outcome)
            return self._left.answer(end.key, outcome, end.request_tokens)
        except Exception:
            logger.exception("rows of request %r are lost", end.key.text)
            why = {str(end.key.choice): "rows: they could not be left, nor could the reason be told"}
            return {FIELD: {ERROR: why}}

    def _over(self, ends: Sequence[End]) -> None:
        """Nothing is read for them any more."""
        self._unread.drop(computation for end in ends for computation in end.computations)
        with self._mutex:
            for end in ends:
                del self._pending[end]


class NoEnds:
    """In place of :class:`Ends` where no rows of ended requests are left: no client waits.

    ``names_mistakes``: a request that is refused has an answer that says why, because the engine has a field of its own
    for rows, whose client would else take a mistake for a gap.
    """

    def __init__(self, *, names_mistakes: bool) -> None:
        self._names_mistakes = names_mistakes

    @property
    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """None."""
        return {}

    def begins(self, key: Key) -> None:
        """A request of this key is under way."""

    def keep(self, end: End, computation: Computation) -> None:
        """The request loses its blocks, and is computed again."""

    def begin(self, end: End, last: Computation) -> None:
        """The request is done."""

    def unanswered(self, end: End) -> None:
        """The request is done, and its client is told nothing."""

    def refused(self, end: End, error: RowError) -> PendingAnswer | None:
        """The request is done: the answer that names the ``error``, where there is one."""
        if not self._names_mistakes:
            return None
        end.answer.value = {FIELD: {ERROR: {str(end.key.choice): str(error)}}}
        end.answer.tell()
        return end.answer

    def close(self) -> None:
        """Nothing is left to do."""


def _whole(end: End, through: float) -> bool:
    for computation in end.computations:  # noqa: SIM110 - a generator costs as much again, of hundreds of requests
        if computation.rows is None and not written(computation, through):
            return False
    return True


__all__ = ["Ends", "NoEnds"]

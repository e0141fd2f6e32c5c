"""A circuit breaker: when to stop asking a store that fails, and when to try again. Pure; the caller passes the time.

Law: calls are let through only while it is CLOSED. One failure that concerns everything, or ``failures_max`` failing
calls in a row, open it. When the pause is over one probe runs; a good one closes the breaker, a bad one opens it again,
for twice as long, until a call succeeds.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Event(Enum):
    SUCCESS = "success"  # of a call
    FAILURE = "failure"  # the last one that is borne
    PAUSE_OVER = "pause over"
    PROBE_GOOD = "probe good"
    PROBE_BAD = "probe bad"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.CLOSED: {Event.SUCCESS: State.CLOSED, Event.FAILURE: State.OPEN},
    # a call that began before the breaker opened may end at any time after; it decides nothing
    State.OPEN: {Event.SUCCESS: State.OPEN, Event.FAILURE: State.OPEN, Event.PAUSE_OVER: State.HALF_OPEN},
    State.HALF_OPEN: {
        Event.SUCCESS: State.HALF_OPEN,
        Event.FAILURE: State.HALF_OPEN,
        Event.PROBE_GOOD: State.CLOSED,
        Event.PROBE_BAD: State.OPEN,
    },
}


class Breaker:
    """Not thread-safe: the owner's lock guards it.

    >>> breaker = Breaker(failures_max=1, pause_s=1.0, pause_max_s=8.0)
    >>> breaker.failed(100.0, "the master is gone")
    >>> breaker.state.value, breaker.due(100.5), breaker.due(101.0)
    ('open', False, True)
    >>> breaker.begin_probe(); breaker.end_probe(102.0, good=True)
    >>> breaker.state.value
    'closed'
    """

    def __init__(self, failures_max: int, pause_s: float, pause_max_s: float) -> None:
        self._failures_max = failures_max
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._failures = 0
        self._unproven = 0  # openings since a call succeeded
        self.state = State.CLOSED
        self.opened = 0
        self.until = 0.0
        self.cause = ""

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    def succeeded(self) -> None:
        """A call was answered."""
        if self.closed:
            self._failures = self._unproven = 0
        self._apply(Event.SUCCESS)

    def failed(self, now_s: float, cause: str, *, fatal: bool = False) -> None:
        """A call failed; ``fatal`` says that the next one would, too."""
        self._failures += 1
        if not fatal and self._failures < self._failures_max:
            return
        was_closed = self.closed
        self._apply(Event.FAILURE)
        if was_closed:
            self._open(now_s, cause)

    def due(self, now_s: float) -> bool:
        """Whether it is time for a probe."""
        return self.state is State.OPEN and now_s >= self.until

    def begin_probe(self) -> None:
        self._apply(Event.PAUSE_OVER)

    def end_probe(self, now_s: float, *, good: bool, cause: str = "") -> None:
        self._apply(Event.PROBE_GOOD if good else Event.PROBE_BAD)
        if good:
            self._failures = 0
        else:
            self._open(now_s, cause or self.cause)

    def _open(self, now_s: float, cause: str) -> None:
        self.cause = cause
        self.opened += 1
        pause_s = min(self._pause_s * 2.0**self._unproven, self._pause_max_s)
        self._unproven = min(self._unproven + 1, 32)
        self.until = now_s + pause_s

    def _apply(self, event: Event) -> None:
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise AssertionError(f"{event.value} while {self.state.value}")
        self.state = after

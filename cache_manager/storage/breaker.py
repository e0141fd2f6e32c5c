"""When to stop asking what fails, and when to try again. Pure; the caller passes the time.

Law: what is closed is asked. ``failures_max`` failing calls in a row open it, or one that concerns everything. Whoever
asks first when the pause is over is let through, and the others wait for what that finds: a pause again, and twice as
long, until a call succeeds.
"""

from __future__ import annotations


class Breaker:
    """Not thread-safe: the owner's lock guards it.

    >>> breaker = Breaker(pause_s=1.0, pause_max_s=8.0)
    >>> breaker.failed(100.0, "the master is gone")
    >>> breaker.asks(100.5), breaker.asks(101.0), breaker.asks(101.0), breaker.until_s
    (False, True, False, 103.0)
    >>> breaker.succeeded()
    >>> breaker.asks(101.5)
    True
    """

    def __init__(self, pause_s: float, pause_max_s: float, failures_max: int = 1) -> None:
        self._first_pause_s = self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._failures_max = failures_max
        self._failures = 0  # in a row
        self.closed = True
        self.opened = 0  # how often
        self.until_s = 0.0  # nobody is let through before, unless it is closed
        self.cause = ""  # of the last failure that mattered

    def asks(self, now_s: float) -> bool:
        """Whether a call may be made now; if it is open, the caller has to say how the call ended."""
        if self.closed or now_s < self.until_s:
            return self.closed
        self._pause(now_s)
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self.closed, self._failures, self._pause_s = True, 0, self._first_pause_s

    def failed(self, now_s: float, cause: str, *, fatal: bool = False) -> None:
        """A call failed; ``fatal`` says that the next would, too. One from before it opened changes no pause."""
        self._failures += 1
        if self.closed and not fatal and self._failures < self._failures_max:
            return
        self.cause = cause
        if self.closed:
            self.closed = False
            self.opened += 1
            self._pause(now_s)

    def _pause(self, now_s: float) -> None:
        self.until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._pause_max_s)


__all__ = ["Breaker"]

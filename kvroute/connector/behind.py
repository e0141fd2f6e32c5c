"""A thread that does what waits, for a device or for a store, so that nobody who schedules or launches has to."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

PENDING_MAX: Final = 16
"""What a worker has under way at most behind its device."""


class Behind:
    """Does calls one by one, in the order in which they were put, on a thread of its own, which keeps no process alive.

    With ``room`` for so many calls :meth:`put` waits for some; 0: whoever puts bounds them. What a call raises is
    logged and given to ``on_failure``, on that thread; the next call is done, whatever that does.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], object] = bool, room: int = 0) -> None:
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(room)
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Do this when all that was put before is done."""
        self._calls.put(call)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was put is done; whether it is. Nothing is to be done once it was closed."""
        if not self._thread.is_alive():
            return True
        done = threading.Event()
        try:
            self._calls.put(done.set, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """:meth:`settle`, and end the thread. It ends with the process where a call never comes to an end."""
        if settled := self.settle(timeout_s):
            self._calls.put(None)
            self._thread.join(timeout_s)
        return settled

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # there is nobody to raise it to
                logger.exception("rows are lost")
                try:
                    self._on_failure(error)
                except Exception:  # without this thread callers of put would wait for ever
                    logger.exception("what was left half done could not be undone")
            del call  # a thread without work keeps nothing alive


__all__ = ["PENDING_MAX", "Behind"]

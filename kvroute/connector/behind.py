"""A thread for calls that wait for a device or a store, so that threads that schedule or launch need not wait."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Behind:
    """Does calls one by one, in the order of :meth:`put`, on a daemon thread of its own.

    With ``room`` for so many calls :meth:`put` waits when it is full; with 0 the callers bound them. A call's exception
    is logged and given to ``on_failure``, on that thread; then the next call is done, whatever either raises: nothing
    but :meth:`close` ends the thread.
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[BaseException], object] = bool,
        room: int = 0,
    ) -> None:
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(room)
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Do this after all calls put before."""
        self._calls.put(call)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all calls put so far are done; whether they are. After a close there are none."""
        if not self._thread.is_alive():
            return True
        done = threading.Event()
        try:
            self._calls.put(done.set, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """:meth:`settle`, and end the thread. If a call never ends, the thread ends with the process."""
        settled = self.settle(timeout_s)
        if settled:
            self._calls.put(None)
            self._thread.join(timeout_s)
        return settled

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # no caller is left to raise it to
                logger.exception("rows are lost")
                try:
                    self._on_failure(error)
                except BaseException:  # the thread goes on, or callers of put would wait for ever
                    logger.exception("what was left half done could not be undone")
            del call  # an idle thread keeps no object alive


class AtOnce:
    """As :class:`Behind`, for a host with no device to wait for: :meth:`put` does each call itself, and raises what it
    raises."""

    def put(self, call: Callable[[], object]) -> None:
        call()

    def settle(self, timeout_s: float) -> bool:  # noqa: ARG002 - nothing takes time
        """Everything is done."""
        return True

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002 - nothing takes time
        """There is nothing to end."""
        return True


__all__ = ["AtOnce", "Behind"]

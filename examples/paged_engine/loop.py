"""The thread that an engine lives in. What is asked of it goes through a queue; what it answers comes back as futures.

When it fails, everything in flight fails with the cause, and so does whatever comes later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final

from cache_manager.errors import KVRouteError
from paged_engine.engine import Engine
from paged_engine.request import Output

logger = logging.getLogger(__name__)

IDLE_S: Final = 0.02
"""Pause of an engine with nothing to do: transfers are still looked after."""
WAITING_S: Final = 0.002
"""Pause of an engine whose sequences all wait for something outside."""

Tell = Callable[[int, tuple[int, ...]], None]
"""Hears, in the engine's thread, what a sample of this number has generated so far."""


class EngineFailedError(KVRouteError):
    """The engine has failed; it will not come back in this process."""


@dataclass(slots=True, eq=False)
class _Job:
    request_id: str
    add: Callable[[], None]
    tell: Tell | None
    future: Future[tuple[Output, ...]] = field(default_factory=Future)
    outputs: dict[int, Output] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """Runs ``engine``. ``failed`` hears, in that thread, that it is over. All may be called from any thread.

    Whoever submits bounds how many requests are in flight.
    """

    def __init__(self, engine: Engine, failed: Callable[[], None]) -> None:
        self._engine, self._failed = engine, failed
        self._jobs: dict[str, _Job] = {}
        self._asked: SimpleQueue[_Job | str] = SimpleQueue()  # to be added; the id of one to be aborted
        self._closing = threading.Event()
        self._turned_at_s = time.monotonic()
        self.failure: EngineFailedError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def turned_ago_s(self) -> float:
        """Seconds since the engine's last step ended."""
        return time.monotonic() - self._turned_at_s

    def submit(self, request_id: str, add: Callable[[], None], tell: Tell | None = None) -> Future[tuple[Output, ...]]:
        """``add`` the request in the engine's thread; the future has its samples, or what was wrong with it."""
        job = _Job(request_id, add, tell)
        self._asked.put(job)
        if self.failure is not None:
            self._fail_all(self.failure)
        return job.future

    def abort(self, *request_ids: str) -> None:
        """End the requests, all if none is named; their futures have what there was. The ids may be unknown."""
        for request_id in request_ids or list(self._jobs):
            self._asked.put(request_id)

    def close(self, within_s: float) -> bool:
        """End the thread, what is in flight with it; whether it has ended in time."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)
        return not self._thread.is_alive()

    # ---------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            self._fail_all(EngineFailedError("the server is ending"))
        except Exception as error:
            logger.exception("the engine has failed")
            self.failure = EngineFailedError(f"the engine has failed: {type(error).__name__}: {error}")
            self._fail_all(self.failure)
            self._failed()

    def _turn(self) -> None:
        while not self._asked.empty():
            self._do(self._asked.get())
        steps, outputs = self._engine.steps, self._engine.step()
        for job in self._jobs.values():
            for sequence in self._engine.scheduler.of(job.request_id):
                if job.tell is not None and sequence.generated:
                    job.tell(sequence.sample, sequence.generated)
        for output in outputs:
            self._jobs[output.request.id].outputs[output.sample] = output
        # A request that is aborted before its samples were forked ends with fewer outputs than it has samples.
        for request_id in {output.request.id for output in outputs}:
            if not self._engine.scheduler.of(request_id):
                job = self._jobs.pop(request_id)
                if job.future.set_running_or_notify_cancel():
                    job.future.set_result(tuple(job.outputs[sample] for sample in sorted(job.outputs)))
        self._turned_at_s = time.monotonic()
        if self._engine.steps == steps and not outputs:
            with suppress(Empty):
                self._do(self._asked.get(timeout=WAITING_S if self._engine.busy else IDLE_S))

    def _do(self, asked: _Job | str) -> None:
        if isinstance(asked, str):
            self._engine.abort(asked)
            return
        try:
            asked.add()
        except Exception as error:  # noqa: BLE001 - one request's trouble must not end the engine
            asked.fail(error)
        else:
            self._jobs[asked.request_id] = asked

    def _fail_all(self, error: Exception) -> None:
        while not self._asked.empty():
            if isinstance(asked := self._asked.get(), _Job):
                asked.fail(error)
        while self._jobs:
            self._jobs.popitem()[1].fail(error)


__all__ = ["EngineFailedError", "EngineThread", "Tell"]

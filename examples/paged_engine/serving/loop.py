"""The thread that an engine lives in, and the way to it from others.

An engine belongs to one thread. Everything that is asked of it goes through a queue with a limit; what it answers comes
back as futures. When the engine fails, every request in flight fails with the reason, and so does every later one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from paged_engine.engine.engine import Engine
from paged_engine.engine.request import Output, Request
from paged_engine.serving.errors import BusyError, DrainingError, EngineFailedError

logger = logging.getLogger(__name__)

IDLE_S = 0.02
"""Pause of an engine with nothing to do: transfers and leases are still looked after."""
WAITING_S = 0.002
"""Pause of an engine whose sequences all wait for something outside."""

Tell = Callable[[int, tuple[int, ...]], None]
"""Hears, in the engine's thread, of new tokens: the sample's number, and what it got since the last call."""


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    add: Callable[[], None]
    answer: Callable[[tuple[Output, ...]], Any]
    tell: Tell | None
    future: Future[Any] = field(default_factory=Future)
    outputs: dict[int, Output] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoopCounters:
    """Requests so far; ``submitted`` is the sum of the others and of those in flight."""

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0


class EngineLoop:
    """Runs ``engine`` in a thread of its own, with at most ``requests_max`` requests in flight.

    :meth:`submit`, :meth:`abort` and the properties may be used from any thread.
    """

    def __init__(self, engine: Engine, *, requests_max: int) -> None:
        self._engine = engine
        self._requests_max = requests_max
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}  # in flight, the queued ones too
        self._commands: deque[Callable[[], None]] = deque()  # at most one add and one abort a job
        self._wake = threading.Event()
        self._closing = False
        self._failure: str | None = None
        self._counts = dict.fromkeys(LoopCounters.__dataclass_fields__, 0)
        self._turned_at_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the engine has failed; ``None`` while it is well."""
        return self._failure

    @property
    def in_flight(self) -> int:
        """Requests that have not been answered."""
        return len(self._jobs)

    @property
    def turned_ago_s(self) -> float:
        """Seconds since the engine's last step ended, or since it was last seen to have nothing to do."""
        return time.monotonic() - self._turned_at_s

    @property
    def counters(self) -> LoopCounters:
        with self._lock:
            return LoopCounters(**self._counts)

    def submit(
        self,
        request: Request,
        add: Callable[[], None],
        answer: Callable[[tuple[Output, ...]], Any],
        tell: Tell | None = None,
    ) -> Future[Any]:
        """Let the engine's thread call ``add``, and ``answer`` with all samples' outputs when they have ended.

        The future has what ``answer`` returned, or the exception of either. Raises :class:`BusyError`,
        :class:`DrainingError` or :class:`EngineFailedError` at once when the request is not taken on.
        """
        job = _Job(request, add, answer, tell)
        with self._lock:
            self._counts["submitted"] += 1
            try:
                self._check_open(request)
            except BaseException:
                self._counts["refused"] += 1
                raise
            self._jobs[request.id] = job
            self._commands.append(lambda: self._add(job))
        self._wake.set()
        return job.future

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; its future has what was generated so far. Idempotent."""
        with self._lock:
            if request_id not in self._jobs:
                return
            self._commands.append(lambda: self._engine.abort(request_id))
        self._wake.set()

    def abort_all(self) -> None:
        for request_id in list(self._jobs):
            self.abort(request_id)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread; requests in flight fail. Whether it has ended: only then may the engine be closed."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._fail_all(DrainingError("the server has ended"))
        return not self._thread.is_alive()

    # ---------------------------------------------------------------- inside

    def _check_open(self, request: Request) -> None:
        if self._failure is not None:
            raise EngineFailedError(f"the engine has failed: {self._failure}")
        if self._closing:
            raise DrainingError("the server is about to end")
        if len(self._jobs) >= self._requests_max:
            raise BusyError(f"{self._requests_max} requests are in flight already")
        if request.id in self._jobs:
            raise BusyError(f"request {request.id} is in flight already")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:  # the edge of the thread: whatever it is, the requests must hear it
            self._failure = f"{type(error).__name__}: {error}"
            logger.exception("the engine has failed")
            self._fail_all(EngineFailedError(f"the engine has failed: {self._failure}"))

    def _turn(self) -> None:
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()
        steps = self._engine.steps
        outputs = self._engine.step()
        self._tell()
        self._take(outputs)
        self._turned_at_s = time.monotonic()
        if self._engine.steps == steps and not outputs:
            self._wake.wait(WAITING_S if self._engine.busy else IDLE_S)

    def _add(self, job: _Job) -> None:
        try:
            job.add()
        except Exception as error:  # noqa: BLE001 - one request's trouble must not end the engine
            self._end(job, "failed", error)

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if (job := self._jobs.get(output.request.id)) is not None:
                job.outputs[output.sample] = output
                self._tell_of(job, output.sample, output.tokens)
        for request_id in {output.request.id for output in outputs}:
            job = self._jobs.get(request_id)
            # A request that is aborted before its samples were forked ends with fewer outputs than it has samples.
            if job is not None and not self._engine.scheduler.of(request_id):
                self._answer(job)

    def _answer(self, job: _Job) -> None:
        try:
            found = job.answer(tuple(job.outputs[sample] for sample in sorted(job.outputs)))
        except Exception as error:  # noqa: BLE001 - one request's trouble must not end the engine
            self._end(job, "failed", error)
        else:
            self._end(job, "answered", found)

    def _tell(self) -> None:
        for job in list(self._jobs.values()):
            if job.tell is not None:
                for sequence in self._engine.scheduler.of(job.request.id):
                    self._tell_of(job, sequence.sample, sequence.generated)

    def _tell_of(self, job: _Job, sample: int, generated: tuple[int, ...]) -> None:
        told = job.told.get(sample, 0)
        if job.tell is not None and len(generated) > told:
            job.tell(sample, generated[told:])
            job.told[sample] = len(generated)

    def _end(self, job: _Job, outcome: str, found: Any) -> None:
        with self._lock:
            if self._jobs.pop(job.request.id, None) is None:
                return
            self._counts[outcome] += 1
        if not job.future.set_running_or_notify_cancel():
            return
        if isinstance(found, BaseException):
            job.future.set_exception(found)
        else:
            job.future.set_result(found)

    def _fail_all(self, error: Exception) -> None:
        for job in list(self._jobs.values()):
            self._end(job, "failed", error)


__all__ = ["EngineLoop", "LoopCounters"]

"""Work that a store does while the scheduler goes on: bounded, cancellable, and landed by whoever polls.

The law: a job's blocks are pinned from its beginning until it has LANDED. Store calls are made in CARRYING and at no
other time, on a thread of the runner's; landing, which is when rows become readable and blocks are let go, happens in
the thread that polls, once. A cancelled job lands too, without bringing anything; while the store is at work for it,
it cannot land, because the store may still read or write its blocks.

    QUEUED --- begun, waits for a thread
    CARRYING - the store is at work
    CARRIED -- the store has answered, failed, or was never asked; waits to be polled
    LANDED --- over
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_manager.books import Books
from cache_manager.errors import BlockStateError, ConfigError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.mover import RowsMover
from cache_manager.ports import HitPolicy, Mover
from cache_manager.table import BlockTable, Ints

_T = TypeVar("_T")


class Phase(Enum):
    QUEUED = "queued"
    CARRYING = "carrying"
    CARRIED = "carried"
    LANDED = "landed"


class Event(Enum):
    START = "start"
    RETURN = "return"
    CANCEL = "cancel"
    LAND = "land"


TRANSITIONS: Final[dict[Phase, dict[Event, Phase]]] = {
    Phase.QUEUED: {Event.START: Phase.CARRYING, Event.CANCEL: Phase.CARRIED},
    Phase.CARRYING: {Event.RETURN: Phase.CARRIED, Event.CANCEL: Phase.CARRYING},
    Phase.CARRIED: {Event.LAND: Phase.LANDED, Event.CANCEL: Phase.CARRIED},
    Phase.LANDED: {Event.CANCEL: Phase.LANDED},
}


@dataclass(frozen=True, slots=True)
class JobLimits:
    """How much may be under way at once; a job that does not fit is refused, which is a normal answer.

    ``jobs_max`` counts queued and running ones, ``nbytes_max`` the bytes of the blocks that they pin; a job larger than
    that is taken when there is no other. ``close_s`` is how long closing waits for jobs to end.
    """

    threads_max: int = 2
    jobs_max: int = 64
    nbytes_max: int = 1 << 30
    close_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("threads_max", "jobs_max", "nbytes_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(name, "an integer of 1 or more", repr(value))
        if not 0 <= self.close_s < float("inf"):
            raise ConfigError("close_s", "a finite number of seconds, 0 or more", self.close_s)


class Job(ABC, Generic[_T]):
    """What the store does for some blocks of one :class:`Archive`. Any thread may ask it, and land it by a poll.

    There is something to do for the ``live`` ones of ``blocks``, whose ids are ``ids [n]``. The blocks of an engine may
    be given out at any time: for these the store works on a copy.
    """

    def __init__(
        self, archive: Archive, what: str, blocks: Mapping[BlockKey, int], ids: Ints, live: NDArray[np.bool_]
    ) -> None:
        self._archive, self.blocks = archive, dict(blocks)
        self._keys, self._ids = keys, ids = list(compress(blocks, live.tolist())), ids[live]
        self._generations = archive.table.generations.take(ids)
        self._mover, self._at, self._copied = archive.mover, ids, np.empty(0, np.uint8)
        self.name, self.nbytes = f"{what} of {len(blocks)} blocks", len(keys) * archive.table.layout.nbytes
        self.phase = Phase.QUEUED if keys else Phase.LANDED
        self.failure: BaseException | None = None
        """What the store raised, ``StorageError`` unless there is a bug; known once the job has been carried."""
        self.cancelled = False
        self.thread = 0  # that asks the store

    @property
    def over(self) -> bool:
        return self.phase is Phase.LANDED

    def poll(self) -> bool:
        """Land the job if the store has done its part; whether it is over. Never waits for the store."""
        if self.phase is Phase.CARRIED:
            with self._archive.books.guard:
                if self.phase is Phase.CARRIED:
                    try:
                        self._land()
                    finally:
                        self._archive.end(self)  # last: whoever sees it LANDED may ask for its result
        return self.over

    def wait(self, timeout_s: float) -> bool:
        """:meth:`poll` as soon as that ends the job, or when ``timeout_s`` is over."""
        self._archive.wait(lambda: self.phase in (Phase.CARRIED, Phase.LANDED), timeout_s)
        return self.poll()

    def cancel(self) -> None:
        """Bring nothing. A queued job is over at once, others when the store call has ended and somebody polls."""
        self._archive.cancel(self)
        self.poll()

    def result(self) -> dict[BlockKey, _T]:
        """The caller's own. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        if not self.over:
            raise BlockStateError(self.name, "a job that has landed", f"one that is {self.phase.value}")
        if self.failure is not None:
            raise self.failure
        return self.known()

    @abstractmethod
    def known(self) -> dict[BlockKey, _T]:
        """As :meth:`result`, so far as is known, without raising."""

    def move(self, event: Event) -> None:
        """Change the phase by the law."""
        self.phase = TRANSITIONS[self.phase][event]

    def _work_on(self, copied: NDArray[np.uint8]) -> None:
        """The store works on these records ``[n, layout.nbytes]`` in place of the blocks."""
        assert isinstance(self._mover, RowsMover)
        self._mover, self._at, self._copied = self._mover.over(copied), np.arange(len(copied)), copied

    @abstractmethod
    def check(self) -> None:
        """Raise unless the blocks may be had; the lock is held, here and in the next."""

    @abstractmethod
    def begin(self) -> None:
        """Take the blocks: they are in motion, and the job's, or copied."""

    @abstractmethod
    def carry(self) -> None:
        """Ask the store; no lock is held."""

    @abstractmethod
    def _land(self) -> None:
        """Make of the store's answer what is still wanted, and let the blocks go; the lock is held."""

    def _let_go(self) -> None:
        """The job holds nothing any more; blocks that it has taken are in motion still."""
        archive, books = self._archive, self._archive.books
        archive.table.release(self)
        self._mover, self._copied = archive.mover, np.empty(0, np.uint8)
        books.count("jobs_landed")
        books.count("jobs_cancelled", int(self.cancelled))


AnyJob = Job[Any]
J = TypeVar("J", bound=AnyJob)


class Archive:
    """Where the blocks of ``table`` are stored by jobs, on up to ``threads_max`` threads that start when first needed.

    ``mover`` stores and fills blocks; ``required`` are the indices of the specs whose rows a block must have in full.
    """

    def __init__(
        self,
        table: BlockTable,
        books: Books,
        mover: Mover,
        policy: HitPolicy,
        required: tuple[int, ...],
        limits: JobLimits,
    ) -> None:
        self.table, self.books, self.mover, self.policy = table, books, mover, policy
        self.required, self.limits = required, limits
        self._changed = books.guard.inner  # guards all below, and the phases of queued and running jobs
        self._jobs: dict[AnyJob, None] = {}  # not landed, in the order in which they began
        self._queue: deque[AnyJob] = deque()
        self._nbytes = 0
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def jobs(self) -> list[AnyJob]:
        """Those that have begun and not landed, the earliest first."""
        with self._changed:
            return list(self._jobs)

    def begin(self, make: Callable[[], J], *, queued: bool) -> J | None:
        """Begin the job that ``make`` makes under the lock; one that is not ``queued`` is carried and landed, too.

        ``None``: there was no room for a queued one.
        """
        with self.books.guard:
            job = make()
            if not self.table.by_engine:
                job.check()
            if job.over:  # nothing to do
                return job
            with self._changed:
                full = len(self._jobs) >= self.limits.jobs_max
                full |= bool(self._jobs) and self._nbytes + job.nbytes > self.limits.nbytes_max
                if queued and (self._closing or full):
                    self.books.count("jobs_refused")
                    return None
                job.begin()
                self._jobs[job] = None
                self._nbytes += job.nbytes
                if queued:
                    self._queue.append(job)
                    if self._idle < len(self._queue) and len(self._threads) < self.limits.threads_max:
                        self._add_thread()
                    self._changed.notify_all()
                else:
                    job.move(Event.START)
            self.books.count("jobs_begun")
        if not queued:
            self._finish(job)
            job.poll()
        return job

    def _add_thread(self) -> None:
        """A process may have no more threads: then those that run do the work, and without any the jobs fail. Held."""
        thread = threading.Thread(target=self._work, name="kvroute-store-job", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            while self._queue and not self._threads:
                job = self._queue.popleft()
                job.move(Event.START)
                job.failure = StorageError(f"{job.name}: no thread to ask the store: {error}")
                job.move(Event.RETURN)
        else:
            self._threads.append(thread)

    def cancel(self, job: AnyJob) -> None:
        with self._changed:
            job.cancelled = job.cancelled or job.phase is not Phase.LANDED
            if job.phase is Phase.QUEUED:
                self._queue.remove(job)
            job.move(Event.CANCEL)

    def end(self, job: AnyJob) -> None:
        """The job lands."""
        with self._changed:
            job.move(Event.LAND)
            del self._jobs[job]
            self._nbytes -= job.nbytes
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until a change of some job has made ``reached`` true; whether it is."""
        with self._changed:
            return self._changed.wait_for(reached, timeout_s)

    def poll(self) -> list[AnyJob]:
        """Land what has been carried, the earliest begun first; the jobs that are over by it."""
        return [job for job in self.jobs if job.poll()]

    def wait_any(self, timeout_s: float) -> bool:
        """Sleep until there is a job to poll, or none at all; ``False`` when ``timeout_s`` was over before."""
        return self.wait(lambda: not self._jobs or any(job.phase is Phase.CARRIED for job in self._jobs), timeout_s)

    def close(self) -> None:
        """Land what has been carried, waiting up to ``close_s``, and end the threads; idempotent.

        Raises :class:`BlockStateError` naming the jobs that the store has not answered; they can be waited for again.
        """
        give_up_s = time.monotonic() + self.limits.close_s
        for job in self.jobs:
            own = job.thread == threading.get_ident()  # whose handler this is
            job.wait(0.0 if own else max(0.0, give_up_s - time.monotonic()))
        with self._changed:
            if self._jobs:
                left = ", ".join(f"{job.name} ({job.phase.value})" for job in self._jobs)
                raise BlockStateError("close", "nothing in flight", left)
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _finish(self, job: AnyJob) -> None:
        """Do a job's store calls on the calling thread; what they raise is :attr:`Job.failure`."""
        job.thread = threading.get_ident()
        try:
            job.carry()
        except BaseException as error:  # noqa: BLE001 (it is not lost: whoever polls the job gets it)
            job.failure = _without_frames(error)
        with self._changed:
            job.move(Event.RETURN)
            self._changed.notify_all()

    def _work(self) -> None:
        """A thread's loop: carry what is queued, until the runner closes."""
        while (job := self._next()) is not None:
            self._finish(job)
            del job  # a thread without work keeps nothing alive

    def _next(self) -> AnyJob | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._idle -= 1
            if not self._queue:
                return None
            job = self._queue.popleft()
            job.move(Event.START)
            return job


def _without_frames(error: BaseException) -> BaseException:
    """A store's failure without the frames it went through, which may hold views of the rows. A bug keeps its own."""
    found: BaseException | None = error
    while isinstance(error, StorageError) and found is not None:
        found = found.with_traceback(None).__cause__ or found.__context__
    return error

"""The jobs of a set of blocks: queued, carried by threads, and landed.

The caller begins and lands a job, a thread does the store's part. A job is queued until a thread takes it, carried when
the store has answered or failed, or when it was cancelled in the queue, and landed at the next poll.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cache_manager.errors import ConfigError, StorageError
from cache_manager.job import AnyJob, Phase
from cache_manager.lock import ProcessLock
from cache_manager.own_keys import Keyed, OwnKeys
from cache_manager.ports import KVBlocks
from cache_manager.slots import Blocks, is_integer
from cache_manager.storage.records import RecordStore
from cache_manager.table import BlockTable

J = TypeVar("J", bound=AnyJob)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """How much may be under way at once; a job that does not fit is refused, which is a normal answer.

    ``nbytes_max`` bounds staging, of rows and of KV that is stored beside them; a larger job is taken when it is the
    only one.
    """

    threads_max: int = 2
    jobs_max: int = 64
    nbytes_max: int = 1 << 30
    close_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("threads_max", "jobs_max", "nbytes_max"):
            value = getattr(self, name)
            if not is_integer(value, 1, 1 << 63):
                raise ConfigError(name, "an integer in [1, 2**63)", repr(value))
        is_number = isinstance(self.close_s, (int, float))
        if not is_number or not 0 <= self.close_s < float("inf"):
            raise ConfigError("close_s", "a finite number of seconds, 0 or more", repr(self.close_s))


class Jobs:
    """The jobs of a set of blocks that have begun and not landed, in the order in which they began; any of them may be
    cancelled. Up to ``threads_max`` threads carry them.

    ``required`` are the specs whose rows a block must have; ``kv`` goes along with rows. The blocks' lock, which
    guards what has begun, is taken before the mutex, which guards the queue and the phases of the jobs in it.
    """

    def __init__(
        self,
        table: BlockTable,
        own_keys: OwnKeys,
        store: RecordStore | None,
        *,
        required: Sequence[int],
        kv: KVBlocks | None,
        limits: JobLimits,
    ) -> None:
        self.table = table
        self.own_keys = own_keys
        self.store = store
        self.required = required
        self.kv = kv
        self._limits = limits
        self._mutex = ProcessLock()
        self._changed = threading.Condition(self._mutex)
        self._begun: dict[AnyJob, None] = {}
        self._polled: deque[AnyJob] = deque()  # landed by a poll that has not returned them
        self._queue: deque[AnyJob] = deque()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def __iter__(self) -> Iterator[AnyJob]:
        """Over a copy: jobs may land meanwhile."""
        with self._mutex:
            return iter(list(self._begun))

    def __len__(self) -> int:
        return len(self._begun)

    def records(self) -> RecordStore:
        """The store; :class:`ConfigError` without one."""
        if self.store is None:
            raise ConfigError("store", "a storage backend", "none")
        return self.store

    def poll(self) -> list[AnyJob]:
        """Land the jobs whose store part is done, and return them, each to one caller. Waits for nothing.

        If the landing of one raises, the next call returns it, and those that landed before it.
        """
        for job in self:
            self.land(job, self._polled)
        with self._mutex:
            landed = list(self._polled)
            self._polled.clear()
        return landed

    def wait(self, timeout_s: float) -> bool:
        """Sleep until :meth:`poll` has something to land, or no job is left; ``False`` after ``timeout_s``."""

        def has_news() -> bool:
            if self._polled:
                return True
            begun = list(self._begun)  # a copy, as jobs may land meanwhile
            return not begun or any(job.phase is Phase.CARRIED for job in begun)

        return self.sleep(has_news, timeout_s)

    def sleep(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until a change of some job makes ``reached`` true; whether it is. An infinite ``timeout_s`` is fine."""
        most_s = min(timeout_s, threading.TIMEOUT_MAX)  # the most that Python waits
        with self._mutex:
            return self._changed.wait_for(reached, most_s)

    # ---------------------------------------------------------------- the life of a job

    def begin(self, kind: type[J], blocks: Keyed, generations: Blocks) -> J | None:
        """Queue a job; ``None`` where there is no room for a further one, and then nothing has changed."""
        lock = self.table.lock
        try:
            with lock:
                job = kind(self, blocks, generations)
                has_room = True
                if not job.over:
                    with self._mutex:
                        has_room = self._has_room(job)
                if not has_room:
                    lock.count("jobs_refused")
                    lock.count(kind.refused, len(job.keys))
                    return None
                self._count(job)
                if job.over:  # nothing to do
                    return job
                job.stage()  # not under the mutex: it may wait for the device, and no other job can begin meanwhile
                with self._mutex:
                    self._changed.notify_all()  # first: threads look when the mutex is free, however this call ends
                    self._begun[job] = None
                    self._queue.append(job)
                lock.count("jobs_begun")
        finally:
            lock.log()
        return job

    def run(self, kind: type[J], blocks: Keyed, generations: Blocks) -> J:
        """A job that this thread carries itself, and that is over; it is listed meanwhile: a close waits for it."""
        job: J | None = None
        lock = self.table.lock
        try:
            with lock:
                job = kind(self, blocks, generations)
                self._count(job)
                if job.over:  # nothing to do
                    return job
                job.stage()
                lock.count("jobs_begun")
                with self._mutex:
                    job.phase = Phase.CARRYING
                    self._begun[job] = None
            self._carry(job)
        finally:  # even after an exception from a signal handler no listed job is without a thread
            if job is not None:
                if job.phase is Phase.CARRYING:  # which no other thread ends
                    job.phase = Phase.CARRIED
                self.land(job, deque())
            lock.log()
        return job

    def _count(self, job: AnyJob) -> None:
        self.own_keys.count(job.unresolved)
        self.table.lock.count("incomplete_blocks_not_persisted", job.incomplete)

    def _carry(self, job: AnyJob) -> None:
        try:
            job.carry()
        except BaseException as error:  # noqa: BLE001 (it is not lost: it comes with the job)
            job.failure = error.with_traceback(None)
        job.phase = Phase.CARRIED

    def cancel(self, job: AnyJob) -> None:
        """A job in the queue is carried by nobody; what another one brings is dropped."""
        with self._mutex:
            job.cancelled = job.cancelled or not job.over
            if job.phase is Phase.QUEUED:
                job.phase = Phase.CARRIED  # first: a job that a thread finds in the queue is not carried
                self._queue.remove(job)

    def land(self, job: AnyJob, landed: deque[AnyJob]) -> None:
        """Take in what a carried job has brought: it is over. If this call did so, the job is added to ``landed``."""
        if job.phase is not Phase.CARRIED:
            return
        with self.table.lock:
            if job.phase is not Phase.CARRIED:
                return
            try:
                job.land()
            finally:
                job.phase = Phase.LANDED
                self._begun.pop(job, None)  # and no call between these two, in which a signal handler may raise
                landed.append(job)
                job.staging = job.staging[:0].copy()
                with self._mutex:
                    self._changed.notify_all()

    # ---------------------------------------------------------------- threads

    def _has_room(self, job: AnyJob) -> bool:
        self._start_threads()
        n = len(self._begun)
        if not n:
            return True  # however large it is
        nbytes = job.nbytes
        for other in self._begun:
            nbytes += other.nbytes
        return n < self._limits.jobs_max and nbytes <= self._limits.nbytes_max

    def _start_threads(self) -> None:
        """Called before each job. If a process can have no more threads, those that run do the work."""
        while len(self._threads) < self._limits.threads_max:
            thread = threading.Thread(target=self._work, name="kvroute-store-job", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    return
                raise StorageError(f"no thread to ask the store: {error}") from error
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            with self._mutex:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                job = self._queue.popleft()
                if job.phase is not Phase.QUEUED:
                    continue
                job.phase = Phase.CARRYING
            self._carry(job)
            with self._mutex:
                self._changed.notify_all()
            del job  # an idle thread keeps no job alive

    def land_all(self) -> None:
        """Wait for every job, up to ``close_s``, and land it."""
        give_up_s = time.monotonic() + self._limits.close_s
        for job in self:
            job.wait(max(0.0, give_up_s - time.monotonic()))

    def end_threads(self) -> None:
        """End the threads when no job can begin any more; idempotent."""
        with self._mutex:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

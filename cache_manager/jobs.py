"""Blocks to the store and back, as jobs: the caller begins and lands them, a thread does the store's part.

A job works on a copy (*staging*): a persist stores the blocks' content at its begin, a restore lands in blocks that
have not changed since. So a store that hangs costs a thread and the bytes of its staging, and a failed or cancelled job
has changed nothing. A job is queued until a thread takes it, carried when the store has answered or failed, or when
it was cancelled in the queue, and landed at the next poll.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any, Generic, TypeVar

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.errors import BlockStateError, ConfigError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.lock import ProcessLock
from cache_manager.own_keys import Keyed, OwnKeys
from cache_manager.ports import Absence, KVBlocks
from cache_manager.publish import bits_in, bits_of, copies_of, have_all, have_none
from cache_manager.record import RecordHeader
from cache_manager.slots import Blocks, Flags, Ints
from cache_manager.storage.records import RecordStore
from cache_manager.table import BlockTable

_T = TypeVar("_T")


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
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, "an integer of 1 or more", repr(value))
        if not 0 <= self.close_s < float("inf"):
            raise ConfigError("close_s", "a finite number of seconds, 0 or more", self.close_s)


class Phase(Enum):
    QUEUED = "queued"
    CARRYING = "carrying"
    CARRIED = "carried"
    LANDED = "landed"


class Job(Generic[_T]):
    """The store's work for some blocks; ``keys`` and ``ids [n]`` are those that take part."""

    name: str
    no_answer: Any
    """The answer for a block that does not take part."""
    refused: str
    """The counter of blocks whose job had no room."""

    def __init__(self, jobs: Jobs, blocks: Keyed, generations: Blocks) -> None:
        """Lock held. A block in another life or a key of another namespace gets ``no_answer``. Nothing is counted yet:
        the job may be refused."""
        self.jobs = jobs
        self.table = jobs.table
        self.store = jobs.records()
        ids, lives, current, self.others = jobs.keys.resolve(self.table, blocks, generations)
        self.blocks = dict(blocks)
        self.begun_s = time.monotonic()
        self.cancelled = False
        self.failure: BaseException | None = None  # the store's; known once the job has been carried
        self.answers: dict[BlockKey, _T] = dict.fromkeys(blocks, self.no_answer)
        self.not_restored: dict[str, int] = {}
        """Blocks in the same life that did not come back, by the counter that says why; set on landing."""
        self.incomplete = 0
        """Current blocks that are not stored, because they lack something that is required."""
        which = self.wanted(ids, current)
        self.keys = list(compress(blocks, which.tolist()))
        self.ids = ids[which]
        self.lives = lives[which]
        self.drops = self.table.drops.take(self.ids)
        self.nbytes = len(self.keys) * jobs.keys.record.nbytes
        self.phase = Phase.QUEUED if self.keys else Phase.LANDED

    # What a kind of job does, in this order. The lock is held, but not in carry().

    def wanted(self, ids: Ints, current: Flags, /) -> Flags:
        """Which of the ``current`` blocks ``ids [n]`` take part."""
        raise NotImplementedError

    def stage(self) -> None:
        shape = (self.ids.size, self.jobs.keys.record.nbytes)
        self.staging = np.zeros(shape, np.uint8)

    def carry(self) -> None: ...
    def land(self) -> None: ...

    def staged_kv(self, kv: KVBlocks) -> NDArray[np.uint8]:
        """The part of the staging that KV takes, ``[n, kv.spec.block_nbytes]``."""
        first = self.table.layout.nbytes
        return self.staging[:, first : first + kv.spec.block_nbytes]

    # What callers do with a job.

    @property
    def over(self) -> bool:
        return self.phase is Phase.LANDED

    def poll(self) -> bool:
        """Land the job if the store's part is done; whether the job is over. Never waits for the store."""
        self.jobs.land(self, deque())
        return self.over

    def wait(self, timeout_s: float) -> bool:
        """:meth:`poll` as soon as that ends the job, or when ``timeout_s`` is over."""
        self.jobs.sleep(lambda: self.phase in (Phase.CARRIED, Phase.LANDED), timeout_s)
        return self.poll()

    def cancel(self) -> None:
        """Cancel the job. A queued job is over at once, another at the first poll after the store call has ended."""
        self.jobs.cancel(self)
        self.poll()

    def result(self) -> dict[BlockKey, _T]:
        """The answers by key. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        if not self.over:
            raise BlockStateError("job", "one that has landed", f"one that is {self.phase.value}")
        if self.failure is not None:
            raise self.failure
        return self.answers


class PersistJob(Job[int]):
    """Blocks on their way to the store. The answer: the origin now stored under the key, 0 for none."""

    name = "persist"
    no_answer = 0
    refused = "refused_blocks_not_persisted"

    def wanted(self, ids: Ints, current: Flags, /) -> Flags:
        whole = have_all(self.table.region, ids, self.jobs.required)
        if self.jobs.kv is None:
            whole &= ~have_none(self.table.region, ids)  # nothing is required, and nothing is there
        else:
            whole &= self.table.fillable(ids)  # KV that is being copied, or written by a pass, is not whole yet
        self.incomplete = int(count(current & ~whole))
        return current & whole

    def stage(self) -> None:
        table = self.table
        kv = self.jobs.kv
        table.fix_origins(self.ids)
        words = bits_of(table.region, self.ids)
        copies = copies_of(table.region, self.ids, words)
        if kv is None:
            self.staging = copies
        else:
            super().stage()
            self.staging[:, : table.layout.nbytes] = copies
            kv.take(self.ids, self.staged_kv(kv))
            shape = (self.ids.size, 1, words.shape[2])
            whole = np.broadcast_to(table.full, shape)
            words = np.append(words, whole, axis=1)
        self.valid = words.astype("<u8")
        self.origins = table.origin.take(self.ids)

    def carry(self) -> None:
        views = [row.data for row in self.staging]
        valid = [words.tobytes() for words in self.valid]
        lives = self.lives.tolist()
        origins = self.origins.tolist()
        parts: tuple[Any, ...] = (self.keys, views, valid, lives, origins)
        headers = self.store.put(*parts)
        less: list[int] = []
        for i, header in enumerate(headers):
            if header and header.valid != valid[i] and self._lacks(header):
                less.append(i)
        if less:
            again = ([part[i] for i in less] for part in parts)
            replaced = self.store.put(*again, replace=True)
            for i, header in zip(less, replaced, strict=True):
                headers[i] = header
        for key, header in zip(self.keys, headers, strict=True):
            if header:
                self.answers[key] = header.origin

    def _lacks(self, header: RecordHeader) -> bool:
        """Whether an engine with fewer required specs has stored less than we need. Such a record would never be a hit
        here, so ours takes its place."""
        bits = bits_in(header.valid, self.table.region)[self.jobs.required, :]
        return bool((bits != self.table.full).any())

    def land(self) -> None:
        persisted = sum(origin != 0 for origin in self.answers.values())
        self.table.lock.count("persisted_blocks", persisted)


class RestoreJob(Job[bool]):
    """Blocks on their way from the store. The answer: whether the block's rows have come back."""

    name = "restore"
    no_answer = False
    refused = "refused_blocks_not_restored"
    found: Sequence[RecordHeader | Absence] = ()

    def wanted(self, ids: Ints, current: Flags, /) -> Flags:
        return current & self.table.slots.known(ids)[1]  # a block is filled once

    def carry(self) -> None:
        if not self.cancelled:
            buffers = [row.data for row in self.staging]
            self.found = self.store.get_into(self.keys, buffers)

    def land(self) -> None:
        """Make the read records readable in blocks

        * that nothing was done to since the begin, or is being done;
        * that have no readable row, and no origin of their own;
        * whose KV is of the record's origin, or of none that is known;
        * of which the record has every row that is required.
        """
        table = self.table
        kv = self.jobs.kv
        ids = self.ids
        unchanged = (table.drops.take(ids) == self.drops) & table.fillable(ids)
        unchanged &= have_none(table.region, ids) & ~table.own.take(ids)
        unchanged &= not self.cancelled
        _, specs, words = table.region.valid.shape
        bits = np.zeros((ids.size, specs, words), np.uint64)
        origins = np.zeros(ids.size, np.uint64)
        corrupt = np.zeros(ids.size, np.bool_)
        for i, each in enumerate(self.found):
            if isinstance(each, RecordHeader):
                origins[i] = each.origin
                bits[i] = bits_in(each.valid, table.region)
            corrupt[i] = each is Absence.CORRUPT
        known = table.origin.take(ids)  # of the KV, where the engine has named it
        is_taken = (known == 0) | (known == origins)
        arrived = unchanged & (origins != 0) & is_taken
        required = bits[:, self.jobs.required, :]
        arrived &= (required == table.full).all(axis=(1, 2))
        interrupted = False
        try:
            if kv is not None and count(arrived):
                kv.fill(ids[arrived], self.staged_kv(kv)[arrived])
            records = self.staging[arrived, : table.layout.nbytes]
            table.fill(ids[arrived], records, bits[arrived], origins[arrived])
        except BaseException as error:  # noqa: BLE001 (it is not lost: it comes with the result)
            self.failure = error.with_traceback(None)
            interrupted = not isinstance(error, Exception)
            table.lose(ids[arrived])  # their KV is half written, so it is of no origin that others know
            arrived[:] = False
        self.answers.update(zip(self.keys, arrived.tolist(), strict=True))
        missing = unchanged & ~arrived
        if self.failure is not None:
            lost = {"failed_blocks_not_restored": missing}
        else:
            lost = {"corrupt_blocks_not_restored": missing & corrupt, "absent_blocks_not_restored": missing & ~corrupt}
        for why, which in lost.items():
            if count(which):
                self.not_restored[why] = int(count(which))
        counts = {
            "restored_blocks": int(count(arrived)),
            "late_restores_dropped": int(count((origins != 0) & ~unchanged)),
        }
        for name, n in (self.not_restored | counts).items():
            table.lock.count(name, n)
        if interrupted and self.failure is not None:
            raise self.failure


AnyJob = Job[Any]
J = TypeVar("J", bound=AnyJob)


class Jobs:
    """The jobs of a set of blocks that have begun and not landed, in the order in which they began; any of them may be
    cancelled. Up to ``threads_max`` threads carry them.

    ``required`` are the specs whose rows a block must have; ``kv`` goes along with rows. The blocks' lock, which
    guards what has begun, is taken before the mutex, which guards the queue and the phases of the jobs in it.
    """

    def __init__(
        self,
        table: BlockTable,
        keys: OwnKeys,
        store: RecordStore | None,
        *,
        required: Sequence[int],
        kv: KVBlocks | None,
        limits: JobLimits,
    ) -> None:
        self.table = table
        self.keys = keys
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
            begun = list(self._begun)  # a copy, as jobs may land meanwhile
            return bool(self._polled) or not begun or any(job.phase is Phase.CARRIED for job in begun)

        return self.sleep(has_news, timeout_s)

    def sleep(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until a change of some job makes ``reached`` true; whether it is."""
        with self._mutex:
            return self._changed.wait_for(reached, timeout_s)

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
                    self._begun[job] = None
                    self._queue.append(job)
                    self._changed.notify_all()
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
                job.poll()
            lock.log()
        return job

    def _count(self, job: AnyJob) -> None:
        self.keys.count(job.others)
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
        nbytes = sum(other.nbytes for other in self._begun) + job.nbytes
        return n < self._limits.jobs_max and (not n or nbytes <= self._limits.nbytes_max)

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

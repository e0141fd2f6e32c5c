"""Blocks to the store and back, as jobs: begun and landed under the lock, moved without it.

A job has a lease of its own on its blocks, so that whoever else holds them may let go meanwhile: they come back when
the job has landed, and not before. Rows and whatever else the mover carries go by one call of the mover. A job that is
*queued* is carried by a thread of the runner's and landed by whoever polls it; any other is carried and landed by the
thread that asks, before it gets the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.books import Books
from cache_manager.errors import StorageError
from cache_manager.jobs import Job, JobRunner, Phase
from cache_manager.keys import BlockKey
from cache_manager.lifecycle import Event
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy, Mover
from cache_manager.records import LifeClaim
from cache_manager.table import BlockTable, Ints


@dataclass(frozen=True, slots=True)
class Archive:
    """What the jobs of one set of blocks share; ``required`` are spec indices."""

    table: BlockTable
    books: Books
    runner: JobRunner
    required: tuple[int, ...]

    def live(self, blocks: Mapping[BlockKey, int], ids: Ints, claim: LifeClaim) -> tuple[list[BlockKey], Ints]:
        """The keys of the current namespace and their ``ids`` in the life that is meant; the lock is held."""
        live = claim.live(self.table, ids)
        ours = np.array([self.books.keys.owns(key) for key in blocks], np.bool_)
        self.books.count("stale_keys", int(count(~ours)))
        self.books.count("stale_blocks", int(count(~live)))
        good = live & ours
        return [key for key, fine in zip(blocks, good.tolist(), strict=True) if fine], ids[good]

    def admits(self, job: Job) -> bool:
        """Whether there is room for a job to be queued; it is counted when there is none. The lock is held."""
        admitted = job.phase is Phase.LANDED or self.runner.reserve(job)
        self.books.count("jobs_refused", int(not admitted))
        return admitted

    def send(self, job: Job, *, queued: bool) -> None:
        """Let a thread carry the job, or carry and land it here."""
        if job.phase is Phase.LANDED:
            return
        if queued:
            self.runner.start(job)
        else:
            self.runner.carry(job)
            job.poll()


@dataclass(frozen=True, slots=True)
class MoverArchive(Archive):
    """For blocks that a job keeps, and that ``mover`` stores and fills where they lie; see :class:`AuxBlocks`."""

    mover: Mover
    policy: HitPolicy

    def begin_persist(self, blocks: Mapping[BlockKey, int], claim: LifeClaim, *, queued: bool) -> PersistJob | None:
        """See :meth:`AuxBlocks.begin_persist`."""
        table = self.table
        with self.books.guard:
            keys, ids = self.live(blocks, table.ids(list(blocks.values())), claim)
            complete = table.complete(ids, self.required)
            self.books.count("incomplete_blocks_not_persisted", int(count(~complete)))
            if self.policy == "gate":  # nothing of a block that misses required rows is stored
                keys = [key for key, whole in zip(keys, complete.tolist(), strict=True) if whole]
                ids = ids[complete]
            job = PersistJob(self, "persist", list(blocks), keys, ids)
            table.check_no_step(ids, "store it")
            table.check(Event.BEGIN_DEPARTURE, ids)
            if queued and not self.admits(job):
                return None
            table.begin_departure(ids)
            job.begin()
        self.send(job, queued=queued)
        return job

    def begin_restore(
        self, blocks: Mapping[BlockKey, int], claim: LifeClaim, origins: Mapping[BlockKey, int] | None, *, queued: bool
    ) -> RestoreJob | None:
        """See :meth:`AuxBlocks.begin_restore`."""
        table = self.table
        with self.books.guard:
            keys, ids = self.live(blocks, table.ids(list(blocks.values())), claim)
            job = RestoreJob(self, list(blocks), keys, ids, origins)
            table.check_no_step(ids, "restore it")
            table.check(Event.BEGIN_ARRIVAL, ids)
            table.check_empty(ids)
            if queued and not self.admits(job):
                return None
            table.begin_arrival(ids)
            job.begin()
        self.send(job, queued=queued)
        return job


class StoreJob(Job):
    """A job for some blocks of one :class:`MoverArchive`; ``wanted`` are all the keys that the caller named."""

    __slots__ = ("_archive", "_generations", "_ids", "_keys", "_wanted")

    def __init__(
        self, archive: MoverArchive, what: str, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints
    ) -> None:
        name, nbytes = f"{what} of {len(wanted)} blocks", len(keys) * archive.table.layout.nbytes
        super().__init__(archive.runner, archive.books.guard, name, nbytes, Phase.QUEUED if keys else Phase.LANDED)
        self._archive = archive
        self._wanted, self._keys, self._ids = wanted, keys, ids

    @property
    def blocks(self) -> Ints:
        """The blocks that the job keeps from being given away until it has landed."""
        return self._ids

    def begin(self) -> None:
        """The blocks are in motion, and the job's: the lock is held."""
        table, books = self._archive.table, self._archive.books
        self._generations = table.generations.take(self._ids)
        if self._keys:
            table.leases.acquire(self, self._ids, stays=True)
            books.count("jobs_begun")
            books.jobs += 1

    def _let_go(self) -> None:
        """The job holds nothing any more; its blocks are in motion still, and the lock is held."""
        table, books = self._archive.table, self._archive.books
        table.release(self)
        books.count("jobs_landed")
        books.jobs -= 1
        books.count("jobs_cancelled", int(self.cancelled))


class PersistJob(StoreJob):
    """Blocks on their way to the store. :meth:`result`: by key, the origin that is stored now, 0 for none."""

    __slots__ = ("_origins", "_stored", "_valid")

    def begin(self) -> None:
        super().begin()
        table = self._archive.table
        self._origins: list[int] = table.origin.take(self._ids).tolist()
        self._valid = [words.astype("<u8").tobytes() for words in table.region.valid[self._ids]]
        self._stored: list[Found | None] = []

    def result(self) -> dict[BlockKey, int]:
        """The caller's own. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        self._check_over()
        return self.stored()

    def stored(self) -> dict[BlockKey, int]:
        """As :meth:`result`, without raising: what is stored so far as is known."""
        found = dict.fromkeys(self._wanted, 0)
        found.update((key, each.origin) for key, each in zip(self._keys, self._stored, strict=False) if each)
        return found

    def _carry(self) -> None:
        records = BlockRecords(self._keys, self._ids.tolist(), self._origins, self._valid, self._generations.tolist())
        stored = self._archive.mover.put(records)
        if len(stored) != len(self._keys):
            raise StorageError(f"the mover answered {len(stored)} of {len(self._keys)} keys")
        self._stored = stored

    def _land(self) -> None:
        self._let_go()
        self._archive.table.end_departure(self._ids)
        self._archive.books.count("persisted_blocks", sum(each is not None for each in self._stored))


class RestoreJob(StoreJob):
    """Blocks on their way from the store. :meth:`result`: by key, whether the block has come back."""

    __slots__ = ("_arrived", "_found", "_origins")

    def __init__(
        self,
        archive: MoverArchive,
        wanted: list[BlockKey],
        keys: list[BlockKey],
        ids: Ints,
        origins: Mapping[BlockKey, int] | None,
    ) -> None:
        super().__init__(archive, "restore", wanted, keys, ids)
        self._origins = None if origins is None else np.array([origins.get(key, 0) for key in keys], np.uint64)
        self._found: Sequence[Found | Absence] = []
        self._arrived: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)

    def result(self) -> dict[BlockKey, bool]:
        """The caller's own. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        self._check_over()
        return self.restored()

    def restored(self) -> dict[BlockKey, bool]:
        """As :meth:`result`, without raising."""
        found = dict.fromkeys(self._wanted, False)
        found.update(zip(self._keys, self._arrived.tolist(), strict=True))
        return found

    def _carry(self) -> None:
        if self.cancelled:
            return
        found = self._archive.mover.get_into(self._keys, self._ids.tolist())
        if len(found) != len(self._keys):
            raise StorageError(f"the mover answered {len(found)} of {len(self._keys)} keys")
        self._found = found

    def _land(self) -> None:
        """Make readable what was read for blocks still in the life it was read for."""
        table, books, cancelled = self._archive.table, self._archive.books, self.cancelled
        arrived = np.zeros(self._ids.size, np.bool_)
        try:
            read = np.zeros(self._ids.size, np.bool_)
            read[: len(self._found)] = [isinstance(each, Found) for each in self._found]
            if cancelled:
                books.count("cancelled_restores_dropped", int(count(read)))
            elif self._failure is None:
                arrived = self._readable(read)
        finally:
            self._arrived = arrived
            self._let_go()
            lost = self._ids[~arrived]
            table.carry_origin(lost, np.zeros(lost.size, np.uint64))  # whatever is in there now
            table.end_arrival(self._ids[arrived], arrived=True)
            table.end_arrival(lost, arrived=False)

    def _readable(self, read: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Publish what came; which blocks have come back. The lock is held."""
        archive, table, books = self._archive, self._archive.table, self._archive.books
        origins = np.zeros(self._ids.size, np.uint64)
        bits = np.zeros((self._ids.size, *table.region.valid.shape[1:]), np.uint64)
        for i, each in enumerate(self._found):
            if isinstance(each, Found):
                origins[i] = each.origin
                if each.valid:
                    bits[i] = np.frombuffer(each.valid, "<u8").reshape(bits.shape[1:])
        live = table.generations.take(self._ids) == self._generations
        expected = origins != 0 if self._origins is None else (origins == self._origins) & (origins != 0)
        whole = (bits[:, archive.required, :] == table.full).all(axis=(1, 2))
        if archive.policy == "mask":
            whole[:] = True
        arrived: NDArray[np.bool_] = read & live & expected & whole
        table.region.valid[self._ids[arrived]] = bits[arrived]
        table.carry_origin(self._ids[arrived], origins[arrived])
        other = sum(each is Absence.ORIGIN for each in self._found) + int(count(read & live & ~expected))
        books.count("blocks_of_another_origin_not_restored", other)
        books.count("restored_blocks", int(count(arrived)))
        books.count("late_restores_dropped", int(count(read & ~live)))
        books.count("incomplete_blocks_not_restored", int(count(read & live & expected & ~whole)))
        return arrived


__all__ = ["Archive", "MoverArchive", "PersistJob", "RestoreJob", "StoreJob"]

"""Blocks to the store and back, as jobs: begun and landed under the lock, moved without it.

A job has a lease of its own on its blocks, so that whoever else holds them may let go meanwhile: they come back when
the job has landed, and not before. Rows and whatever else the mover carries go by one call of the mover. A job that is
*queued* is carried by a thread of the runner's and landed by whoever polls it; any other is carried and landed by the
thread that asks, before it gets the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.books import Books
from cache_manager.jobs import Job, JobRunner, Phase
from cache_manager.keys import BlockKey
from cache_manager.lifecycle import Event
from cache_manager.memory import bits_of, put_bits
from cache_manager.mover import one_each
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy, Mover
from cache_manager.records import LifeClaim
from cache_manager.table import BlockTable, Ints

J = TypeVar("J", bound="StoreJob")


@dataclass(frozen=True, slots=True)
class Archive:
    """What the jobs of one set of blocks share; ``required`` are spec indices, ``mover`` stores and fills blocks."""

    table: BlockTable
    books: Books
    runner: JobRunner
    required: tuple[int, ...]
    mover: Mover
    policy: HitPolicy

    def begin_persist(self, blocks: Mapping[BlockKey, int], claim: LifeClaim, *, queued: bool) -> PersistJob | None:
        """See :meth:`AuxBlocks.begin_persist`."""
        with self.books.guard:
            keys, ids = self._live(blocks, claim)
            whole = self.table.complete(ids, self.required)
            self.books.count("incomplete_blocks_not_persisted", int(count(~whole)))
            if self.policy == "gate":  # nothing of a block that misses required rows is stored
                keys, ids = list(compress(keys, whole.tolist())), ids[whole]
            job = self._persist_job(list(blocks), keys, ids)
            begun = self._begin(job, queued=queued)
        return self._send(job, queued=queued) if begun else None

    def begin_restore(
        self, blocks: Mapping[BlockKey, int], claim: LifeClaim, origins: Mapping[BlockKey, int] | None, *, queued: bool
    ) -> RestoreJob | None:
        """See :meth:`AuxBlocks.begin_restore`."""
        with self.books.guard:
            keys, ids = self._live(blocks, claim)
            job = self._restore_job(list(blocks), keys, ids)
            job.expected = None if origins is None else np.array([origins.get(key, 0) for key in keys], np.uint64)
            begun = self._begin(job, queued=queued)
        return self._send(job, queued=queued) if begun else None

    def _persist_job(self, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints) -> PersistJob:
        return PersistJob(self, "persist", wanted, keys, ids)

    def _restore_job(self, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints) -> RestoreJob:
        return RestoreJob(self, "restore", wanted, keys, ids)

    def _ids(self, blocks: Mapping[BlockKey, int]) -> Ints:
        return self.table.ids(list(blocks.values()))

    def _live(self, blocks: Mapping[BlockKey, int], claim: LifeClaim) -> tuple[list[BlockKey], Ints]:
        """The keys of the current namespace and their blocks in the life that is meant; the lock is held."""
        ids = self._ids(blocks)
        live = claim.live(self.table, ids)
        ours = np.array([self.books.keys.owns(key) for key in blocks], np.bool_)
        self.books.count("stale_keys", int(count(~ours)))
        self.books.count("stale_blocks", int(count(~live)))
        return list(compress(blocks, (live & ours).tolist())), ids[live & ours]

    def _begin(self, job: StoreJob, *, queued: bool) -> bool:
        """Whether there is room for a job to be queued; then it has its blocks. The lock is held."""
        job.check()
        if job.phase is Phase.LANDED:
            return True
        if queued and not self.runner.reserve(job):
            self.books.count("jobs_refused")
            return False
        job.begin()
        self.books.count("jobs_begun")
        self.books.jobs += 1
        return True

    def _send(self, job: J, *, queued: bool) -> J:
        """Let a thread carry the job, or carry and land it here."""
        if job.phase is not Phase.LANDED:
            if queued:
                self.runner.start(job)
            else:
                self.runner.carry(job)
                job.poll()
        return job


class StoreJob(Job):
    """A job for some blocks of one :class:`Archive`; ``wanted`` are all the keys that the caller named."""

    __slots__ = ("_archive", "_at", "_generations", "_ids", "_keys", "_mover", "_wanted")

    def __init__(self, archive: Archive, what: str, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints) -> None:
        name, nbytes = f"{what} of {len(wanted)} blocks", len(keys) * archive.table.layout.nbytes
        super().__init__(archive.runner, archive.books.guard, name, nbytes, Phase.QUEUED if keys else Phase.LANDED)
        self._archive, self._wanted, self._keys, self._ids = archive, wanted, keys, ids
        self._mover, self._at = archive.mover, ids  # what moves the records, and where they are to it
        self._generations = archive.table.generations.take(ids)

    def check(self) -> None:
        """Raise unless the blocks may be had; the lock is held, here and below."""

    def begin(self) -> None:
        """Take the blocks: they are in motion, and the job's."""
        self._archive.table.leases.acquire(self, self._ids, stays=True)

    def _land(self) -> None:
        """The job holds nothing any more; its blocks are in motion still."""
        books = self._archive.books
        self._archive.table.release(self)
        books.count("jobs_landed")
        books.count("jobs_cancelled", int(self.cancelled))
        books.jobs -= 1


class PersistJob(StoreJob):
    """Blocks on their way to the store. :meth:`result`: by key, the origin that is stored now, 0 for none."""

    __slots__ = ("_origins", "_stored", "_valid")

    def __init__(self, archive: Archive, what: str, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints) -> None:
        super().__init__(archive, what, wanted, keys, ids)
        self._stored: Sequence[Found | None] = []

    def check(self) -> None:
        self._archive.table.check_no_step(self._ids, "store it")
        self._archive.table.check(Event.BEGIN_DEPARTURE, self._ids)

    def begin(self) -> None:
        self._archive.table.begin_departure(self._ids)
        super().begin()
        self._note()

    def _note(self) -> None:
        """What is put is as it is now."""
        table = self._archive.table
        self._origins: list[int] = table.origin.take(self._ids).tolist()
        self._valid = [words.astype("<u8").tobytes() for words in bits_of(table.region, self._ids)]

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
        records = BlockRecords(self._keys, self._at.tolist(), self._origins, self._valid, self._generations.tolist())
        self._stored = one_each(self._mover.put(records), self._keys)

    def _land(self) -> None:
        super()._land()
        self._let_go()
        self._archive.books.count("persisted_blocks", sum(each is not None for each in self._stored))

    def _let_go(self) -> None:
        self._archive.table.end_departure(self._ids)


class RestoreJob(StoreJob):
    """Blocks on their way from the store. :meth:`result`: by key, whether the block has come back."""

    __slots__ = ("_arrived", "_found", "expected")

    def __init__(self, archive: Archive, what: str, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints) -> None:
        super().__init__(archive, what, wanted, keys, ids)
        self.expected: NDArray[np.uint64] | None = None  # the origins that count, where the caller has said so
        self._found: Sequence[Found | Absence] = []
        self._arrived: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)

    def check(self) -> None:
        table = self._archive.table
        table.check_no_step(self._ids, "restore it")
        table.check(Event.BEGIN_ARRIVAL, self._ids)
        table.check_empty(self._ids)

    def begin(self) -> None:
        self._archive.table.begin_arrival(self._ids)
        super().begin()
        self._generations = self._archive.table.generations.take(self._ids)

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
        if not self.cancelled:
            self._found = one_each(self._mover.get_into(self._keys, self._at.tolist()), self._keys)

    def _land(self) -> None:
        """Make readable what was read for blocks still in the life it was read for."""
        arrived = np.zeros(self._ids.size, np.bool_)
        try:
            if self.cancelled:
                read = sum(isinstance(each, Found) for each in self._found)
                self._archive.books.count("cancelled_restores_dropped", read)
            elif self._found and self._failure is None:
                arrived = self._place()
        finally:
            self._arrived = arrived
            super()._land()
            self._let_go()

    def _let_go(self) -> None:
        table, lost = self._archive.table, self._ids[~self._arrived]
        table.carry_origin(lost, np.zeros(lost.size, np.uint64))  # whatever is in there now
        table.end_arrival(self._ids[self._arrived], arrived=True)
        table.end_arrival(lost, arrived=False)

    def _live(self) -> NDArray[np.bool_]:
        """Which blocks are in the life that the rows were read for."""
        live: NDArray[np.bool_] = self._archive.table.generations.take(self._ids) == self._generations
        return live

    def _named(self, origins: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of ``origins`` are those that belong there."""
        named: NDArray[np.bool_] = origins != 0
        return named if self.expected is None else named & (origins == self.expected)

    def _place(self) -> NDArray[np.bool_]:
        """Publish what came; which blocks have come back."""
        archive, table, books = self._archive, self._archive.table, self._archive.books
        read = np.array([isinstance(each, Found) for each in self._found])
        origins = np.zeros(read.size, np.uint64)
        bits = np.zeros((read.size, *table.region.valid.shape[1:]), np.uint64)
        for i, each in enumerate(self._found):
            if isinstance(each, Found):
                origins[i] = each.origin
                if each.valid:
                    bits[i] = np.frombuffer(each.valid, "<u8").reshape(bits.shape[1:])
        live, named = self._live(), self._named(origins)
        whole = (bits[:, archive.required, :] == table.full).all(axis=(1, 2)) | (archive.policy == "mask")
        arrived: NDArray[np.bool_] = read & live & named & whole
        self._fill(arrived)
        put_bits(table.region, self._ids[arrived], bits[arrived])
        table.carry_origin(self._ids[arrived], origins[arrived])
        other = sum(each is Absence.ORIGIN for each in self._found) + int(count(read & live & ~named))
        books.count("blocks_of_another_origin_not_restored", other)
        books.count("restored_blocks", int(count(arrived)))
        books.count("late_restores_dropped", int(count(read & ~live)))
        books.count("incomplete_blocks_not_restored", int(count(read & live & named & ~whole)))
        return arrived

    def _fill(self, arrived: NDArray[np.bool_]) -> None:
        """Put the bytes of what has arrived in place: the mover has."""


__all__ = ["Archive", "PersistJob", "RestoreJob", "StoreJob"]

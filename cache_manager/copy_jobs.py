"""Persist and restore for blocks that an engine owns: by copy, so that nothing is pinned while the store works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.jobs import Job, Phase
from cache_manager.keys import BlockKey
from cache_manager.lifecycle import State
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader
from cache_manager.records import LifeClaim
from cache_manager.storage.records import RecordStore
from cache_manager.store_jobs import Archive
from cache_manager.table import Blocks, Ints


@dataclass(frozen=True, slots=True)
class CopyArchive(Archive):
    """For blocks that nothing keeps, and whose rows are copied to and from ``records``; see :class:`EngineBlocks`."""

    records: RecordStore

    def begin_persist(
        self, blocks: Mapping[BlockKey, int], generations: Blocks, *, queued: bool
    ) -> CopyPersistJob | None:
        """See :meth:`EngineBlocks.begin_persist`."""
        with self.books.guard:
            keys, ids, lives = self._living(blocks, generations)
            complete = self.table.complete(ids, self.required)
            self.books.count("incomplete_blocks_not_persisted", int(count(~complete)))
            keys = [key for key, whole in zip(keys, complete.tolist(), strict=True) if whole]
            job = CopyPersistJob(self, "persist", list(blocks), keys, ids[complete], lives[complete])
            if queued and not self.admits(job):
                return None
            job.begin()
        self.send(job, queued=queued)
        return job

    def begin_restore(
        self,
        blocks: Mapping[BlockKey, int],
        generations: Blocks,
        origins: Mapping[BlockKey, int] | None,
        *,
        queued: bool,
    ) -> CopyRestoreJob | None:
        """See :meth:`EngineBlocks.begin_restore`."""
        with self.books.guard:
            keys, ids, lives = self._living(blocks, generations)
            job = CopyRestoreJob(self, "restore", list(blocks), keys, ids, lives)
            job.expected = None if origins is None else np.array([origins.get(key, 0) for key in keys], np.uint64)
            if queued and not self.admits(job):
                return None
            job.begin()
        self.send(job, queued=queued)
        return job

    def _living(self, blocks: Mapping[BlockKey, int], generations: Blocks) -> tuple[list[BlockKey], Ints, Ints]:
        """The keys of this namespace, their blocks in the lives that are meant, and those lives. The lock is held."""
        ids = self.table.ids_often(list(blocks.values()))
        keys, ids = self.live(blocks, ids, LifeClaim(None, generations, len(blocks)))
        return keys, ids, self.table.generations.take(ids)


class CopyJob(Job):
    """A job that works on a copy ``[n, record bytes]`` of its blocks' rows."""

    __slots__ = ("_archive", "_copy", "_ids", "_keys", "_lives", "_wanted")

    def __init__(
        self, archive: CopyArchive, what: str, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints, lives: Ints
    ) -> None:
        name, nbytes = f"{what} of {len(wanted)} blocks", len(keys) * archive.table.layout.nbytes
        super().__init__(archive.runner, archive.books.guard, name, nbytes, Phase.QUEUED if keys else Phase.LANDED)
        self._archive, self._wanted, self._keys = archive, wanted, keys
        self._ids, self._lives = ids, lives

    def begin(self) -> None:
        """Make the copy; the lock is held."""
        if self._keys:
            self._copy = self._copied()
            self._archive.books.count("jobs_begun")
            self._archive.books.jobs += 1

    def _copied(self) -> NDArray[np.uint8]:
        return np.empty((self._ids.size, self._archive.table.layout.nbytes), np.uint8)

    def _buffers(self) -> list[memoryview]:
        return [row.data for row in self._copy]

    def _land(self) -> None:
        books = self._archive.books
        books.count("jobs_landed")
        books.count("jobs_cancelled", int(self.cancelled))
        books.jobs -= 1


class CopyPersistJob(CopyJob):
    """Copied rows on their way to the store. :meth:`result`: by key, the origin that is stored now, 0 for none."""

    __slots__ = ("_origins", "_stored", "_valid")

    def _copied(self) -> NDArray[np.uint8]:
        table = self._archive.table
        table.seal(self._ids)
        self._origins: list[int] = table.origin.take(self._ids).tolist()
        self._valid = [words.astype("<u8").tobytes() for words in table.region.valid[self._ids]]
        self._stored: list[RecordHeader | None] = []
        return np.ascontiguousarray(table.region.rows[self._ids])

    def result(self) -> dict[BlockKey, int]:
        """The caller's own. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        self._check_over()
        found = dict.fromkeys(self._wanted, 0)
        if self._keys:
            found.update((key, each.origin) for key, each in zip(self._keys, self._stored, strict=False) if each)
        return found

    def _carry(self) -> None:
        self._stored = self._archive.records.put(
            self._keys, self._buffers(), self._valid, self._lives.tolist(), self._origins
        )

    def _land(self) -> None:
        super()._land()
        del self._copy
        self._archive.books.count("persisted_blocks", sum(each is not None for each in self._stored))


class CopyRestoreJob(CopyJob):
    """Rows on their way from the store. :meth:`result`: by key, whether the block's rows have come back."""

    __slots__ = ("_arrived", "_found", "_lapses", "expected")

    expected: NDArray[np.uint64] | None

    def begin(self) -> None:
        super().begin()
        table = self._archive.table
        table.awaited += bool(self._keys)
        self._lapses = table.lapses.take(self._ids)
        self._found: list[RecordHeader | Absence] = []
        self._arrived: NDArray[np.bool_] = np.zeros(len(self._keys), np.bool_)

    def result(self) -> dict[BlockKey, bool]:
        """The caller's own. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        self._check_over()
        found = dict.fromkeys(self._wanted, False)
        found.update(zip(self._keys, self._arrived.tolist(), strict=True))
        return found

    def _carry(self) -> None:
        if not self.cancelled:
            self._found = self._archive.records.get_into(self._keys, self._buffers())

    def _land(self) -> None:
        cancelled = self.cancelled
        super()._land()
        self._archive.table.awaited -= 1
        if self._found and not cancelled and self._failure is None:
            self._place()
        elif cancelled:
            read = sum(isinstance(header, RecordHeader) for header in self._found)
            self._archive.books.count("cancelled_restores_dropped", read)
        del self._copy

    def _place(self) -> None:
        """Put what came into the blocks that are in the life and the state that it was read for. The lock is held."""
        archive, table, books, ids = self._archive, self._archive.table, self._archive.books, self._ids
        origins, bits = np.zeros(ids.size, np.uint64), np.zeros((ids.size, *table.region.valid.shape[1:]), np.uint64)
        for i, header in enumerate(self._found):
            if isinstance(header, RecordHeader):
                origins[i] = header.origin
                bits[i] = np.frombuffer(header.valid, "<u8").reshape(bits.shape[1:])
        read = origins != 0
        live = (table.generations.take(ids) == self._lives) & (table.states.take(ids) == State.HELD)
        live &= table.lapses.take(ids) == self._lapses  # no reset, no gap of a feed, no copy over it
        live &= table.empty(ids) & ~table.own.take(ids) & ~table.busy(ids) & ~table.busy(ids, in_place=True)
        known = table.origin.take(ids)  # of the KV, where somebody has said so
        named = (known == 0) | (known == origins)
        if self.expected is not None:
            named &= self.expected == origins
        whole = (bits[:, archive.required, :] == table.full).all(axis=(1, 2))
        self._arrived = read & live & named & whole
        to = ids[self._arrived]
        table.region.rows[to] = self._copy[self._arrived]
        table.region.valid[to] = bits[self._arrived]
        table.carry_origin(to, origins[self._arrived])
        books.count("restored_blocks", int(count(self._arrived)))
        books.count("late_restores_dropped", int(count(read & ~live)))
        books.count("blocks_of_another_origin_not_restored", int(count(read & live & ~named)))
        books.count("incomplete_blocks_not_restored", int(count(read & live & named & ~whole)))


__all__ = ["CopyArchive", "CopyJob", "CopyPersistJob", "CopyRestoreJob"]

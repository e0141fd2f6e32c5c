"""Persist and restore for blocks that an engine owns: by copy, so that nothing is pinned while the store works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.lifecycle import State
from cache_manager.mover import RowsMover
from cache_manager.spec import RecordLayout
from cache_manager.storage.records import RecordStore
from cache_manager.store_jobs import Archive, PersistJob, RestoreJob
from cache_manager.table import Ints


@dataclass(frozen=True, slots=True)
class CopyArchive(Archive):
    """For blocks that nothing keeps, and whose rows are copied to and from ``records``; see :class:`EngineBlocks`."""

    records: RecordStore | None

    def _persist_job(self, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints) -> PersistJob:
        return CopyPersistJob(self, "persist", wanted, keys, ids)

    def _restore_job(self, wanted: list[BlockKey], keys: list[BlockKey], ids: Ints) -> RestoreJob:
        return CopyRestoreJob(self, "restore", wanted, keys, ids)

    def _ids(self, blocks: Mapping[BlockKey, int]) -> Ints:
        return self.table.ids_often(list(blocks.values()))

    def over(self, rows: NDArray[np.uint8]) -> tuple[RowsMover, Ints]:
        """What moves records ``rows`` ``[n, layout.nbytes]`` that are no blocks, and their places to it."""
        return RowsMover(Copies(self.table.layout, rows), None, self.records), np.arange(len(rows))


@dataclass(slots=True)
class Copies:
    """Records of blocks, one after the other."""

    layout: RecordLayout
    rows: NDArray[np.uint8]


class CopyPersistJob(PersistJob):
    """Copied rows on their way to the store."""

    __slots__ = ()
    _archive: CopyArchive

    def check(self) -> None: ...

    def begin(self) -> None:
        table = self._archive.table
        table.seal(self._ids)
        self._note()
        self._mover, self._at = self._archive.over(table.region.rows[self._ids])

    def _let_go(self) -> None:
        del self._mover


class CopyRestoreJob(RestoreJob):
    """Rows on their way from the store. :meth:`result`: by key, whether the block's rows have come back."""

    __slots__ = ("_copied", "_lapses")
    _archive: CopyArchive

    def check(self) -> None: ...

    def begin(self) -> None:
        table = self._archive.table
        self._lapses = table.lapses.take(self._ids)
        self._copied = np.empty((self._ids.size, table.layout.nbytes), np.uint8)
        self._mover, self._at = self._archive.over(self._copied)

    def _let_go(self) -> None:
        del self._copied, self._mover

    def _live(self) -> NDArray[np.bool_]:
        """As for blocks that are kept; and nobody has filled, written or given up what was to come."""
        table, ids = self._archive.table, self._ids
        live: NDArray[np.bool_] = super()._live() & (table.states.take(ids) == State.HELD)
        live &= table.lapses.take(ids) == self._lapses  # no reset, no gap of a feed, no copy over it
        live &= table.empty(ids) & ~table.own.take(ids) & ~table.busy(ids)
        return live

    def _named(self, origins: NDArray[np.uint64]) -> NDArray[np.bool_]:
        known = self._archive.table.origin.take(self._ids)  # of the KV, where somebody has said so
        named: NDArray[np.bool_] = super()._named(origins) & ((known == 0) | (known == origins))
        return named

    def _fill(self, arrived: NDArray[np.bool_]) -> None:
        self._archive.table.region.rows[self._ids[arrived]] = self._copied[arrived]


__all__ = ["CopyArchive", "CopyPersistJob", "CopyRestoreJob"]

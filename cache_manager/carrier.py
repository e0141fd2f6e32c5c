"""Bytes of blocks, moved by the thread that asks: the carrier and the copier of a process that does its own work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, Copier, RecordCarrier, Region, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.spec import RecordLayout
from cache_manager.storage.records import RecordCounters, RecordStore


@dataclass(frozen=True, slots=True)
class Transport:
    """What moves the bytes of blocks, from region to region and, unless ``carrier`` is ``None``, to a store."""

    copier: Copier
    carrier: RecordCarrier | None


class LocalCarrier:
    """A ``RecordCarrier`` between ``region`` and ``records``; the store reads and fills the region's own memory."""

    __slots__ = ("_records", "_region")

    def __init__(self, region: Region, records: RecordStore) -> None:
        self._region = region
        self._records = records

    @property
    def counters(self) -> RecordCounters:
        return self._records.counters

    def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[int], valid: Sequence[bytes], generations: Sequence[int]
    ) -> list[bool]:
        views: list[memoryview] = []
        try:
            views += [self._region.rows[b].data for b in blocks]
            return self._records.put(keys, views, valid, generations)
        finally:
            _release(views)

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[RecordHeader | Absence]:
        views: list[memoryview] = []
        try:
            views += [self._region.rows[b].data for b in blocks]
            return self._records.get_into(keys, views)
        finally:
            _release(views)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._records.contains(keys)

    def flush(self) -> None:
        self._records.flush()


class LocalCopier:
    """A ``Copier`` that copies block by block: a fancy index would first gather all of them elsewhere."""

    __slots__ = ()

    def copy(self, source: Region, target: Region, sources: Sequence[int], targets: Sequence[int]) -> None:
        from_rows, to_rows = source.rows, target.rows
        for s, t in zip(sources, targets, strict=True):
            to_rows[t] = from_rows[s]


def local_transport(device: Region, layout: RecordLayout, store: StorageBackend | None) -> Transport:
    """The thread that asks moves the bytes, and those to and from ``store`` if there is one."""
    return Transport(LocalCopier(), None if store is None else LocalCarrier(device, RecordStore(store, layout)))


def _release(views: list[memoryview]) -> None:
    """Let the region go, also where an exception keeps the store's frames; a view that is exported stays."""
    for view in views:
        with suppress(BufferError):
            view.release()


__all__ = ["LocalCarrier", "LocalCopier", "Transport", "local_transport"]

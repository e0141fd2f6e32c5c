"""The file store's writer: records in the slots of extents, in one directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, takes_the_place
from cache_manager.storage.disk import Disk, write_all
from cache_manager.storage.file.directory import FILE_MODE
from cache_manager.storage.file.extent import FREE, PAGE_NBYTES, UNSURE, USES_MAX, Extent, Layout
from cache_manager.storage.file.index import BITS, LOCAL, NOWHERE, KeyIndex
from cache_manager.storage.file.pool import NO_ROOM, Pool

QUOTA_NBYTES: Final = 4 << 30


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"
    """After ``flush`` or ``close``; a killed process loses nothing, a power cut what was not flushed."""
    BATCH = "batch"
    """When ``put`` returns."""


class FileStore(Pool):
    """A ``StorageBackend`` in a directory, for one process at a time; others may read (:class:`FileReader`).

    Records of one layout have one size: they lie in the slots of extents of about ``extent_nbytes`` each, which
    together never take more than ``quota_nbytes``, nor leave the file system less than ``min_free_nbytes`` or
    ``min_free_percent`` of it, whichever is more. When there is no room for a new extent, records that were used least
    give their slots (:mod:`cache_manager.storage.file.clock`), and an extent of another layout in which nothing was
    used for a whole turn of the clock gives its room. ``put`` answers ``None`` for a record that still has none; of a
    batch that does not fit, the first ones stay. With ``ttl_s`` no record is served that is older by ``clock``, a wall
    clock; its slot is used again like that of a record that nobody asks for.

    Opening reads all heads and no payload; payloads are checked by :class:`RecordStore`. :class:`StorageError` when the
    disk fails: what had been stored is still there, but for what gave its slot, and later calls are tried anew.
    """

    def __init__(
        self,
        directory: Path,
        *,
        quota_nbytes: int = QUOTA_NBYTES,
        extent_nbytes: int | None = None,
        sync: Sync = Sync.NONE,
        ttl_s: float | None = None,
        min_free_nbytes: int = 0,
        min_free_percent: int = 0,
        file_mode: int = FILE_MODE,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        min_free = min_free_nbytes, min_free_percent
        super().__init__(directory, quota_nbytes, extent_nbytes, min_free, ttl_s, file_mode, disk, clock)
        self._sync = sync

    @property
    def record_nbytes_max(self) -> int:
        """Of a payload: an extent of its own has to fit the quota."""
        return self._quota_nbytes // PAGE_NBYTES * PAGE_NBYTES - 4 * PAGE_NBYTES

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        for header, payload in zip(headers, payloads, strict=True):
            if (found := payload.nbytes if isinstance(payload, memoryview) else len(payload)) != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, found)
        self.guard.check()
        with self._writing:
            keys = [header.key for header in headers]
            with self.looking():
                places, held = self._held(keys)
            evicted, wanted = self._evicted, dict[BlockKey, int]()
            for i, key in enumerate(keys):
                stored = headers[wanted[key]] if key in wanted else held.get(key)
                if stored is None or takes_the_place(headers[i], stored, replace=replace):
                    wanted[key] = i
            groups: dict[Layout, list[int]] = {}
            for i in sorted(wanted.values()):
                header = headers[i]
                layout = header.fingerprint, header.payload_nbytes, len(header.valid)
                groups.setdefault(layout, []).append(i)
            try:
                for layout, numbers in groups.items():
                    some = [headers[i] for i in numbers]
                    self._store(layout, some, [payloads[i] for i in numbers], places, held)
                if self._evicted != evicted:  # perhaps of these keys, for a later record
                    with self.lock:
                        slots = self.index.find_all(held)
                    held = {key: held[key] for key, slot in zip(held, slots, strict=True) if slot != NOWHERE}
            except OSError as error:
                raise StorageError(f"{self.path}: cannot write: {error}") from error
            finally:
                if groups:
                    self._directory.tell(self._tick)
        return list(map(held.get, keys))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Gone from this process in any case; :class:`StorageError` when a record may be back after a restart."""
        self.guard.check()
        with self._writing:
            with self.looking():
                slots = [slot for slot in self.index.find_all(dict.fromkeys(keys)) if slot != NOWHERE]
            try:
                self._kill(slots)
                self._erase_unsure()
            except OSError as error:
                raise StorageError(f"{self.path}: cannot delete a record: {error}") from error

    def flush(self) -> None:
        """Return when all that was put before is on stable storage.

        :class:`StorageError` when that cannot be: nothing is promised then of what was put before, not by a later flush
        either, because an operating system takes pages whose write has failed for written.
        """
        with self.looking():
            extents = list(self.index.extents.values())
        try:
            self._sync_all(extents)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot flush: {error}") from error

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four ``extents``, and since opening what went and what was refused.

        ``evicted_records`` gave their slots or the room of their extents to others; ``failed_reads``, which the disk
        did not give back. What opening found: ``damaged_heads`` and ``refused_files``. ``moved`` is 1 when the
        directory is not at its path any more.
        """
        moved = not self._directory.is_in_place()
        with self.looking():
            return {
                "records": sum(extent.living for extent in self.index.extents.values()),
                "used_nbytes": self._used_nbytes,
                "free_nbytes": self._quota_nbytes - self._used_nbytes,
                "capacity_nbytes": self._quota_nbytes,
                "extents": len(self.index.extents),
                "evicted_records": self._evicted,
                "failed_reads": self.failed_reads,
                "damaged_heads": self._damaged,
                "refused_files": len(self.refused),
                "moved": int(moved),
            }

    def close(self) -> None:
        """Flush, then let the directory go; idempotent. :class:`StorageError`: closed, but not all was flushed."""
        if not self.guard.closable:
            return
        with self._writing:
            if not self.guard.close():
                return
            try:
                self._sync_all(list(self.index.extents.values()))
            except OSError as error:
                raise StorageError(f"{self.path}: cannot flush: {error}") from error
            finally:
                self._clocks.clear()
                self.index = KeyIndex()
                self._directory.close()

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        return extent.packed(local, count)

    def _held(self, keys: Sequence[BlockKey]) -> tuple[dict[BlockKey, int], dict[BlockKey, RecordHeader]]:
        """The slots of these keys, and what is stored under them; storing it again is a use. Held: lock."""
        self.calls += 1
        slots = self.index.find_all(keys)
        places = {key: slot for key, slot in zip(keys, slots, strict=True) if slot != NOWHERE}
        held = {}
        for key, slot in zip(places, self.find_all(places), strict=True):
            if slot != NOWHERE and slot not in self._suspects:
                extent, local = self.index.extents[slot >> BITS], slot & LOCAL
                (held[key],) = extent.headers(extent.packed(local, 1))
                extent.uses[local] = min(extent.uses[local] + 1, USES_MAX)
                extent.used_at = self.calls
        return places, held

    def _store(
        self,
        layout: Layout,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        places: dict[BlockKey, int],
        held: dict[BlockKey, RecordHeader],
    ) -> None:
        """Store records of one layout, as far as there is room. Held: writing."""
        runs, at, touched = self._take(layout, len(headers)), 0, list[Extent]()
        try:
            while runs:
                extent, start, count = runs[-1]
                some = headers[at : at + count]
                older = self._write(extent, start, some, payloads[at : at + count], places)
                held.update((header.key, header) for header in some)
                touched.append(extent)
                runs.pop()  # first: when this run's older records cannot be killed, it holds records all the same
                at += count
                self._kill(older)
            if self._sync is Sync.BATCH:
                self._sync_all(touched)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            for run in runs:
                self._give_back(run)

    def _write(
        self,
        extent: Extent,
        start: int,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        places: dict[BlockKey, int],
    ) -> list[int]:
        """Payloads, then heads, then the groups' ticks; only then are the records found; the slots of older ones."""
        count, step = len(headers), extent.shape.step
        if extent.uses.count(FREE, start, start + count) < count:
            self._erase(extent, start, count)
        heads = extent.pack(headers, self._tick + 1, int(self._clock() * 1000))
        self._tick += count
        pad = bytes(step - extent.shape.layout[1])
        vector = [part for payload in payloads for part in (payload, pad)] if pad else list(payloads)
        write_all(self._disk, extent.fd, vector, extent.payload_at(start), count * step)
        extent.uses[start : start + count] = bytes([UNSURE]) * count
        self._write_heads(extent, start, count, heads)
        older: list[int] = []
        with self.lock:
            extent.set(start, heads)
            extent.uses[start : start + count] = b"\1" * count
            extent.living += count
            extent.used_at = self.calls
            extent.dirty = True
            for slot, header in enumerate(headers, extent.ordinal << BITS | start):
                key = header.key
                if places and (old := places.pop(key, NOWHERE)) != NOWHERE and self.index.find(key) == old:
                    self.index.remove(key, old)
                    older.append(old)
                self.index.add(key, slot)
        return older

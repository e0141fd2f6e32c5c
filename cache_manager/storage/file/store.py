"""Records in files: append-only packed segments in a directory, an index in arrays, a quota that drops whole segments.

Locks, in the order in which they are taken:

* ``flush``: one flush at a time; held over ``fdatasync``.
* ``append``: one batch is written or deleted at a time; held over the write, and over ``fdatasync`` with
  ``sync=batch``. A flush takes it to see what there is to sync: a put may hold records that are in no segment then.
* ``index_lock``: guards the index and the segments' counts; never held over I/O.

A reader takes only ``index_lock``, to pin the segments that it reads; a segment that is dropped meanwhile keeps its
bytes until the last pin is gone. A record's bytes never change once it is in the index, but for the mark of deletion: a
record that takes another's place is appended first, then the older copy is marked as deleted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader, pack_header, takes_the_place
from cache_manager.spec import ALIGNMENT
from cache_manager.storage.disk import Disk, SystemDisk
from cache_manager.storage.file.directory import FILE_MODE, LockedDirectory
from cache_manager.storage.file.files import Sync
from cache_manager.storage.file.limits import QUOTA_NBYTES, Limits, default_segment_nbytes
from cache_manager.storage.file.pool import NO_ROOM, SegmentPool
from cache_manager.storage.file.segment import ENTRY, ENTRY_NBYTES, PAGE_NBYTES, index_nbytes, pack_entry, unpack_entry
from cache_manager.storage.file.table import Place, Segment
from cache_manager.storage.guard import ClosingStore

_ZEROS: Final = bytes(ALIGNMENT)
_COUNTS: Final = (
    *("dropped_segments", "kept_records", "expired_segments", "expired_records", "sweep_failures", "short_of_free"),
    *("damaged_segments", "torn_records", "replaced_records", "lost_nbytes", "lost_records", "failed_reads"),
)


Held = dict[BlockKey, tuple[Segment, RecordHeader]]
"""What is stored under the keys of a put."""


class _Batch:
    """Records that go behind each other to the end of a segment, in one write."""

    __slots__ = ("end", "headers", "rows", "vector")

    def __init__(self, segment: Segment | None) -> None:
        self.headers: list[RecordHeader] = []
        self.rows: list[bytes] = []  # their entries
        self.vector: list[Buffer] = []
        self.end = segment.end if segment is not None else 0  # where the next one would go

    def add(self, header: RecordHeader, packed: bytes, payload: Buffer) -> None:
        self.headers.append(header)
        self.rows.append(pack_entry(header, self.end, packed))
        self.vector.append(packed)
        self.vector.append(payload)
        if pad := -header.payload_nbytes % ALIGNMENT:
            self.vector.append(_ZEROS[:pad])
        self.end += len(packed) + header.payload_nbytes + pad


class FileStore(ClosingStore):
    """A ``StorageBackend`` in a directory, for one process at a time; others may read (:class:`FileReader`).

    Records are packed into segments of ``segment_nbytes``. When a new one would pass ``quota_nbytes``, or leave the
    file system less than ``min_free_nbytes`` or ``min_free_percent`` of it, whichever is more, or when the disk is
    full, the segments that were used least recently go. Records in them that were asked for since they were written are
    appended to the new segment, up to two thirds of it; in one ``put`` a quarter of the quota and 1 MiB at most. On a
    full disk, and with ``ttl_s``, none are.
    ``put`` answers ``None`` for a record that still has no room. With ``ttl_s`` no record is served that is older by
    ``clock``, a wall clock; what its jumps can do is in :mod:`cache_manager.storage.file.limits`. A deleted record
    keeps its bytes until its segment goes, and does not come back after a restart.

    Opening reads the indexes of finished segments, and headers and payloads of those with a journal and of the newest;
    nothing that could be a record is erased (:mod:`cache_manager.storage.file.pool`). Headers are checked here on every
    read, payloads by :class:`RecordStore`. :class:`StorageError` when the disk fails: the store still has every record
    that it had, and later calls are tried anew.
    """

    def __init__(
        self,
        directory: Path,
        *,
        quota_nbytes: int = QUOTA_NBYTES,
        segment_nbytes: int | None = None,
        sync: Sync = Sync.NONE,
        ttl_s: float | None = None,
        min_free_nbytes: int = 0,
        min_free_percent: int = 0,
        file_mode: int = FILE_MODE,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        segment_nbytes = segment_nbytes or default_segment_nbytes(quota_nbytes)
        self.limits = Limits(quota_nbytes, segment_nbytes, ttl_s, min_free_nbytes, min_free_percent)
        self._path = directory
        self._sync = sync
        self._flush = threading.Lock()
        self._directory = LockedDirectory(directory, file_mode=file_mode)
        try:
            self._pool = SegmentPool(self._directory, disk or SystemDisk(), self.limits, sync, clock)
        except BaseException:
            self._directory.close()
            raise

    @property
    def record_nbytes_max(self) -> int:
        """Of a payload: a segment of its own, with page and index, has to fit the quota."""
        return self.limits.quota_nbytes // PAGE_NBYTES * PAGE_NBYTES - 2 * PAGE_NBYTES

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        for header, payload in zip(headers, payloads, strict=True):
            if (found := payload.nbytes if isinstance(payload, memoryview) else len(payload)) != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, found)
        pool = self._pool
        pool.guard.check()
        with pool.append:
            held = self._held(headers)
            pool.sweep(pool.clock())
            self._append(_to_write(headers, held, replace=replace), headers, payloads, held)
            for key in [key for key, (segment, _) in held.items() if segment.dropped or segment.expired]:
                del held[key]  # it made room for a later record
        return [place and place[1] for place in map(held.get, [header.key for header in headers])]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Keys that are asked for in the order in which they were put are read in one call.

        A record that the disk does not give back is a miss, for now (``usage()["failed_reads"]``).
        """
        found = self._pool.get_into(keys, buffers)
        self._sweep_unless_writing()
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = self._pool.contains(keys)
        self._sweep_unless_writing()
        return found

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Gone from this process in any case; :class:`StorageError` when a record may be back after a restart."""
        pool = self._pool
        pool.guard.check()
        failure: OSError | None = None
        with pool.append:
            places = pool.hide(keys)
            for place in places:
                try:
                    pool.mark(place)
                except OSError as error:
                    failure = error
            pool.unpin(segment for segment, _ in places)
        if failure is not None:
            raise StorageError(f"{self._path}: cannot mark a record as deleted: {failure}") from failure

    def flush(self) -> None:
        """Return when all that was put before is on stable storage, also where an earlier flush has failed.

        :class:`StorageError` when that cannot be; what is not there any more, because the disk has lost it after a
        failed flush, is served no longer and counted as ``lost_records``.
        """
        pool = self._pool
        pool.guard.check()
        with self._flush:
            with pool.append, pool.looking():
                dirty = [segment for segment in pool.segments.values() if segment.dirty]
                for segment in dirty:
                    segment.pins += 1
            try:
                pool.sync_all(dirty)
            finally:
                pool.unpin(dirty)

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four ``segments``, and since opening what went and what was refused.

        ``dropped_segments`` to make room, and ``kept_records`` in them that were appended anew; ``expired_segments``
        and ``expired_records`` for their age, of whose files ``sweep_failures`` times one could not be removed;
        ``short_of_free``, how often the file system's reserve forbade a segment; ``replaced_records``, older copies
        that were deleted for a newer one; ``failed_reads``, records or sectors that the disk did not give back;
        ``lost_records``, after a failed flush. What opening found: ``damaged_segments``, ``torn_records``, and
        ``lost_nbytes`` that are no record's. Now: ``aside_segments`` and ``aside_nbytes``, which are part of what is
        used; ``moved``, 1 when the directory is not at its path any more.
        """
        pool, quota_nbytes = self._pool, self.limits.quota_nbytes
        moved = not self._directory.is_in_place()
        with pool.looking():
            aside = [segment.size for segment in pool.segments.values() if segment.aside]
            return {
                "records": pool.table.records,
                "used_nbytes": pool.used_nbytes,
                "free_nbytes": quota_nbytes - pool.used_nbytes,
                "capacity_nbytes": quota_nbytes,
                "segments": len(pool.segments),
                **{name: getattr(pool, name) for name in _COUNTS},
                "aside_segments": len(aside),
                "aside_nbytes": sum(aside),
                "moved": int(moved),
            }

    def close(self) -> None:
        """Flush, then let the directory go; idempotent. :class:`StorageError`: closed, but not all was flushed."""
        pool = self._pool
        if not pool.guard.closable:
            return
        with self._flush, pool.append:
            if not pool.guard.close():
                return
            try:
                pool.close()
            finally:
                self._directory.close()

    def _held(self, headers: Sequence[RecordHeader]) -> Held:
        """What is stored under these keys; storing it again is a use. Held: append.

        A record that the disk does not give back, or not sound, is none: what is put takes its place.
        """
        pool, places, held = self._pool, list[Place](), Held()
        with pool.looking():
            pool.tick += 1
            for place in pool.table.find_all(dict.fromkeys([header.key for header in headers])):
                if place is not None and place[1].number not in place[0].suspects:
                    place[0].use(pool.tick)
                    place[0].pins += 1
                    places.append(place)
        try:
            for place in places:
                if (stored := pool.header_of(place)) is not None:
                    held[stored.key] = (place[0], stored)
        finally:
            pool.unpin(segment for segment, _ in places)
        return held

    def _append(
        self, wanted: Sequence[int], headers: Sequence[RecordHeader], payloads: Sequence[Buffer], held: Held
    ) -> None:
        """Store the records numbered ``wanted``, as far as there is room. Held: append."""
        pool, active = self._pool, self._pool.active
        batch, room, kept_nbytes = _Batch(active), 0, self.limits.kept_nbytes
        if active is not None:
            room = active.size - active.end - index_nbytes(active.count) - ALIGNMENT
        for i in wanted:
            header = headers[i]
            packed = pack_header(header)
            more = len(packed) + (header.payload_nbytes + 63 & -64)  # align, inlined: every record comes here
            room -= more + ENTRY_NBYTES + 1
            if active is None or room < 0:  # or perhaps: what is exact costs more
                if not pool.fits(more):
                    room += more + ENTRY_NBYTES + 1
                    continue
                self._write(batch, held)
                batch = _Batch(None)
                if (activated := pool.activate(more, kept_nbytes)) is None:
                    break
                active, kept = activated
                batch = _Batch(active)
                if kept:
                    replaced = {headers[j].key for j in wanted}
                    for old, copy in kept:
                        if old.key not in replaced:
                            batch.add(old, pack_header(old), copy)
                    pool.kept_records += len(batch.headers)
                    kept_nbytes -= batch.end - active.end
                room = active.size - batch.end - index_nbytes(active.count + len(batch.headers) + 1) - ALIGNMENT - more
            batch.add(header, packed, payloads[i])
        self._write(batch, held)

    def _sweep_unless_writing(self) -> None:
        """Remove expired files now, so that a store that is only read gives them back; a writer would do it itself."""
        pool = self._pool
        if pool.sweepable and pool.append.acquire(blocking=False):
            try:
                if pool.guard.closable:
                    pool.sweep(pool.clock())
            finally:
                pool.append.release()

    def _write(self, batch: _Batch, held: Held) -> None:
        """Append a batch that fits the active segment; only then does the index know of it, and older copies go.

        A failure retires the segment, so that nothing of the batch is read back, and the next put starts another one.
        Held: append.
        """
        if not batch.headers:
            return
        pool, segment = self._pool, self._pool.active
        assert segment is not None, "a batch is for a segment that has room for it"
        where, rows, nbytes = f"{self._path}/{segment.name}", b"".join(batch.rows), batch.end - segment.end
        try:
            pool.write(segment, batch.vector, nbytes, rows)
        except OSError as error:
            pool.retire(segment)
            if error.errno in NO_ROOM:
                return
            raise StorageError(f"{where}: cannot write: {error}") from error
        first = segment.count
        with pool.index_lock:
            segment.dirty = segment.dirty or self._sync is Sync.NONE
            if segment.expired:  # the clock jumped while this was written: it would never be swept with the others
                return
            segment.rows += rows
            segment.states += bytes(len(batch.headers))
            segment.count += len(batch.headers)
            segment.end += nbytes
            add = pool.table.add
            older = [place for number, row in enumerate(batch.rows, first) if (place := add(segment, number, row))]
            held.update((header.key, (segment, header)) for header in batch.headers)
            segment.use(pool.tick, len(batch.headers))
        older.reverse()  # the last one gives way first: in the order of the records
        back, replaced = list(older), len(older)
        try:
            pool.give_way(older)
        except OSError as error:
            if older:
                self._take_back(segment, first, back[: len(older)])
            raise StorageError(f"{where}: cannot replace a record: {error}") from error
        finally:
            pool.replaced_records += replaced - len(older)

    def _take_back(self, segment: Segment, first: int, older: Sequence[Place]) -> None:
        """Cut away what was just appended from the first record on whose ``older`` copy was not deleted: they stand.

        A record before it has no other copy any more. Held: append.
        """
        pool = self._pool
        with pool.index_lock:
            ours = [unpack_entry(segment.rows, number) for number in range(first, segment.count)]
            keys = [entry.key for entry in ours]
            kept = keys.index(older[-1][1].key)
            first += kept
            for place in pool.table.find_all(keys[kept:]):
                if place is not None and place[0] is segment and place[1].number >= first:
                    pool.table.remove(place)
                    for where, entry in older:
                        if entry.key == place[1].key and not where.expired:
                            pool.table.add(where, entry.number, ENTRY.pack(*entry))
            del segment.rows[first * ENTRY_NBYTES :], segment.states[first:], segment.hits[first:]
            segment.count, segment.end = first, ours[kept].offset
        pool.retire(segment)


def _to_write(headers: Sequence[RecordHeader], held: Held, *, replace: bool) -> list[int]:
    """Which of these are to be stored beside what is ``held``: of each key at most one."""
    wanted: dict[BlockKey, int] = {}
    for i, header in enumerate(headers):
        key = header.key
        if key in wanted:
            stored = headers[wanted[key]]
        elif key in held:
            stored = held[key][1]
        else:
            wanted[key] = i
            continue
        if takes_the_place(header, stored, replace=replace):
            wanted[key] = i
    return sorted(wanted.values())

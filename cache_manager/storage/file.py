"""Records in files: append-only packed segments in a directory, an index in memory, a quota that drops whole segments.

Locks, in the order in which they are taken:

* ``append``: one batch is written at a time; held over the write, and over ``fdatasync`` with ``sync=batch``.
* ``flush``: one flush at a time; held over ``fdatasync``.
* ``index_lock``: guards the index and the segments' counts; never held over I/O.

A reader takes only ``index_lock``, to pin the segments that it reads; a segment that is dropped meanwhile keeps its
bytes until the last pin is gone. A record's bytes never change once it is in the index, but for the mark of deletion.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreClosedError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader, pack_header
from cache_manager.spec import ALIGNMENT, align
from cache_manager.storage.directory import StoreDirectory
from cache_manager.storage.disk import IOV_MAX, Disk, SystemDisk, read_all, write_all
from cache_manager.storage.segment import PAGE_NBYTES, header_is_sound, pack_dead_header
from cache_manager.storage.segments import NO_ROOM, SEGMENTS_MAX, Place, SegmentPool, Sync
from cache_manager.storage.url import StoreUrl

QUOTA_NBYTES: Final = 4 << 30
SEGMENT_NBYTES: Final = 64 << 20
SEGMENT_NBYTES_MIN: Final = 16 << 10

_ZEROS: Final = bytes(ALIGNMENT)
_RUN_MAX: Final = IOV_MAX // 3


def default_segment_nbytes(quota_nbytes: int) -> int:
    """64 MiB, less where that is much of the quota, more where it would make too many files."""
    wanted = max(min(SEGMENT_NBYTES, quota_nbytes // 4), -(-quota_nbytes // (SEGMENTS_MAX // 2)))
    return max(wanted // PAGE_NBYTES * PAGE_NBYTES, SEGMENT_NBYTES_MIN)


def open_file_store(url: StoreUrl) -> FileStore:
    """``file:///dir?quota=4GiB&segment=64MiB&sync=none|batch``; the path may be percent-encoded."""
    url.allow("quota", "segment", "sync")
    if url.host not in ("", "localhost") or not url.path.startswith("/") or "\0" in url.path:
        raise ConfigError("file: store path", "file:///absolute/path", repr(url.text))
    quota = url.nbytes("quota", QUOTA_NBYTES)
    segment = url.nbytes("segment", default_segment_nbytes(quota))
    sync = url.choice("sync", tuple(Sync), Sync.NONE)
    return FileStore(Path(url.path), quota_nbytes=quota, segment_nbytes=segment, sync=Sync(sync))


class FileStore:
    """A ``StorageBackend`` in a directory, for one process at a time.

    Records are packed into segments of ``segment_nbytes``; when a new one would pass ``quota_nbytes``, the segment
    that was used least recently goes, whole. A deleted record keeps its bytes until its segment goes, and does not
    come back after a restart. ``put`` answers ``False`` for a record that the quota or the disk has no room for.

    Opening reads the headers of all segments and the payloads of the newest; what a crash cut off is cut away.
    Headers are checked here on every read, payloads by :class:`RecordStore`. :class:`StorageError` when the disk
    fails: the store still has every record that it had, and later calls are tried anew.
    """

    def __init__(
        self,
        directory: Path,
        *,
        quota_nbytes: int = QUOTA_NBYTES,
        segment_nbytes: int | None = None,
        sync: Sync = Sync.NONE,
        disk: Disk | None = None,
    ) -> None:
        segment_nbytes = segment_nbytes or default_segment_nbytes(quota_nbytes)
        if segment_nbytes < SEGMENT_NBYTES_MIN or segment_nbytes % PAGE_NBYTES:
            raise ConfigError("segment", f"a multiple of {PAGE_NBYTES}, {SEGMENT_NBYTES_MIN} or more", segment_nbytes)
        if not 2 <= quota_nbytes // segment_nbytes <= SEGMENTS_MAX:
            wanted = f"2 to {SEGMENTS_MAX} segments of {segment_nbytes} bytes"
            raise ConfigError("quota", wanted, f"{quota_nbytes} bytes")
        self._quota_nbytes = quota_nbytes
        self._sync = sync
        self._disk: Disk = disk or SystemDisk()
        self._flush = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._directory = StoreDirectory(directory)
        try:
            self._pool = SegmentPool(
                self._directory, self._disk, quota_nbytes=quota_nbytes, segment_nbytes=segment_nbytes, sync=sync
            )
        except BaseException:
            self._directory.close()
            raise

    def put(self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer]) -> list[bool]:
        for header, payload in zip(headers, payloads, strict=True):
            if (found := payload.nbytes if isinstance(payload, memoryview) else len(payload)) != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, found)
        pool = self._pool
        with pool.append:
            with pool.index_lock:
                self._check_open()
                pool.tick += 1
                stored = self._known(headers)
            batch: list[Place] = []
            vector: list[Buffer] = []
            full = False
            for header, payload in zip(headers, payloads, strict=True):
                if header.key in stored:
                    continue
                stored[header.key] = False
                header_nbytes = header.nbytes
                nbytes = header_nbytes + align(header.payload_nbytes)
                if full or not pool.fits(nbytes):
                    continue
                active = pool.active
                offset = batch[-1].offset + batch[-1].nbytes if batch else active.end if active else 0
                if active is None or offset + nbytes > active.size:
                    self._write(batch, vector, stored)
                    batch, vector = [], []
                    if (active := pool.activate(nbytes)) is None:
                        full = True
                        continue
                    offset = active.end
                batch.append(Place(active.sequence, offset, nbytes, header_nbytes, header, active))
                vector.append(pack_header(header))
                vector.append(payload)
                if pad := -header.payload_nbytes % ALIGNMENT:
                    vector.append(_ZEROS[:pad])
            self._write(batch, vector, stored)
        return [stored[header.key] for header in headers]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Keys that are asked for in the order in which they were put are read in one call."""
        pool = self._pool
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        runs: list[list[tuple[int, Place]]] = []  # of neighbours in one segment
        with pool.index_lock:
            self._check_open()
            pool.tick += 1
            index = pool.index
            sequence = after = -1
            for i, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                if (place := index.get(key)) is None:
                    continue
                if place.header.payload_nbytes != buffer.nbytes:
                    found[i] = Absence.CORRUPT
                elif place.offset == after and place.sequence == sequence and len(runs[-1]) < _RUN_MAX:
                    runs[-1].append((i, place))
                    after += place.nbytes
                else:
                    runs.append([(i, place)])
                    sequence, after = place.sequence, place.offset + place.nbytes
                    place.segment.pins += 1
                    place.segment.used_at = pool.tick
        try:
            for run in runs:
                self._read(run, buffers, found)
        finally:
            pool.unpin(run[0][1].segment for run in runs)
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._pool.index_lock:
            self._check_open()
            return [key in self._pool.index for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Gone from this process in any case; :class:`StorageError` when a record may be back after a restart."""
        pool = self._pool
        with pool.index_lock:
            self._check_open()
            places = [place for key in keys if (place := pool.index.pop(key, None)) is not None]
            for place in places:
                place.segment.pins += 1
        failure: OSError | None = None
        for place in places:
            try:
                dead = pack_dead_header(place.header)
                write_all(self._disk, place.segment.fd, [dead], place.offset, len(dead))
            except OSError as error:
                failure = error
            place.segment.dirty = True
        pool.unpin(place.segment for place in places)
        if failure is not None:
            raise StorageError(f"{self._directory.path}: cannot mark a record as deleted: {failure}") from failure

    def flush(self) -> None:
        pool = self._pool
        with self._flush:
            with pool.index_lock:
                self._check_open()
                dirty = [segment for segment in pool.segments.values() if segment.dirty]
                for segment in dirty:
                    segment.pins += 1
            try:
                pool.sync_all(dirty)
            finally:
                pool.unpin(dirty)

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four: ``segments``, and since opening ``dropped_segments`` for the quota.

        And what opening found: ``damaged_segments``, ``torn_records``, and ``lost_nbytes`` behind a damaged header.
        """
        pool = self._pool
        with pool.index_lock:
            self._check_open()
            return {
                "records": len(pool.index),
                "used_nbytes": pool.used_nbytes,
                "free_nbytes": self._quota_nbytes - pool.used_nbytes,
                "capacity_nbytes": self._quota_nbytes,
                "segments": len(pool.segments),
                "dropped_segments": pool.dropped_segments,
                "damaged_segments": pool.damaged_segments,
                "torn_records": pool.torn_records,
                "lost_nbytes": pool.lost_nbytes,
            }

    def close(self) -> None:
        """Flush, then let the directory go; idempotent. :class:`StorageError`: closed, but not all was flushed."""
        pool = self._pool
        if os.getpid() != self._pid:
            return
        with pool.append, self._flush:
            with pool.index_lock:
                if self._closed:
                    return
                self._closed = True
            try:
                if pool.active is not None:
                    pool.retire(pool.active)
                pool.sync_all([segment for segment in pool.segments.values() if segment.dirty])
            finally:
                pool.release()
                self._directory.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:  # a forked child shares the lock, and would write where its parent writes
            raise StoreClosedError(f"{self._directory.path}: opened before fork; open it in the process that uses it")
        if self._closed:
            raise StoreClosedError(f"{self._directory.path}: the store is closed")

    def _known(self, headers: Sequence[RecordHeader]) -> dict[BlockKey, bool]:
        """``True`` for what is stored already; storing it again is a use. Held: index_lock."""
        known: dict[BlockKey, bool] = {}
        for header in headers:
            if (place := self._pool.index.get(header.key)) is not None:
                place.segment.used_at = self._pool.tick
                known[header.key] = True
        return known

    def _read(
        self,
        run: Sequence[tuple[int, Place]],
        buffers: Sequence[memoryview],
        found: list[RecordHeader | Absence],
    ) -> None:
        """Read a run in one call straight into the callers' buffers, and check each header. Held: pins."""
        first, last = run[0][1], run[-1][1]
        segment, nbytes = first.segment, last.offset + last.nbytes - first.offset
        scratch = memoryview(bytearray(sum([place.header_nbytes for _, place in run])))
        vector, raws, at = [], [], 0
        for i, place in run:
            raw = scratch[at : at + place.header_nbytes]
            at += place.header_nbytes
            raws.append(raw)
            vector.append(raw)
            vector.append(buffers[i])
            if pad := -place.header.payload_nbytes % ALIGNMENT:
                vector.append(memoryview(bytearray(pad)))
        try:
            whole = read_all(self._disk, segment.fd, vector, first.offset, nbytes) == nbytes
        except OSError as error:
            if error.errno != errno.EIO:
                raise StorageError(f"{segment.path}: cannot read: {error}") from error
            whole = False
        if not whole and len(run) > 1:  # the file was cut, or a sector is bad: find out whose
            for one in run:
                self._read([one], buffers, found)
            return
        for (i, place), raw in zip(run, raws, strict=True):
            header = place.header
            found[i] = header if whole and header_is_sound(raw, header.key) else self._absence(place)

    def _absence(self, place: Place) -> Absence:
        """Damage, or the mark of a deletion that came between the look-up and the read."""
        with self._pool.index_lock:
            return Absence.CORRUPT if self._pool.index.get(place.header.key) is place else Absence.MISS

    def _write(self, batch: Sequence[Place], vector: Sequence[Buffer], stored: dict[BlockKey, bool]) -> None:
        """Append ``batch``, which fits the active segment; only then does the index know of it.

        A failure retires the segment, so that nothing of the batch is read back, and the next put starts another one.
        Held: append.
        """
        if not batch:
            return
        pool, segment, start = self._pool, batch[0].segment, batch[0].offset
        end = batch[-1].offset + batch[-1].nbytes
        try:
            write_all(self._disk, segment.fd, vector, start, end - start)
            if self._sync is Sync.BATCH:
                self._disk.sync(segment.fd)
        except OSError as error:
            pool.retire(segment)
            if error.errno in NO_ROOM:
                return
            raise StorageError(f"{segment.path}: cannot write: {error}") from error
        with pool.index_lock:
            segment.dirty = segment.dirty or self._sync is Sync.NONE
            segment.used_at = pool.tick
            for place in batch:
                key = place.header.key
                pool.index[key] = place
                segment.keys.append(key)
                stored[key] = True
        segment.end = end

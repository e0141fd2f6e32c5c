"""Records in files: append-only packed segments in a directory, an index in memory, a quota that drops whole segments.

Locks, in the order in which they are taken:

* ``append``: one batch is written at a time; held over the write, and over ``fdatasync`` with ``sync=batch``.
* ``flush``: one flush at a time; held over ``fdatasync``.
* ``index_lock``: guards the index and the segments' counts; never held over I/O.

A reader takes only ``index_lock``, to pin the segments that it reads; a segment that is dropped meanwhile keeps its
bytes until the last pin is gone. A record's bytes never change once it is in the index, but for the mark of deletion: a
record that takes another's place is appended first, then the older copy is marked as deleted.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreClosedError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader, pack_header, takes_the_place
from cache_manager.spec import ALIGNMENT, align
from cache_manager.storage.directory import StoreDirectory
from cache_manager.storage.disk import Disk, SystemDisk, write_all
from cache_manager.storage.limits import QUOTA_NBYTES, Limits, default_segment_nbytes
from cache_manager.storage.reader import FileReader
from cache_manager.storage.segment import header_sum, pack_dead_header
from cache_manager.storage.segment_index import Place
from cache_manager.storage.segments import NO_ROOM, SegmentPool, Sync
from cache_manager.storage.url import StoreUrl, parse_nbytes

_ZEROS: Final = bytes(ALIGNMENT)
_PERCENT = re.compile(r"([0-9]{1,2})%")


def open_file_store(url: StoreUrl) -> StorageBackend:
    """``file:///dir?quota=4GiB&segment=64MiB&sync=none|batch&ttl=6h&min_free=1GiB``, or ``file:///dir?mode=read&ttl=6h``.

    The path may be percent-encoded. ``min_free`` is a size or a share of the file system such as ``5%``.
    """
    reads = url.choice("mode", ("write", "read"), "write") == "read"
    url.allow("mode", "ttl", *(() if reads else ("quota", "segment", "sync", "min_free")))
    if url.host not in ("", "localhost") or not url.path.startswith("/") or "\0" in url.path:
        raise ConfigError("file: store path", "file:///absolute/path", repr(url.text))
    ttl_s = url.seconds("ttl", None)
    if reads:
        return FileReader(Path(url.path), ttl_s=ttl_s)
    quota = url.nbytes("quota", QUOTA_NBYTES)
    segment = url.nbytes("segment", default_segment_nbytes(quota))
    sync = Sync(url.choice("sync", tuple(Sync), Sync.NONE))
    nbytes, percent = _min_free(url.parameters.get("min_free"))
    return FileStore(
        Path(url.path),
        quota_nbytes=quota,
        segment_nbytes=segment,
        sync=sync,
        ttl_s=ttl_s,
        min_free_nbytes=nbytes,
        min_free_percent=percent,
    )


def _min_free(text: str | None) -> tuple[int, int]:
    """Bytes and per cent, one of which is zero."""
    if text is None:
        return 0, 0
    if match := _PERCENT.fullmatch(text):
        return 0, int(match[1])
    return parse_nbytes(text, "file: store parameter min_free"), 0


class FileStore:
    """A ``StorageBackend`` in a directory, for one process at a time; others may read (:class:`FileReader`).

    Records are packed into segments of ``segment_nbytes``. When a new one would pass ``quota_nbytes``, or leave the
    file system less than ``min_free_nbytes`` or ``min_free_percent`` of it, whichever is more, the segments that were
    used least recently go, whole; ``put`` answers ``None`` for a record that still has no room. With ``ttl_s`` no
    record is served that is older by ``clock``, a wall clock; what its jumps can do is in
    :mod:`cache_manager.storage.limits`. A deleted record keeps its bytes until its segment goes, and does not come
    back after a restart.

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
        ttl_s: float | None = None,
        min_free_nbytes: int = 0,
        min_free_percent: int = 0,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        segment_nbytes = segment_nbytes or default_segment_nbytes(quota_nbytes)
        self.limits = Limits(quota_nbytes, segment_nbytes, ttl_s, min_free_nbytes, min_free_percent)
        self._sync = sync
        self._clock = clock
        self._disk: Disk = disk or SystemDisk()
        self._flush = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._directory = StoreDirectory(directory)
        try:
            self._pool = SegmentPool(self._directory, self._disk, self.limits, sync, clock)
        except BaseException:
            self._directory.close()
            raise

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        for header, payload in zip(headers, payloads, strict=True):
            if (found := payload.nbytes if isinstance(payload, memoryview) else len(payload)) != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, found)
        pool, now_s = self._pool, self._clock()
        with pool.append:
            with pool.index_lock:
                self._check_open()
                pool.tick += 1
                pool.expire(now_s)
                held = self._held(headers)
            pool.sweep(now_s)
            self._append(_to_write(headers, held, replace=replace), headers, payloads, held)
            for key in [key for key, place in held.items() if place.segment.dropped or place.segment.expired]:
                del held[key]  # it made room for a later record
        return [place and place.header for place in map(held.get, [header.key for header in headers])]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Keys that are asked for in the order in which they were put are read in one call."""
        now_s = self._clock()
        found = self._pool.get_into(keys, buffers, now_s, self._check_open)
        self._sweep_unless_writing(now_s)
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        pool, now_s = self._pool, self._clock()
        with pool.index_lock:
            self._check_open()
            pool.expire(now_s)
            found = [key in pool.index for key in keys]
        self._sweep_unless_writing(now_s)
        return found

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
        """Beside the port's four ``segments``, and since opening what went and what was refused.

        ``dropped_segments`` to make room; ``expired_segments`` and ``expired_records`` for their age, of whose files
        ``sweep_failures`` times one could not be removed; ``short_of_free``, how often the file system's reserve
        forbade a segment; ``replaced_records``, older copies that were deleted for a newer one. And what opening
        found: ``damaged_segments``, ``torn_records``, and ``lost_nbytes`` behind a damaged header.
        """
        pool, quota_nbytes, now_s = self._pool, self.limits.quota_nbytes, self._clock()
        with pool.index_lock:
            self._check_open()
            pool.expire(now_s)
            return {
                "records": len(pool.index),
                "used_nbytes": pool.used_nbytes,
                "free_nbytes": quota_nbytes - pool.used_nbytes,
                "capacity_nbytes": quota_nbytes,
                "segments": len(pool.segments),
                "dropped_segments": pool.dropped_segments,
                "expired_segments": pool.expired_segments,
                "expired_records": pool.expired_records,
                "sweep_failures": pool.sweep_failures,
                "short_of_free": pool.short_of_free,
                "damaged_segments": pool.damaged_segments,
                "torn_records": pool.torn_records,
                "replaced_records": pool.replaced_records,
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

    def _held(self, headers: Sequence[RecordHeader]) -> dict[BlockKey, Place]:
        """What is stored under these keys; storing it again is a use. Held: index_lock."""
        held: dict[BlockKey, Place] = {}
        for header in headers:
            if (place := self._pool.index.get(header.key)) is not None:
                place.segment.used_at = self._pool.tick
                held[header.key] = place
        return held

    def _append(
        self,
        wanted: Sequence[int],
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        held: dict[BlockKey, Place],
    ) -> None:
        """Store the records numbered ``wanted``, as far as there is room. Held: append."""
        pool = self._pool
        batch: list[Place] = []
        vector: list[Buffer] = []
        for header, payload in ((headers[i], payloads[i]) for i in wanted):
            header_nbytes = header.nbytes
            nbytes = header_nbytes + align(header.payload_nbytes)
            if not pool.fits(nbytes):
                continue
            active = pool.active
            offset = batch[-1].offset + batch[-1].nbytes if batch else active.end if active else 0
            if active is None or offset + nbytes > active.size:
                self._write(batch, vector, held)
                batch, vector = [], []
                if (active := pool.activate(nbytes)) is None:
                    break
                offset = active.end
            packed = pack_header(header)
            place = Place(active.sequence, offset, nbytes, header_nbytes, header, active, header_sum(packed))
            batch.append(place)
            vector.append(packed)
            vector.append(payload)
            if pad := -header.payload_nbytes % ALIGNMENT:
                vector.append(_ZEROS[:pad])
        self._write(batch, vector, held)

    def _sweep_unless_writing(self, now_s: float) -> None:
        """Remove expired files now, so that a store that is only read gives them back; a writer would do it itself."""
        pool = self._pool
        if pool.sweepable and pool.append.acquire(blocking=False):
            try:
                if not self._closed:
                    pool.sweep(now_s)
            finally:
                pool.append.release()

    def _write(self, batch: Sequence[Place], vector: Sequence[Buffer], held: dict[BlockKey, Place]) -> None:
        """Append ``batch``, which fits the active segment; only then does the index know of it, and older copies go.

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
            if segment.expired:  # the clock jumped while this was written: it would never be swept with the others
                return
            older = [place for new in batch if (place := pool.index.get(new.header.key)) is not None]
            for place in batch:
                pool.index[place.header.key] = held[place.header.key] = place
                segment.keys.append(place.header.key)
        try:
            replaced = len(older)
            pool.mark_dead(older)
        except OSError as error:
            self._take_back(batch, older)
            raise StorageError(f"{segment.path}: cannot replace a record: {error}") from error
        pool.replaced_records += replaced
        segment.end = end

    def _take_back(self, batch: Sequence[Place], older: Sequence[Place]) -> None:
        """Cut away what was just appended; the ``older`` copies that were not deleted yet stand. Held: append."""
        pool = self._pool
        with pool.index_lock:
            ours = [place for place in batch if pool.index.get(place.header.key) is place]
            for place in ours:
                del pool.index[place.header.key]
            keys = {place.header.key for place in ours}
            back = [place for place in older if place.header.key in keys and not place.segment.expired]
            pool.index.update({place.header.key: place for place in back})
        pool.retire(batch[0].segment)


def _to_write(headers: Sequence[RecordHeader], held: Mapping[BlockKey, Place], *, replace: bool) -> list[int]:
    """Which of these are to be stored beside what is ``held``: of each key at most one."""
    wanted: dict[BlockKey, int] = {}
    for i, header in enumerate(headers):
        stored = headers[wanted[header.key]] if header.key in wanted else None
        if stored is None and (place := held.get(header.key)) is not None:
            stored = place.header
        if stored is None or takes_the_place(header, stored, replace=replace):
            wanted[header.key] = i
    return sorted(wanted.values())

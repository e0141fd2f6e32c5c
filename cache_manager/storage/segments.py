"""The segments of a file store: which are open, what the index says is in them, and which goes when room is needed.

:class:`SegmentPool` is the part of the store that creates, grows, retires, drops and recovers segment files. Whoever
calls a method that says *held: append* holds the pool's ``append`` lock; ``index_lock`` guards ``index``, ``segments``
and the counts, and is never held over I/O.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader
from cache_manager.spec import align
from cache_manager.storage.directory import StoreDirectory
from cache_manager.storage.disk import Disk, read_all, write_all
from cache_manager.storage.segment import (
    PAGE_NBYTES,
    SEGMENT_MAGIC,
    TEMP_SUFFIX,
    pack_dead_header,
    pack_segment_page,
    record_nbytes,
    scan,
    segment_name,
    segment_page_is_sound,
)

SEGMENTS_MAX: Final = 512

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"
    """After ``flush`` or ``close``; a killed process loses nothing, a power cut what was not flushed."""
    BATCH = "batch"
    """When ``put`` returns."""


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file that is open, and what the store knows about it."""

    sequence: int
    path: Path
    fd: int
    size: int  # of the file; counts against the quota
    end: int  # where the next record would go
    used_at: int  # tick of the last put or get
    keys: list[BlockKey] = field(default_factory=list)  # of records written here, deleted ones too
    pins: int = 0  # calls that use the descriptor outside the index lock
    dirty: bool = False  # bytes were written since the last sync
    dropped: bool = False  # close the descriptor when the last pin is gone


class Place(NamedTuple):
    """Where a record is, and its header as it was when it was sound."""

    sequence: int  # of the segment: places sort as they lie on the disk
    offset: int
    nbytes: int  # of header, payload and padding
    header_nbytes: int
    header: RecordHeader
    segment: Segment


class SegmentPool:
    """The open segments of a store, and the index of the records in them.

    Opening rebuilds the index from the headers in every segment; ``StorageError`` when that cannot be.
    """

    def __init__(
        self, directory: StoreDirectory, disk: Disk, *, quota_nbytes: int, segment_nbytes: int, sync: Sync
    ) -> None:
        self.append = threading.Lock()
        self.index_lock = threading.Lock()
        self.index: dict[BlockKey, Place] = {}
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None  # the one that is written; changes under ``append``
        self.tick = 0
        self.used_nbytes = 0
        self.dropped_segments = self.damaged_segments = self.torn_records = self.lost_nbytes = 0
        self._directory = directory
        self._disk = disk
        self._quota_nbytes = quota_nbytes
        self._segment_nbytes = segment_nbytes
        self._sync = sync
        self._next_sequence = 1
        self._entries_dirty = False
        try:
            self._recover()
        except BaseException as error:
            for segment in self.segments.values():
                os.close(segment.fd)
            if isinstance(error, OSError):
                raise StorageError(f"{directory.path}: cannot read the store: {error}") from error
            raise

    def unpin(self, segments: Iterable[Segment]) -> None:
        with self.index_lock:
            for segment in segments:
                segment.pins -= 1
                if segment.dropped and not segment.pins:
                    os.close(segment.fd)

    def release(self) -> None:
        """Close every segment, those in use when their last pin goes."""
        with self.index_lock:
            for segment in self.segments.values():
                segment.pins += 1
                segment.dropped = True
        self.unpin(self.segments.values())

    def fits(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` can be stored at all."""
        return align(PAGE_NBYTES + nbytes, PAGE_NBYTES) <= self._quota_nbytes

    def activate(self, nbytes: int) -> Segment | None:
        """The active segment, after it was made one that has room for a record of ``nbytes``. Held: append.

        ``None``: neither the quota nor the disk has room now.
        """
        active = self.active
        try:
            if active is not None and active.end + nbytes <= self._segment_nbytes > active.size:
                self._make_room(self._segment_nbytes - active.size, 0)
                self._disk.allocate(active.fd, self._segment_nbytes)
                self._resize(active, self._segment_nbytes)
                return active
            if active is not None:
                self.retire(active)
            size = max(self._segment_nbytes, align(PAGE_NBYTES + nbytes, PAGE_NBYTES))
            self._make_room(size, 1)
            self.active = self._create(size)
        except OSError as error:
            if self.active is not None:
                self.retire(self.active)
            if error.errno in NO_ROOM:
                return None
            raise StorageError(f"{self._directory.path}: cannot start a segment: {error}") from error
        return self.active

    def retire(self, segment: Segment) -> None:
        """Write no more to the active segment, and give back the space behind its last record. Held: append."""
        self.active = None
        with suppress(OSError):  # then the space stays taken, and counted, until the segment goes
            if segment.end == PAGE_NBYTES:
                self._drop(segment)
            else:
                self._cut(segment)

    def sync_all(self, segments: Iterable[Segment]) -> None:
        """Make entries and bytes durable; a segment stays dirty when that fails. Held: flush."""
        try:
            if self._entries_dirty:
                self._entries_dirty = False
                self._sync_entries()
            for segment in segments:
                segment.dirty = False  # before the sync: what is written meanwhile is dirty again
                try:
                    self._disk.sync(segment.fd)
                except OSError:
                    segment.dirty = True
                    raise
        except OSError as error:
            raise StorageError(f"{self._directory.path}: cannot flush: {error}") from error

    def _sync_entries(self) -> None:
        fd = self._directory.open_entries()
        try:
            self._disk.sync(fd)
        except OSError:
            self._entries_dirty = True
            raise
        finally:
            os.close(fd)

    def _create(self, size: int) -> Segment:
        """A new segment, which has its name only when it has its header page and all its space."""
        sequence = self._next_sequence
        path = self._directory.path / segment_name(sequence)
        temp = path.with_name(path.name + TEMP_SUFFIX)
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._disk.allocate(fd, size)
            write_all(self._disk, fd, [pack_segment_page(sequence, self._directory.store_id)], 0, PAGE_NBYTES)
            temp.rename(path)
            self._entries_dirty = True
            if self._sync is Sync.BATCH:
                self._sync_entries()
        except OSError:
            os.close(fd)
            for leftover in (temp, path):
                with suppress(OSError):  # the failure that is on its way out says more
                    leftover.unlink(missing_ok=True)
            raise
        self._next_sequence = sequence + 1
        segment = Segment(sequence, path, fd, size, PAGE_NBYTES, self.tick)
        with self.index_lock:
            self.segments[sequence] = segment
            self.used_nbytes += size
        return segment

    def _cut(self, segment: Segment) -> None:
        self._disk.truncate(segment.fd, segment.end)  # what a failed write left behind must not be read back
        size = align(segment.end, PAGE_NBYTES)
        self._disk.truncate(segment.fd, size)
        self._resize(segment, size)

    def _resize(self, segment: Segment, size: int) -> None:
        with self.index_lock:
            self.used_nbytes += size - segment.size
            segment.size = size

    def _make_room(self, nbytes: int, segments: int) -> None:
        """Drop the least recently used segments until ``nbytes`` in ``segments`` new files fit."""
        while self.used_nbytes + nbytes > self._quota_nbytes or len(self.segments) + segments > SEGMENTS_MAX:
            others = [segment for segment in self.segments.values() if segment is not self.active]
            if not others:
                raise OSError(errno.ENOSPC, "the quota has no room beside the active segment")
            self._drop(min(others, key=lambda segment: (segment.used_at, segment.sequence)))
            self.dropped_segments += 1

    def _drop(self, segment: Segment) -> None:
        """Remove a segment and all its records; its bytes stay readable to calls that have it pinned."""
        segment.path.unlink(missing_ok=True)
        self._entries_dirty = True
        with self.index_lock:
            for key in segment.keys:
                if (place := self.index.get(key)) is not None and place.segment is segment:
                    del self.index[key]
            del self.segments[segment.sequence]
            self.used_nbytes -= segment.size
            segment.pins += 1
            segment.dropped = True
        self.unpin([segment])

    def _recover(self) -> None:
        """Rebuild the index from the segments' headers."""
        sequences = self._directory.segments()
        for sequence in sequences:
            self._next_sequence = sequence + 1
            self._open_segment(sequence, newest=sequence == sequences[-1])
        self._make_room(0, 0)
        if sequences:
            self.active = self.segments.get(sequences[-1])

    def _open_segment(self, sequence: int, *, newest: bool) -> None:
        path = self._directory.path / segment_name(sequence)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.tick += 1
        segment = Segment(sequence, path, fd, os.fstat(fd).st_size, PAGE_NBYTES, self.tick)
        self.segments[sequence] = segment
        self.used_nbytes += segment.size
        page = bytearray(PAGE_NBYTES)
        found = read_all(self._disk, fd, [memoryview(page)], 0, PAGE_NBYTES)
        if not any(page) or (found < PAGE_NBYTES and SEGMENT_MAGIC.startswith(page[: min(found, len(SEGMENT_MAGIC))])):
            self.damaged_segments += 1  # cut short, or a power cut came before its first bytes reached the disk
            self._drop(segment)
            return
        sound = segment_page_is_sound(bytes(page), str(path), sequence, self._directory.store_id)
        content = scan(self._disk, fd, segment.size, payloads=newest)
        segment.end = content.end
        lost = 0 if newest else segment.size - align(content.end, PAGE_NBYTES)
        self.lost_nbytes += lost
        self.damaged_segments += not sound or content.damaged or lost > 0
        self.torn_records += len(content.torn)
        if not content.records:
            self._drop(segment)
            return
        if not sound:  # its content is known; damage that adds up would look like a foreign file one day
            write_all(self._disk, fd, [pack_segment_page(sequence, self._directory.store_id)], 0, PAGE_NBYTES)
        for offset, header in content.torn:
            if offset < content.end:
                write_all(self._disk, fd, [pack_dead_header(header)], offset, header.nbytes)
        if newest:
            self._cut(segment)
        for offset, header in content.records:
            nbytes, header_nbytes = record_nbytes(header), header.nbytes
            self.index[header.key] = Place(sequence, offset, nbytes, header_nbytes, header, segment)
            segment.keys.append(header.key)

"""The segments of a file store as its writer has them: created, grown, retired, dropped and recovered.

Whoever calls a method of :class:`SegmentPool` that says *held: append* holds the pool's ``append`` lock; ``index_lock``
guards ``index``, ``segments`` and the counts, and is never held over I/O.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Final

from cache_manager.errors import StorageError
from cache_manager.spec import align
from cache_manager.storage.directory import StoreDirectory
from cache_manager.storage.disk import Disk, open_regular, read_all, write_all
from cache_manager.storage.limits import SEGMENTS_MAX, Limits, victims
from cache_manager.storage.segment import (
    PAGE_NBYTES,
    TEMP_SUFFIX,
    pack_dead_header,
    pack_segment_page,
    page_is_missing,
    read_segment_page,
    scan,
    segment_name,
)
from cache_manager.storage.segment_index import Place, Segment, SegmentIndex

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"
    """After ``flush`` or ``close``; a killed process loses nothing, a power cut what was not flushed."""
    BATCH = "batch"
    """When ``put`` returns."""


class SegmentPool(SegmentIndex):
    """The segments of the store that this process writes.

    Opening rebuilds the index from the headers in every segment; ``StorageError`` when that cannot be.
    """

    def __init__(
        self, directory: StoreDirectory, disk: Disk, limits: Limits, sync: Sync, clock: Callable[[], float]
    ) -> None:
        super().__init__(disk, limits.ttl_s)
        self.append = threading.Lock()
        self.active: Segment | None = None  # the one that is written; changes under ``append``
        self.dropped_segments = self.damaged_segments = self.torn_records = self.lost_nbytes = 0
        self.replaced_records = 0
        self.short_of_free = self.sweep_failures = 0
        self._directory = directory
        self._limits = limits
        self._sync = sync
        self._clock = clock
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

    def fits(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` can be stored at all."""
        return align(PAGE_NBYTES + nbytes, PAGE_NBYTES) <= self._limits.quota_nbytes

    def activate(self, nbytes: int) -> Segment | None:
        """The active segment, after it was made one that has room for a record of ``nbytes``. Held: append.

        ``None``: neither the quota nor the disk has room now.
        """
        active, segment_nbytes = self.active, self._limits.segment_nbytes
        try:
            if active is not None and active.end + nbytes <= segment_nbytes > active.size:
                self._make_room(segment_nbytes - active.size, 0)
                self._disk.allocate(active.fd, segment_nbytes)
                self._resize(active, segment_nbytes)
                return active
            if active is not None:
                self.retire(active)
            size = max(segment_nbytes, align(PAGE_NBYTES + nbytes, PAGE_NBYTES))
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

    def sweep(self, now_s: float) -> None:
        """Remove the files of expired segments, and write no more to a segment that has taken records long enough.

        A file that cannot be removed now is counted and tried again by the next call; nothing of it is served
        meanwhile. Held: append.
        """
        if (active := self.active) is not None and self._limits.is_fully_written(active.created_s, now_s):
            self.retire(active)
        if not self.sweepable:
            return
        with self.index_lock:
            gone = [segment for segment in self.segments.values() if segment.expired]
            self.sweepable = False
        for segment in gone:
            try:
                self._drop(segment)
            except OSError:
                self.sweep_failures += 1
                self.sweepable = True

    def sync_all(self, segments: Iterable[Segment]) -> None:
        """Make entries and bytes durable; a segment stays dirty when that fails. Held: flush."""
        try:
            if self._entries_dirty:
                self._entries_dirty = False
                self._sync_entries()
            for segment in segments:
                self._sync_segment(segment)
        except OSError as error:
            raise StorageError(f"{self._directory.path}: cannot flush: {error}") from error

    def mark_dead(self, older: list[Place]) -> None:
        """Delete copies for which there are newer ones; ``OSError``, and ``older`` is what is left to do.

        Held: append, or opening.
        """
        touched = {place.segment.sequence: place.segment for place in older}
        while older:
            place, segment = older[-1], older[-1].segment
            segment.dirty = True
            segment.marks += 1
            write_all(self._disk, segment.fd, [pack_dead_header(place.header)], place.offset, place.header_nbytes)
            older.pop()
        if self._sync is Sync.BATCH:
            for segment in touched.values():
                self._sync_segment(segment)

    def _sync_segment(self, segment: Segment) -> None:
        marks = segment.marks
        segment.dirty = False  # before the sync: what is written meanwhile is dirty again
        try:
            self._disk.sync(segment.fd)
        except OSError:
            segment.dirty = True
            raise
        segment.synced_marks = max(segment.synced_marks, marks)

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
        """A new segment, which has its name only when its header page is on the disk, whatever ``sync`` says.

        A name without its page, as a power cut could leave it, would be no segment and would keep the store closed.
        """
        sequence, created_s = self._next_sequence, self._clock()
        path = self._directory.path / segment_name(sequence)
        temp = path.with_name(path.name + TEMP_SUFFIX)
        fd = open_regular(temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._disk.allocate(fd, size)
            page = pack_segment_page(sequence, self._directory.store_id, created_s)
            write_all(self._disk, fd, [page], 0, PAGE_NBYTES)
            self._disk.sync(fd)
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
        segment = Segment(sequence, path, fd, size, PAGE_NBYTES, self.tick, created_s)
        with self.index_lock:
            self.add(segment)
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

    def _make_room(self, nbytes: int, files: int) -> None:
        """Drop the least recently used segments until ``nbytes`` in ``files`` new ones fit quota and reserve.

        ``OSError`` (``ENOSPC``) when that cannot be; then nothing was dropped, unless the file system did not give
        back what was dropped, because a reader of another process still has it open.
        """
        asks = nbytes > 0 and self._limits.asks_for_space
        space = self._disk.space(self._directory.lock_fd) if asks else None
        short = self._limits.short_nbytes(self.used_nbytes, nbytes, space)
        others = [segment for segment in self.segments.values() if segment is not self.active]
        chosen = victims(others, short, len(self.segments) + files - SEGMENTS_MAX)
        for segment in chosen or ():
            self._drop(segment)
            self.dropped_segments += 1
        if chosen is None or (asks and chosen and self._is_short(nbytes)):
            self.short_of_free += space is not None and self._limits.short_nbytes(0, nbytes, space) > 0
            raise OSError(errno.ENOSPC, "neither the quota nor the file system's reserve has room")

    def _is_short(self, nbytes: int) -> bool:
        space = self._disk.space(self._directory.lock_fd)
        return self._limits.short_nbytes(self.used_nbytes, nbytes, space) > 0

    def _drop(self, segment: Segment) -> None:
        """Remove a segment and all its records; its bytes stay readable to calls that have it pinned.

        An older copy of one of them must not outlive it in a power cut: its deletion reaches the disk before.
        """
        for other in self.segments.values():
            if other.marks > other.synced_marks and other is not segment:
                self._sync_segment(other)
        segment.path.unlink(missing_ok=True)
        self._entries_dirty = True
        if segment is self.active:
            self.active = None
        self.let_go(segment)

    def _recover(self) -> None:
        """Rebuild the index from the segments' headers."""
        sequences, now_s = self._directory.segments(), self._clock()
        for sequence in sequences:
            self._next_sequence = sequence + 1
            self._open_segment(sequence, newest=sequence == sequences[-1])
        self.expire(now_s)
        self.sweep(now_s)
        self._make_room(0, 0)
        if sequences:
            self.active = self.segments.get(sequences[-1])

    def _open_segment(self, sequence: int, *, newest: bool) -> None:
        path = self._directory.path / segment_name(sequence)
        fd = open_regular(path, os.O_RDWR)
        self.tick += 1
        segment = Segment(sequence, path, fd, os.fstat(fd).st_size, PAGE_NBYTES, self.tick, None)
        self.add(segment)
        raw = bytearray(PAGE_NBYTES)
        found = read_all(self._disk, fd, [memoryview(raw)], 0, PAGE_NBYTES)
        if page_is_missing(raw, found):
            self.damaged_segments += 1
            self._drop(segment)
            return
        page = read_segment_page(bytes(raw), str(path), sequence, self._directory.store_id)
        segment.created_s = page.created_s
        content = scan(self._disk, fd, segment.size, payloads=newest)
        segment.end = content.end
        lost = 0 if newest else segment.size - align(content.end, PAGE_NBYTES)
        self.lost_nbytes += lost
        self.damaged_segments += not page.sound or content.damaged or lost > 0
        self.torn_records += len(content.torn)
        torn = [(offset, header) for offset, header in content.torn if offset < content.end]
        self.mark_dead(self.take(segment, content.records, content.dead + torn))
        if not content.records:
            self._drop(segment)
            return
        if not page.sound:  # its content is known; damage that adds up would look like a foreign file one day
            write_all(
                self._disk, fd, [pack_segment_page(sequence, self._directory.store_id, page.created_s)], 0, PAGE_NBYTES
            )
        for offset, header in torn:
            write_all(self._disk, fd, [pack_dead_header(header)], offset, header.nbytes)
        if newest:
            self._cut(segment)

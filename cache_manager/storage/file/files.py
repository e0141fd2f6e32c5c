"""What is done to the files of segments: marks of deletion, indexes, syncs, removal; when, the pool decides.

``_marking`` keeps the marks of deletion, the indexes of finished segments, and what is written anew after a failed sync
out of each other's way; it is held over I/O, and ``index_lock`` may be taken within it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Final

from cache_manager.errors import StorageError
from cache_manager.spec import align
from cache_manager.storage.disk import Disk, read_all, write_all
from cache_manager.storage.file.directory import LockedDirectory
from cache_manager.storage.file.index import Place, Segment, SegmentIndex
from cache_manager.storage.file.recovery import Content, verify
from cache_manager.storage.file.segment import (
    DEAD_MAGIC,
    DELETED,
    ENTRY_NBYTES,
    LIVING,
    PAGE_NBYTES,
    UNSOUND,
    header_is_dead,
    header_is_sound,
    pack_index,
    pack_segment_page,
    segment_name,
    stand_in_header,
    states_at,
)

_PIECE_NBYTES: Final = 1 << 20


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"
    """After ``flush`` or ``close``; a killed process loses nothing, a power cut what was not flushed."""
    BATCH = "batch"
    """When ``put`` returns."""


class SegmentFiles(SegmentIndex):
    """The segments' files in the directory of the one who writes them."""

    def __init__(self, directory: LockedDirectory, disk: Disk, ttl_s: float | None, sync: Sync) -> None:
        super().__init__(disk, ttl_s, directory.path)
        self.active: Segment | None = None  # the one that is written
        self.lost_records = 0
        self._directory = directory
        self._sync = sync
        self._marking = threading.Lock()
        self._entries_changed = self._entries_synced = 0

    def sync_all(self, segments: Iterable[Segment]) -> None:
        """Make entries and bytes durable; a segment stays dirty when that fails. Held: flush."""
        lost = self.lost_records
        try:
            self._sync_entries()
            for segment in segments:
                self._sync_segment(segment)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot flush: {error}") from error
        if self.lost_records > lost:
            raise StorageError(
                f"{self._path}: the disk has lost {self.lost_records - lost} records since a flush failed"
            )

    def give_way(self, older: list[Place]) -> None:
        """Delete copies for which there are newer ones; ``OSError``, and ``older`` is what is left to do.

        Held: append, or opening.
        """
        touched = {place.segment.sequence: place.segment for place in older}
        while older:
            older[-1].segment.marks += 1
            self.mark(older[-1])
            older.pop()
        if self._sync is Sync.BATCH:
            for segment in touched.values():
                self._sync_segment(segment)

    def mark(self, place: Place) -> None:
        """Mark a record as deleted on the disk: in its header, and in the index if there is one.

        A header that is not the record's any more is replaced, so that a scan gets past it.
        """
        segment, number, entry = place
        raw = bytearray(entry.header_nbytes)
        with self._marking:
            segment.dirty = True
            read_all(self._disk, segment.fd, [raw], entry.offset, len(raw))
            if header_is_sound(raw, entry):
                write_all(self._disk, segment.fd, [DEAD_MAGIC], entry.offset, len(DEAD_MAGIC))
            elif not header_is_dead(raw, entry):
                write_all(self._disk, segment.fd, [stand_in_header(entry)], entry.offset, entry.header_nbytes)
            if segment.indexed:
                at = states_at(segment.end, len(segment.states)) + number
                write_all(self._disk, segment.fd, [bytes([DELETED])], at, 1)

    def _sync_segment(self, segment: Segment) -> None:
        marks, records = segment.marks, len(segment.states)
        if segment.unwritten:
            self._write_again(segment)
        segment.dirty = False  # before the sync: what is written meanwhile is dirty again
        try:
            self._disk.sync(segment.fd)
        except OSError:
            segment.dirty = segment.unwritten = True
            raise
        segment.unwritten = False
        segment.synced_marks = max(segment.synced_marks, marks)
        segment.synced_records = max(segment.synced_records, records)

    def _write_again(self, segment: Segment) -> None:
        """Write what a failed sync covered once more: the kernel takes it for written, or has dropped it.

        Records that did not come back are not served any more, and are counted.
        """
        with self._marking:
            with self.index_lock:
                first, stop = segment.synced_records, segment.size if segment.indexed else segment.end
                fresh = Content(segment.rows[first * ENTRY_NBYTES :], segment.states[first:])
            verify(self._disk, segment.fd, segment.size, fresh)
            with self.index_lock:
                for number, state in enumerate(fresh.states, first):
                    if state == UNSOUND and segment.states[number] == LIVING and not segment.expired:
                        self.table.remove(segment, number, UNSOUND)
                        self.lost_records += 1
            page = pack_segment_page(segment.sequence, self._directory.store_id, segment.created_s)
            write_all(self._disk, segment.fd, [page], 0, len(page))
            for at in range(PAGE_NBYTES, stop, _PIECE_NBYTES):
                piece = bytearray(min(_PIECE_NBYTES, stop - at))
                found = read_all(self._disk, segment.fd, [piece], at, len(piece))
                write_all(self._disk, segment.fd, [memoryview(piece)[:found]], at, found)

    def _sync_entries(self) -> None:
        """Make the directory's entries durable, unless they are; they stay to be synced when that fails."""
        changed = self._entries_changed
        if changed != self._entries_synced:
            self._disk.sync(self._directory.fd)
            self._entries_synced = changed

    def _finish(self, segment: Segment) -> None:
        """Write a segment's index behind its last record, in the space that was kept for it."""
        with self._marking:
            self._disk.truncate(segment.fd, segment.end)  # what a failed write left behind must not be read back
            index = pack_index(
                segment.sequence, self._directory.store_id, segment.end, bytes(segment.rows), bytes(segment.states)
            )
            self._resize(segment, segment.end)
            segment.dirty = True
            write_all(self._disk, segment.fd, [index], segment.end, len(index))
            segment.indexed = True
        self._resize(segment, segment.end + len(index))
        self._drop_journal(segment)

    def _cut(self, segment: Segment) -> None:
        with self._marking:
            self._disk.truncate(segment.fd, segment.end)
            size = align(segment.end, PAGE_NBYTES)
            self._disk.truncate(segment.fd, size)
        self._resize(segment, size)

    def _resize(self, segment: Segment, size: int) -> None:
        with self.index_lock:
            self.used_nbytes += size - segment.size
            segment.size = size

    def _drop(self, segment: Segment) -> None:
        """Remove a segment and all its records; its bytes stay readable to calls that have it pinned.

        An older copy of one of them must not outlive it in a power cut: its deletion reaches the disk before.
        """
        for other in self.segments.values():
            if other.marks > other.synced_marks and other is not segment:
                self._sync_segment(other)
        self._directory.unlink(segment.name)
        self._entries_changed += 1
        if segment is self.active:
            self.active = None
        self._drop_journal(segment)
        self.let_go(segment)  # from here on its descriptors are closed by whoever reads there last

    def _drop_journal(self, segment: Segment) -> None:
        if segment.journal_fd >= 0:
            os.close(segment.journal_fd)
            segment.journal_fd = -1
        with suppress(OSError):  # an orphan is removed at the next opening
            self._directory.unlink(segment_name(segment.sequence, "journal"))

    def _set_name(self, segment: Segment) -> None:
        name = segment_name(segment.sequence, "aside" if segment.aside else "kvr")
        if name != segment.name:
            self._directory.rename(segment.name, name)
            segment.name = name
            self._entries_changed += 1

    def _begin_journal(self, segment: Segment) -> None:
        with suppress(OSError):
            name = segment_name(segment.sequence, "journal")
            segment.journal_fd = self._directory.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            write_all(self._disk, segment.journal_fd, [bytes(segment.rows)], 0, len(segment.rows))

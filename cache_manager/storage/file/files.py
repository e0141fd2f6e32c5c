"""What is done to the files of segments: marks of deletion, indexes, syncs, removal; when, the pool decides.

``_marking`` keeps the marks of deletion, the indexes of finished segments, and what is written anew after a failed sync
out of each other's way; it is held over I/O, and ``index_lock`` may be taken within it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Final

import numpy as np

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader, checksum
from cache_manager.spec import align
from cache_manager.storage.disk import Disk, read_all, write_all
from cache_manager.storage.file.directory import LockedDirectory
from cache_manager.storage.file.index import SegmentIndex, plan
from cache_manager.storage.file.recovery import Content, verify
from cache_manager.storage.file.segment import (
    DEAD_MAGIC,
    DELETED,
    ENTRY,
    ENTRY_NBYTES,
    LIVING,
    PAGE_NBYTES,
    UNREADABLE,
    UNSOUND,
    Entry,
    pack_index,
    pack_segment_page,
    read_header,
    read_index,
    segment_name,
    stand_in_header,
    states_at,
    unpack_entry,
)
from cache_manager.storage.file.table import Place, Segment

_PIECE_NBYTES: Final = 1 << 20


Kept = tuple[RecordHeader, memoryview]
"""A copy of a record and its payload, whose segment goes."""


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"
    """After ``flush`` or ``close``; a killed process loses nothing, a power cut what was not flushed."""
    BATCH = "batch"
    """When ``put`` returns."""


class SegmentFiles(SegmentIndex):
    """The segments' files in the directory of the one who writes them."""

    def __init__(
        self, directory: LockedDirectory, disk: Disk, ttl_s: float | None, sync: Sync, clock: Callable[[], float]
    ) -> None:
        super().__init__(disk, ttl_s, directory.path, clock)
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
            lost = self.lost_records - lost
            raise StorageError(f"{self._path}: the disk has lost {lost} records since a flush failed")

    def write(self, segment: Segment, vector: list[Buffer], nbytes: int, rows: Buffer) -> None:
        """Append records to the active segment's file, and their entries to its journal. Held: append."""
        write_all(self._disk, segment.fd, vector, segment.end, nbytes)
        if segment.journal_fd >= 0:
            try:
                write_all(self._disk, segment.journal_fd, [rows], len(segment.rows), len(rows))
            except OSError:  # records are found without it, unless there is damage
                segment.close_journal()
        if self._sync is Sync.BATCH:
            self._sync_bytes(segment)
            self._sync_entries()

    def asked_for(self, segments: Sequence[Segment], nbytes: int) -> list[Kept]:
        """Copies of the records that were asked for since they were written, ``nbytes`` with their entries at most.

        The newest ones of each segment, if these are too many. What does not come back from the disk as it was put is
        left out, and so is a segment without an index. Held: append.
        """
        places: list[Place] = []
        for segment in segments if nbytes > 0 else ():
            with suppress(OSError):
                for place in self._hits(segment):
                    if (nbytes := nbytes - place[1].nbytes - ENTRY_NBYTES - 1) < 0:
                        break
                    places.append(place)
        places.reverse()
        payloads = [memoryview(bytearray(entry.payload_nbytes)) for _, entry in places]
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(places)
        for run in plan(enumerate(places), payloads, found):
            with suppress(StorageError):
                self._read(run, found, [])
        kept = zip(found, payloads, strict=True)
        return [(it, raw) for it, raw in kept if isinstance(it, RecordHeader) and checksum(raw) == it.payload_xxh3]

    def _hits(self, segment: Segment) -> list[Place]:
        """The records of a segment with an index that are served and were asked for, the newest first."""
        numbers = np.flatnonzero(np.frombuffer(bytes(segment.hits), np.uint8)).tolist()  # others add to it
        if not (numbers and segment.indexed):
            return []
        index = read_index(self._disk, segment.fd, segment.size, segment.sequence, self._directory.store_id)
        entries = [unpack_entry(index[0], number) for number in reversed(numbers)] if index is not None else []
        with self.index_lock:
            found = zip(entries, self.table.find_all([entry.key for entry in entries]), strict=True)
        return [place for was, place in found if place and place[0] is segment and place[1].number == was.number]

    def give_way(self, older: list[Place]) -> None:
        """Delete copies for which there are newer ones; ``OSError``, and ``older`` is what is left to do.

        Held: append, or opening.
        """
        touched = {place[0].sequence: place[0] for place in older}
        while older:
            segment, entry = older[-1]
            segment.marks += 1
            try:
                self.mark(older[-1])
            except OSError:
                with suppress(OSError):
                    if read_header(self._disk, segment.fd, entry)[0] == DELETED:  # but not in the index
                        older.pop()
                raise
            older.pop()
        if self._sync is Sync.BATCH:
            for segment in touched.values():
                self._sync_segment(segment)

    def mark(self, place: Place) -> None:
        """Mark a record as deleted on the disk: in its header, and in the index if there is one.

        A header that is not the record's any more is replaced, so that a scan gets past it. For one that the disk does
        not give back the index is enough.
        """
        segment, entry = place
        with self._marking:
            segment.dirty = True
            try:
                state, _ = read_header(self._disk, segment.fd, entry)
            except OSError as error:
                if error.errno != errno.EIO or not segment.indexed:
                    raise
                state = UNREADABLE
            if state == LIVING:
                write_all(self._disk, segment.fd, [DEAD_MAGIC], entry.offset, len(DEAD_MAGIC))
            elif state == UNSOUND:
                write_all(self._disk, segment.fd, [stand_in_header(entry)], entry.offset, entry.header_nbytes)
            if segment.indexed:
                at = states_at(segment.end, segment.count) + entry.number
                write_all(self._disk, segment.fd, [bytes([DELETED])], at, 1)

    def _sync_segment(self, segment: Segment) -> None:
        marks, records, failed = segment.marks, segment.count, segment.failed_syncs
        if failed > segment.rewritten:
            self._write_again(segment)
            segment.rewritten = failed
        segment.dirty = False  # before the sync: what is written meanwhile is dirty again
        self._sync_bytes(segment)
        segment.synced_marks = max(segment.synced_marks, marks)
        segment.synced_records = max(segment.synced_records, records)

    def _sync_bytes(self, segment: Segment) -> None:
        """``OSError`` also where another call's sync failed meanwhile: of two the kernel tells one."""
        failed = segment.failed_syncs
        try:
            self._disk.sync(segment.fd)
            if segment.failed_syncs != failed:
                raise OSError(errno.EIO, "another sync has failed meanwhile")
        except OSError:
            segment.failed_syncs += 1
            segment.dirty = True
            raise

    def _write_again(self, segment: Segment) -> None:
        """Write what a failed sync covered once more: the kernel takes it for written, or has dropped it.

        Records that did not come back are not served any more, and are counted.
        """
        with self._marking:
            with self.index_lock:
                stop, rows = segment.size if segment.indexed else segment.end, self.table.entries(segment)
            content = Content(bytearray(rows), bytearray(len(rows) // ENTRY_NBYTES))
            verify(self._disk, segment.fd, segment.size, content)
            with self.index_lock:
                for fields, state in zip(ENTRY.iter_unpack(rows), content.states, strict=True):
                    entry = Entry._make(fields)
                    if state != UNSOUND or entry.number < segment.synced_records:
                        continue
                    if self.table.find(entry.key) == (segment, entry):
                        self.table.remove((segment, entry), UNSOUND)
                        self.lost_records += 1
            self._write_page(segment)
            for at in range(PAGE_NBYTES, stop, _PIECE_NBYTES):
                piece = bytearray(min(_PIECE_NBYTES, stop - at))
                found = read_all(self._disk, segment.fd, [piece], at, len(piece))
                write_all(self._disk, segment.fd, [memoryview(piece)[:found]], at, found)

    def _write_page(self, segment: Segment) -> None:
        page = pack_segment_page(segment.sequence, self._directory.store_id, segment.created_s)
        write_all(self._disk, segment.fd, [page], 0, len(page))

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
            self._resize(segment, segment.end)
            with self.index_lock:
                rows, states = bytes(segment.rows), bytes(segment.states)
            index = pack_index(segment.sequence, self._directory.store_id, segment.end, rows, states)
            segment.dirty = True
            write_all(self._disk, segment.fd, [index], segment.end, len(index))
            segment.indexed = True
            segment.rows, segment.states = bytearray(), bytearray()
        self._resize(segment, segment.end + len(index))
        self._drop_journal(segment)

    def _cut(self, segment: Segment) -> None:
        """Give back the space behind the last record; what a failed write left there must not be read back."""
        size = align(segment.end, PAGE_NBYTES)
        with self._marking:
            self._disk.truncate(segment.fd, segment.end)
            self._disk.truncate(segment.fd, size)
        self._resize(segment, size)

    def _begin_journal(self, segment: Segment) -> None:
        """Start the journal of the active segment with the records that are in it."""
        name = segment_name(segment.sequence, "journal")
        segment.journal_fd = self._directory.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        write_all(self._disk, segment.journal_fd, [segment.rows], 0, len(segment.rows))

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
        segment.close_journal()
        with suppress(OSError):  # an orphan is removed at the next opening
            self._directory.unlink(segment_name(segment.sequence, "journal"))

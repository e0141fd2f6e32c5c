"""The segments of a file store as its writer has them: created, grown, finished, set aside, dropped and recovered.

Whoever calls a method of :class:`SegmentPool` that says *held: append* holds the pool's ``append`` lock; ``index_lock``
guards the table, ``segments`` and the counts, and is never held over I/O.

Nothing is erased that could be somebody's record. A segment with bytes that no record accounts for is **set aside**: it
is renamed, what is sound in it is served, nothing more is written to it, and it goes when everything else has gone.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from cache_manager.errors import StorageError, StoreFormatError
from cache_manager.record import HEADER_NBYTES_MIN, Buffer
from cache_manager.spec import align
from cache_manager.storage.disk import Disk, write_all
from cache_manager.storage.file.directory import LockedDirectory
from cache_manager.storage.file.files import SegmentFiles, Sync
from cache_manager.storage.file.index import Place, Segment
from cache_manager.storage.file.limits import SEGMENTS_MAX, Limits, victims
from cache_manager.storage.file.recovery import Content, read_journal, recover
from cache_manager.storage.file.segment import (
    ENTRY_NBYTES,
    LIVING,
    PAGE_NBYTES,
    SEQUENCE_MAX,
    UNSOUND,
    index_nbytes,
    pack_segment_page,
    segment_name,
)

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""
_IN_THE_WAY_MAX: Final = 64


class SegmentPool(SegmentFiles):
    """The segments of the store that this process writes; ``StorageError`` when they cannot be read at opening."""

    def __init__(
        self, directory: LockedDirectory, disk: Disk, limits: Limits, sync: Sync, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, disk, limits.ttl_s, sync)
        self.append = threading.Lock()
        self.dropped_segments = self.damaged_segments = self.torn_records = self.lost_nbytes = 0
        self.replaced_records = 0
        self.short_of_free = self.sweep_failures = 0
        self._limits = limits
        self._clock = clock
        self._next_sequence = 1
        try:
            limits.check_space(disk.space(directory.fd) if limits.asks_for_space else None)
            self._recover()
        except BaseException as error:
            for segment in self.segments.values():
                segment.close()
            if isinstance(error, OSError):
                raise StorageError(f"{directory.path}: cannot read the store: {error}") from error
            raise

    def fits(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` can be stored at all."""
        return nbytes <= self._limits.segment_nbytes // 2 or self._size_for(nbytes) <= self._limits.quota_nbytes

    def has_room(self, segment: Segment, nbytes: int, records: int) -> bool:
        """Whether ``records`` of ``nbytes`` together, and then the index, fit behind what is in a segment."""
        return segment.end + nbytes + index_nbytes(len(segment.states) + records) <= segment.size

    def activate(self, nbytes: int) -> Segment | None:
        """The active segment, after it was made one that has room for a record of ``nbytes``. Held: append.

        ``None``: neither the quota nor the disk has room now.
        """
        active, segment_nbytes = self.active, self._limits.segment_nbytes
        try:
            if active is not None and active.size < segment_nbytes:
                grown = segment_nbytes - active.size
                if active.end + nbytes + index_nbytes(len(active.states) + 1) <= segment_nbytes:
                    self._make_room(grown, 0)
                    self._allocate(active.fd, segment_nbytes, grown)
                    self._resize(active, segment_nbytes)
                    return active
            if active is not None:
                self.retire(active)
            size = self._size_for(nbytes)
            self._make_room(size, 1)
            self.active = self._create(size)
        except OSError as error:
            if self.active is not None:
                self.retire(self.active)
            if error.errno in NO_ROOM:
                return None
            raise StorageError(f"{self._path}: cannot start a segment: {error}") from error
        return self.active

    def retire(self, segment: Segment) -> None:
        """Write no more to the active segment: give it its index, or drop it when nothing is in it. Held: append."""
        self.active = None
        try:
            if segment.states:
                self._finish(segment)
            else:
                self._drop(segment)
        except OSError:
            try:
                self._cut(segment)
            except OSError:  # then the space stays taken, and counted, until the segment goes
                self._resize(segment, os.fstat(segment.fd).st_size)

    def leave_active(self) -> None:
        """Give back the space behind the active segment's last record; the next life goes on there. Held: append."""
        active, self.active = self.active, None
        if active is not None:
            with suppress(OSError):
                (self._cut if active.states else self._drop)(active)

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

    def write(self, segment: Segment, vector: list[Buffer], nbytes: int, rows: Buffer) -> None:
        """Append records to the active segment's file, and their entries to its journal. Held: append."""
        write_all(self._disk, segment.fd, vector, segment.end, nbytes)
        if segment.journal_fd >= 0:
            try:
                write_all(self._disk, segment.journal_fd, [rows], len(segment.rows), len(rows))
            except OSError:  # records are found without it, unless there is damage
                os.close(segment.journal_fd)
                segment.journal_fd = -1
        if self._sync is Sync.BATCH:
            segment.unwritten = True
            self._disk.sync(segment.fd)
            segment.unwritten = False
            self._sync_entries()

    def _size_for(self, nbytes: int) -> int:
        """Of a segment that has room for a record of ``nbytes``."""
        return max(self._limits.segment_nbytes, align(PAGE_NBYTES + nbytes + index_nbytes(1), PAGE_NBYTES))

    def _create(self, size: int) -> Segment:
        """A new segment. Nothing is synced: until its first record is, the file may be gone after a power cut."""
        created_s, directory = self._clock(), self._directory
        sequence, fd = self._new_file()
        name, journal = segment_name(sequence), segment_name(sequence, "journal")
        segment = Segment(sequence, name, fd, size, created_s)
        try:
            self._allocate(segment.fd, size, size)
            write_all(
                self._disk, segment.fd, [pack_segment_page(sequence, directory.store_id, created_s)], 0, PAGE_NBYTES
            )
            segment.journal_fd = directory.open(journal, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        except OSError:
            segment.close()
            for leftover in (name, journal):
                with suppress(OSError):  # the failure that is on its way out says more
                    directory.unlink(leftover)
            raise
        self._next_sequence = sequence + 1
        self._entries_changed += 1
        segment.used_at = self.tick
        with self.index_lock:
            self.join(segment)
        return segment

    def _new_file(self) -> tuple[int, int]:
        """A sequence that no file has, and a descriptor of its new file; what is in the way stays as it is."""
        for _ in range(_IN_THE_WAY_MAX):
            if self._next_sequence > SEQUENCE_MAX:
                raise OSError(errno.EOVERFLOW, "no sequence number is left")
            with suppress(FileExistsError):
                name = segment_name(self._next_sequence)
                return self._next_sequence, self._directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self._next_sequence += 1
        raise OSError(errno.EEXIST, f"{_IN_THE_WAY_MAX} files have the names of the next segments")

    def _allocate(self, fd: int, nbytes: int, grown_nbytes: int) -> None:
        """As the disk's; when that is full this store's own oldest segments go first, if that is of any use."""
        try:
            self._disk.allocate(fd, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = self._disk.space(self._directory.fd).free_nbytes if error.errno == errno.ENOSPC else 0
            chosen = victims(self._others(), grown_nbytes - free, 0)
            if not chosen:
                raise
            for segment in chosen:
                self._drop(segment)
                self.dropped_segments += 1
            self._disk.allocate(fd, nbytes)

    def _others(self) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment is not self.active]

    def _make_room(self, nbytes: int, files: int) -> None:
        """Drop the least recently used segments until ``nbytes`` in ``files`` new ones fit quota and reserve.

        ``OSError`` (``ENOSPC``) when that cannot be; then nothing was dropped, unless the file system did not give
        back what was dropped, because a reader of another process still has it open.
        """
        asks = nbytes > 0 and self._limits.asks_for_space
        space = self._disk.space(self._directory.fd) if asks else None
        short = self._limits.short_nbytes(self.used_nbytes, nbytes, space)
        chosen = victims(self._others(), short, len(self.segments) + files - SEGMENTS_MAX)
        for segment in chosen or ():
            self._drop(segment)
            self.dropped_segments += 1
        if chosen is None or (asks and chosen and self._is_short(nbytes)):
            self.short_of_free += space is not None and self._limits.short_nbytes(0, nbytes, space) > 0
            raise OSError(errno.ENOSPC, "neither the quota nor the file system's reserve has room")

    def _is_short(self, nbytes: int) -> bool:
        space = self._disk.space(self._directory.fd)
        return self._limits.short_nbytes(self.used_nbytes, nbytes, space) > 0

    def _recover(self) -> None:
        """Find what is in the segments, and go on in the newest if nothing is wrong with it."""
        files, now_s = self._directory.files(), self._clock()
        if files and (newest := max(files)) > SEQUENCE_MAX:
            raise StoreFormatError(
                str(self._directory.path / files[newest]), "sequence", f"up to {SEQUENCE_MAX}", newest
            )
        opened = [self._open_segment(sequence, name, newest=sequence == max(files)) for sequence, name in files.items()]
        self.table.reserve(sum(len(content.states) for _, content in opened))
        for segment, content in opened:
            self._next_sequence = segment.sequence + 1
            self._admit(segment, content, newest=segment.sequence == max(files))
        self.expire(now_s)
        self.sweep(now_s)
        self._make_room(0, 0)

    def _open_segment(self, sequence: int, name: str, *, newest: bool) -> tuple[Segment, Content]:
        directory, fd = self._directory, self._directory.open(name, os.O_RDWR)
        self.tick += 1
        segment = Segment(sequence, name, fd, os.fstat(fd).st_size, used_at=self.tick)
        content = recover(
            *(self._disk, fd, segment.size),
            path=str(directory.path / name),
            sequence=sequence,
            store_id=directory.store_id,
            journal=read_journal(directory, self._disk, sequence),
            payloads=newest,
            record_nbytes_max=self._limits.quota_nbytes,
        )
        self.torn_records += content.states.count(UNSOUND)
        # Behind the last record there may be the start of a header that was never written whole: room for no record.
        unfinished = newest and 0 < content.lost_nbytes < HEADER_NBYTES_MIN and not content.failed_reads
        segment.aside = content.damaged and not unfinished
        if unfinished:
            self.torn_records += 1
            content.lost_nbytes = 0
        keep = len(content.states)
        while keep and content.states[keep - 1] == UNSOUND and not segment.aside:  # cut off, and cut away
            keep -= 1
        segment.rows, segment.states = content.rows[: keep * ENTRY_NBYTES], content.states[:keep]
        segment.end, segment.indexed, segment.created_s = content.end, content.indexed, content.page.created_s
        return segment, content

    def _admit(self, segment: Segment, content: Content, *, newest: bool) -> None:
        unsound = [Place(segment, n, segment.entry(n)) for n, state in enumerate(segment.states) if state == UNSOUND]
        self.torn_records += content.cut_short
        self.damaged_segments += segment.aside or not content.page.sound or (content.cut_short and not newest)
        self.lost_nbytes += content.lost_nbytes
        self.failed_reads += content.failed_reads
        self.join(segment)
        segment.dirty = True  # nobody knows what the life before has synced
        self.give_way([*self.take(segment), *unsound])
        if content.empty or (LIVING not in segment.states and not segment.aside):
            self._drop(segment)
            return
        self._set_name(segment)
        if not content.page.sound and not content.failed_reads:  # damage that adds up would look like a foreign file
            page = pack_segment_page(segment.sequence, self._directory.store_id, segment.created_s)
            write_all(self._disk, segment.fd, [page], 0, PAGE_NBYTES)
        if segment.aside or segment.indexed:
            return
        if newest:
            self._cut(segment)
            self.active = segment
            self._begin_journal(segment)
        elif self.used_nbytes + index_nbytes(len(segment.states)) + PAGE_NBYTES <= self._limits.quota_nbytes:
            with suppress(OSError):
                self._finish(segment)

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from cache_manager.errors import StorageError, StoreFormatError
from cache_manager.record import HEADER_NBYTES_MIN
from cache_manager.spec import align
from cache_manager.storage.disk import Disk
from cache_manager.storage.file.directory import LockedDirectory
from cache_manager.storage.file.files import Kept, SegmentFiles, Sync
from cache_manager.storage.file.limits import SEGMENTS_MAX, Limits, victims
from cache_manager.storage.file.recovery import Content, read_segment
from cache_manager.storage.file.segment import (
    DELETED,
    PAGE_NBYTES,
    SEQUENCE_MAX,
    UNSOUND,
    index_nbytes,
    segment_name,
)
from cache_manager.storage.file.table import Segment

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""
_IN_THE_WAY_MAX: Final = 64


class SegmentPool(SegmentFiles):
    """The segments of the store that this process writes; ``StorageError`` when they cannot be read at opening."""

    def __init__(
        self, directory: LockedDirectory, disk: Disk, limits: Limits, sync: Sync, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, disk, limits.ttl_s, sync, clock)
        self.append = threading.Lock()
        self.dropped_segments = self.damaged_segments = self.torn_records = self.lost_nbytes = 0
        self.replaced_records = self.kept_records = 0
        self.short_of_free = self.sweep_failures = 0
        self._limits = limits
        self._unended: list[Segment] = []  # no more is written to them, but they could not be cut to their records
        self._next_sequence = 1
        try:
            limits.check_space(disk.space(directory.fd) if limits.asks_for_space else None)
            self._recover()
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise StorageError(f"{directory.path}: cannot read the store: {error}") from error
            raise

    def fits(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` can be stored at all."""
        return self._size_for(nbytes) <= self._limits.quota_nbytes

    def activate(self, nbytes: int, kept_nbytes: int) -> tuple[Segment, list[Kept]] | None:
        """The active segment, after it was made one that has room for a record of ``nbytes``. Held: append.

        And what is to be appended to a new one first, for which it has room, too: records that were asked for since
        they were written, of the segments that made room; ``kept_nbytes`` and two thirds of it at most. A crash takes
        them now, as it takes their segments.
        ``None``: neither the quota nor the disk has room now.
        """
        active = self.active
        try:
            if active is not None:
                size = max(self._limits.segment_nbytes, active.size)
                if active.end + nbytes + index_nbytes(active.count + 1) <= size:
                    self._make_room(size - active.size, 0)
                    self._allocate(active.fd, size, size - active.size)
                    self._resize(active, size)
                    return active, []
                self.retire(active)
            size = self._size_for(nbytes)
            spare_nbytes = min(2 * size // 3, size - PAGE_NBYTES - nbytes - index_nbytes(1))
            kept = self._make_room(size, 1, min(spare_nbytes, kept_nbytes))
            self.active = self._create(size)
        except OSError as error:
            if self.active is not None:
                self.retire(self.active)
            if error.errno in NO_ROOM:
                return None
            raise StorageError(f"{self._path}: cannot start a segment: {error}") from error
        return self.active, kept

    def retire(self, segment: Segment) -> None:
        """Write no more to the active segment: give it its index, or drop it when nothing is in it. Held: append."""
        self.active = None
        self._end(segment)

    def _end(self, segment: Segment) -> None:
        try:
            if segment.count:
                self._finish(segment)
            else:
                self._drop(segment)
        except OSError:
            try:
                self._cut(segment)
            except OSError:  # then the space stays taken, and counted; what is in it may look like records
                self._resize(segment, os.fstat(segment.fd).st_size)
                self._unended.append(segment)

    def close(self) -> None:
        """Give back the space behind the active segment's last record, where the next life goes on; sync; let go.

        :class:`StorageError` when not all of it could be synced. Held: flush, append.
        """
        try:
            self._end_again()
            active, self.active = self.active, None
            if active is not None:
                with suppress(OSError):
                    (self._cut if active.count else self._drop)(active)
            self.sync_all([segment for segment in self.segments.values() if segment.dirty])
        finally:
            self.release()

    def sweep(self, now_s: float) -> None:
        """Remove the files of expired segments, and write no more to a segment that has taken records long enough.

        A file that cannot be removed now is counted and tried again by the next call; nothing of it is served
        meanwhile. Held: append.
        """
        if (active := self.active) is not None and self._limits.is_fully_written(active.created_s, now_s):
            self.retire(active)
        self._end_again()
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

    def _end_again(self) -> None:
        """End the segments whose end the disk has refused. Held: append."""
        unended, self._unended = self._unended, []
        for segment in unended:
            if not segment.dropped:
                self._end(segment)

    def _size_for(self, nbytes: int) -> int:
        """Of a segment that has room for a record of ``nbytes``."""
        return max(self._limits.segment_nbytes, align(PAGE_NBYTES + nbytes + index_nbytes(1), PAGE_NBYTES))

    def _create(self, size: int) -> Segment:
        """A new segment. Nothing is synced: until its first record is, the file may be gone after a power cut."""
        created_s = self.clock()
        sequence, fd = self._new_file()
        segment = Segment(sequence, segment_name(sequence), fd, size, created_s)
        try:
            self._allocate(segment.fd, size, size)
            self._write_page(segment)
            self._begin_journal(segment)
        except OSError:
            segment.close()
            for kind in ("kvr", "journal"):
                with suppress(OSError):  # the failure that is on its way out says more
                    self._directory.unlink(segment_name(sequence, kind))
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
            self._evict(chosen)
            self._disk.allocate(fd, nbytes)

    def _others(self) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment is not self.active]

    def _make_room(self, nbytes: int, files: int, kept_nbytes: int = 0) -> list[Kept]:
        """Drop the least recently used segments until ``nbytes`` in ``files`` new ones fit quota and reserve.

        Copies of what was asked for in them, as :meth:`asked_for` says. ``OSError`` (``ENOSPC``) when that cannot be;
        then nothing was dropped, unless the file system did not give back what was dropped, because a reader of another
        process still has it open.
        """
        asks = nbytes > 0 and self._limits.asks_for_space
        space = self._disk.space(self._directory.fd) if asks else None
        short = self._limits.short_nbytes(self.used_nbytes, nbytes, space)
        chosen = victims(self._others(), short, len(self.segments) + files - SEGMENTS_MAX)
        kept = self._evict(chosen or (), kept_nbytes)
        if asks and chosen:
            space = self._disk.space(self._directory.fd)
        if chosen is None or self._limits.short_nbytes(self.used_nbytes, nbytes, space) > 0:
            self.short_of_free += space is not None and self._limits.short_nbytes(0, nbytes, space) > 0
            raise OSError(errno.ENOSPC, "neither the quota nor the file system's reserve has room")
        return kept

    def _evict(self, segments: Sequence[Segment], kept_nbytes: int = 0) -> list[Kept]:
        """Drop segments; copies of what was asked for in them, ``kept_nbytes`` with their entries at most."""
        kept = self.asked_for(segments, kept_nbytes)
        for segment in segments:
            self._drop(segment)
            self.dropped_segments += 1
        return kept

    def _recover(self) -> None:
        """Find what is in the segments, and go on in the newest if nothing is wrong with it."""
        files, now_s = self._directory.files(), self.clock()
        newest = max(files, default=0)
        if newest > SEQUENCE_MAX:
            path = str(self._directory.path / files[newest])
            raise StoreFormatError(path, "sequence", f"up to {SEQUENCE_MAX}", newest)
        written = self._directory.journals() | {newest}  # what has no index may end in what was not written whole
        opened = [
            self._open_segment(sequence, name, newest=sequence == newest, payloads=sequence in written)
            for sequence, name in files.items()
        ]
        older = self.serve(opened)
        for segment, content in opened:
            older += [(segment, entry) for entry in content.entries(UNSOUND)]
            segment.states = bytearray(state and DELETED for state in content.states)
        for segment, entry in older:
            segment.states[entry.number] = DELETED
        self.give_way(older)
        for segment, content in opened:
            self._admit(segment, content, newest=segment.sequence == newest)
        self._next_sequence = newest + 1
        self.expire(now_s)
        self.sweep(now_s)
        self._make_room(0, 0)

    def _open_segment(self, sequence: int, name: str, *, newest: bool, payloads: bool) -> tuple[Segment, Content]:
        self.tick += 1
        segment, content = read_segment(
            self._directory,
            self._disk,
            sequence,
            name,
            flags=os.O_RDWR,
            payloads=payloads,
        )
        segment.used_at = self.tick
        segment.dirty = True  # nobody knows what the life before has synced
        self.torn_records += content.states.count(UNSOUND)
        # Behind the last record there may be the start of a header that was never written whole: room for no record.
        if newest and 0 < content.lost_nbytes < HEADER_NBYTES_MIN and not content.failed_reads:
            self.torn_records += 1
            content.lost_nbytes = 0
        segment.aside = content.damaged
        if not segment.aside:
            content.cut_torn()  # cut off, and cut away
            segment.end = content.end
        return segment, content

    def _admit(self, segment: Segment, content: Content, *, newest: bool) -> None:
        self.torn_records += content.cut_short
        self.damaged_segments += segment.aside or not content.page_sound or (content.cut_short and not newest)
        self.lost_nbytes += content.lost_nbytes
        self.failed_reads += content.failed_reads
        if content.empty or not (segment.served or segment.aside):
            self._drop(segment)
            return
        name = segment_name(segment.sequence, "aside" if segment.aside else "kvr")
        if name != segment.name:
            self._directory.rename(segment.name, name)
            segment.name = name
            self._entries_changed += 1
        if not content.page_sound and not content.failed_reads:  # damage that adds up would look like a foreign file
            self._write_page(segment)
        if not (segment.aside or segment.indexed):
            segment.rows = bytearray(content.rows)
            if newest and align(segment.end, PAGE_NBYTES) <= self._limits.quota_nbytes:
                self._cut(segment)
                self.active = segment
                with suppress(OSError):
                    self._begin_journal(segment)
                return
            if self.used_nbytes + index_nbytes(segment.count) + PAGE_NBYTES <= self._limits.quota_nbytes:
                with suppress(OSError):
                    self._finish(segment)
        segment.rows, segment.states = bytearray(), bytearray()

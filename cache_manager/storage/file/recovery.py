"""What is in a segment: the one way in which writers, readers and checks read a segment back. Nothing is changed here.

A segment with an index is what its index says. One without is scanned from header to header. A scan ends where zeros
or an index begin; where something else follows, or the disk does not give a header back, it goes on at the next place
where the segment's journal says that a record begins, and what lies between is *lost*: damaged, and no record's.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cache_manager.errors import RecordError
from cache_manager.record import (
    HEADER_NBYTES_MAX,
    HEADER_NBYTES_MIN,
    MAGIC,
    RecordHeader,
    RunningChecksum,
    unpack_checked_header,
    unpack_header,
)
from cache_manager.storage.disk import Disk, read_all
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.segment import (
    DEAD_MAGIC,
    DELETED,
    ENTRY_DTYPE,
    ENTRY_NBYTES,
    INDEX_MAGIC,
    LIVING,
    PAGE_NBYTES,
    SEGMENT_MAGIC,
    UNREADABLE,
    UNSOUND,
    Entry,
    are_sound,
    pack_entry,
    read_header,
    read_index,
    read_segment_page,
    record_nbytes,
    segment_name,
    unpack_entry,
)
from cache_manager.storage.file.table import Segment

_WINDOW_NBYTES: Final = 1 << 20
_FEW: Final = 4
"""So many records are looked at faster one by one than in one call."""
_HEADER_NBYTES: Final = 1024
_AHEAD_NBYTES: Final = 64 << 10
_JOURNAL_NBYTES_MAX: Final = 64 << 20
"""A million records in one segment."""
RECORD_NBYTES_MAX: Final = 1 << 36
"""A header that claims more than this is not sound, whatever its sum says."""


@dataclass(slots=True)
class Content:
    """The records of a segment in the order of their offsets, and what else was found."""

    rows: bytearray = field(default_factory=bytearray)  # an entry of 64 bytes each
    states: bytearray = field(default_factory=bytearray)
    end: int = PAGE_NBYTES  # of the last record that can be told from what follows it
    page_sound: bool = True
    empty: bool = False  # no page, and nothing behind it
    cut_short: bool = False  # the file ends within the last record
    lost_nbytes: int = 0  # that are not zeros and no record's
    failed_reads: int = 0  # places that the disk did not give back

    @property
    def damaged(self) -> bool:
        """Whether something is in it that no record accounts for, so that nothing should be written behind it."""
        return self.lost_nbytes > 0 or self.failed_reads > 0

    def count(self, error: OSError) -> None:
        """A sector that cannot be read is counted; any other failure is raised again."""
        if error.errno != errno.EIO:
            raise error
        self.failed_reads += 1

    def entries(self, state: int) -> Iterator[Entry]:
        """Those in a state."""
        at = self.states.find(state)
        while at >= 0:
            yield unpack_entry(self.rows, at)
            at = self.states.find(state, at + 1)

    def cut_torn(self) -> Entry | None:
        """Leave out the records at the end whose payloads are not theirs, cut off or being written; the last then."""
        keep = len(self.states)
        while keep and self.states[keep - 1] == UNSOUND:
            keep -= 1
            self.end = unpack_entry(self.rows, keep).offset
        del self.rows[keep * ENTRY_NBYTES :], self.states[keep:]
        return unpack_entry(self.rows, keep - 1) if keep else None


def read_segment(
    directory: StoreDirectory,
    disk: Disk,
    sequence: int,
    name: str,
    *,
    flags: int = os.O_RDONLY,
    payloads: bool = False,
) -> tuple[Segment, Content]:
    """Open a segment's file and read it. With ``payloads`` a record without an index has to have its payload.

    :class:`StoreFormatError` for a file that is no segment of this store; ``OSError`` where it cannot be opened, or the
    disk fails in another way than by a sector that it cannot read.
    """
    fd = directory.open(name, flags)
    segment = Segment(sequence, name, fd, os.fstat(fd).st_size, aside=name.endswith(".aside"))
    content, raw = Content(), bytearray(PAGE_NBYTES)
    if payloads:  # from the start: after the page and the index the system would read ahead in small pages
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    try:
        found = read_all(disk, fd, [raw], 0, PAGE_NBYTES)
        start = bytes(raw[: min(found, len(SEGMENT_MAGIC))])
        if not any(raw) or (found < PAGE_NBYTES and SEGMENT_MAGIC.startswith(start)):
            content.page_sound = False
            content.empty = _data_behind(disk, fd, PAGE_NBYTES, segment.size) == 0
        else:
            path = str(directory.path / name)
            content.page_sound, segment.created_s = read_segment_page(bytes(raw), path, sequence, directory.store_id)
    except OSError as error:
        content.count(error)
        content.page_sound = False
    try:
        if (index := read_index(disk, fd, segment.size, sequence, directory.store_id)) is not None:
            content.rows, content.states, content.end = index
            segment.indexed = True
    except OSError as error:
        content.count(error)
    if not (segment.indexed or content.empty):
        scan = _Scan(disk, fd, segment.size, content)
        scan.run(_read_journal(directory, disk, sequence))
        if payloads:
            verify(disk, fd, segment.size, content)
    segment.end = content.end
    return segment, content


class _Scan:
    """Reads from header to header what has no index, ahead through a buffer that has room for any header."""

    def __init__(self, disk: Disk, fd: int, size: int, content: Content) -> None:
        self._disk, self._fd, self._size = disk, fd, size
        self._content = content
        self._buffer = memoryview(bytearray(_AHEAD_NBYTES))
        self._start = self._stop = 0  # of what is in it

    def run(self, journal: bytes) -> None:
        at = self.read_on(PAGE_NBYTES)
        while at is not None and _data_behind(self._disk, self._fd, at, self._size):
            resumed = self._resume(journal, at)
            stop = self._size if resumed is None else resumed
            self._content.lost_nbytes += _data_behind(self._disk, self._fd, at, stop)
            at = None if resumed is None else self.read_on(resumed)

    def read_on(self, at: int) -> int | None:
        """Read record after record from ``at``; where something follows that is neither a record nor an index."""
        content, size = self._content, self._size
        while at + HEADER_NBYTES_MIN <= size:
            try:
                found = self._header(at)
            except RecordError:
                return at
            except OSError as error:
                content.count(error)
                return at
            if found is None:
                return None
            header, packed = found
            if header.payload_nbytes > RECORD_NBYTES_MAX:
                return at
            if at + record_nbytes(header) > size:
                content.cut_short = True
                return None
            content.rows += pack_entry(header, at, packed)
            content.states.append(DELETED if packed.startswith(DEAD_MAGIC) else LIVING)
            at += record_nbytes(header)
            content.end = at
        return at

    def _resume(self, journal: bytes, at: int) -> int | None:
        """Where behind ``at`` the journal has a record whose header is the one that it says."""
        for number in range(len(journal) // ENTRY_NBYTES):
            entry = unpack_entry(journal, number)
            if not at < entry.offset <= self._size - HEADER_NBYTES_MIN or entry.header_nbytes > HEADER_NBYTES_MAX:
                continue
            try:
                state, _ = read_header(self._disk, self._fd, entry)
            except OSError as error:
                self._content.count(error)
                continue
            if state != UNSOUND:
                return entry.offset
        return None

    def _header(self, at: int) -> tuple[RecordHeader, bytes] | None:
        """The header there and its bytes, those of a dead one as well; :class:`RecordError` when it is not sound.

        ``None`` where the records end and an index begins.
        """
        raw = self._read(at, _HEADER_NBYTES)
        if raw.startswith(INDEX_MAGIC):
            return None
        nbytes = int.from_bytes(raw[6:8], "little")  # as it says itself
        packed = raw[:nbytes] if nbytes <= len(raw) else self._read(at, nbytes)
        alive = MAGIC + packed[len(MAGIC) :] if packed.startswith(DEAD_MAGIC) else packed
        return unpack_header(alive), packed

    def _read(self, offset: int, nbytes: int) -> bytes:
        """What is there; fewer bytes only where the file ends. ``OSError``."""
        if not self._start <= offset <= offset + nbytes <= self._stop:
            self._start = self._stop = offset
            try:
                self._stop += read_all(self._disk, self._fd, [self._buffer], offset, _AHEAD_NBYTES)
            except OSError:
                self._stop += read_all(self._disk, self._fd, [self._buffer[:nbytes]], offset, nbytes)  # no further
        at = offset - self._start
        return bytes(self._buffer[at : min(at + nbytes, self._stop - self._start)])


def read_on(disk: Disk, fd: int, size: int, start: int, *, payloads: bool) -> Content:
    """The records from ``start`` on, where one begins, up to whatever is none."""
    content = Content(end=start)
    _Scan(disk, fd, size, content).read_on(start)
    if payloads:
        verify(disk, fd, size, content)
    return content


def verify(disk: Disk, fd: int, size: int, content: Content) -> None:
    """Look at every living record: header and payload. Changes the states of those that are not.

    Many are read and looked at in one call; one that is not sound at first sight, or near which the disk gives nothing
    back, is read again by itself.
    """
    if LIVING not in content.states:
        return
    table = np.frombuffer(content.rows, ENTRY_DTYPE)
    living = np.flatnonzero(np.frombuffer(content.states, np.uint8) == LIVING)
    starts = table["offset"][living]
    stops = starts + table["header_nbytes"][living] + table["payload_nbytes"][living]
    buffer = memoryview(bytearray(min(_WINDOW_NBYTES, size)))
    at = 0
    while at < len(living):
        after = max(int(np.searchsorted(stops, starts[at] + np.uint64(len(buffer)), "right")), at + 1)
        odd = some = living[at:after]
        start, nbytes = int(starts[at]), int(stops[after - 1] - starts[at])
        if len(some) > _FEW and nbytes <= len(buffer):
            with suppress(OSError):  # whose it is shows below
                if read_all(disk, fd, [buffer[:nbytes]], start, nbytes) == nbytes:
                    odd = some[~are_sound(buffer, start, table[some])]
        for number in odd.tolist():
            content.states[number] = _look_at(disk, fd, unpack_entry(content.rows, number), content, buffer)
        at = after


def _look_at(disk: Disk, fd: int, entry: Entry, content: Content, buffer: memoryview) -> int:
    """What has become of one record."""
    try:
        state, raw = read_header(disk, fd, entry)
        if state != LIVING:
            return state
        payload = _sum_of(disk, fd, entry.offset + len(raw), entry.payload_nbytes, buffer)
        return LIVING if payload == unpack_checked_header(raw).payload_xxh3 else UNSOUND
    except OSError as error:
        content.count(error)
        return UNREADABLE


def _sum_of(disk: Disk, fd: int, offset: int, nbytes: int, buffer: memoryview) -> int | None:
    """The sum of a payload; ``None`` where the file ends within it. A header can claim more than memory holds."""
    found, stop = RunningChecksum(), offset + nbytes
    while offset < stop:
        piece = buffer[: stop - offset]
        if read_all(disk, fd, [piece], offset, len(piece)) < len(piece):
            return None
        found.update(piece)
        offset += len(piece)
    return found.intdigest()


def _data_behind(disk: Disk, fd: int, start: int, stop: int) -> int:
    """Bytes from ``start`` to the last one before ``stop`` that is not zero; holes are not read."""
    last, at = start, start
    window = bytearray(_WINDOW_NBYTES)
    while (at := _data_from(fd, at, stop)) < stop:
        wanted = min(len(window), stop - at)
        try:
            found = read_all(disk, fd, [memoryview(window)[:wanted]], at, wanted)
        except OSError:
            return stop - start  # nobody knows what is there
        if used := len(window[:found].rstrip(b"\0")):
            last = at + used
        if found < wanted:
            break
        at += wanted
    return last - start


def _data_from(fd: int, at: int, stop: int) -> int:
    """Where after ``at`` there may be something; a hole of a sparse file is not read."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        return stop if error.errno == errno.ENXIO else at


def _read_journal(directory: StoreDirectory, disk: Disk, sequence: int) -> bytes:
    """The journal of a segment; empty where there is none, or it cannot be read."""
    try:
        with open(directory.open(segment_name(sequence, "journal"), os.O_RDONLY), "rb") as file:
            raw = bytearray(min(os.fstat(file.fileno()).st_size, _JOURNAL_NBYTES_MAX))
            return bytes(raw[: read_all(disk, file.fileno(), [raw], 0, len(raw))])
    except OSError:
        return b""

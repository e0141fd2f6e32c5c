"""Is a file store sound? Every header and every payload is read; with ``repair``, what is not sound is taken away.

Without ``repair`` nothing is written, and a live writer is no obstacle: what it is writing at the end of its newest
segment is then not held against the store. With ``repair`` the store is locked like a writer's, and

* a record whose payload is not the one of its sum is marked as deleted, and so is an older copy of a record;
* a header in which one bit is wrong is written anew as it was: its sum says which bit, and it is believed only when
  the payload's sum agrees;
* what follows the last readable record of a segment is cut away, and a segment with no page is removed. Records behind
  a header that cannot be mended are among that: no store finds them, because payload is never searched for headers;
* a damaged header page is written anew, and what crashes left unfinished is removed.

A sound record, which is one that a store would serve, is never touched. Files that are no part of the store, or
segments of another one, are named and left alone.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError
from cache_manager.keys import BlockKey
from cache_manager.record import HEADER_NBYTES_MAX, RecordHeader
from cache_manager.spec import align
from cache_manager.storage.directory import StoreLock, existing_store, leftovers, segment_sequences
from cache_manager.storage.disk import Disk, SystemDisk, open_regular, read_all, write_all
from cache_manager.storage.mend import mend_header
from cache_manager.storage.segment import (
    DEAD_MAGIC,
    LOCK_NAME,
    MARKER_NAME,
    PAGE_NBYTES,
    pack_dead_header,
    pack_segment_page,
    page_is_missing,
    payload_is_sound,
    read_segment_page,
    record_nbytes,
    scan,
    segment_name,
    segment_sequence,
)

Placed = list[tuple[int, RecordHeader]]
"""Records of a segment by their offsets."""

_READ_NBYTES: Final = 1 << 20
_COLUMNS: Final = {
    "bytes": "nbytes",
    "records": "records",
    "deleted": "deleted",
    "corrupt": "corrupt",
    "torn": "torn",
    "older": "older",
    "one bit": "mendable",
    "lost bytes": "lost_nbytes",
}


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """What one segment file holds. ``lost_nbytes`` follow its last readable record and are not zeros."""

    name: str
    nbytes: int
    records: int = 0
    deleted: int = 0
    corrupt: int = 0  # sound header, wrong payload, another record behind
    torn: int = 0  # sound header, wrong payload, no sound record behind
    older: int = 0  # copies for which there is a newer one, here or in a later segment
    mendable: int = 0  # headers with one wrong bit before a right payload
    lost_nbytes: int = 0
    page_damaged: bool = False
    page_missing: bool = False
    refused: str | None = None  # why this is no segment of this store

    @property
    def sound(self) -> bool:
        bad = self.corrupt or self.torn or self.older or self.mendable or self.lost_nbytes
        return not (bad or self.page_damaged or self.page_missing) and self.refused is None


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What a check found, before any repair; ``writer`` says who was writing meanwhile."""

    directory: str
    segments: tuple[SegmentReport, ...]
    leftovers: tuple[str, ...]
    foreign: tuple[str, ...]  # other entries of the directory; they are no fault
    writer: str | None
    repaired: bool

    @property
    def sound(self) -> bool:
        return not self.leftovers and all(segment.sound for segment in self.segments)

    def total(self, count: str) -> int:
        """The sum of one of the segments' numbers, by its name."""
        return sum(int(getattr(segment, count)) for segment in self.segments)

    def to_json(self) -> str:
        """The report as one JSON object: its fields, and ``sound``."""
        return json.dumps({"sound": self.sound, **asdict(self)}, indent=2) + "\n"

    def to_text(self) -> str:
        """The report for people: a line a segment, what else is there, and a verdict."""
        width = max((len(segment.name) for segment in self.segments), default=0)
        lines = [f"{'segment':{width}}" + "".join(f"{title:>11}" for title in _COLUMNS)]
        for segment in self.segments:
            counts = "".join(f"{int(getattr(segment, name)):>11,}" for name in _COLUMNS.values())
            lines.append(f"{segment.name:{width}}{counts}{_remark(segment)}")
        lines.append(f"{'all':{width}}" + "".join(f"{self.total(name):>11,}" for name in _COLUMNS.values()))
        lines += [f"left unfinished by a crash: {name}" for name in self.leftovers]
        lines += [f"no part of the store: {name}" for name in self.foreign]
        if self.writer is not None:
            lines.append(f"checked beside a writer, the end of the newest segment not judged: {self.writer}")
        lines.append(f"{self.directory}: {self._verdict()}")
        return "\n".join(lines) + "\n"

    def _verdict(self) -> str:
        if self.sound:
            return "sound"
        if not self.repaired:
            return "not sound; kvroute fsck --repair takes away what is wrong"
        left = sum(segment.refused is not None for segment in self.segments)
        return "was not sound and is repaired" + (f", but for {left} files left alone" if left else "")


def _remark(segment: SegmentReport) -> str:
    if segment.refused is not None:
        return f"  left alone: {segment.refused}"
    if segment.page_missing:
        return "  no header page"
    return "  header page damaged" if segment.page_damaged else ""


def fsck(directory: Path, *, repair: bool = False, disk: Disk | None = None) -> FsckReport:
    """Check the store in ``directory``; with ``repair`` leave it sound, as far as bytes can tell.

    :class:`StoreMissingError` and :class:`StoreFormatError` when there is no store of this format;
    :class:`StoreLockedError` for a repair while somebody writes; :class:`StorageError` when the disk fails, which
    leaves repaired what was repaired before.
    """
    store_id = existing_store(directory)
    disk = disk or SystemDisk()
    lock, writer = _lock(directory, repair=repair)
    try:
        unfinished = () if writer else tuple(leftovers(directory))
        sequences = segment_sequences(directory)
        reports, copies = [], Copies(judged=writer is None)
        for sequence in reversed(sequences):
            live = writer is not None and sequence == sequences[-1]
            with suppress(FileNotFoundError):  # a live writer has dropped it
                reports.append(_segment(directory, store_id, sequence, disk, copies, repair=repair, live=live))
        reports.reverse()
        foreign = tuple(name for name in sorted(os.listdir(directory)) if not _is_ours(name, unfinished))
        if repair:
            for name in unfinished:
                (directory / name).unlink()
    except OSError as error:
        raise StorageError(f"{directory}: cannot check the store: {error}") from error
    finally:
        if lock is not None:
            lock.close()
    return FsckReport(str(directory), tuple(reports), unfinished, foreign, writer, repair)


def _lock(directory: Path, *, repair: bool) -> tuple[StoreLock | None, str | None]:
    """The lock for the job, and for a report without one who writes."""
    try:
        return StoreLock(directory, shared=not repair), None
    except FileNotFoundError:
        return None, None  # a copy without its lock file: nobody writes it
    except StoreLockedError as error:
        if repair:
            raise
        return None, str(error)
    except OSError as error:
        raise StorageError(f"{directory}: cannot lock the store: {error}") from error


def _is_ours(name: str, unfinished: tuple[str, ...]) -> bool:
    stem = name.removesuffix(".tmp")
    return name in (MARKER_NAME, LOCK_NAME, *unfinished) or stem == MARKER_NAME or segment_sequence(stem) is not None


class Copies:
    """The keys of records that were met, from the newest to the oldest; the newest copy of a key decides about it.

    Beside a writer nothing is judged: it appends a copy first and deletes the older one then.
    """

    def __init__(self, *, judged: bool) -> None:
        self._judged = judged
        self._keys: set[BlockKey] = set()

    def meet(self, alive: Placed, dead: Placed) -> Placed:
        """The living copies of a segment that have a newer one; segments come newest first."""
        if not self._judged:
            return []
        older = []
        living = {offset for offset, _ in alive}
        for offset, header in sorted(alive + dead, key=lambda copy: copy[0], reverse=True):
            if header.key in self._keys and offset in living:
                older.append((offset, header))
            self._keys.add(header.key)
        return older


def _segment(
    directory: Path, store_id: bytes, sequence: int, disk: Disk, copies: Copies, *, repair: bool, live: bool
) -> SegmentReport:
    path = directory / segment_name(sequence)
    fd = open_regular(path, os.O_RDWR if repair else os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        raw = bytearray(PAGE_NBYTES)
        found = read_all(disk, fd, [memoryview(raw)], 0, PAGE_NBYTES)
        if page_is_missing(raw, found):
            if repair:
                path.unlink()
            return SegmentReport(path.name, size, page_missing=True)
        try:
            page = read_segment_page(bytes(raw), str(path), sequence, store_id)
        except StoreFormatError as error:
            return SegmentReport(path.name, size, refused=str(error))
        walk = _Walk(disk, fd, size, copies, repair=repair)
        if repair and not page.sound:
            write_all(disk, fd, [pack_segment_page(sequence, store_id, page.created_s)], 0, PAGE_NBYTES)
        return SegmentReport(
            path.name,
            size,
            records=walk.records,
            deleted=walk.deleted,
            corrupt=walk.corrupt,
            torn=0 if live else walk.torn,
            older=walk.older,
            mendable=0 if live else walk.mendable,
            lost_nbytes=0 if live else walk.lost_nbytes,
            page_damaged=not page.sound,
        )
    finally:
        if repair:
            disk.sync(fd)
        os.close(fd)


class _Walk:
    """Reads a segment from record to record, and repairs it on the way; a damaged header ends it or is mended."""

    def __init__(self, disk: Disk, fd: int, size: int, copies: Copies, *, repair: bool) -> None:
        self._disk, self._fd, self._size = disk, fd, size
        mended: list[tuple[int, bytes]] = []
        alive: Placed = []
        dead: Placed = []
        torn: Placed = []
        self.end = at = PAGE_NBYTES
        while True:
            content = scan(disk, fd, size, payloads=True, start=at)
            alive += content.records
            dead += content.dead
            torn += content.torn
            if content.last is not None:
                self.end = content.end
            found = self._mend(content.stopped) if content.damaged else None
            if found is None:
                break
            raw, header = found
            mended.append((content.stopped, raw))
            (dead if raw.startswith(DEAD_MAGIC) else alive).append((content.stopped, header))
            self.end = at = content.stopped + record_nbytes(header)
        within = [copy for copy in torn if copy[0] < self.end]
        older = copies.meet(alive, dead + within)
        others = {offset for offset, _ in (*mended, *older)}
        self.records = sum(offset not in others for offset, _ in alive)
        self.deleted, self.mendable = sum(offset not in others for offset, _ in dead), len(mended)
        self.corrupt, self.torn, self.older = len(within), len(torn) - len(within), len(older)
        self.lost_nbytes = self._used_nbytes_behind(self.end)
        if repair:
            for offset, raw in mended:
                write_all(disk, fd, [raw], offset, len(raw))
            for offset, header in within + older:
                write_all(disk, fd, [pack_dead_header(header)], offset, header.nbytes)
            if self.lost_nbytes:
                disk.truncate(fd, self.end)
                disk.truncate(fd, align(self.end, PAGE_NBYTES))

    def _used_nbytes_behind(self, end: int) -> int:
        """Bytes from ``end`` to the last that is not zero."""
        last, at = end, end
        window = bytearray(_READ_NBYTES)
        while (at := _data_from(self._fd, at, self._size)) < self._size:
            wanted = min(len(window), self._size - at)
            found = read_all(self._disk, self._fd, [memoryview(window)[:wanted]], at, wanted)
            if used := len(window[:found].rstrip(b"\0")):
                last = at + used
            if found < wanted:
                break
            at += wanted
        return last - end

    def _mend(self, at: int) -> tuple[bytes, RecordHeader] | None:
        """The header at ``at`` with one bit turned back, if its own sum and the payload's agree that it is it."""
        raw = bytearray(min(HEADER_NBYTES_MAX, self._size - at))
        raw = raw[: read_all(self._disk, self._fd, [memoryview(raw)], at, len(raw))]
        found = mend_header(bytes(raw))
        return found if found is not None and self._payload_is(found[1], at) else None

    def _payload_is(self, header: RecordHeader, at: int) -> bool:
        if at + record_nbytes(header) > self._size:
            return False
        return payload_is_sound(self._disk, self._fd, header, at, bytearray(_READ_NBYTES))


def _data_from(fd: int, at: int, size: int) -> int:
    """Where after ``at`` there may be something; a hole of a sparse file is not read."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else at

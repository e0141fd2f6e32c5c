"""Is a file store sound? Every header and every payload is read; with ``repair``, what is not sound is taken away.

Without ``repair`` nothing is written, and a live writer is no obstacle: what it is writing at the end of its newest
segment is then not held against the store. A repair locks the store like a writer and does what opening does
(:mod:`cache_manager.storage.file.pool`): older copies of records are marked as deleted, a segment with bytes that are
no record's is set aside, a damaged header page is written anew, and what crashes left unfinished is removed. Beyond
that it marks the records as deleted whose payload is not the one of its sum.

A sound record, which is one that a store would serve, is never touched. Files that are no part of the store, or
segments of another one, are named and left alone; while there are any of the latter, nothing is repaired.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError
from cache_manager.storage.disk import Disk, SystemDisk
from cache_manager.storage.file.directory import LockedDirectory, StoreDirectory, StoreLock
from cache_manager.storage.file.files import Sync
from cache_manager.storage.file.limits import Limits
from cache_manager.storage.file.pool import SegmentPool
from cache_manager.storage.file.recovery import Content, read_segment, verify
from cache_manager.storage.file.segment import (
    DELETED,
    LIVING,
    LOCK_NAME,
    MARKER_NAME,
    UNREADABLE,
    UNSOUND,
    Entry,
    parse_name,
    unpack_entry,
)
from cache_manager.storage.file.table import Segment, replaced

_COLUMNS: Final = ("nbytes", "records", "deleted", "corrupt", "torn", "older", "unreadable", "lost_nbytes")
_THREADS: Final = 2
"""While one waits for the disk, or copies what that gave, the other sums."""
_NO_LIMIT: Final = Limits(1 << 62, 1 << 54)


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """What one segment file holds. ``lost_nbytes`` are not zeros and no record's."""

    name: str
    nbytes: int
    records: int = 0
    deleted: int = 0
    corrupt: int = 0  # sound header, wrong payload, another record behind
    torn: int = 0  # sound header, wrong payload or none, no sound record behind
    older: int = 0  # copies for which there is a newer one, here or in a later segment
    unreadable: int = 0  # records that the disk does not give back
    lost_nbytes: int = 0
    page_damaged: bool = False
    page_missing: bool = False
    aside: bool = False  # set aside, which is what becomes of a segment with lost bytes
    refused: str | None = None  # why this is no segment of this store

    @property
    def sound(self) -> bool:
        lost = self.lost_nbytes and not self.aside
        bad = self.corrupt or self.torn or self.older or self.unreadable or lost
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
        titles = [name.replace("nbytes", "bytes").replace("_", " ") for name in _COLUMNS]
        lines = [f"{'segment':{width}}" + "".join(f"{title:>11}" for title in titles)]
        for segment in self.segments:
            counts = "".join(f"{int(getattr(segment, name)):>11,}" for name in _COLUMNS)
            lines.append(f"{segment.name:{width}}{counts}{_remark(segment)}")
        lines.append(f"{'all':{width}}" + "".join(f"{self.total(name):>11,}" for name in _COLUMNS))
        lines += [f"left unfinished by a crash: {name}" for name in self.leftovers]
        lines += [f"no part of the store: {name}" for name in self.foreign]
        if self.writer is not None:
            lines.append(f"checked beside a writer, the end of the newest segment not judged: {self.writer}")
        lines.append(f"{self.directory}: {self._verdict()}")
        return "\n".join(lines) + "\n"

    def _verdict(self) -> str:
        aside = self.total("aside")
        beside = f"; {aside} segments are set aside, remove them when you have what you want of them" if aside else ""
        if self.sound:
            return "sound" + beside
        if left := sum(segment.refused is not None for segment in self.segments):
            return f"not sound; {left} files are not this store's: move them away, then kvroute fsck --repair"
        if not self.repaired:
            return "not sound; kvroute fsck --repair takes away what is wrong" + beside
        return "was not sound and is repaired" + beside


def _remark(segment: SegmentReport) -> str:
    if segment.refused is not None:
        return f"  left alone: {segment.refused}"
    if segment.aside:
        return "  set aside"
    if segment.page_missing:
        return "  no header page"
    return "  header page damaged" if segment.page_damaged else ""


def fsck(directory: Path, *, repair: bool = False, disk: Disk | None = None) -> FsckReport:
    """Check the store in ``directory``; with ``repair`` leave it sound, as far as bytes can tell.

    :class:`StoreMissingError` and :class:`StoreFormatError` when there is no store of this format;
    :class:`StoreLockedError` for a repair while somebody writes; :class:`StorageError` when the disk fails in another
    way than by sectors that it cannot read, which leaves repaired what was repaired before.
    """
    disk = disk or SystemDisk()
    with closing(StoreDirectory.existing(directory)) as opened:
        try:
            lock, writer = _lock(opened, repair=repair)
            with lock or nullcontext():
                unfinished = () if writer else tuple(opened.leftovers())
                files = opened.files()
                check = partial(_check, opened, disk, newest=max(files, default=0), beside_writer=writer is not None)
                with ThreadPoolExecutor(_THREADS) as pool:
                    checked = [each for each in pool.map(check, files.items()) if each is not None]
                ours = {MARKER_NAME, LOCK_NAME, *unfinished}
                foreign = tuple(name for name in opened.names() if name not in ours and parse_name(name) is None)
        except OSError as error:
            raise StorageError(f"{directory}: cannot check the store: {error}") from error
    reports = [each.report for each in checked]
    if writer is None:
        for number, older in _older(checked).items():
            reports[number] = replace(reports[number], records=reports[number].records - older, older=older)
    may = repair and not any(report.refused for report in reports)
    if may:
        _repair(directory, disk, [(each.sequence, entry) for each in checked for entry in each.wrong])
    ordered = tuple(sorted(reports, key=lambda report: report.name))
    return FsckReport(str(directory), ordered, unfinished, foreign, writer, may)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A segment without a look at the others; a repair marks what is ``wrong`` as deleted."""

    sequence: int
    report: SegmentReport
    content: Content
    wrong: list[Entry]


def _check(
    directory: StoreDirectory, disk: Disk, file: tuple[int, str], *, newest: int, beside_writer: bool
) -> _Checked | None:
    """Read all of a segment, by its sequence and name; ``None`` when a live writer has dropped it."""
    sequence, name = file
    try:
        segment, content = read_segment(directory, disk, sequence, name, payloads=True)
    except FileNotFoundError:
        return None
    except StoreFormatError as error:
        nbytes = os.stat(name, dir_fd=directory.fd).st_size
        return _Checked(sequence, SegmentReport(name, nbytes, refused=str(error)), Content(), [])
    wrong = []
    if segment.indexed:
        before = np.array(content.states)
        verify(disk, segment.fd, segment.size, content)
        after = np.array(content.states)
        changed = np.flatnonzero((after != before) & (after != UNREADABLE))
        wrong = [unpack_entry(content.rows, number) for number in changed.tolist()]
    elif sequence != newest:  # at the end of the newest opening cuts them away
        wrong = list(content.entries(UNSOUND))
    segment.close()
    return _Checked(sequence, _report(segment, content, live=beside_writer and sequence == newest), content, wrong)


def _older(checked: Sequence[_Checked]) -> Counter[int]:
    """How many copies give way to newer ones, as they do when a store is opened, by the places of their segments."""
    rows = b"".join([each.content.rows for each in checked])
    states = np.frombuffer(b"".join([each.content.states for each in checked]), np.uint8)
    stops = np.cumsum([len(each.content.states) for each in checked])
    older = [old for old, new in replaced(rows, states) if states[new] != UNREADABLE]
    return Counter(np.searchsorted(stops, older, "right").tolist())


def _lock(directory: StoreDirectory, *, repair: bool) -> tuple[closing[StoreLock] | None, str | None]:
    """The lock for the job, and for a report without one who writes."""
    try:
        return closing(StoreLock(directory, shared=not repair)), None
    except FileNotFoundError:
        return None, None  # a copy without its lock file: nobody writes it
    except StoreLockedError as error:
        if repair:
            raise
        return None, str(error)


def _report(segment: Segment, content: Content, *, live: bool) -> SegmentReport:
    states = content.states
    torn = 0 if segment.indexed else len(states) - len(states.rstrip(bytes([UNSOUND])))
    return SegmentReport(
        segment.name,
        segment.size,
        records=states.count(LIVING),
        deleted=states.count(DELETED),
        corrupt=states.count(UNSOUND) - torn,
        torn=0 if live else torn + (content.cut_short and not segment.aside),
        unreadable=states.count(UNREADABLE),
        lost_nbytes=0 if live else content.lost_nbytes,
        page_damaged=not content.page_sound and not content.empty,
        page_missing=content.empty,
        aside=segment.aside,
    )


def _repair(path: Path, disk: Disk, unsound: list[tuple[int, Entry]]) -> None:
    try:
        with (
            closing(LockedDirectory(path)) as directory,
            closing(SegmentPool(directory, disk, _NO_LIMIT, Sync.NONE, time.time)) as pool,
        ):
            for sequence, entry in unsound:
                segment = pool.segments.get(sequence)
                if segment is not None and entry.number < segment.count:
                    pool.mark((segment, entry))
    except OSError as error:
        raise StorageError(f"{path}: cannot repair the store: {error}") from error

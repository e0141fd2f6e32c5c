"""Is a file store sound? Every page and every head is looked at and, if that is asked for, every payload.

Nothing is written: a damaged record is a miss and its slot is used again, a damaged page has a copy. A live writer is
no obstacle; what it changes meanwhile may be counted as it was or as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError
from cache_manager.record import checksum
from cache_manager.storage.disk import Disk, SystemDisk, read_all
from cache_manager.storage.file.directory import LOCK_NAME, TEMP_SUFFIX, StoreDirectory, StoreLock, is_ours
from cache_manager.storage.file.extent import PAGE_NBYTES, Extent, open_extent, parse_name, read_page
from cache_manager.storage.file.index import BITS, LOCAL, KeyIndex

_COLUMNS: Final = ("nbytes", "slots", "records", "older", "damaged_heads", "damaged_pages", "corrupt", "unreadable")


@dataclass(slots=True)
class ExtentReport:
    """What one file holds. ``records`` are served; of ``older`` ones there is a newer copy."""

    name: str
    nbytes: int = 0
    slots: int = 0
    records: int = 0
    older: int = 0
    damaged_heads: int = 0
    damaged_pages: int = 0  # of the first and the last
    corrupt: int = 0  # payloads that are not those of their sums, if payloads were read
    unreadable: int = 0  # payloads that the disk does not give back
    refused: str = ""  # why this is no extent

    @property
    def sound(self) -> bool:
        return not (self.damaged_heads or self.damaged_pages or self.corrupt or self.unreadable or self.refused)


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What a check found; ``writer`` says who was writing meanwhile."""

    directory: str
    extents: tuple[ExtentReport, ...]
    leftovers: tuple[str, ...]  # of a crash; the next writer removes them
    foreign: tuple[str, ...]  # other entries of the directory; they are no fault
    writer: str | None
    payloads: bool  # whether they were read

    @property
    def sound(self) -> bool:
        return not self.leftovers and all(extent.sound for extent in self.extents)

    def total(self, count: str) -> int:
        """The sum of one of the extents' numbers, by its name."""
        return sum(int(getattr(extent, count)) for extent in self.extents)

    def to_json(self) -> str:
        """The report as one JSON object: its fields, and ``sound``."""
        return json.dumps({"sound": self.sound, **asdict(self)}, indent=2) + "\n"

    def to_text(self) -> str:
        """The report for people: a line an extent, what else is there, and a verdict."""
        lines = [f"{'extent':19}" + "".join(f"{name.replace('_', ' '):>15}" for name in _COLUMNS)]
        for extent in self.extents:
            counts = "".join(f"{int(getattr(extent, name)):>15,}" for name in _COLUMNS)
            lines.append(f"{extent.name:19}{counts}" + (f"  left alone: {extent.refused}" if extent.refused else ""))
        lines.append(f"{'all':19}" + "".join(f"{self.total(name):>15,}" for name in _COLUMNS))
        lines += [f"left unfinished by a crash: {name}" for name in self.leftovers]
        lines += [f"no part of the store: {name}" for name in self.foreign]
        lines += [f"checked beside a writer: {self.writer}"] if self.writer is not None else []
        read = "" if self.payloads else " (payloads were not read: --payloads)"
        lines.append(f"{self.directory}: {'sound' if self.sound else 'not sound'}{read}")
        return "\n".join(lines) + "\n"


def fsck(directory: Path, *, payloads: bool = False, disk: Disk | None = None) -> FsckReport:
    """Check the store in ``directory``; with ``payloads`` read everything.

    :class:`StoreMissingError` and :class:`StoreFormatError` when there is no store; :class:`StorageError` when its
    directory cannot be read.
    """
    disk, writer, lock = disk or SystemDisk(), None, None
    with closing(StoreDirectory.existing(directory)) as opened:
        try:
            lock = StoreLock(opened, shared=True)
        except StoreLockedError as error:
            writer = str(error)
        with closing(lock) if lock is not None else nullcontext():
            reports = []
            for report, extent, served in read_extents(opened, disk):
                if payloads and extent is not None:
                    for local in served:
                        _check_payload(disk, extent, local, report)
                reports.append(report)
            names = [name for name in opened.names() if parse_name(name) is None and name != LOCK_NAME]
    leftovers = tuple(name for name in names if name.endswith(TEMP_SUFFIX) and is_ours(name) and writer is None)
    foreign = tuple(name for name in names if not is_ours(name))
    return FsckReport(str(directory), tuple(reports), leftovers, foreign, writer, payloads)


def read_extents(opened: StoreDirectory, disk: Disk) -> Iterator[tuple[ExtentReport, Extent | None, list[int]]]:
    """What each file says, the extent if it is one, and which of its slots are served."""
    index, found = KeyIndex(), []
    try:
        names = opened.extents()
    except OSError as error:
        raise StorageError(f"{opened.path}: cannot read the store: {error}") from error
    for name in names:
        report, extent = ExtentReport(name), None
        try:
            fd = opened.open(name, os.O_RDONLY)
            report.nbytes = os.fstat(fd).st_size
            extent = open_extent(disk, fd, name, str(opened.path / name))
            index.join(extent)
        except FileNotFoundError:
            continue  # a writer has dropped it
        except (StoreFormatError, OSError) as error:
            report.refused = str(error)
        found.append((report, extent))
    older = index.load()
    for report, extent in found:
        served = list[int]()
        if extent is not None:
            gone = {slot & LOCAL for slot in older if slot >> BITS == extent.ordinal}
            served = [local for local in np.flatnonzero(extent.all_ticks()).tolist() if local not in gone]
            report.slots, report.older, report.records = extent.slots, len(gone), len(served)
            report.damaged_heads = extent.damaged
            pages = (0, extent.shape.nbytes - PAGE_NBYTES)
            report.damaged_pages = sum(not _is_page(disk, extent, at) for at in pages)
        yield report, extent, served


def _is_page(disk: Disk, extent: Extent, at: int) -> bool:
    try:
        return read_page(disk, extent.fd, at, extent.name).pack() == extent.shape.pack()
    except (StoreFormatError, OSError):
        return False


def _check_payload(disk: Disk, extent: Extent, local: int, report: ExtentReport) -> None:
    """Read a payload; one that is not its head's, under the same head as before, is corrupt."""
    nbytes, head = extent.shape.layout[1], extent.packed(local, 1)
    payload, now = bytearray(nbytes), bytearray(len(head))
    try:
        whole = read_all(disk, extent.fd, [payload], extent.payload_at(local), nbytes) == nbytes
        read_all(disk, extent.fd, [now], extent.head_at(local), len(now))
    except OSError:
        whole = False
    report.unreadable += not whole
    report.corrupt += whole and now == head and checksum(payload) != extent.headers(head)[0].payload_xxh3

"""Is a file store sound? Every page and every head is looked at and, if that is asked for, every payload.

Nothing is written: a damaged record is a miss and its slot is used again, a damaged page has a copy. A live writer is
no obstacle; what it changes meanwhile may be counted as it was or as it is. Files that are no part of the store are
named.
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
from cache_manager.storage.slots.clock import runs_of
from cache_manager.storage.slots.directory import LOCK_NAME, TEMP_SUFFIX, StoreDirectory, StoreLock, is_ours
from cache_manager.storage.slots.extent import PAGE_NBYTES, Extent, Shape, open_extent, parse_name, read_heads
from cache_manager.storage.slots.index import LOCAL, ORDINAL_BITS, KeyIndex

_COLUMNS: Final = ("nbytes", "slots", "records", "older", "damaged_heads", "damaged_pages", "corrupt", "unreadable")
_PIECE_NBYTES: Final = 4 << 20


@dataclass(slots=True)
class ExtentReport:
    """What one file holds. ``records`` are served; of ``older`` ones there is a newer copy."""

    name: str
    nbytes: int = 0
    slots: int = 0
    payload_nbytes: int = 0
    fingerprint: str = ""
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
        titles = [name.replace("nbytes", "bytes").replace("_", " ") for name in _COLUMNS]
        lines = [f"{'extent':19}" + "".join(f"{title:>15}" for title in titles)]
        for extent in self.extents:
            counts = "".join(f"{int(getattr(extent, name)):>15,}" for name in _COLUMNS)
            lines.append(f"{extent.name:19}{counts}" + (f"  left alone: {extent.refused}" if extent.refused else ""))
        lines.append(f"{'all':19}" + "".join(f"{self.total(name):>15,}" for name in _COLUMNS))
        lines += [f"left unfinished by a crash: {name}" for name in self.leftovers]
        lines += [f"no part of the store: {name}" for name in self.foreign]
        if self.writer is not None:
            lines.append(f"checked beside a writer: {self.writer}")
        read = "" if self.payloads else " (payloads were not read: --payloads)"
        lines.append(f"{self.directory}: {'sound' if self.sound else 'not sound'}{read}")
        return "\n".join(lines) + "\n"


def fsck(directory: Path, *, payloads: bool = False, disk: Disk | None = None) -> FsckReport:
    """Check the store in ``directory``; with ``payloads`` read everything.

    :class:`StoreMissingError` and :class:`StoreFormatError` when there is no store; :class:`StorageError` when its
    directory cannot be read.
    """
    disk = disk or SystemDisk()
    with closing(StoreDirectory.existing(directory)) as opened:
        writer, lock = None, None
        try:
            lock = StoreLock(opened, shared=True)
        except StoreLockedError as error:
            writer = str(error)
        with closing(lock) if lock is not None else nullcontext():
            reports = []
            for report, extent, served in read_extents(opened, disk):
                if payloads and extent is not None:
                    _read_payloads(disk, extent, served, report)
                reports.append(report)
            names = [name for name in opened.names() if parse_name(name) is None and name != LOCK_NAME]
    leftovers = tuple(name for name in names if name.endswith(TEMP_SUFFIX) and is_ours(name) and writer is None)
    foreign = tuple(name for name in names if not is_ours(name))
    return FsckReport(str(directory), tuple(reports), leftovers, foreign, writer, payloads)


def read_extents(opened: StoreDirectory, disk: Disk) -> Iterator[tuple[ExtentReport, Extent | None, list[int]]]:
    """What each file says, the extent if it is one, and which of its slots are served."""
    index, found = KeyIndex(), []
    try:
        for name in opened.extents().values():
            path, extent, report = str(opened.path / name), None, ExtentReport(name)
            try:
                fd = opened.open(name, os.O_RDONLY)
                report.nbytes = os.fstat(fd).st_size
                extent = open_extent(disk, fd, name, path, float("inf"))
                read_heads(disk, extent)
            except FileNotFoundError:
                continue  # a writer has dropped it
            except (StoreFormatError, OSError) as error:
                report.refused, extent = str(error), None
            else:
                index.join(extent)
            found.append((report, extent))
        older = index.load()
    except OSError as error:
        raise StorageError(f"{opened.path}: cannot read the store: {error}") from error
    for report, extent in found:
        served = list[int]()
        if extent is not None:
            shape = extent.shape
            report.slots, (fingerprint, report.payload_nbytes, _) = shape.slots, shape.layout
            report.fingerprint, report.damaged_heads = fingerprint.hex(), extent.damaged
            report.damaged_pages = sum(not _is_page(disk, extent, at) for at in (0, shape.nbytes - PAGE_NBYTES))
            gone = {slot & LOCAL for slot in older if slot >> ORDINAL_BITS == extent.ordinal}
            served = [local for local in np.flatnonzero(extent.column("<u8")).tolist() if local not in gone]
            report.older, report.records = len(gone), len(served)
        yield report, extent, served


def _is_page(disk: Disk, extent: Extent, at: int) -> bool:
    raw = bytearray(PAGE_NBYTES)
    try:
        read_all(disk, extent.fd, [raw], at, PAGE_NBYTES)
        return Shape.unpack(raw, extent.name) == extent.shape
    except (StoreFormatError, OSError):
        return False


def _read_payloads(disk: Disk, extent: Extent, served: list[int], report: ExtentReport) -> None:
    """Read the payloads of slots; one that is not its head's, under the same head as before, is corrupt."""
    shape, (_, nbytes, _) = extent.shape, extent.shape.layout
    most = max(_PIECE_NBYTES // shape.step, 1)
    for first, count in runs_of(served):
        for start in range(first, first + count, most):
            some = min(most, first + count - start)
            piece = memoryview(bytearray(some * shape.step))
            try:
                came = read_all(disk, extent.fd, [piece], extent.payload_at(start), len(piece))
            except OSError:
                came = 0
            for k in range(some):
                payload = piece[k * shape.step : k * shape.step + nbytes]
                if k * shape.step + nbytes > came:
                    came_alone = _read_one(disk, extent, start + k, payload)
                    report.unreadable += not came_alone
                    if not came_alone:
                        continue
                if checksum(payload) != extent.header(extent.head_of(start + k), 0).payload_xxh3:
                    report.corrupt += _is_unchanged(disk, extent, start + k)


def _read_one(disk: Disk, extent: Extent, local: int, payload: memoryview) -> bool:
    try:
        return read_all(disk, extent.fd, [payload], extent.payload_at(local), len(payload)) == len(payload)
    except OSError:
        return False


def _is_unchanged(disk: Disk, extent: Extent, local: int) -> bool:
    raw = bytearray(extent.shape.head_nbytes)
    try:
        read_all(disk, extent.fd, [raw], extent.heads_at(local), len(raw))
    except OSError:
        return True
    return raw == extent.head_of(local)

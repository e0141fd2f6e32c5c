"""Is a file store sound? Every page and every head is looked at and, if that is asked for, every payload.

Nothing is locked or written: a damaged record is a miss and its slot is used again, a damaged page has a copy. What a
live writer changes meanwhile may be counted as it was or as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from cache_manager.record import checksum
from cache_manager.storage.disk import Disk, SystemDisk, read_all
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.extent import PAGE_NBYTES, UNSURE, Extent, open_extents
from cache_manager.storage.file.index import KeyIndex

_COLUMNS: Final = ("nbytes", "slots", "records", "damaged_heads", "damaged_pages", "corrupt")


@dataclass(slots=True)
class ExtentReport:
    """What one file holds. ``records`` are served; ``corrupt``, if payloads were read, are not those of their sums, or
    the disk does not give them back; ``refused`` says why this is no extent."""

    name: str
    nbytes: int = 0
    slots: int = 0
    records: int = 0
    damaged_heads: int = 0
    damaged_pages: int = 0  # of the first and the last
    corrupt: int = 0
    refused: str = ""

    @property
    def sound(self) -> bool:
        return not (self.damaged_heads or self.damaged_pages or self.corrupt or self.refused)


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What a check found; ``payloads`` says whether they were read."""

    directory: str
    extents: tuple[ExtentReport, ...]
    payloads: bool

    @property
    def sound(self) -> bool:
        return all(extent.sound for extent in self.extents)

    def to_json(self) -> str:
        """The report as one JSON object: its fields, and ``sound``."""
        return json.dumps({"sound": self.sound, **asdict(self)}, indent=2) + "\n"

    def to_text(self) -> str:
        """The report for people: a line an extent, and a verdict."""
        lines = [f"{'extent':19}" + "".join(f"{name.replace('_', ' '):>15}" for name in _COLUMNS)]
        for extent in self.extents:
            counts = "".join(f"{getattr(extent, name):>15,}" for name in _COLUMNS)
            lines.append(f"{extent.name:19}{counts}" + (f"  left alone: {extent.refused}" if extent.refused else ""))
        read = "" if self.payloads else " (payloads were not read: --payloads)"
        lines.append(f"{self.directory}: {'sound' if self.sound else 'not sound'}{read}")
        return "\n".join(lines) + "\n"


def fsck(directory: Path, *, payloads: bool = False, disk: Disk | None = None) -> FsckReport:
    """Check the store in ``directory``; with ``payloads`` read everything.

    :class:`StoreMissingError` and :class:`StoreFormatError` when there is no store; :class:`StorageError` when its
    directory cannot be read.
    """
    disk, reports = disk or SystemDisk(), []
    with closing(StoreDirectory.existing(directory)) as opened:
        for report, extent, served in read_extents(opened, disk):
            if payloads and extent is not None:
                report.corrupt = sum(not _is_sound(disk, extent, local) for local in served)
            reports.append(report)
    return FsckReport(str(directory), tuple(reports), payloads)


def read_extents(opened: StoreDirectory, disk: Disk) -> Iterator[tuple[ExtentReport, Extent | None, list[int]]]:
    """What each file says, the extent if it is one, and which of its slots are served: older copies are not."""
    index, refused = KeyIndex(), dict[str, str]()
    for extent in open_extents(disk, opened, os.O_RDONLY, refused):
        extent.load(disk)
        index.join(extent)
    index.load()
    for name, why in refused.items():
        yield ExtentReport(name, refused=why), None, []
    for extent in index.extents:
        report = ExtentReport(extent.name, extent.shape.nbytes, extent.slots, extent.living, extent.damaged)
        for at in (0, extent.shape.nbytes - PAGE_NBYTES):
            page = bytearray(PAGE_NBYTES)
            with suppress(OSError):
                read_all(disk, extent.fd, [page], at, PAGE_NBYTES)
            report.damaged_pages += page != extent.shape.page
        yield report, extent, np.flatnonzero(extent.uses < UNSURE).tolist()


def _is_sound(disk: Disk, extent: Extent, local: int) -> bool:
    """Whether a payload is its head's, or the head is another by now."""
    nbytes, head = extent.shape.layout[1], extent.packed(local, 1)
    payload = bytearray(nbytes)
    try:
        whole = read_all(disk, extent.fd, [payload], extent.payload_at(local), nbytes) == nbytes
        now = extent.read_heads(disk, local, 1)
    except OSError:
        return False
    return now != head or (whole and checksum(payload) == extent.headers(head)[0].payload_xxh3)

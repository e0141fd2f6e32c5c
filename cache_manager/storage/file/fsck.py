"""What is in a file store, and is it sound? Every page and every head is read and, if asked for, every payload.

Nothing is locked or written: a damaged record is a miss and its slot is used again. Changes of a live writer may be
counted or not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cache_manager.keys import SCOPE_NBYTES
from cache_manager.record import checksum
from cache_manager.storage.disk import Disk, read_all
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.extent import Extent, Refusal, open_extents
from cache_manager.storage.file.index import KeyIndex
from cache_manager.storage.guard import StoreLock

_COLUMNS: Final = ("nbytes", "slots", "records", "damaged_heads", "corrupt")


@dataclass(slots=True)
class Share:
    """The records of one namespace, which is named by its keys' scope in hex: ``KeyChain(namespace, layout).scope``."""

    namespace: str
    records: int = 0
    nbytes: int = 0
    oldest_s: float = 0.0  # the highest age
    newest_s: float = float("inf")


@dataclass(slots=True)
class ExtentReport:
    """What one file holds. ``records`` are served; ``corrupt``, if payloads were read, are those that do not match
    their sums or that the disk cannot read; ``refused`` says why this is not an extent."""

    name: str
    nbytes: int = 0
    slots: int = 0
    records: int = 0
    damaged_heads: int = 0
    corrupt: int = 0
    refused: str = ""

    @property
    def sound(self) -> bool:
        return not (self.damaged_heads or self.corrupt or self.refused)


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What a check found; ``payloads`` says whether they were read."""

    directory: str
    payloads: bool
    sound: bool
    namespaces: tuple[Share, ...]
    extents: tuple[ExtentReport, ...]

    def to_text(self) -> str:
        """The report for people: a line a namespace, a line an extent, and a verdict."""
        lines = [f"{'namespace':19}{'records':>15}{'nbytes':>15}{'age':>30}"]
        for each in self.namespaces:
            ages = f"{each.newest_s / 3600:,.1f} to {each.oldest_s / 3600:,.1f} h"
            lines.append(f"{each.namespace:19}{each.records:>15,}{each.nbytes:>15,}{ages:>30}")
        lines.append(f"{'extent':19}" + "".join(f"{name.replace('_', ' '):>15}" for name in _COLUMNS))
        for extent in self.extents:
            counts = "".join(f"{getattr(extent, name):>15,}" for name in _COLUMNS)
            lines.append(f"{extent.name:19}{counts}" + (f"  left alone: {extent.refused}" if extent.refused else ""))
        read = "" if self.payloads else " (payloads were not read: --payloads)"
        lines.append(f"{self.directory}: {'sound' if self.sound else 'not sound'}{read}")
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"


def fsck(
    directory: Path, *, payloads: bool = False, disk: Disk | None = None, now_s: float | None = None
) -> FsckReport:
    """Check the store in ``directory``; with ``payloads`` read everything.

    :class:`StoreMissingError` and :class:`StoreFormatError` when there is no store; :class:`StorageError` when its
    directory cannot be read.
    """
    disk = disk or Disk()
    reports: list[ExtentReport] = []
    shares: dict[str, Share] = {}
    now_s = time.time() if now_s is None else now_s
    with closing(StoreDirectory.existing(directory)) as opened:
        for report, extent, served in read_extents(opened, disk):
            reports.append(report)
            for local in served:
                assert extent is not None
                report.corrupt += payloads and not _is_sound(disk, extent, local)
                scope = extent.key_of(local)[:SCOPE_NBYTES].hex()
                share = shares.setdefault(scope, Share(scope))
                age_s = now_s - int(extent.created_ms[local]) / 1000
                share.records = share.records + 1
                share.nbytes = share.nbytes + extent.shape.layout[1]
                share.oldest_s = max(share.oldest_s, age_s)
                share.newest_s = min(share.newest_s, age_s)
    namespaces = tuple(sorted(shares.values(), key=lambda share: -share.nbytes))
    return FsckReport(str(directory), payloads, all(each.sound for each in reports), namespaces, tuple(reports))


def read_extents(opened: StoreDirectory, disk: Disk) -> Iterator[tuple[ExtentReport, Extent | None, list[int]]]:
    """The report of each file, its extent if it is one, and which of its slots are served: older copies are not."""
    index = KeyIndex(StoreLock("fsck"))
    refused: dict[str, Refusal] = {}
    index.join(open_extents(disk, opened, os.O_RDONLY, refused), [])
    for name, refusal in refused.items():
        yield ExtentReport(name, refused=refusal.why), None, []
    for extent in index.extents:
        served = extent.served.tolist()
        report = ExtentReport(extent.name, extent.shape.nbytes, extent.slots, len(served), extent.damaged_heads)
        yield report, extent, served


def _is_sound(disk: Disk, extent: Extent, local: int) -> bool:
    """Whether a payload matches its head, or the head has changed by now."""
    nbytes = extent.shape.layout[1]
    head = extent.packed(local, 1)
    payload = bytearray(nbytes)
    try:
        found_nbytes = read_all(disk, extent.fd, [payload], extent.payload_at(local), nbytes)
        now = extent.read_heads(disk, local, 1)
    except OSError:
        return False
    if now != head:
        return True
    (header,) = extent.headers(head)
    return found_nbytes == nbytes and checksum(payload) == header.payload_xxh3

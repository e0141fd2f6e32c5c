"""What is in a file store: by namespace, age and size, with what is damaged.

Only heads are read and nothing is locked or written. What a writer changes meanwhile may be counted as it was or is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError, StoreMissingError
from cache_manager.keys import SCOPE_NBYTES
from cache_manager.storage.disk import SystemDisk
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.fsck import ExtentReport, read_extents

AGES_S: Final = {"1 min": 60, "1 h": 3_600, "6 h": 21_600, "1 day": 86_400, "7 days": 604_800, "older": float("inf")}
"""Up to how old the records of a line are, by its name."""


@dataclass(slots=True)
class Share:
    """A part of what a store holds; ``oldest_s`` and ``newest_s`` are wall-clock times."""

    name: str
    records: int = 0
    nbytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = 0.0

    def add(self, nbytes: int, created_s: float) -> None:
        self.records += 1
        self.nbytes += nbytes
        self.oldest_s = min(self.oldest_s or created_s, created_s)
        self.newest_s = max(self.newest_s, created_s)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is in one store. A namespace is named by its keys' scope in hex: ``KeyChain(namespace, layout).scope``."""

    directory: str
    now_s: float
    records: int
    nbytes: int
    namespaces: tuple[Share, ...]
    ages: tuple[Share, ...]
    sizes: tuple[Share, ...]
    extents: tuple[ExtentReport, ...]

    def to_text(self) -> str:
        """Tables for people."""
        total = f"{self.records:,} records, {self.nbytes:,} bytes"
        files = sum(extent.nbytes for extent in self.extents)
        lines = [f"{self.directory}: {total}, in {len(self.extents)} extents of {files:,} bytes"]
        for title, shares in (("namespace", self.namespaces), ("age", self.ages), ("record", self.sizes)):
            width = max([len(title), *(len(share.name) for share in shares)])
            lines += ["", f"{title:{width}}{'records':>12}{'bytes':>18}  age"]
            for share in shares:
                age = f"{_age(self.now_s, share.newest_s)} to {_age(self.now_s, share.oldest_s)}"
                lines.append(f"{share.name:{width}}{share.records:>12,}{share.nbytes:>18,}  {age}")
        for extent in self.extents:
            damage = f"{extent.damaged_heads:,} heads, {extent.damaged_pages} pages damaged"
            if not extent.sound:
                lines.append(f"{extent.name}: " + (f"left alone: {extent.refused}" if extent.refused else damage))
        return "\n".join(lines) + "\n"


def inventory(directory: Path, now_s: float) -> Inventory:
    """What is in the store in ``directory`` at ``now_s``; :class:`StoreMissingError`, :class:`StoreFormatError`."""
    kinds: tuple[dict[str, Share], ...] = {}, {}, {}
    reports = []
    with closing(StoreDirectory.existing(directory)) as opened:
        for report, extent, served in read_extents(opened, SystemDisk()):
            reports.append(report)
            if extent is not None:
                nbytes = extent.shape.layout[1]
                size = f"up to {(1 << max(nbytes - 1, 1).bit_length()) / 1024:g} KiB"
                for local in served:
                    created_s = int(extent.created_ms[local]) / 1000
                    age = next(name for name, limit_s in AGES_S.items() if now_s - created_s <= limit_s)
                    for shares, name in zip(kinds, (extent.key_of(local)[:SCOPE_NBYTES].hex(), age, size), strict=True):
                        shares.setdefault(name, Share(name)).add(nbytes, created_s)
    namespaces, ages, sizes = kinds
    return Inventory(
        str(directory),
        now_s,
        sum(share.records for share in ages.values()),
        sum(share.nbytes for share in ages.values()),
        tuple(sorted(namespaces.values(), key=lambda share: -share.nbytes)),
        tuple(ages[name] for name in AGES_S if name in ages),
        tuple(sorted(sizes.values(), key=lambda share: share.nbytes / share.records)),
        tuple(reports),
    )


def stores_in(directory: Path) -> list[Path]:
    """The store in ``directory``, or those below it; :class:`StoreMissingError` where there is none."""
    found: list[Path] = []
    with suppress(OSError):
        for path in (directory, *sorted(filter(Path.is_dir, directory.glob("*")))):
            with suppress(StorageError):
                StoreDirectory.existing(path).close()
                found.append(path)
            if found == [directory]:
                break
    if not found:
        raise StoreMissingError(f"{directory}: there is no store, and none in a directory below it")
    return found


def to_json(inventories: Sequence[Inventory]) -> str:
    """A JSON array with an object for each store."""
    return json.dumps([asdict(each) for each in inventories], indent=2) + "\n"


def _age(now_s: float, when_s: float) -> str:
    """
    >>> _age(100_000.0, 90_000.0), _age(100.0, 200.0)
    ('2.8 h', '0 s')
    """
    age_s = max(now_s - when_s, 0.0)
    for unit, seconds in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.1f} {unit}"
    return f"{age_s:.0f} s"

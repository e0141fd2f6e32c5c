"""What is in a file store: by namespace, age and size, with what is damaged.

Only heads are read, nothing is locked and nothing is written, so that a writer may go on, or start. What it changes
meanwhile may be counted as it was or as it is. ``fsck`` says whether payloads are sound; this does not look.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError, StoreMissingError
from cache_manager.keys import SCOPE_NBYTES
from cache_manager.storage.disk import SystemDisk
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.fsck import ExtentReport, read_extents

AGES_S: Final = {"1 min": 60, "1 h": 3_600, "6 h": 21_600, "1 day": 86_400, "7 days": 604_800}
"""Up to how old the records of a line are, by its name."""
OLDER: Final = "older"


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
    namespaces: tuple[Share, ...]
    ages: tuple[Share, ...]
    sizes: tuple[Share, ...]
    extents: tuple[ExtentReport, ...]

    @property
    def records(self) -> int:
        return sum(share.records for share in self.namespaces)

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.namespaces)

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
            if extent.refused:
                lines.append(f"{extent.name}: left alone: {extent.refused}")
            elif not extent.sound:
                lines.append(f"{extent.name}: {extent.damaged_heads:,} heads, {extent.damaged_pages} pages damaged")
        return "\n".join(lines) + "\n"


def inventory(directory: Path, now_s: float) -> Inventory:
    """Look through the store in ``directory``; ``now_s`` is wall-clock time.

    :class:`StoreMissingError` and :class:`StoreFormatError` when there is no store.
    """
    namespaces: dict[str, Share] = {}
    sizes: dict[int, Share] = {}
    ages = {name: Share(name) for name in (*AGES_S, OLDER)}
    reports = []
    try:
        with closing(StoreDirectory.existing(directory)) as opened:
            for report, extent, served in read_extents(opened, SystemDisk()):
                reports.append(report)
                for local in served if extent is not None else ():
                    assert extent is not None, "only of an extent anything is served"
                    scope, nbytes = extent.key_of(local)[:SCOPE_NBYTES].hex(), extent.shape.layout[1]
                    created_s, up_to = extent.created_ms(local) / 1000, 1 << max(nbytes - 1, 1).bit_length()
                    age = next((name for name, limit_s in AGES_S.items() if now_s - created_s <= limit_s), OLDER)
                    of_scope = namespaces.setdefault(scope, Share(scope))
                    of_size = sizes.setdefault(up_to, Share(f"up to {_size(up_to)}"))
                    for share in (of_scope, of_size, ages[age]):
                        share.add(nbytes, created_s)
    except OSError as error:
        raise StorageError(f"{directory}: cannot look through the store: {error}") from error
    return Inventory(
        str(directory),
        now_s,
        tuple(sorted(namespaces.values(), key=lambda share: -share.nbytes)),
        tuple(share for share in ages.values() if share.records),
        tuple(sizes[size] for size in sorted(sizes)),
        tuple(reports),
    )


def stores_in(directory: Path) -> list[Path]:
    """The store in ``directory``, or those below it, as a store of rows and one of KV are; never none.

    :class:`StoreMissingError` where there is none.
    """
    found: list[Path] = []
    with suppress(OSError):
        for path in (directory, *sorted(path for path in directory.glob("*") if path.is_dir())):
            with suppress(StorageError):
                StoreDirectory.existing(path).close()
                found.append(path)
            if found == [directory]:
                break
    if not found:
        raise StoreMissingError(f"{directory}: there is no store, and none in a directory below it")
    return found


def to_json(inventories: Sequence[Inventory]) -> str:
    """A JSON array with an object for each store: its fields, ``records`` and ``nbytes``."""
    found = [{"records": each.records, "nbytes": each.nbytes, **asdict(each)} for each in inventories]
    return json.dumps(found, indent=2) + "\n"


def to_text(inventories: Iterable[Inventory]) -> str:
    return "\n".join(each.to_text() for each in inventories)


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


def _size(nbytes: int) -> str:
    """
    >>> _size(512), _size(32 << 10), _size(1 << 20)
    ('512 B', '32 KiB', '1 MiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


__all__ = ["Inventory", "Share", "inventory", "stores_in", "to_json", "to_text"]

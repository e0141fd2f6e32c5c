"""What is in a file store: by namespace, age and size, with what is damaged and what was set aside.

Only headers are read, nothing is locked and nothing is written, so that a writer may go on, or start. What it changes
meanwhile may be counted as it was or as it is; a record that was replaced counts until its older copy is deleted.
``fsck`` says whether payloads are sound; this does not look.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError, StoreFormatError, StoreMissingError
from cache_manager.keys import SCOPE_NBYTES, BlockKey
from cache_manager.storage.disk import SystemDisk
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.recovery import Content, read_segment
from cache_manager.storage.file.segment import DELETED, LIVING, MARKER_NAME, UNSOUND

AGES_S: Final = {"1 min": 60, "1 h": 3_600, "6 h": 21_600, "1 day": 86_400, "7 days": 604_800}
"""Up to how old the records of a line are, by its name."""
OLDER, UNKNOWN = "older", "unknown"


@dataclass(slots=True)
class SegmentSummary:
    """One file of a store."""

    name: str
    nbytes: int = 0
    created_s: float | None = None  # wall clock
    records: int = 0  # the living ones
    deleted: int = 0
    aside: bool = False
    trouble: str = ""  # what is wrong with it; what is said of its records is true all the same


def read_segments(directory: Path) -> Iterator[tuple[SegmentSummary, list[tuple[BlockKey, int]]]]:
    """The segments of a store, oldest first: the one place here that knows the format.

    With each the living records: key, and bytes with header and padding. :class:`StoreMissingError` and
    :class:`StoreFormatError` when there is no store of this format. A segment that cannot be read says so in
    ``trouble``.
    """
    opened, disk = StoreDirectory.existing(directory), SystemDisk()
    try:
        files = opened.files()
        for sequence, name in files.items():
            found, records = SegmentSummary(name, aside=name.endswith(".aside")), list[tuple[BlockKey, int]]()
            try:
                found.nbytes = os.stat(name, dir_fd=opened.fd, follow_symlinks=False).st_size
                segment, content = read_segment(opened, disk, sequence, name)
                segment.close()
                found.created_s = segment.created_s
                records = [(entry.key, entry.nbytes) for entry in content.entries(LIVING)]
                found.records = len(records)
                found.deleted = content.states.count(DELETED)
                found.trouble = _trouble(content, newest=sequence == max(files))
            except FileNotFoundError:
                continue  # a writer has dropped it
            except StoreFormatError as error:
                found.trouble = f"left alone: {error}"
            except OSError as error:
                found.trouble = f"cannot be read: {error.strerror}"
            yield found, records
    finally:
        opened.close()


def _trouble(content: Content, *, newest: bool) -> str:
    """What is wrong with a segment, in words."""
    if content.empty:
        return "no header page"
    found = [] if content.page_sound else ["header page damaged"]
    if content.lost_nbytes or content.cut_short:
        last = " or are being written" if newest else ""
        found.append(f"{content.lost_nbytes:,} bytes are no record's{last}")
    if unsound := content.states.count(UNSOUND):
        found.append(f"{unsound:,} records are damaged")
    if content.failed_reads:
        found.append(f"{content.failed_reads:,} places cannot be read")
    return ", ".join(found)


@dataclass(slots=True)
class Share:
    """A part of what a store holds; ``oldest_s`` and ``newest_s`` are wall-clock times of segments, 0 for unknown."""

    name: str
    records: int = 0
    nbytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = 0.0

    def add(self, nbytes: int, created_s: float | None) -> None:
        self.records += 1
        self.nbytes += nbytes
        if created_s:
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
    segments: tuple[SegmentSummary, ...]

    @property
    def records(self) -> int:
        return sum(share.records for share in self.namespaces)

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.namespaces)

    def to_text(self) -> str:
        """Tables for people."""
        files = sum(segment.nbytes for segment in self.segments)
        deleted = sum(segment.deleted for segment in self.segments)
        total = f"{self.records:,} records, {self.nbytes:,} bytes"
        lines = [f"{self.directory}: {total}, in {len(self.segments)} segments of {files:,} bytes; {deleted:,} deleted"]
        for title, shares in (("namespace", self.namespaces), ("age", self.ages), ("record", self.sizes)):
            width = max([len(title), *(len(share.name) for share in shares)])
            lines += ["", f"{title:{width}}{'records':>12}{'bytes':>18}  age"]
            for share in shares:
                age = f"{_age(self.now_s, share.newest_s)} to {_age(self.now_s, share.oldest_s)}"
                lines.append(f"{share.name:{width}}{share.records:>12,}{share.nbytes:>18,}  {age}")
        odd = [segment for segment in self.segments if segment.trouble or segment.aside]
        lines += ["", *(f"{each.name}: {'set aside; ' * each.aside}{each.trouble or 'readable'}" for each in odd)]
        return "\n".join(lines).rstrip("\n") + "\n"


def inventory(directory: Path, now_s: float) -> Inventory:
    """Look through the store in ``directory``; ``now_s`` is wall-clock time. Raises as :func:`read_segments` does."""
    namespaces: dict[str, Share] = {}
    sizes: dict[int, Share] = {}
    ages = {name: Share(name) for name in (*AGES_S, OLDER, UNKNOWN)}
    segments = []
    try:
        for segment, records in read_segments(directory):
            segments.append(segment)
            age = ages[_age_line(now_s, segment.created_s)]
            for key, nbytes in records:
                scope, up_to = key[:SCOPE_NBYTES].hex(), 1 << max(nbytes - 1, 1).bit_length()
                of_scope = namespaces.setdefault(scope, Share(scope))
                of_size = sizes.setdefault(up_to, Share(f"up to {_size(up_to)}"))
                for share in (of_scope, of_size, age):
                    share.add(nbytes, segment.created_s)
    except OSError as error:
        raise StorageError(f"{directory}: cannot look through the store: {error}") from error
    return Inventory(
        str(directory),
        now_s,
        tuple(sorted(namespaces.values(), key=lambda share: -share.nbytes)),
        tuple(share for share in ages.values() if share.records),
        tuple(sizes[size] for size in sorted(sizes)),
        tuple(segments),
    )


def stores_in(directory: Path) -> list[Path]:
    """The store in ``directory``, or those below it, as a store of rows and one of KV are; never none.

    :class:`StoreMissingError` where there is none.
    """
    if (directory / MARKER_NAME).exists():
        return [directory]
    found: list[Path] = []
    with suppress(OSError):
        found = sorted(path.parent for path in directory.glob(f"*/{MARKER_NAME}"))
    if not found:
        raise StoreMissingError(f"{directory}: there is no store, and none in a directory below it")
    return found


def to_json(inventories: Sequence[Inventory]) -> str:
    """A JSON array with an object for each store: its fields, ``records`` and ``nbytes``."""
    found = [{"records": each.records, "nbytes": each.nbytes, **asdict(each)} for each in inventories]
    return json.dumps(found, indent=2) + "\n"


def to_text(inventories: Iterable[Inventory]) -> str:
    return "\n".join(each.to_text() for each in inventories)


def _age_line(now_s: float, created_s: float | None) -> str:
    if created_s is None:
        return UNKNOWN
    return next((name for name, limit_s in AGES_S.items() if now_s - created_s <= limit_s), OLDER)


def _age(now_s: float, when_s: float) -> str:
    """
    >>> _age(100_000.0, 90_000.0), _age(100.0, 0.0), _age(100.0, 200.0)
    ('2.8 h', 'unknown', '0 s')
    """
    if not when_s:
        return UNKNOWN
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


__all__ = ["Inventory", "SegmentSummary", "Share", "inventory", "read_segments", "stores_in", "to_json", "to_text"]

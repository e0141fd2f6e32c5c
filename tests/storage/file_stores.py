"""Small file stores for tests, and what harms them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faulty_disk import FaultyDisk

from cache_manager.record import header_nbytes
from cache_manager.storage.file import FileReader, FileStore
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, key_of, put

HEADER_NBYTES = header_nbytes(LAYOUT)
RECORD_NBYTES = HEADER_NBYTES + LAYOUT.nbytes
SEGMENT_NBYTES = 32 << 10  # six records
RECORDS = 14
"""In a store that is :func:`filled`."""


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def opened(directory: Path, disk: FaultyDisk | None = None, **options: Any) -> Iterator[RecordStore]:
    """A writer with small segments; ``options`` are those of :class:`FileStore`."""
    options = {"quota_nbytes": 1 << 20, "segment_nbytes": SEGMENT_NBYTES, **options}
    backend = FileStore(directory, disk=disk, **options)
    try:
        yield RecordStore(backend, LAYOUT)
    finally:
        backend.close()


@contextmanager
def reading(directory: Path, **options: Any) -> Iterator[RecordStore]:
    """A reader that looks again whenever a key is missing, unless ``options`` say otherwise."""
    backend = FileReader(directory, **{"refresh_s": 0.0, **options})
    try:
        yield RecordStore(backend, LAYOUT)
    finally:
        backend.close()


def filled(directory: Path) -> Path:
    """Fourteen records in three segments, of which two are deleted, closed."""
    with opened(directory) as store:
        assert all(put(store, range(RECORDS)))
        store.backend.delete([key_of(3), key_of(9)])
    return directory


def at(n: int) -> int:
    """Where record ``n`` lies in its segment; six to a segment."""
    return PAGE_NBYTES + n % 6 * RECORD_NBYTES


def segments(directory: Path) -> list[Path]:
    """Whole ones and those set aside, oldest first."""
    return sorted([*directory.glob("segment-*.kvr"), *directory.glob("segment-*.aside")])


def flip(path: Path, offset: int) -> None:
    """One bit, without a copy of the file: a store may have it open."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


FILL = """
import sys
from pathlib import Path
from cache_manager.ports import Absence
from cache_manager.spec import align
from cache_manager.storage.file import FileStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, payload_of, put
store = RecordStore(FileStore(Path(sys.argv[1]), quota_nbytes=1 << 20, segment_nbytes=32 << 10), LAYOUT)
"""

"""Small file stores for tests, judged from outside, by what was put, acknowledged, flushed, deleted and read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.disk import Disk
from cache_manager.storage.file import FileReader, FileStore
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.fsck import read_extents
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import BOTH, LAYOUT, Content, get, held, key_of, offer, payload_of

SMALL_NBYTES = 64 << 10
"""Of an extent: a dozen records."""
PER_EXTENT = 12
"""Records of the tests in a small extent."""
OTHER = RecordLayout((AuxBlockDataSpec("other", row_shape=(40, 8), dtype="uint8", block_tokens=80),))
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - names below it are mkdtemp's
"""A file system whose syncs cost nothing; a killed process leaves the same behind on any."""


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def opened(directory: Path, disk: Disk | None = None, **options: Any) -> Iterator[RecordStore]:
    """A writer with small extents; ``options`` are those of :class:`FileStore`."""
    backend = FileStore(directory, disk=disk, **{"quota_nbytes": 1 << 20, "extent_nbytes": SMALL_NBYTES, **options})
    try:
        yield RecordStore(backend, LAYOUT)
    finally:
        backend.close()


@contextmanager
def reading(directory: Path, **options: Any) -> Iterator[RecordStore]:
    """A reader that looks again whenever a key is missing, unless ``options`` say otherwise."""
    backend = FileReader(directory, **options)
    try:
        yield RecordStore(backend, LAYOUT)
    finally:
        backend.close()


def files(directory: Path) -> list[Path]:
    """Those with records in them, the oldest first."""
    return sorted(directory.glob("extent-*.kvr"))


def flip(path: Path, offset: int, bit: int = 4) -> None:
    """One bit, without a copy of the file: a store may have it open."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


def payload_in(directory: Path, key: BlockKey, at: int = 0) -> tuple[Path, int]:
    """The file that has the record of a key, and where byte ``at`` of its payload is."""
    for report, extent, served in read_extents(StoreDirectory.existing(directory), Disk()):
        for slot in served if extent is not None else ():
            assert extent is not None
            if extent.key_of(slot) == key:
                return directory / report.name, extent.payload_at(slot) + at
    raise AssertionError(f"no record of {key.hex()}")


class Known:
    """What each key may be answered with: contents that were put and not deleted since; 0 stands for nothing."""

    def __init__(self) -> None:
        self.may: dict[int, set[int]] = defaultdict(set)  # origins
        self.certain: dict[int, int] = {}  # what has to be there

    def offered(self, wanted: Iterable[int], origin: int) -> None:
        for n in wanted:
            self.may[n].add(origin)
            self.certain.pop(n, None)

    def put(self, store: RecordStore, wanted: Sequence[int], origin: int, *, replace: bool = True) -> list[int]:
        """Offer whole records; the origins that are reported as stored, 0 for none."""
        self.offered(wanted, origin)
        told = offer(store.backend, [(n, Content(origin, BOTH)) for n in wanted], replace=replace)
        answers = [0 if each is None else each.origin for each in told]
        assert all(not each or each in self.may[n] for n, each in zip(wanted, answers, strict=True))
        return answers

    def deleted(self, wanted: Iterable[int]) -> None:
        for n in wanted:
            self.may[n].clear()
            self.certain.pop(n, None)

    def judge(self, store: RecordStore, wanted: Sequence[int], *, corrupt: bool = False) -> set[int]:
        """Read, and return which are there. ``corrupt``: records that may be missing may also be corrupt."""
        there = set()
        for n, answer in zip(wanted, held(store, wanted), strict=True):
            if isinstance(answer, Content):
                assert answer.origin in self.may[n], f"{n}: {answer.origin}, may be {self.may[n]}"
                there.add(n)
            assert n not in self.certain or n in there, f"{n} was certain, and is {answer}"
            assert corrupt or answer is not Absence.CORRUPT, f"{n} is corrupt"
            assert n not in self.certain or (isinstance(answer, Content) and answer.origin == self.certain[n])
        return there


def there(store: RecordStore, wanted: Sequence[int]) -> set[int]:
    """Which of these are there; each that is has to be right."""
    answers = get(store, wanted)
    assert all(answer in (payload_of(n), Absence.MISS) for n, answer in zip(wanted, answers, strict=True))
    return {n for n, answer in zip(wanted, answers, strict=True) if answer is not Absence.MISS}


def put_others(store: RecordStore, wanted: Sequence[int]) -> int:
    """How many records of another layout are stored."""
    payload, valid = bytes(OTHER.nbytes), b"\xff" * 8 + b"\xff\xff" + bytes(6)
    keys = [key_of(1000 + n) for n in wanted]
    others, count = RecordStore(store.backend, OTHER), len(keys)
    answers = others.put(keys, [payload] * count, [valid] * count, [0] * count, [1] * count)
    return sum(answer is not None for answer in answers)

"""Trials of the file store by its disk: calls that fail, power cuts and damage.

Each takes a scratch directory and a seed; :mod:`tests.faults.attacks` runs them.
"""

from __future__ import annotations

import errno
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from faulty_disk import FaultyDisk, VolatileDisk
from stores import Known, files, opened, reading

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.disk import Room
from cache_manager.storage.file import Sync, fsck
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import Content, get, held, key_of, payload_of, put

NUMBERS = range(40)
ERRORS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ESTALE)

# A disk that fails.


class UnluckyDisk(FaultyDisk):
    """Every call fails now and then, as ``rng`` has it; a write that fails may have written a part."""

    def __init__(self, rng: np.random.Generator, share: float) -> None:
        super().__init__()
        self.rng, self.share = rng, share
        self.faults: Counter[str] = Counter()

    def _fail(self, what: str) -> None:
        if self.rng.random() < self.share:
            self.faults[what] += 1
            raise OSError(int(self.rng.choice(ERRORS)), what)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.rng.random() < self.share:
            whole = b"".join(buffers)
            if part := int(self.rng.integers(0, len(whole))):
                super().pwritev(fd, [whole[:part]], offset)
            self.faults["write"] += 1
            raise OSError(int(self.rng.choice(ERRORS)), "write")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        self._fail("read")
        return super().preadv(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._fail("allocate")
        super().allocate(fd, nbytes)

    def size(self, fd: int) -> int:
        self._fail("size")
        return super().size(fd)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)


def faults(scratch: Path, seed: int) -> Counter[str]:
    """One store with an unlucky disk and a reader with another, over three lives: a record is itself or missing.

    With every eighth seed no call moves more than 1000 bytes.
    """
    rng = np.random.default_rng((1, seed))
    disk, of_reader, known = UnluckyDisk(rng, 0.0), UnluckyDisk(rng, 0.0), Known()
    sync = Sync.BATCH if rng.random() < 0.3 else Sync.NONE
    disk.call_nbytes_max = of_reader.call_nbytes_max = None if seed % 8 else 1000
    for _ in range(3):
        disk.share = of_reader.share = 0.0
        with (
            opened(scratch / "s", disk, sync=sync, quota_nbytes=3 << 16) as store,
            reading(scratch / "s", disk=of_reader) as reader,
        ):
            disk.share = of_reader.share = float(rng.choice((0.02, 0.1, 0.3)))
            for _ in range(40):
                wanted = [int(n) for n in rng.integers(0, len(NUMBERS), int(rng.integers(1, 7)))]
                with suppress(StorageError):
                    match int(rng.integers(0, 9)):
                        case 0:
                            store.backend.delete([key_of(n) for n in wanted])
                            known.deleted(wanted)
                        case 1:
                            store.flush()
                        case 2 | 3:
                            known.judge(store, wanted, corrupt=True)
                        case 4:
                            for answer in held(reader, wanted):
                                assert isinstance(answer, Absence) or answer.origin in (1, 2)
                        case _:
                            known.put(store, wanted, int(rng.integers(1, 3)), replace=bool(rng.integers(2)))
            disk.share = of_reader.share = 0.0
            known.judge(store, NUMBERS, corrupt=True)
            assert store.usage()["used_nbytes"] == sum(path.stat().st_size for path in files(scratch / "s"))
            new = sorted({int(n) for n in rng.integers(0, len(NUMBERS), 3)})
            assert known.put(store, new, 1) == [1] * len(new)  # the disk is well again
            assert known.judge(store, new) == set(new)
    return disk.faults + of_reader.faults


# Power cuts.


def cut(scratch: Path, seed: int) -> None:
    """Puts, replacements, deletions and flushes, and a power cut: what was flushed and let alone since is there."""
    rng = np.random.default_rng((2, seed))
    directory, disk, known = scratch / "before", VolatileDisk(scratch / "before"), Known()
    sync, quota = Sync.BATCH if rng.random() < 0.5 else Sync.NONE, int(rng.choice((3 << 16, 1 << 20)))
    gone: set[int] = set()  # deleted, but not flushed yet
    with opened(directory, disk, sync=sync, quota_nbytes=quota) as store:
        for _ in range(int(rng.integers(1, 14))):
            wanted = sorted({int(n) for n in rng.integers(0, len(NUMBERS), int(rng.integers(1, 10)))})
            match int(rng.integers(0, 6)):
                case 0:
                    store.backend.delete([key_of(n) for n in wanted])
                    gone.update(wanted)
                    for n in wanted:
                        known.certain.pop(n, None)
                case 1:
                    store.flush()
                    known.deleted(gone)
                    gone.clear()
                    known.certain.update({n: _origin(store, n) for n in NUMBERS if _origin(store, n)})
                case _:
                    origin = int(rng.integers(1, 4))
                    answers = known.put(store, wanted, origin)
                    gone -= set(wanted)
                    if sync is Sync.BATCH:
                        known.certain.update({n: each for n, each in zip(wanted, answers, strict=True) if each})
        disk.cut_power(scratch / "after", rng)
    if quota < 1 << 20:
        known.certain = {}  # a slot may have been used again
    for life in range(2):  # the second opening finds what the first one made of it
        with opened(scratch / "after", quota_nbytes=quota) as after:
            known.judge(after, NUMBERS, corrupt=life == 0)
            if life == 1:
                assert all(known.put(after, NUMBERS[:4], 9))
                assert known.judge(after, NUMBERS[:4]) == set(NUMBERS[:4])


def _origin(store: RecordStore, n: int) -> int:
    (answer,) = held(store, [n])
    return answer.origin if isinstance(answer, Content) else 0


# Damage.


def damage(scratch: Path, seed: int) -> str:
    """One store damaged in one to four places: records elsewhere are served, whichever process opens the store first,
    and stay so."""
    rng = np.random.default_rng((3, seed))
    directory = scratch / "store"
    with opened(directory) as store:
        for first in range(0, 38, 4):
            assert all(put(store, range(first, first + 4)))
        store.backend.delete([key_of(3)])
    paths = files(directory)
    raws = [path.read_bytes() for path in paths]
    where = {n: i for n in range(40) for i, raw in enumerate(raws) if payload_of(n) in raw and n != 3}
    lost: dict[int, float] = defaultdict(float)  # how many records of a file may be missing
    for _ in range(int(rng.integers(1, 5))):
        which = int(rng.integers(0, len(paths)))
        path = paths[which]
        raw = bytearray(path.read_bytes()) if path.exists() else bytearray()
        at = int(rng.integers(0, max(len(raw), 1)))
        harm = str(rng.choice(["flip", "flip", "cut", "zero", "junk", "swap", "gone", "sparse", "first"]))
        few = {"flip": 1, "zero": 6, "junk": 6, "swap": 6, "sparse": 0}
        in_page = at < 4096 and harm != "sparse"
        lost[which] += np.inf if in_page else few.get(harm, np.inf)
        match harm:
            case "flip" if raw:
                raw[at] ^= 1 << int(rng.integers(0, 8))
            case "cut":
                del raw[at:]
            case "zero":
                raw[at : at + 512] = bytes(len(raw[at : at + 512]))
            case "junk":
                raw[at : at + 512] = rng.bytes(len(raw[at : at + 512]))
            case "swap" if raw:
                other = int(rng.integers(0, len(raw)))
                raw[at : at + 512] = raw[other : other + 512].ljust(len(raw[at : at + 512]), b"\0")[: len(raw) - at]
            case "first":
                raw[: min(len(raw), 4096)] = rng.bytes(min(len(raw), 4096))
        path.unlink(missing_ok=True)
        if harm != "gone":
            path.write_bytes(raw)
        if harm == "sparse":
            os.truncate(path, 3 << 40)
            lost[which] += np.inf if len(lost) > 1 or lost[which] else 0
            break
    served: dict[str, set[int]] = {}
    for order in ("read write fsck write", "fsck write read", "write read fsck write"):
        copy = scratch / order
        _copy(directory, copy)
        before: set[int] = set()
        for step in order.split():
            if step == "fsck":
                fsck(copy, payloads=True)
                continue
            with (opened if step == "write" else reading)(copy) as store:  # type: ignore[operator]
                answers = get(store, range(40))
            there = {n for n, answer in enumerate(answers) if not isinstance(answer, Absence)}
            assert all(answers[n] == payload_of(n) and n != 3 for n in there)
            for which in range(len(paths)):
                missing = [n for n, i in where.items() if i == which and n not in there]
                assert len(missing) <= lost[which], f"{paths[which].name}: {missing} of {lost[which]}"
            assert before <= there
            before = there
        served[order] = before
    assert len(set(map(frozenset, served.values()))) == 1, served
    return "served"


def _copy(source: Path, target: Path) -> None:
    """Holes in the file stay holes."""
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as file, (target / path.name).open("wb") as copy:
            size, at = path.stat().st_size, 0
            while at < size:
                try:
                    at = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break
                end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
                os.pwrite(copy.fileno(), os.pread(file.fileno(), end - at, at), at)
                at = end
            os.truncate(copy.fileno(), size)

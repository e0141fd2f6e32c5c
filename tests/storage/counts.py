"""The file store's trials by the thousand: ``python -m tests.storage.counts`` runs them all and prints what it counted.

CI runs a slice of each (:mod:`tests.storage.test_file_counts`); the kills are a test of their own
(:mod:`tests.storage.test_file_crash`). Every trial has a seed, so that one that fails can be run again.
"""

from __future__ import annotations

import argparse
import errno
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from faulty_disk import FaultyDisk

from cache_manager.errors import StorageError, StoreFormatError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.disk import Room
from cache_manager.storage.file import Sync, fsck
from cache_manager.testing.records import get, key_of, payload_of, put
from tests.storage.file_stores import SEGMENT_NBYTES, opened, reading, segments
from tests.storage.test_file_crash import MEMORY, cut_power_after

FAULTS, CUTS, DAMAGED = 5_000, 900, 700
_NUMBERS = range(40)
_ERRORS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENXIO)


class UnluckyDisk(FaultyDisk):
    """Every call fails now and then, as ``rng`` has it; a write that fails may have written a part."""

    def __init__(self, rng: np.random.Generator, share: float) -> None:
        super().__init__()
        self.rng, self.share = rng, share
        self.faults: Counter[str] = Counter()

    def _fail(self, what: str) -> None:
        if self.rng.random() < self.share:
            self.faults[what] += 1
            raise OSError(int(self.rng.choice(_ERRORS)), what)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.rng.random() < self.share:
            self.faults["write"] += 1
            whole = b"".join(buffers)
            if part := int(self.rng.integers(0, len(whole))):
                super().pwritev(fd, [whole[:part]], offset)
            raise OSError(int(self.rng.choice(_ERRORS)), "write")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        self._fail("read")
        return super().preadv(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._fail("allocate")
        super().allocate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._fail("truncate")
        super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)


def faults(directory: Path, seed: int) -> Counter[str]:
    """One store with an unlucky disk, over three lives: a record is itself or missing, and calls work again."""
    rng = np.random.default_rng((1, seed))
    disk = UnluckyDisk(rng, 0.0)
    sync = Sync.BATCH if rng.random() < 0.3 else Sync.NONE
    put_ever: set[int] = set()
    for _ in range(3):
        disk.share = 0.0
        with opened(directory, disk, sync=sync, quota_nbytes=6 * SEGMENT_NBYTES) as store:
            disk.share = float(rng.choice((0.02, 0.1, 0.3)))
            for _ in range(40):
                wanted = [int(n) for n in rng.integers(0, len(_NUMBERS), int(rng.integers(1, 7)))]
                try:
                    match int(rng.integers(0, 8)):
                        case 0:
                            store.backend.delete([key_of(n) for n in wanted])
                        case 1:
                            store.flush()
                        case 2 | 3:
                            _check(get(store, wanted), wanted, put_ever)
                        case _:
                            put_ever.update(wanted)
                            put(store, wanted)
                except StorageError:
                    continue
            disk.share = 0.0
            _check(get(store, _NUMBERS), _NUMBERS, put_ever)
            usage = store.usage()
            assert usage["used_nbytes"] == sum(path.stat().st_size for path in segments(directory))
            new = [int(n) for n in rng.integers(0, len(_NUMBERS), 3)]
            put_ever.update(new)
            assert all(put(store, new))  # the disk is well again
            assert get(store, new) == [payload_of(n) for n in new]
    report = fsck(directory)
    assert report.total("corrupt") == 0
    return disk.faults


def _check(answers: Sequence[bytes | Absence], wanted: Sequence[int], put_ever: set[int]) -> None:
    for n, answer in zip(wanted, answers, strict=True):
        assert isinstance(answer, Absence) or (n in put_ever and answer == payload_of(n))


def cut(scratch: Path, seed: int) -> None:
    """One power cut after puts and flushes drawn from the seed."""
    rng = np.random.default_rng((2, seed))
    batches = [rng.permutation(41)[: int(rng.integers(1, 10))].tolist() for _ in range(int(rng.integers(1, 9)))]
    sync = Sync.BATCH if rng.random() < 0.5 else Sync.NONE
    cut_power_after(scratch, batches, sync, int(rng.integers(1, 5)), seed)


def damage(scratch: Path, seed: int) -> str:
    """One store damaged in one to four places: who opens first loses nothing for who comes then."""
    rng = np.random.default_rng((3, seed))
    directory = scratch / "store"
    with opened(directory) as store:
        for first in range(0, 26, 4):
            assert all(put(store, range(first, first + 4)))
        store.backend.delete([key_of(3)])
    paths = segments(directory)
    harmed = set()
    for _ in range(int(rng.integers(1, 5))):
        which = int(rng.integers(0, len(paths)))
        harmed.add(which)
        raw = bytearray(paths[which].read_bytes())
        at = int(rng.integers(0, max(len(raw), 1)))
        match str(rng.choice(["flip", "cut", "zero", "junk", "swap"])):
            case "flip" if raw:
                raw[at] ^= 1 << int(rng.integers(0, 8))
            case "cut":
                del raw[at:]
            case "zero":
                raw[at : at + 512] = bytes(len(raw[at : at + 512]))
            case "junk":
                raw[at : at + 512] = rng.bytes(len(raw[at : at + 512]))
            case "swap":
                other = int(rng.integers(0, max(len(raw), 1)))
                raw[at : at + 512] = raw[other : other + 512].ljust(len(raw[at : at + 512]), b"\0")[: len(raw) - at]
        paths[which].write_bytes(raw)
    untouched = {n for n in range(28) if n // 6 not in harmed} - {3}
    served: dict[str, set[int]] = {}
    for order in (("read", "write", "fsck", "write"), ("fsck", "write", "read"), ("write", "read", "fsck", "write")):
        copy = scratch / "-".join(order)
        shutil.copytree(directory, copy)
        before: set[int] = set()
        for step in order:
            try:
                if step == "fsck":
                    fsck(copy, repair=True)
                    assert any(segment.refused for segment in fsck(copy).segments) or fsck(copy).sound
                    continue
                with (opened if step == "write" else reading)(copy) as store:  # type: ignore[operator]
                    answers = get(store, range(28))
            except StoreFormatError:
                return "refused by name"
            _check(answers, range(28), set(range(28)) - {3})
            there = {n for n, answer in enumerate(answers) if not isinstance(answer, Absence)}
            assert untouched <= there
            assert before <= there
            before = there
        served["-".join(order)] = before
    assert len(set(map(frozenset, served.values()))) == 1, served
    return "served"


def many(trial: Callable[[Path, int], object], count: int, first: int = 0) -> list[object]:
    answers = []
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
            try:
                answers.append(trial(Path(scratch), seed))
            except BaseException:
                print(f"{trial.__name__}: seed {seed} failed")
                raise
    return answers


def count_faults(wanted: int) -> Counter[str]:
    found: Counter[str] = Counter()
    seed = 0
    while found.total() < wanted:
        (answer,) = many(faults, 1, seed)
        assert isinstance(answer, Counter)
        found += answer
        seed += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    share = parser.parse_args().share
    for name, run in {
        "injected faults": lambda: dict(found := count_faults(int(FAULTS * share))) | {"in all": found.total()},
        "power cuts": lambda: len(many(cut, int(CUTS * share))),
        "damaged stores": lambda: Counter(many(damage, int(DAMAGED * share))),
    }.items():
        started = time.monotonic()
        print(f"{name}: {run()} in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

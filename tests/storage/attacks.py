"""The file store's trials by the thousand: ``python -m tests.storage.attacks`` runs them all and says what it counted.

A store is judged by its outside, so that every store with a directory passes the same trials. CI runs a slice of each
(:mod:`tests.storage.test_attacks`). Every trial has a seed, so that one that fails can be run again.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from faulty_disk import FaultyDisk, VolatileDisk

from cache_manager.errors import StorageError, StoreClosedError, StoreLockedError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.disk import Room
from cache_manager.storage.file import Sync, fsck
from cache_manager.storage.records import RecordStore
from cache_manager.testing.origins import Content, held, offer, together
from cache_manager.testing.records import BOTH, get, key_of, payload_of, put
from tests.storage.stores import MEMORY, files, opened, reading

NUMBERS = range(40)
ERRORS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ESTALE)


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
        """Offer whole records; the origins that are said to be stored, 0 for none."""
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
        """Read; which are there. ``corrupt``: what is not certain may be that."""
        there = set()
        for n, answer in zip(wanted, held(store, wanted), strict=True):
            if isinstance(answer, Content):
                assert answer.origin in self.may[n], f"{n}: {answer.origin}, may be {self.may[n]}"
                there.add(n)
            assert n not in self.certain or n in there, f"{n} was certain, and is {answer}"
            assert corrupt or answer is not Absence.CORRUPT, f"{n} is corrupt"
            assert n not in self.certain or (isinstance(answer, Content) and answer.origin == self.certain[n])
        return there


# Processes that are killed.


def in_child(
    work: Callable[[Callable[[int], None]], None], *, kill_after_s: float | None = None, at_work: bool = False
) -> list[int]:
    """Run ``work(acknowledge)`` in a forked child that ends by SIGKILL; what it acknowledged until then.

    The time to its kill begins at the fork, or, if ``at_work``, with the first that it acknowledges.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            work(lambda n: os.write(writer, n.to_bytes(8, "little", signed=True)) and None)
        except BaseException:  # noqa: BLE001 - shown here; the parent sees that the child was not killed
            traceback.print_exc()
        os._exit(3)
    os.close(writer)

    def kill() -> None:
        with suppress(ProcessLookupError):  # it was the first to do so
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(kill_after_s, kill) if kill_after_s is not None else None
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        raw = pipe.read(8) if at_work else b""
        if timer is not None:
            timer.start()
        raw += pipe.read()
    _, status = os.waitpid(pid, 0)
    if timer is not None:
        timer.join()
    assert os.WIFSIGNALED(status), f"the child was not killed but ended with {status}"
    return [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw) - 7, 8)]


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills(scratch: Path, seed: int, lives: int = 11, records: int = 1500) -> int:
    """Lives of one store that are killed at a byte or a moment; how many records they had acknowledged.

    Each puts new records in batches, replaces some of its own and deletes some. What was acknowledged is as it was
    acknowledged; what was on its way is before or after; nothing is torn.
    """
    rng = np.random.default_rng((4, seed))
    known, total = Known(), 0
    for life in range(lives):
        first, budget = life * records, int(rng.integers(0, records * 5000)) if rng.random() < 0.5 else None
        sync = Sync.BATCH if rng.random() < 0.3 else Sync.NONE

        def work(
            acknowledge: Callable[[int], None], first: int = first, budget: int | None = budget, sync=sync
        ) -> None:
            disk, n = FaultyDisk(), first
            with opened(scratch / "s", disk, quota_nbytes=1 << 28, extent_nbytes=1 << 20, sync=sync) as store:
                disk.write_budget_nbytes, disk.at_limit = budget, kill_me
                while n < first + records:
                    batch = range(n, min(n + 1 + n % 7, first + records))
                    assert all(put(store, batch))
                    for done in batch:
                        acknowledge(2 * done + 1)
                    if n % 3 == 0:
                        assert offer(store.backend, [(n, Content(2, BOTH))], replace=True) == [Content(2, BOTH)]
                        acknowledge(2 * n + 2)
                    if n % 5 == 0:
                        store.backend.delete([key_of(n)])
                        acknowledge(-n - 1)
                    n = batch.stop
                kill_me()

        for done in in_child(
            work, kill_after_s=float(rng.uniform(0.005, 0.4)) if budget is None else None, at_work=True
        ):
            total += 1
            n, origin = (-done - 1, 0) if done < 0 else ((done - 1) // 2, 2 - done % 2)
            known.may[n], known.certain[n] = {origin}, origin
        for n in range(first, first + records):  # what was on its way when it ended
            step = known.certain.get(n, 0)
            following = {0: [1], 1: [2] if n % 3 == 0 else [], 2: []}[step] if n not in known.certain or step else []
            known.may[n].update(following)
        last = max((n for n in known.certain if first <= n), default=first - 1)
        doubtful = {n for n in known.certain if n >= last - 7 and (n % 3 == 0 or n % 5 == 0)}
        with opened(scratch / "s", quota_nbytes=1 << 28, extent_nbytes=1 << 20) as store:
            there = store.contains([key_of(n) for n in range(first + records)])
            for n, answer in enumerate(held(store, range(first + records))):
                origin = answer.origin if isinstance(answer, Content) else 0
                assert answer is not Absence.CORRUPT
                assert origin in known.may[n] | {0}
                assert there[n] == bool(origin)
                assert n in doubtful or known.certain.get(n, origin) == origin, f"{n}: {known.certain[n]}, is {origin}"
                known.certain[n], known.may[n] = origin, {origin} if origin else set()
            assert store.usage()["records"] == sum(there)
    return total


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
    """One store with an unlucky disk and a reader with another, over three lives: a record is itself or missing."""
    rng = np.random.default_rng((1, seed))
    disk, of_reader, known = UnluckyDisk(rng, 0.0), UnluckyDisk(rng, 0.0), Known()
    sync = Sync.BATCH if rng.random() < 0.3 else Sync.NONE
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
    gone: set[int] = set()  # deleted; not flushed yet
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
    """One store damaged in one to four places: what lies elsewhere is served, whoever comes first, and stays so."""
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
        lost[which] += {"flip": 1, "zero": 6, "junk": 6, "swap": 6, "sparse": 0, "first": 0}.get(harm, np.inf)
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
                lost[which] += np.inf if lost[which] > 0 else 0  # the copy may be harmed, too
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
    """Holes stay holes."""
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


# Readers, forks, openings and racing writers.


def beside(scratch: Path, seed: int, lasts_s: float = 3.0) -> int:
    """A reader in this process beside a writer in another that replaces and evicts: a record is whole or missing."""
    del seed
    with opened(scratch / "s", quota_nbytes=3 << 16):
        pass
    pid = os.fork()
    if not pid:
        try:
            with opened(scratch / "s", quota_nbytes=3 << 16) as store:
                for n in range(1_000_000):
                    put(store, [n % 60, (n * 7) % 60], origin=1 + n % 3, replace=True)
        finally:
            os._exit(1)
    checks, until_s = 0, time.monotonic() + lasts_s
    try:
        with reading(scratch / "s") as reader:
            while time.monotonic() < until_s:
                answers = held(reader, range(60))
                assert Absence.CORRUPT not in answers
                checks += 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return checks


def forks(scratch: Path, seed: int) -> None:
    """A child of a process with a store is told so by every call, whatever locks were held; the parent goes on."""
    del seed
    with opened(scratch / "s") as store, reading(scratch / "s") as reader:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                put(store, range(8))
                get(reader, range(8))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            pid = os.fork()
            if not pid:
                signal.alarm(20)
                told = 0
                for each in (store, reader):
                    for call in (lambda each=each: each.contains([key_of(1)]), lambda each=each: get(each, [1])):
                        try:
                            call()
                        except StoreClosedError:
                            told += 1
                store.close()
                os._exit(0 if told == 4 else 5)
            assert os.waitpid(pid, 0)[1] == 0, "a forked child hung, or was not told"
        stop.set()
        for thread in threads:
            thread.join(20)
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]


def openings(scratch: Path, seed: int) -> None:
    """Four processes open one store at once, one of them where a writer was killed: one writes, the others are told."""
    ready, go = os.pipe()
    pids = []
    for which in range(4):
        pid = os.fork()
        if not pid:
            os.close(go)
            os.read(ready, 1)
            try:
                with opened(scratch / "s") as store:
                    assert all(put(store, range(which * 5, which * 5 + 5)))
                    if seed % 2:
                        kill_me()
                os._exit(0)
            except StoreLockedError:
                os._exit(7)
            finally:
                os._exit(3)
        pids.append(pid)
    os.close(ready)
    os.close(go)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    good = sum(os.WIFSIGNALED(code) or os.WEXITSTATUS(code) == 0 for code in codes)
    assert good
    assert all(os.WIFSIGNALED(code) or os.WEXITSTATUS(code) in (0, 7) for code in codes), codes
    with opened(scratch / "s") as store:
        there = [not isinstance(answer, Absence) for answer in get(store, range(20))]
        assert sum(there) == 5 * good


def racing(scratch: Path, seed: int) -> int:
    """Four threads put their own computations of the same keys in a store that has to make room."""
    puts, threads = 500, 4
    known = {n: {1, 2, 3, 4} for n in range(60)}
    with opened(scratch / "s", quota_nbytes=3 << 16) as store:

        def work(which: int) -> None:
            rng = np.random.default_rng((5, seed, which))
            for _ in range(puts):
                wanted = [int(n) for n in rng.integers(0, 60, 5)]
                batch = [(n, Content(1 + which, int(rng.integers(1, 4)))) for n in wanted]
                told = offer(store.backend, batch, replace=bool(rng.integers(2)))
                assert any(told)
                for n, answer in zip(wanted, held(store, wanted), strict=True):
                    assert answer is not Absence.CORRUPT
                    assert isinstance(answer, Absence) or answer.origin in known[n]

        together([lambda which=which: work(which) for which in range(threads)])  # type: ignore[misc]
        assert store.counters.corrupt == 0
    return puts * threads * 5


def many(trial: Callable[[Path, int], object], count: int, first: int = 0) -> list[object]:
    answers = []
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
            try:
                answers.append(trial(Path(scratch), seed))
            except BaseException:
                print(f"{trial.__name__}: seed {seed} failed", flush=True)
                raise
    return answers


def count_faults(wanted: int, first: int = 0) -> Counter[str]:
    found: Counter[str] = Counter()
    while found.total() < wanted:
        (answer,) = many(faults, 1, first)
        assert isinstance(answer, Counter)
        found += answer
        first += 1
    return found


TRIALS: dict[str, Callable[[float], object]] = {
    "faults": lambda share: (found := count_faults(int(2800 * share))) and {**found, "in all": found.total()},
    "cuts": lambda share: len(many(cut, int(300 * share))),
    "damage": lambda share: Counter(many(damage, int(100 * share))),
    "kills": lambda share: sum(many(kills, round(6 * share) or 1)),
    "forks": lambda share: 10 * len(many(forks, int(30 * share) or 1)),
    "openings": lambda share: len(many(openings, int(120 * share) or 1)),
    "beside": lambda share: sum(many(beside, int(5 * share) or 1)),
    "racing": lambda share: sum(many(racing, int(25 * share) or 1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    parser.add_argument("--only", choices=TRIALS, nargs="+", default=list(TRIALS))
    chosen = parser.parse_args()
    for name in chosen.only:
        started = time.monotonic()
        print(f"{name}: {TRIALS[name](chosen.share)} in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

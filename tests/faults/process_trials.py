"""Trials of the file store by processes and threads: writers that are killed, readers, forks, openings and races.

Each takes a scratch directory and a seed; :mod:`tests.faults.attacks` runs them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from faulty_disk import FaultyDisk
from stores import Known, opened, reading
from waiting import GIVE_UP_S

from cache_manager.errors import StoreClosedError, StoreLockedError
from cache_manager.ports import Absence
from cache_manager.storage.file import Sync, fsck
from cache_manager.testing.records import BOTH, Content, get, held, key_of, offer, payload_of, put, together

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

    Each puts new records in batches, replaces some of its own and deletes some. Acknowledged operations are kept; each
    record of an operation in progress at the kill is as before or as after it; no record is torn.
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
        for n in range(first, first + records):  # the operation in progress when it ended
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
                assert checks % 10 or len(fsck(scratch / "s").extents) <= 3  # locks no other process out
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
            thread.join(GIVE_UP_S)
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

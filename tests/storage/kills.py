"""Processes that are killed while they write a file store, and what must be there afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from faulty_disk import FaultyDisk

from cache_manager.ports import Absence
from cache_manager.storage.file import FileStore, Sync
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put

LIFE_RECORDS = 60
"""Records that one life puts at most."""


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
            work(lambda n: os.write(writer, n.to_bytes(4, "little")))
        except BaseException:  # noqa: BLE001 - shown here; the parent sees that the child was not killed
            traceback.print_exc()
        os._exit(3)
    os.close(writer)
    timer = threading.Timer(kill_after_s, os.kill, (pid, signal.SIGKILL)) if kill_after_s is not None else None
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        raw = pipe.read(4) if at_work else b""
        if timer is not None:
            timer.start()
        raw += pipe.read()
    _, status = os.waitpid(pid, 0)
    if timer is not None:
        timer.join()
    assert os.WIFSIGNALED(status), f"the child was not killed but ended with {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw) - 3, 4)]


def fill(
    directory: Path,
    first: int,
    disk: FaultyDisk,
    acknowledge: Callable[[int], None],
    sync: Sync,
    records: int = 2000,
) -> None:
    """Put records in batches of one to seven and acknowledge each."""
    backend = FileStore(directory, quota_nbytes=1 << 24, segment_nbytes=64 << 10, sync=sync, disk=disk)
    store, n = RecordStore(backend, LAYOUT), first
    while n < first + records:
        batch = range(n, min(n + 1 + n % 7, first + records))
        assert all(put(store, batch))
        for done in batch:
            acknowledge(done)
        n = batch.stop


def check(directory: Path, acknowledged: list[int], last: int) -> int:
    """Reopen: every acknowledged record is there, nothing is torn, and nothing is there that was not put."""
    backend = FileStore(directory, quota_nbytes=1 << 24, segment_nbytes=64 << 10)
    store = RecordStore(backend, LAYOUT)
    there = store.contains([key_of(n) for n in range(last)])
    answers = get(store, range(last))
    for n in acknowledged:
        assert answers[n] == payload_of(n)
    for n in range(last):
        assert answers[n] == payload_of(n) if there[n] else answers[n] is Absence.MISS
    assert store.counters.corrupt == 0
    assert backend.usage()["records"] == sum(there)
    torn = backend.usage()["torn_records"]
    store.close()
    return torn


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def begin_lives(work: Callable[[], None], delays_s: Sequence[float]) -> int:
    """Start a process that runs ``work`` in one child after another and kills each after its delay; its pid.

    Call it before there are threads: the children are forks of that process, which has none. It exits with 0 when
    every child died by the signal.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 0
    for delay_s in delays_s:
        child = os.fork()
        if not child:
            try:
                work()
            except BaseException:  # noqa: BLE001 - shown here; whoever waits sees that the child was not killed
                traceback.print_exc()
            os._exit(3)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        status |= not os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os._exit(status)

"""Stores in a process of their own: the shipped contract with real processes, which are then stopped and killed."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from standing_still import send_signal
from waiting import GIVE_UP_S, until

from cache_manager.child import Child
from cache_manager.errors import ConfigError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.storage import open_store
from cache_manager.storage.apart import ApartSettings, ApartStore
from cache_manager.storage.apart_process import CALLS_MAX
from cache_manager.storage.records import RecordStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put

WAIT_S = GIVE_UP_S
FEW = settings(max_examples=4, stateful_step_count=25, deadline=None)


class TestFileApart(StorageContract):
    """The arena's slots hold seven records: batches come in parts."""

    machine_settings = FEW

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        return open_store(f"apart:?arena=128KiB,file://{directory}?quota={capacity_nbytes}")


def apart(url: str, **limits: float) -> ApartStore:
    return ApartStore(url, ApartSettings(**{"restart_pause_s": 0.01, "restart_pause_max_s": 0.05, **limits}))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?quota=64MiB"


@pytest.fixture
def store(url: str) -> Iterator[ApartStore]:
    with apart(url) as opened:
        yield opened


def end(pid: int | None, *signals: int) -> int:
    assert pid is not None
    for each in signals or (signal.SIGKILL,):
        send_signal(pid, each)
    return pid


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def again(store: ApartStore) -> None:
    """Wait until calls are taken."""
    until(lambda: store.pid is not None, WAIT_S)


@contextmanager
def in_a_hurry(store: ApartStore) -> Iterator[None]:
    """Questions and the end of a process have little time, while it is stopped: one that works is never too slow."""
    before = store.settings
    store.settings = replace(before, call_s=0.2, close_s=0.2)
    yield
    store.settings = before


def asks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a process is asked something."""
    asked, ask = threading.Event(), Child.ask

    def noting(self: Child, *arguments: Any) -> bytes:
        asked.set()
        return ask(self, *arguments)

    monkeypatch.setattr(Child, "ask", noting)
    return asked


def arenas() -> int:
    """How many descriptors of arenas this process has."""
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("kvroute-arena" in os.readlink(link) for link in links if link.is_symlink())


def test_a_store_that_cannot_be_opened_raises_the_same_error_as_here(tmp_path: Path) -> None:
    for url, field in (
        ("nosuch:x", "store scheme"),
        (f"file://{tmp_path}?quota=many", "file: store parameter quota"),
        ("memory:?capacity=1MiB,memory:", "apart: store path"),
    ):
        with pytest.raises(ConfigError) as found:
            open_store(f"apart:{url}")
        assert found.value.field == field
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        open_store(f"apart:file://{tmp_path}/file")
    with pytest.raises(ConfigError, match="call_s: wanted a finite number"):
        ApartSettings(call_s=0)


def test_errors_of_the_store_arrive_with_their_types(store: ApartStore) -> None:
    """Goal: callers see the same as with a store in their own process. Method: a store that another process has; it
    lives on."""
    with pytest.raises(StorageError) as found:
        apart(store.url)
    assert type(found.value).__name__ == "StoreLockedError"
    assert put(RecordStore(store, LAYOUT), [1]) == [True]


def test_a_record_that_no_slot_of_the_arena_holds_is_refused_at_once() -> None:
    with apart("memory:?capacity=1MiB", arena_nbytes=4 * 4096) as store:
        assert store.record_nbytes_max == 4096
        with pytest.raises(ConfigError, match="record: wanted 4096 bytes at most"):
            RecordStore(store, LAYOUT)
        assert store.put([header_of(1)], [payload_of(1)]) == [None]
        assert store.get_into([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]) == [Absence.MISS]


def test_a_record_evicted_by_a_later_part_of_its_batch_is_not_reported_as_stored() -> None:
    """Method: a batch in four parts for a store that has room for one."""
    with apart("memory:?capacity=40000", arena_nbytes=128 << 10) as store:
        numbers = range(28)
        answers = store.put([header_of(n) for n in numbers], [payload_of(n) for n in numbers])
        assert [answer is not None for answer in answers] == store.contains([key_of(n) for n in numbers])
        assert 0 < sum(answer is not None for answer in answers) < 28


def test_a_buffer_is_untouched_where_nothing_was_found(store: ApartStore) -> None:
    """Goal: bytes of another caller's record do not come along. Method: a record, then a miss in the same slot."""
    put(RecordStore(store, LAYOUT), [1])
    buffer = memoryview(bytearray(b"\xee" * LAYOUT.nbytes))
    assert store.get_into([key_of(2)], [buffer]) == [Absence.MISS]
    assert bytes(buffer) == b"\xee" * LAYOUT.nbytes


@pytest.mark.parametrize(
    ("call", "how"),
    [("put", "killed"), ("get_into", "killed"), ("delete", "killed"), ("usage", "too slow")],
)
def test_a_lost_process_fails_what_is_in_flight_and_another_takes_over(
    url: str, call: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: stopped first, so that the call is in flight for certain; then SIGKILL, or the deadline."""
    arguments = {
        "put": ([header_of(2)], [payload_of(2)]),
        "get_into": ([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]),
        "delete": ([key_of(3)],),
    }
    with apart(url, call_s=WAIT_S) as store, ThreadPoolExecutor(1) as threads:
        records = RecordStore(store, LAYOUT)
        assert put(records, [1]) == [True]
        asked = asks(monkeypatch)
        first = end(store.pid, signal.SIGSTOP)
        with in_a_hurry(store) if how == "too slow" else nullcontext():
            future = threads.submit(getattr(store, call), *arguments.get(call, ()))
            if how == "killed":
                assert asked.wait(WAIT_S)
                end(first)
            with pytest.raises(StoreUnavailableError, match="lost" if how == "killed" else "did not answer in time"):
                future.result(WAIT_S)
        assert gone(first)
        again(store)
        assert store.pid != first
        assert get(records, [1]) == [payload_of(1)]
        assert put(records, [2]) == [True], "the new process has the store's lock"


def test_kills_at_random_moments_never_lose_an_answered_record_nor_make_a_wrong_one(store: ApartStore) -> None:
    """Method: eight threads put and read while the process is killed ten times; then everything is read."""
    rng, answered, stop = random.Random(7), set[int](), threading.Event()
    refused = itertools.count()

    def work(first: int) -> None:
        records = RecordStore(store, LAYOUT)
        for number in range(first, 1 << 20, 8):
            if stop.is_set():
                return
            try:
                if put(records, [number, number + 7]) == [True, True]:
                    answered.add(number)
                for asked, found in zip((number, first), get(records, [number, first]), strict=True):
                    assert found in (payload_of(asked), Absence.MISS)
            except StoreUnavailableError:
                next(refused)
                stop.wait(0.005)

    kills = 0
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(work, first) for first in range(8)]
        while kills < 10:
            time.sleep(rng.random() * 0.1)
            if (pid := store.pid) is not None:
                end(pid)
                kills += 1
                until(lambda pid=pid: gone(pid), WAIT_S)
        stop.set()
        for future in futures:
            future.result(WAIT_S)
    again(store)
    records = RecordStore(store, LAYOUT)
    for number in answered:
        assert get(records, [number, number + 7]) == [payload_of(number), payload_of(number + 7)]
    assert next(refused) > 0
    assert records.counters.corrupt == 0


def test_while_it_cannot_start_calls_are_refused_with_the_cause(
    store: ApartStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is free, or something unforeseen happens; then a file stands where the store's directory was. Bugs
    that were found: the former two ended the thread that restarts the process."""
    place, aside = tmp_path / "store", tmp_path / "aside"
    errors = [OSError(errno.EMFILE, "no descriptor, on purpose"), ValueError("unforeseen, on purpose")]

    def popen(*_: object, **__: object) -> None:
        raise errors[0]

    def said(cause: str) -> bool:
        with pytest.raises(StoreUnavailableError) as refused:
            store.flush()
        return "is being replaced: not started again" in str(refused.value) and cause in str(refused.value)

    place.rename(aside)
    place.touch()
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", popen)
        pid = end(store.pid)
        until(lambda: gone(pid), WAIT_S)
        until(lambda: said("no descriptor, on purpose"), WAIT_S)
        del errors[0]
        until(lambda: said("unforeseen, on purpose"), WAIT_S)
    until(lambda: said(str(place)), WAIT_S)
    place.unlink()
    aside.rename(place)
    again(store)
    assert store.usage()["records"] == 0


def test_a_machine_without_room_for_a_process_or_thread_is_a_storage_error(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a process that never answers is ended."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)
    for executable, said in ((tmp_path / "none", "no process can be started"), (silent, "did not answer in time")):
        monkeypatch.setattr(sys, "executable", str(executable))
        with pytest.raises(StorageError, match=said):
            apart(url, set_up_s=0.1)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(StorageError, match="can't start new thread"):
        apart(url)
    assert not ours()


def ours() -> list[str]:
    """The stores' processes that this process has started."""
    found = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return [line for line in found.stdout.splitlines() if "apart_process" in line and "defunct" not in line]


def test_closing_while_it_is_started_again(url: str) -> None:
    """Close ends the new process at any stage of its start; a call that waited for it gets an error."""
    for pause_s in (0.0, 0.2, 0.5):
        store = apart(url, restart_pause_s=0.001)
        pid = end(store.pid)
        until(lambda pid=pid: gone(pid), WAIT_S)
        with ThreadPoolExecutor(1) as threads:
            time.sleep(0.01)
            future = threads.submit(store.usage)
            time.sleep(pause_s)  # where in its start the next one is found differs; the outcome may not
            store.close()
            with suppress(StorageError):
                assert future.result(WAIT_S)["records"] == 0
        assert store.pid is None
        with pytest.raises(StoreClosedError):
            store.usage()
    assert not ours()


class Raising(logging.Handler):
    """A handler that raises where it should log."""

    def __init__(self) -> None:
        super().__init__()
        self.raised = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.raised += 1
        raise ValueError(f"on purpose: {record.msg}")


@pytest.fixture
def raising() -> Iterator[Raising]:
    handler = Raising()
    logger = logging.getLogger("cache_manager.storage.apart")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_logging_handler_that_raises_ends_no_restarts(store: ApartStore, raising: Raising) -> None:
    """Goal: a lost process is replaced, whatever becomes of the line about it. Method: a handler raises, twice."""
    for lost in (1, 2):
        pid = end(store.pid)
        until(lambda pid=pid: store.pid not in (None, pid), WAIT_S)
        assert raising.raised == lost
        assert store.usage()["records"] == 0


def test_a_logging_handler_that_raises_leaves_no_process_at_the_end(url: str, raising: Raising) -> None:
    """Goal: after close there is no process. Method: its slots are all lent, so that it is not asked; the warning of
    that raises."""
    store = apart(url, close_s=0.1)
    pid = store.pid
    assert pid is not None
    with ExitStack() as lent:
        for _ in range(CALLS_MAX):
            lent.enter_context(store.slot())
        with pytest.raises(ValueError, match="on purpose"):
            store.close()
    assert raising.raised == 1
    until(lambda: gone(pid), WAIT_S)


def test_closing_while_the_process_is_lost_raises_nothing(url: str) -> None:
    """Method: close waits for a slot of the arena, and the process is killed meanwhile."""
    store = apart(url, restart_pause_s=5.0)
    opened = arenas()
    closing = threading.Thread(target=store.close)
    with ExitStack() as lent:
        for _ in range(CALLS_MAX):
            lent.enter_context(store.slot())
        closing.start()
        pid = end(store.pid)
        until(lambda: gone(pid) and store.pid is None, WAIT_S)
    closing.join(WAIT_S)
    assert arenas() == opened - 1, "its mapping has another one, as long as somebody has the store"


def test_a_fork_ends_no_process_of_its_parent(store: ApartStore) -> None:
    """Method: a forked child calls the store, and closes it, as the end of a ``with`` block would."""
    pid, child = store.pid, os.fork()
    if not child:
        try:
            store.close()
            store.usage()
        except StoreClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store.usage()["records"] == 0
    assert store.pid == pid


def test_a_command_too_large_for_a_frame_is_sent_in_parts(store: ApartStore) -> None:
    pid = store.pid
    assert put(RecordStore(store, LAYOUT), [1]) == [True]
    keys = [key_of(number) for number in range(600_000)]
    assert sum(store.contains(keys)) == 1
    headers: list[RecordHeader] = [header_of(n) for n in range(300)]
    assert store.put(headers, [payload_of(n) for n in range(300)]) == headers
    assert store.pid == pid


def test_a_full_arena_is_waited_for_until_the_deadline(url: str) -> None:
    """Goal: slots are never lent twice, nor for ever. Method: more callers than slots, of a process that is stopped."""
    with apart(url) as store, ThreadPoolExecutor(2 * CALLS_MAX) as threads:
        pid = end(store.pid, signal.SIGSTOP)
        with in_a_hurry(store):
            calls = [threads.submit(store.usage) for _ in range(2 * CALLS_MAX)]
            for call in calls:
                with pytest.raises(StoreUnavailableError):
                    call.result(WAIT_S)
        assert gone(pid)
        assert store.counters["lost_calls"] >= 1
        again(store)
        with ExitStack() as lent:
            slots = [lent.enter_context(store.slot()) for _ in range(CALLS_MAX)]
            places = range(0, store.settings.arena_nbytes, store.settings.arena_nbytes // CALLS_MAX)
            assert sorted(slot.at for slot in slots) == list(places)
            with in_a_hurry(store), pytest.raises(StoreUnavailableError, match="stay taken"):
                store.usage()
        assert store.usage()["records"] == 0


def test_no_slot_is_lent_before_a_process_that_may_write_it_is_gone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: memory that an abandoned call may still write gets no other record. Method: a killed process that the
    kernel cannot end, as one that waits for a hanging file system."""
    real = os.kill
    with apart(url) as store:
        pid = end(store.pid, signal.SIGSTOP)
        with monkeypatch.context() as away, in_a_hurry(store):
            away.setattr(os, "kill", lambda pid, number: number == signal.SIGKILL or real(pid, number))
            with pytest.raises(StoreUnavailableError, match="does not end"):
                store.usage()
            with pytest.raises(StoreUnavailableError, match="did not answer in time"), store.slot():
                pass
        end(pid)
        again(store)
        assert store.usage()["records"] == 0


def test_what_was_filled_in_for_one_process_is_given_to_no_other(store: ApartStore) -> None:
    """Goal: a record is stored as it was filled in. Method: the process before wrote into the slot when it was killed;
    another one is there when the call is made."""
    with store.slot() as slot:
        pid = end(store.pid)
        until(lambda: store.pid not in (None, pid), WAIT_S)
        with pytest.raises(StoreUnavailableError, match="has ended"):
            store.call(slot, "usage")
    assert store.usage()["records"] == 0


def test_no_caller_waits_for_a_slot_while_another_one_is_free(store: ApartStore) -> None:
    """A bug that was found: callers that met at a free slot waited for each other there, without a limit, while other
    slots were free. Method: as many threads as there are slots, each of which lets the others go on at every call that
    it makes, and keeps its slot until all have one."""
    everybody_has_one = threading.Barrier(CALLS_MAX)

    def borrow() -> None:
        sys.setprofile(lambda *_: time.sleep(0.0005))
        try:
            with store.slot():
                sys.setprofile(None)
                everybody_has_one.wait(WAIT_S)
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(CALLS_MAX) as threads:
        for borrower in [threads.submit(borrow) for _ in range(CALLS_MAX)]:
            borrower.result(WAIT_S)


def test_pauses_between_processes_grow_only_while_no_call_succeeds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: the pauses are written down while the process is killed three times, with a call after each of them or
    with none."""
    wait = threading.Event.wait
    for calls, wanted in ((True, [0.01, 0.01, 0.01]), (False, [0.01, 0.02, 0.04])):
        pauses = list[float]()

        def noting(event: threading.Event, timeout_s: float | None = None, pauses: list[float] = pauses) -> bool:
            if timeout_s is not None and threading.current_thread().name == "kvroute-apart":
                pauses.append(timeout_s)
            return wait(event, timeout_s)

        with apart(url) as store, monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", noting)
            for _ in wanted:
                pid = end(store.pid)
                until(lambda pid=pid, store=store: store.pid not in (None, pid), WAIT_S)
                assert not calls or store.usage()["records"] == 0
            assert pauses == wanted

"""What breaks in a Mooncake pool, broken on purpose: no wrong byte, no wait beyond the deadline, no crash, recovery."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from mooncake_pool import LEASE_MS, Master, Owner, free_port, running_master, running_owner, send

from cache_manager.errors import NoSpaceError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, pack_header
from cache_manager.storage import open_store
from cache_manager.storage.breaker import State
from cache_manager.storage.mooncake import MooncakeStore
from cache_manager.storage.mooncake.arena import SLOTS
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.records import RecordStore
from cache_manager.testing.origins import Content, held, offer
from cache_manager.testing.records import BOTH, LAYOUT, get, header_of, key_of, payload_of, put

TIMEOUT_MS = 1_000
GRACE_S = 8.0
"""For a machine that is shared. What no deadline bounds takes 10 s and more in the native client."""
CALM_MS = 30_000
"""Where nothing hangs: a machine that stands still for a second fails no call."""
SEGMENT_NBYTES = 1 << 20


@pytest.fixture
def master(request: pytest.FixtureRequest) -> Iterator[Master]:
    """Its parameter is the lease that a read has, in ms."""
    with running_master(getattr(request, "param", LEASE_MS)) as running:
        yield running


@pytest.fixture
def owner(master: Master, tmp_path: Path) -> Iterator[Owner]:
    with running_owner(master, tmp_path / "segment", SEGMENT_NBYTES) as running:
        yield running


def opened(master: Master, **parameters: object) -> MooncakeStore:
    wanted = {"timeout_ms": TIMEOUT_MS, "full_ms": 300, "pause_ms": 200, "pause_max_ms": 1000, **parameters}
    store = open_store(master.url(**wanted))
    assert isinstance(store, MooncakeStore)
    return store


@pytest.fixture
def backend(master: Master, owner: Owner) -> Iterator[MooncakeStore]:  # noqa: ARG001 - the pool's memory
    with opened(master) as store:
        yield store


@pytest.fixture
def calm(master: Master, owner: Owner) -> Iterator[MooncakeStore]:  # noqa: ARG001 - the pool's memory
    with opened(master, timeout_ms=CALM_MS) as store:
        yield store


def timed(call: Callable[[], object]) -> object:
    """The answer or the :class:`StorageError`; a call that passes its deadline fails the test."""
    begun_s = time.monotonic()
    try:
        answer = call()
    except StorageError as error:
        answer = error
    took_s = time.monotonic() - begun_s
    assert took_s < TIMEOUT_MS / 1e3 + GRACE_S, f"{took_s:.1f} s: {answer}"
    return answer


def until(what: str, holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < give_up_s, f"not within 60 s: {what}"
        time.sleep(0.05)


def stored(store: RecordStore, numbers: Sequence[int]) -> None:
    """Returns when all are stored, before anything is broken."""
    until("all are stored", lambda: timed(lambda: put(store, numbers)) == [True] * len(numbers))


def name_of(number: int) -> str:
    return f"test/2/{key_of(number).hex()}"


def stores_again(store: RecordStore, number: int) -> bool:
    """Whether a record can be put and read; none is ever read wrong."""
    stored = timed(lambda: put(store, [number]))
    answer = timed(lambda: get(store, [number]))
    assert isinstance(answer, StorageError) or answer[0] in (payload_of(number), Absence.MISS)
    return stored == [True] and answer == [payload_of(number)]


def test_every_call_after_close_says_closed(backend: MooncakeStore) -> None:
    """Goal: no crash. Method: all calls, from two threads, while and after the store is closed."""
    put(RecordStore(backend, LAYOUT), [1])
    seen: list[object] = []

    def ask() -> None:
        while not seen or not isinstance(seen[-1], StoreClosedError):
            seen.append(timed(lambda: get(RecordStore(backend, LAYOUT), [1])))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    backend.close()
    for thread in threads:
        thread.join(10)
    assert {type(answer) for answer in seen} <= {list, StoreClosedError}
    assert all(answer in ([payload_of(1)], [Absence.MISS]) for answer in seen if isinstance(answer, list))
    for call in (
        lambda: backend.put([header_of(1)], [payload_of(1)]),
        lambda: backend.contains([key_of(1)]),
        lambda: backend.delete([key_of(1)]),
        backend.flush,
        backend.usage,
    ):
        assert isinstance(timed(call), StoreClosedError)


@pytest.mark.parametrize("listening", [False, True], ids=["closed port", "silent server"])
def test_a_master_that_is_not_there_is_an_error_in_time(listening: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        port, begun_s = server.getsockname()[1], time.monotonic()
        with pytest.raises(StorageError, match=f"127.0.0.1:{port}"):
            open_store(f"mooncake://127.0.0.1:{port}/x?admin=127.0.0.1:{free_port()}&connect_ms=2000")
        assert time.monotonic() - begun_s < 2.0 + GRACE_S


def _ask_in_fork(backend: MooncakeStore, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        backend.contains([key_of(1)])
    except StoreClosedError as error:
        answers.put(str(error))
    backend.close()
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_refused_and_harms_nobody(calm: MooncakeStore) -> None:
    store = RecordStore(calm, LAYOUT)
    put(store, [1])
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_ask_in_fork, args=(calm, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "before fork" in answers.get()
    assert get(store, [1]) == [payload_of(1)]


@pytest.mark.parametrize("master", [60_000], indirect=True)  # a lease that ends on the way makes a miss of it
@pytest.mark.parametrize("lends", [False, True])
def test_a_damaged_object_is_a_counted_miss_and_can_be_stored_anew(
    lends: bool, calm: MooncakeStore, owner: Owner
) -> None:
    """Every offset class: header, bitmap, payload; a cut, an addition, another key's record, another version, junk.

    ``lends``: the store knows how large records are, and so hands them out where they were received."""
    whole = [pack_header(header_of(n)) + payload_of(n) for n in range(20)]
    header_nbytes = header_of(0).nbytes

    def flipped(n: int, at: int) -> bytes:
        return whole[n][:at] + bytes([whole[n][at] ^ 1]) + whole[n][at + 1 :]

    damaged = [
        *(flipped(n, at) for n, at in enumerate((0, 4, 6, 8, 20, 40, 70, 78, 100))),
        flipped(9, header_nbytes - 1),
        flipped(10, header_nbytes),
        flipped(11, len(whole[11]) - 1),
        whole[12][:-1],
        whole[13][: header_nbytes + 7],
        whole[14][:10],
        whole[15] + b"\0",
        whole[16] * 40,
        whole[3],
        whole[18][:4] + b"\x01\x00" + whole[18][6:],
        b"junk",
    ]
    for n, raw in enumerate(damaged):
        assert owner.ask("put", name_of(n), raw.decode("latin-1"), "") == 0
    store = RecordStore(calm, LAYOUT)
    if lends:
        assert put(store, [20])
        assert get(store, [20, 21]) == [payload_of(20), Absence.MISS]
        with calm.borrow([key_of(n) for n in (20, 11, 20, 21)]) as lent:  # the sum of 11 is wrong
            assert [bytes(each[1]) if isinstance(each, tuple) else each for each in lent] == [
                *(payload_of(20), damaged[11][header_nbytes:], payload_of(20), Absence.MISS)
            ]
        with pytest.raises(NoSpaceError, match="get_into"), calm.borrow([key_of(20), key_of(12)]):
            pass
    assert bool(calm.lent_nbytes_max) is lends
    assert get(store, range(20)) == [Absence.CORRUPT] * 20
    assert store.counters.corrupt == 20
    assert get(store, range(20)) == [Absence.MISS] * 20
    assert all(put(store, range(20)))
    assert get(store, range(20)) == [payload_of(n) for n in range(20)]


@pytest.mark.parametrize("master", [60_000], indirect=True)
@pytest.mark.parametrize("damaged", [False, True])
def test_a_second_look_that_fails_costs_no_record_that_was_found(
    damaged: bool, calm: MooncakeStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that was found. A key is read once more where it stands twice in a batch, and where what came is damaged.

    Method: the pool answers one call, and no other."""
    put(RecordStore(calm, LAYOUT), [1, 2])
    numbers = [1, 3, 2] if damaged else [1, 2, 2]
    assert owner.ask("put", name_of(3), "junk", "") == 0
    calls, real = itertools.count(), Link.call

    def once(link: Link, *call: Any) -> list[int]:
        if next(calls):
            raise StorageError("on purpose")
        return real(link, *call)

    monkeypatch.setattr(Link, "call", once)
    room = [bytearray(LAYOUT.nbytes) for _ in numbers]
    found = calm.get_into([key_of(n) for n in numbers], [*map(memoryview, room)])
    absent = 1 if damaged else 2
    for at, (n, header) in enumerate(zip(numbers, found, strict=True)):
        if at == absent:
            assert header is Absence.MISS
        else:
            assert isinstance(header, RecordHeader)
            assert room[at] == payload_of(n)
    assert calm.counters.failed_reads == 1
    with pytest.raises(StorageError, match="on purpose"):
        calm.get_into([key_of(1)], [memoryview(room[0])])


def test_a_record_that_changes_between_two_looks_is_counted_by_a_number(
    calm: MooncakeStore, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that was found: it was counted by a truth value, and so told as one."""
    assert owner.ask("put", name_of(1), "junk", "") == 0
    sums = itertools.count()
    monkeypatch.setattr("cache_manager.storage.mooncake.store.checksum", lambda _: next(sums))
    assert calm.get_into([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]) == [Absence.MISS]
    assert repr(calm.counters.torn) == "1"


def test_headers_that_grow_while_records_are_borrowed(
    master: Master,
    owner: Owner,  # noqa: ARG001 - the pool's memory
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug that was found: the first put of larger headers, of another thread, made a slot too small for a loan.

    Method: the size changes between the looks at it that a read takes."""
    with opened(master, timeout_ms=CALM_MS, arena="1MiB") as backend:
        store = RecordStore(backend, LAYOUT)
        put(store, range(3))
        count = backend.lent_nbytes_max // LAYOUT.nbytes
        for looks in range(1, 5):
            sizes = itertools.chain(itertools.repeat(1024, looks), itertools.repeat(8192))
            monkeypatch.setattr(Link, "header_room", property(lambda _, sizes=sizes: next(sizes)), raising=False)
            assert get(store, range(count)) == [*(payload_of(n) for n in range(3)), *[Absence.MISS] * (count - 3)]


def test_a_record_that_others_read_can_be_deleted_and_replaced(master: Master, owner: Owner) -> None:
    """Goal: a lease keeps no record that was denied. Method: another process leases it on and on."""
    backend, other = opened(master, timeout_ms=CALM_MS), opened(master, timeout_ms=CALM_MS)
    old, new = Content(1, BOTH), Content(2, BOTH)
    assert offer(backend, [(1, old), (2, old)], replace=False) == [old, old]
    stop, asked = threading.Event(), threading.Event()

    def lease() -> None:
        while not stop.is_set():
            owner.ask("is_exist", name_of(1))
            owner.ask("is_exist", name_of(2))
            asked.set()

    reader = threading.Thread(target=lease, daemon=True)
    reader.start()
    try:
        assert asked.wait(60)
        backend.delete([key_of(1)])
        assert held(other, [1]) == [Absence.MISS]
        assert offer(backend, [(2, new)], replace=True) == [new]
        assert held(other, [1, 2]) == [Absence.MISS, new]
    finally:
        stop.set()
        reader.join(10)
    backend.close()
    other.close()


def test_a_damaged_object_gives_way_to_what_is_put(calm: MooncakeStore, owner: Owner) -> None:
    assert owner.ask("put", name_of(1), "junk", "") == 0
    assert owner.ask("put", name_of(2), "j" * 5000, "") == 0
    new = Content(2, BOTH)
    assert offer(calm, [(1, new), (2, new)], replace=False) == [new, new]
    assert held(calm, [1, 2]) == [new, new]


def test_a_full_pool_refuses_in_time_and_recovers(calm: MooncakeStore, owner: Owner) -> None:
    """Objects that may not be evicted fill it; then they go."""
    store = RecordStore(calm, LAYOUT)
    pinned = 0
    while owner.ask("pin", f"pinned{pinned}", "p" * 4096, "") == 0:
        pinned += 1
    for n in range(3):
        assert timed(lambda n=n: put(store, [n])) == [False]
    assert calm.counters.refused == 3
    assert calm.states == (State.CLOSED, State.CLOSED)
    for n in range(pinned):
        owner.ask("remove", f"pinned{n}", True)
    assert all(put(store, range(40)))
    assert get(store, range(40)) == [payload_of(n) for n in range(40)]


def test_the_master_is_killed_and_restarted_under_load(backend: MooncakeStore, master: Master) -> None:
    store = RecordStore(backend, LAYOUT)
    stored(store, range(40))
    stop, failures, causes = threading.Event(), [], set()

    def work(first: int) -> None:
        try:
            while not stop.is_set():
                for call in (lambda: put(store, range(first, first + 4)), lambda: get(store, range(40))):
                    answer = timed(call)
                    if isinstance(answer, StorageError):
                        causes.add(type(answer))
                        stop.wait(0.02)
                    else:
                        assert all(a in (True, False, Absence.MISS) or a in payloads for a in answer)
        except BaseException as error:
            failures.append(error)
            raise

    payloads = {payload_of(n) for n in range(40)}
    threads = [threading.Thread(target=work, args=(first,), daemon=True) for first in (0, 20)]
    try:
        for thread in threads:
            thread.start()
        until("it is under load", lambda: store.counters.hits > 40)
        master.kill()
        until("a call is not made", lambda: StoreUnavailableError in causes or bool(failures))
        master.start()
        until("the store works again", lambda: stores_again(store, 41))
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures, failures[0]
    assert backend.counters.rebuilds >= 1
    assert store.counters.corrupt == 0


def test_a_master_that_hangs_costs_one_deadline(backend: MooncakeStore, master: Master) -> None:
    """And a store that lends memory is closed beside it, in time."""
    lender = opened(master, close_ms=500, segment="16MiB")
    store = RecordStore(backend, LAYOUT)
    stored(store, [1])
    master.signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    for _ in range(5):
        for call in (
            lambda: get(store, [1]),
            lambda: put(store, [2]),
            lambda: store.contains([key_of(1)]),
            lambda: backend.delete([key_of(5)]),
        ):
            assert isinstance(timed(call), StorageError)
    assert time.monotonic() - begun_s < TIMEOUT_MS / 1e3 + GRACE_S, "the breaker answers after the first deadline"
    assert isinstance(timed(backend.usage), StorageError)
    timed(lender.close)
    assert isinstance(timed(lambda: lender.contains([key_of(1)])), StoreClosedError)
    master.signal(signal.SIGCONT)
    until("the store works again", lambda: stores_again(store, 3))


def test_an_open_breaker_is_told_at_once_though_the_whole_arena_is_lent(backend: MooncakeStore) -> None:
    """A bug that was found: calls waited for a slot first, until their deadline. And what is lent stays as it is."""
    store = RecordStore(backend, LAYOUT)
    stored(store, range(SLOTS))
    until("the store knows how large records are", lambda: backend.lent_nbytes_max > 0)
    with ExitStack() as lent:
        views = [lent.enter_context(backend.borrow([key_of(n)])) for n in range(SLOTS)]
        os.kill(backend._link._client.pid, signal.SIGKILL)
        until("the breakers are open", lambda: State.CLOSED not in backend.states)
        calls: list[Callable[[], object]] = [
            lambda: backend.contains([key_of(1)]),
            lambda: backend.delete([key_of(1)]),
            lambda: get(store, [1]),
            lambda: put(store, [8]),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError):
                call()
        for n, (view,) in enumerate(views):
            assert isinstance(view, tuple)
            assert bytes(view[1]) == payload_of(n)
    until("the store works again", lambda: stores_again(store, 8))


def test_a_client_that_cannot_be_started_is_tried_again(
    backend: MooncakeStore, master: Master, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bug that was found: a machine without a descriptor for a moment ended the thread that brings clients back."""
    store = RecordStore(backend, LAYOUT)
    stored(store, [1])
    starts, real = itertools.count(), subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if next(starts) < 2:
            raise OSError(errno.EMFILE, "no descriptor, on purpose")
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    os.kill(backend._link._client.pid, signal.SIGKILL)
    until("the store works again", lambda: stores_again(store, 2))
    with pytest.raises(StorageError, match="cannot be started"):
        opened(master, log=tmp_path / "nowhere" / "log")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_segment_owner_that_fails(
    number: int, backend: MooncakeStore, master: Master, owner: Owner, tmp_path: Path
) -> None:
    """Its records are misses or errors in time; another owner's memory is used as soon as it is there."""
    store = RecordStore(backend, LAYOUT)
    stored(store, range(20))
    owner.signal(number)
    for _ in range(6):
        answer = timed(lambda: get(store, range(20)))
        assert isinstance(answer, StorageError) or set(answer) <= {Absence.MISS}
        timed(lambda: put(store, [31, 32]))
    opened_breaker = backend.counters.read_openings > 0
    assert opened_breaker or answer == [Absence.MISS] * 20, "the master may have noticed first"
    with running_owner(master, tmp_path / "other", SEGMENT_NBYTES):
        until("the store works again", lambda: stores_again(store, 40))
        assert backend.counters.rebuilds > 0 or not opened_breaker
    assert store.counters.corrupt == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_native_client_may_crash_or_hang(number: int, backend: MooncakeStore) -> None:
    """The records are elsewhere: another client has them all."""
    store = RecordStore(backend, LAYOUT)
    stored(store, range(10))
    send(backend._link._client.pid, number)
    whole = [payload_of(n) for n in range(10)]
    answer = timed(lambda: get(store, range(10)))
    assert isinstance(answer, StorageError) or answer == whole, "another client may be there already"
    until("a new client reads", lambda: timed(lambda: get(store, range(10))) == whole)
    assert backend.counters.rebuilds > 0


@pytest.mark.parametrize(
    ("named", "objects", "group"),
    [
        (True, ("{chunk}",), "vllm-mooncake-store:m@{chunk}"),
        (True, ("{chunk}_0_k", "{chunk}_0_v"), "sglang-hicache:{chunk}"),
        (False, ("{chunk}",), "vllm-mooncake-store:m@{chunk}"),
    ],
    ids=["vllm", "sglang", "none"],
)
def test_rows_go_with_the_kv_of_their_group(
    named: bool, objects: tuple[str, ...], group: str, calm: MooncakeStore, owner: Owner, tmp_path: Path
) -> None:
    """Goal: few KV hits without rows. Method: 16 KiB of KV a chunk under the engine's names and groups, rows later, a
    pool too small for both, and the KV of every third chunk read again. Without groups most of those lose their rows,
    which shows that the test can fail.
    """
    owner.segment(tmp_path / "small", 512 << 10)
    store = RecordStore(calm, LAYOUT)
    chunks = {key_of(n): f"tag_m_{n:064x}" for n in range(60)}
    names = {n: [name.format(chunk=chunks[key_of(n)]) for name in objects] for n in range(60)}
    if named:
        calm.name_groups({key: group.format(chunk=chunk) for key, chunk in chunks.items()})
    for n in range(60):
        for name in names[n]:
            arguments = (name, "k" * (16384 // len(objects)), group.format(chunk=chunks[key_of(n)]))
            until("room", lambda: owner.ask("put", *arguments) == 0)  # noqa: B023
        put(store, [n])
        for again in range(0, n, 3):
            owner.ask("get", names[again][0])
    alive = [n for n in range(60) if all(owner.ask("is_exist", name) == 1 for name in names[n])]
    rows = store.contains([key_of(n) for n in alive])
    assert 5 < len(alive) < 40
    assert rows.count(False) <= 1 if named else rows.count(False) > 3

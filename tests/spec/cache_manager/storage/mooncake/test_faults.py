"""What breaks in a Mooncake pool, broken on purpose: no wrong byte, no wait beyond the deadline, no crash, recovery."""

from __future__ import annotations

import re
import signal
import socket
import threading
from pathlib import Path

import pytest
from mooncake_pool import Master, Owner, running_owner
from mooncake_stores import (
    HANG_S,
    SEGMENT_NBYTES,
    opened,
    pid_of,
    stored,
    stores_again,
    timed,
)
from ports import hold_port
from standing_still import send_signal
from waiting import until

from cache_manager.errors import StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.ports import Absence
from cache_manager.storage import open_store
from cache_manager.storage.mooncake import MooncakeStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put


@pytest.mark.parametrize("listening", [False, True], ids=["closed port", "silent server"])
def test_a_master_that_is_not_there_is_an_error_in_time(listening: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        port = server.getsockname()[1]
        url = f"mooncake://127.0.0.1:{port}/x?admin=127.0.0.1:{hold_port()}&connect_ms=2000"
        assert f"127.0.0.1:{port}" in str(timed(lambda: open_store(url)))


def test_a_full_pool_refuses_in_time_and_recovers(calm: MooncakeStore, owner: Owner) -> None:
    """Objects that may not be evicted fill it; then they go."""
    store = RecordStore(calm, LAYOUT)
    pinned = 0
    while owner.ask("pin", f"pinned{pinned}", "p" * 4096) == 0:
        pinned += 1
    for n in range(3):
        assert timed(lambda n=n: put(store, [n])) == [False]
    assert calm.counters["refused"] == 3
    assert calm.counters["bypassed"] == calm.counters["lost_calls"] == 0
    for n in range(pinned):
        owner.ask("remove", f"pinned{n}", True)
    whole = [payload_of(n) for n in range(40)]  # until the pool has freed what was removed it evicts
    until(lambda: all(put(store, range(40))) and get(store, range(40)) == whole, what="there is room again")


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
        until(lambda: store.counters.hits > 40, what="it is under load")
        master.kill()
        until(lambda: StoreUnavailableError in causes or bool(failures), what="a call is not made")
        master.start()
        until(lambda: stores_again(store, 41), what="the store works again")
    finally:
        stop.set()
        for thread in threads:
            thread.join(HANG_S)
    assert not failures, failures[0]
    assert backend.counters["restarts"] >= 1
    assert store.counters.corrupt == 0


def test_a_master_that_hangs_costs_one_deadline(backend: MooncakeStore, master: Master) -> None:
    """No call is made after the first deadline. And a store that lends memory is closed beside it, in time.

    The native client has the same deadline as its caller: either may notice first, and both end the client's process.
    """
    lender = opened(master, segment="16MiB")
    store = RecordStore(backend, LAYOUT)
    stored(store, [1])
    master.signal(signal.SIGSTOP)
    first = timed(lambda: get(store, [1]))
    assert isinstance(first, StorageError)
    assert re.search("did not answer in time|RPC_TIMEOUT: the master does not answer", str(first)), first
    until(lambda: backend.pid is None, what="it is not asked any more")
    for call in (
        lambda: get(store, [1]),
        lambda: put(store, [2]),
        lambda: store.contains([key_of(1)]),
        lambda: backend.delete([key_of(5)]),
    ):
        assert isinstance(timed(call), StoreUnavailableError)
    assert backend.counters["bypassed"] >= 4
    assert isinstance(timed(backend.usage), StorageError)
    timed(lender.close)
    assert isinstance(timed(lambda: lender.contains([key_of(1)])), StoreClosedError)
    master.signal(signal.SIGCONT)
    until(lambda: stores_again(store, 3), what="the store works again")


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
    with running_owner(master, tmp_path / "other", SEGMENT_NBYTES):
        until(lambda: stores_again(store, 40), what="the store works again")
        assert backend.counters["restarts"] > 0
    assert store.counters.corrupt == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_native_client_may_crash_or_hang(number: int, backend: MooncakeStore) -> None:
    """The records are elsewhere: another client has them all."""
    store = RecordStore(backend, LAYOUT)
    stored(store, range(10))
    send_signal(pid_of(backend), number)
    whole = [payload_of(n) for n in range(10)]
    answer = timed(lambda: get(store, range(10)))
    assert isinstance(answer, StorageError) or answer == whole, "another client may be there already"
    until(lambda: timed(lambda: get(store, range(10))) == whole, what="a new client reads")
    assert backend.counters["restarts"] > 0

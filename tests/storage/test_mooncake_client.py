"""Many threads and one native client's process: every call ends, with its own answer, whoever receives it.

The child is the real one before its set-up: it answers at once, and loads nothing of Mooncake.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from mooncake_pool import send

from cache_manager.errors import StorageError
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.client import ClientLostError, NativeClient

CALLERS = 8
CALLS = 50
WAIT_S = 60.0


@pytest.fixture
def client() -> Iterator[NativeClient]:
    client = NativeClient(None, 1_000, None)
    yield client
    client.kill()
    client.close(WAIT_S)
    assert client.in_flight == 0


def test_every_caller_gets_its_own_answer(client: NativeClient) -> None:
    """Method: callers at once, each with requests that the child refuses in words of their own."""
    requests = [(wire.Exist(["k"]), "before set-up"), (wire.SetUp("", "h", "tcp", "", 0, 0), "with a master")]

    def ask(caller: int) -> list[str]:
        said = []
        for i in range(CALLS):
            with pytest.raises(StorageError) as caught:
                client.call(requests[(caller + i) % 2][0], WAIT_S)
            said.append(str(caught.value))
        return said

    with ThreadPoolExecutor(CALLERS) as pool:
        answers = list(pool.map(ask, range(CALLERS)))
    for caller, said in enumerate(answers):
        assert all(requests[(caller + i) % 2][1] in each for i, each in enumerate(said))


def test_an_answer_that_nobody_waits_for_is_received(client: NativeClient) -> None:
    """What gives a range of the arena back hangs on a future, also when its caller has given up."""
    for _ in range(3):
        ended = threading.Event()
        future = client.submit(wire.Exist(["k"]))
        future.add_done_callback(lambda _, ended=ended: ended.set())
        assert ended.wait(WAIT_S)


def test_all_calls_end_when_the_process_is_killed(client: NativeClient) -> None:
    """Method: a stopped child, so that all of them wait."""
    with pytest.raises(StorageError, match="before set-up"):
        client.call(wire.Exist(["k"]), WAIT_S)  # it is up
    send(client.pid, signal.SIGSTOP)  # until it has stopped in all its threads, it answers
    futures: list[Future[list[int]]] = [client.submit(wire.Exist(["k"])) for _ in range(CALLERS)]
    with pytest.raises(TimeoutError):
        futures[0].result(0.05)
    with ThreadPoolExecutor(CALLERS) as pool:
        waits = [pool.submit(future.result, WAIT_S) for future in futures]
        os.kill(client.pid, signal.SIGKILL)
        for each in waits:
            with pytest.raises(ClientLostError):
                each.result(WAIT_S)
    assert client.gone


def test_an_idle_process_that_ends_is_noticed(client: NativeClient) -> None:
    with pytest.raises(StorageError, match="before set-up"):
        client.call(wire.Exist(["k"]), WAIT_S)
    os.kill(client.pid, signal.SIGKILL)
    looked = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        if client.gone:
            break
        looked.wait(0.05)
    assert client.gone

"""One supervised child: every request ends, whatever the child does, and is told so when the child is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_child import Answer, Asked
from waiting import until

from cache_manager.child import FRAME_NBYTES_MAX, AskedChild, Child, receive_frame, send_frame

WAIT_S = 60.0


class LostError(Exception):
    pass


class Odd(AskedChild[str]):
    def __init__(self) -> None:
        self.ends: list[tuple[str, int, bool]] = []
        super().__init__(Child("odd_child"), "odd")

    def _decoded(self, body: bytes) -> tuple[int, str | Exception]:
        answer = msgspec.msgpack.decode(body, type=Answer)
        return answer.number, answer.said

    def _ended(self, cause: str, lost: int) -> None:
        self.ends.append((cause, lost, Path(f"/proc/{self.pid}").exists()))

    def _lost(self, cause: str) -> Exception:
        return LostError(cause)

    def begin(self, how: str, within_s: float = WAIT_S) -> Future[str]:
        return self.ask(lambda number: msgspec.msgpack.encode(Asked(number, how)), within_s)


@pytest.fixture
def odd() -> Iterator[Odd]:
    child = Odd()
    yield child
    child.kill()
    assert child.join(WAIT_S)
    assert child.in_flight == 0


@given(st.binary(max_size=64))
def test_whatever_comes_receiving_ends(junk: bytes) -> None:
    """A frame, or the other end is gone; never a wait for more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(junk)
        theirs.shutdown(socket.SHUT_WR)
        body = receive_frame(ours)
        assert body is None or junk.startswith(len(body).to_bytes(4, "little") + body)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_messages_arrive_whole_and_in_order(bodies: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for body in bodies:
            send_frame(theirs, body)
        assert [receive_frame(ours) for _ in bodies] == bodies


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("half", "it has ended"),
        ("too long", "it has ended"),
        ("garbage", "its message was no answer"),
        ("unknown", "it answered a question that was not asked"),
        ("end", r"it has ended \(status 3\)|it has ended \(status -9\)"),
    ],
)
def test_a_child_that_does_what_it_should_not_is_reaped_and_then_its_requests_end(
    odd: Odd, how: str, cause: str
) -> None:
    """A further request is in flight beside the odd one."""
    beside = odd.begin("silence")
    asked = odd.begin(how)
    with pytest.raises(LostError, match=cause):
        asked.result(WAIT_S)
    with pytest.raises(LostError, match=cause):
        beside.result(WAIT_S)
    assert odd.gone
    assert [(lost, exists) for _, lost, exists in odd.ends] == [(2, False)]
    with pytest.raises(LostError, match=cause):
        odd.begin("echo").result(0)


def test_an_answer_that_is_overdue_ends_the_child(odd: Odd) -> None:
    """The request that is overdue is not the one that is waited for first."""
    patient = odd.begin("silence")
    overdue = odd.begin("silence", 0.05)
    for future in (patient, overdue):
        with pytest.raises(LostError, match="did not answer in time"):
            future.result(WAIT_S)


def test_waiting_has_a_limit_and_the_child_goes_on(odd: Odd) -> None:
    with pytest.raises(TimeoutError):
        odd.begin("silence").result(0.05)
    assert odd.begin("echo").result(WAIT_S) == "echo"
    assert odd.in_flight == 1


def test_a_second_answer_ends_the_child_after_the_first_has_counted(odd: Odd) -> None:
    assert odd.begin("twice").result(WAIT_S) == "twice"
    until(lambda: odd.ends)
    assert "not asked" in odd.ends[0][0]


def test_a_request_that_cannot_be_made_is_not_sent(odd: Odd) -> None:
    with pytest.raises(AssertionError):
        odd.ask(lambda _: bytes(FRAME_NBYTES_MAX + 1))
    with pytest.raises(TypeError):
        odd.ask(lambda _: msgspec.msgpack.encode(object()))
    assert odd.in_flight == 0
    assert odd.begin("echo").result(WAIT_S) == "echo"


def test_a_child_that_reads_nothing_is_killed_when_a_message_does_not_fit(odd: Odd) -> None:
    """Method: a stopped child; its socket takes the first messages and not the last."""
    os.kill(odd.pid, signal.SIGSTOP)
    futures = [odd.ask(lambda _: bytes(1 << 20), WAIT_S) for _ in range(2)]
    for future in futures:
        with pytest.raises(LostError):
            future.result(WAIT_S)


def test_callers_at_once_get_each_their_own_answer(odd: Odd) -> None:
    def ask(caller: int) -> None:
        for i in range(50):
            how = f"{caller}-{i}"
            assert odd.begin(how).result(WAIT_S) == how

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(ask, caller) for caller in range(6)]:
            future.result(WAIT_S)


def test_an_idle_child_that_ends_is_noticed(odd: Odd) -> None:
    os.kill(odd.pid, signal.SIGKILL)
    until(lambda: odd.gone)


def test_a_child_whose_parent_is_killed_ends_though_a_fork_holds_its_socket() -> None:
    """Goal: no orphan. Method: a parent forks a copy of itself, which keeps the socket open, and is killed at once.

    The child is still being imported then: whoever its parent is when it looks first is not who started it.
    """
    script = textwrap.dedent(
        """
        import os, time
        from cache_manager.child import Child
        child = Child("odd_child")
        copy = os.fork() or time.sleep(600)
        print(child.pid, copy, flush=True)
        time.sleep(600)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid, copy = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            parent.wait()
            until(lambda: not Path(f"/proc/{pid}").exists())
        finally:
            os.kill(copy, signal.SIGKILL)


def test_a_start_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        Odd()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)

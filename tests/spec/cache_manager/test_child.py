"""One supervised child: every request ends, whatever the child does, and none gets the answer to another request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from standing_still import send_signal
from waiting import GIVE_UP_S, until

from cache_manager.child import Child, LostError

WAIT_S = GIVE_UP_S
CHANNELS = 3


@pytest.fixture
def odd() -> Iterator[Child]:
    child = Child("odd_child", CHANNELS)
    yield child
    child.kill("the test ends")
    child.wait()


@pytest.mark.parametrize(
    ("how", "cause"),
    [("half", "ended"), ("too long", "ended"), ("silence", "not answer in time"), ("end", "ended"), ("raise", "ended")],
)
def test_a_child_that_does_not_answer_is_killed(odd: Child, how: str, cause: str) -> None:
    """A further question is in flight on another channel; the third channel is asked when the child is gone."""
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(odd.ask, 1, b"silence", WAIT_S)
        with pytest.raises(LostError, match=cause):
            odd.ask(0, how.encode(), 0.3 if how == "silence" else WAIT_S)
        assert odd.wait() == {"end": 3, "raise": 1}.get(how, -signal.SIGKILL)
        assert not Path(f"/proc/{odd.pid}").exists()
        with pytest.raises(LostError, match="ended"):
            beside.result(WAIT_S)
    with pytest.raises(LostError, match="ended"):
        odd.ask(2, b"echo", WAIT_S)
    odd.kill("twice")


def test_a_second_answer_is_dropped(odd: Child) -> None:
    assert odd.ask(0, b"twice", WAIT_S) == b"twice"
    with pytest.raises(LostError, match="not asked"):
        odd.ask(0, b"echo", WAIT_S)
    odd.wait()


def test_a_question_that_is_interrupted_ends_the_child(odd: Child) -> None:
    """Goal: no other request gets the answer. Method: Ctrl-C while a request waits for its answer.

    It is pressed again until it takes effect: a signal right before the wait begins does not end that wait.
    """
    felt = threading.Event()

    def feel(*_: object) -> None:
        if not felt.is_set():
            felt.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not felt.wait(0.2):
            os.kill(os.getpid(), signal.SIGINT)

    before, presses = signal.signal(signal.SIGINT, feel), threading.Thread(target=press)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            odd.ask(0, b"silence", WAIT_S)
    finally:
        felt.set()
        presses.join()
        signal.signal(signal.SIGINT, before)
    with pytest.raises(LostError):
        odd.ask(0, b"echo", WAIT_S)
    assert odd.wait() == -signal.SIGKILL


def test_a_child_that_reads_nothing_is_killed_when_a_message_does_not_fit(odd: Child) -> None:
    send_signal(odd.pid, signal.SIGSTOP)
    with pytest.raises(LostError):
        odd.ask(0, bytes(1 << 22), WAIT_S)
    odd.wait()


def test_callers_at_once_get_each_their_own_answer(odd: Child) -> None:
    def ask(channel: int) -> None:
        for i in range(50):
            how = f"{channel}-{i}".encode() * (1 + 1000 * (i % 3))
            assert odd.ask(channel, how, WAIT_S) == how

    with ThreadPoolExecutor(CHANNELS) as threads:
        for future in [threads.submit(ask, channel) for channel in range(CHANNELS)]:
            future.result(WAIT_S)


def test_a_child_whose_parent_is_killed_ends_though_a_fork_holds_its_sockets() -> None:
    """Goal: no orphan. Method: a parent forks a copy of itself, which keeps the sockets open, and is killed at once.

    The child is still importing then: the parent that it sees first is not the process that started it.
    """
    script = textwrap.dedent(
        """
        import os, time
        from cache_manager.child import Child
        child = Child("odd_child", 1)
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
    """Descriptors, each with its target: those that earlier tests have left open may be closed meanwhile."""
    before = _open()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        Child("odd_child", CHANNELS)
    assert not _open() - before


def _open() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this very listing
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found

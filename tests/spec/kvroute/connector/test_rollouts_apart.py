"""Rollouts apart: a process of its own stores the rows of ended requests, and dies as it likes; no row is wrong, and
none is missing without a reason."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_engine import Toy, judge
from toy_takers import FIRST, SECOND, Takers, by_key, compute, end, left
from waiting import GIVE_UP_S, until

from cache_manager.errors import KVRouteError, RowError
from kvroute.rollout import RolloutStore


@pytest.mark.parametrize("aborted", [False, True])
def test_a_process_that_is_killed_loses_no_row(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore, aborted: bool
) -> None:
    """Goal: the next process stores them, and the engine goes on meanwhile. Method: the process is stopped with a
    question and killed; another request is computed before anybody is told."""
    toy = start_apart()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    first = end(toy, FIRST, "a", cut=aborted)
    taker.wait_until_asked()
    taker.kill()
    compute(toy, SECOND)
    second = end(toy, SECOND, "b")
    assert judge(left(first, left_apart), FIRST) == {"right": 6}
    assert judge(left(second, left_apart), SECOND) == {"right": 6}
    assert judge(by_key(FIRST, "a", left_apart), FIRST) == {"right": 6}
    assert (taker().counters["lost_calls"], taker().counters["restarts"]) == (1, 1)


def test_a_process_that_is_killed_amid_its_puts(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore, tmp_path: Path
) -> None:
    """Goal: what it had put is found under its key when the next process has been asked for the same, though no client
    was told. Method: 30 aborted requests in one question; it is killed when some of them are in the directory."""
    toy = start_apart()
    compute(toy, FIRST)
    for number in range(99):
        taker.kill(signal.SIGSTOP)
        before = end(toy, FIRST, f"before-{number}")
        taker.wait_until_asked()
        keys = [f"k{number}-{i}" for i in range(30)]
        told = [end(toy, FIRST, key, cut=True) for key in keys]
        taker.kill(signal.SIGCONT)
        assert before.result(GIVE_UP_S)
        until(lambda number=number: any((tmp_path / "rollouts").glob(f"k{number}-*")))
        taker.kill(signal.SIGSTOP)
        amid = len(list((tmp_path / "rollouts").glob(f"k{number}-*.routes"))) in range(1, 30)
        taker.kill(signal.SIGKILL if amid else signal.SIGCONT)
        for each in told:
            assert judge(left(each, left_apart), FIRST) == {"right": 6}
        for key in keys:
            assert judge(by_key(FIRST, key, left_apart), FIRST) == {"right": 6}
        if amid:
            break
    assert taker().counters["lost_calls"] == 1
    assert taker().counters["unstored"] == 0


def test_a_process_that_hangs_is_replaced(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore, tmp_path: Path
) -> None:
    """Goal: as above. Method: it is stopped, and stays so, for longer than the setting's ``call``."""
    toy = start_apart(rollouts=f"apart:?call=500ms,file://{tmp_path}/rollouts")
    compute(toy, FIRST)
    before = taker.pid
    taker.kill(signal.SIGSTOP)
    assert judge(left(end(toy, FIRST), left_apart), FIRST) == {"right": 6}
    assert taker.pid != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_what_no_process_stores_is_told(
    start_apart: Callable[..., Toy],
    taker: Takers,
    left_apart: RolloutStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Goal: the answer, a counter and the log say so; nothing of an earlier request is found in its place; later ones
    have their rows. Method: the directory gives way to a file, so that no store opens, and the process is killed."""
    toy = start_apart(limits={"answer_s": 0.2})
    compute(toy, FIRST)
    assert judge(left(end(toy, FIRST, "a"), left_apart), FIRST) == {"right": 6}
    home, aside = tmp_path / "rollouts", tmp_path / "aside"
    home.rename(aside)
    home.touch()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    told = end(toy, FIRST, "a")
    taker.wait_until_asked()
    taker.kill()
    with pytest.raises(RowError, match=r"rows: wanted a process that stores them, got none for 0\.2 s"):
        left(told, left_apart)
    assert taker().counters["unstored"] == 1
    assert "request 'a' has no routes: rows: wanted a process that stores them" in caplog.text
    home.unlink()
    aside.rename(home)
    compute(toy, SECOND)
    until(lambda: taker().pid)
    assert judge(left(end(toy, SECOND, "b"), left_apart), SECOND) == {"right": 6}
    with pytest.raises(RowError, match="no other request has had with this prompt"):
        by_key(FIRST, "a", left_apart)


def test_an_engine_that_is_closed_leaves_no_process(start_apart: Callable[..., Toy], taker: Takers) -> None:
    """Goal: nothing stays behind. Method: its process, when the engine's end has been closed."""
    toy = start_apart()
    pid = taker.pid
    toy.scheduler.close()
    gone_s = time.monotonic() + GIVE_UP_S
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < gone_s


def test_a_store_that_cannot_be_opened_stops_the_start(start_apart: Callable[..., Toy], tmp_path: Path) -> None:
    """Goal: the operator hears of it at the start, as of a store in the engine's process. Method: a file in place of
    the directory."""
    (tmp_path / "rollouts").touch()
    with pytest.raises(KVRouteError, match="rollouts at"):
        start_apart()

"""A worker whose device is behind the scheduler: what never comes is missing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_engine import Toy, held, judge

from cache_manager.errors import RowError
from kvroute.connector import ends, routes
from kvroute.connector.behind import PENDING_MAX, Behind

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def test_rows_that_a_device_does_not_come_to_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: nobody waits for ever, nothing is made up. Method: the worker is held up for longer than an answer waits,
    which says so; the next request has all of its rows, of the blocks of the first.
    """
    monkeypatch.setattr(ends, "LATE_S", 0.01)
    toy = Toy(late=True, blocks=4)
    go = held(toy)
    with pytest.raises(RowError, match="a worker that is behind"):
        routes(toy.ask("r", TOKENS))
    monkeypatch.setattr(ends, "LATE_S", 600.0)
    with pytest.raises(RowError, match="a worker that is behind"):  # a worker that is stuck holds nobody up twice
        routes(toy.ask("stuck", TOKENS[1:]))
    go.set()
    toy.settle()
    others = TOKENS[::-1]
    assert judge(routes(toy.ask("s", others)), others) == {"right": len(TOKENS)}
    toy.close()


def test_a_last_row_that_is_missing_holds_up_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what was not captured is known as soon as the step is over. Method: a limit that would end the test."""
    monkeypatch.setattr(ends, "LATE_S", 600.0)
    toy = Toy(late=True)
    toy.loses = {len(TOKENS) - 1}
    assert judge(routes(toy.ask("r", TOKENS)), TOKENS) == {"right": len(TOKENS) - 1, "missing": 1}
    toy.close()


def test_a_step_whose_host_part_fails_leaves_no_row() -> None:
    """Goal: what a step left half done is not readable, and the engine goes on. Method: one call behind the device
    raises; a strict worker says so at the next step.
    """
    toy = Toy(late=True)
    assert toy.worker._behind is not None
    toy.ask("r", TOKENS)
    toy.worker._behind.put(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    toy.worker.settle()
    assert not toy.worker.blocks.complete(toy.table[:2]).any()
    with pytest.raises(ZeroDivisionError):
        toy.ask("s", TOKENS)
    toy.close()


def test_calls_are_done_in_order_and_room_is_waited_for() -> None:
    """Goal: nothing is lost, turned round or without end. Method: more calls than there is room for, one that raises,
    from a thread that is held up in between; then a close that cannot wait.
    """
    done, failed, go = list[int](), list[Exception](), threading.Event()
    behind = Behind("behind", failed.append, PENDING_MAX)
    behind.put(lambda: go.wait(60) and None)
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(
            lambda: [behind.put(lambda i=i: done.append(7 // (i - 3))) for i in range(PENDING_MAX + 3)]
        )  # type: ignore[misc]
        assert not behind.settle(0.01)
        assert not done
        go.set()
        putting.result(60)
    assert behind.settle(60)
    assert done == [7 // (i - 3) for i in range(PENDING_MAX + 3) if i != 3]
    assert [type(each) for each in failed] == [ZeroDivisionError]
    stop = threading.Event()
    behind.put(lambda: stop.wait(60) and None)
    assert not behind.close(0.01)
    stop.set()
    assert behind.close(60)

"""A worker whose device is behind the scheduler: rows are waited for, and what never comes is missing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import Asked, Toy, judge

from cache_manager.errors import RowError
from kvroute.connector import ends, routes
from kvroute.connector.behind import PENDING_MAX, Behind

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def hold(toy: Toy) -> threading.Event:
    """What steps leave to the host is held up, until the event is set."""
    go = threading.Event()
    assert toy.worker._behind is not None
    toy.worker._behind.put(lambda: go.wait(60) and None)
    return go


def test_a_request_that_is_done_has_the_rows_of_a_device_that_is_late() -> None:
    """Goal: an answer waits for its rows, and for no later ones. Method: the worker is held up until the scheduler has
    asked how far it is; then a second request's steps lie behind it.
    """
    toy = Toy(late=True)
    go, view = hold(toy), toy.scheduler.view
    assert view is not None
    asked, generations = threading.Event(), view.generations

    def seen(blocks: Any) -> Any:
        asked.set()
        return generations(blocks)

    with ThreadPoolExecutor(1) as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ends, "LATE_S", 60.0)
        patch.setattr(type(view), "generations", lambda _self, blocks: seen(blocks))
        answer = threads.submit(toy.ask, "r", TOKENS, (3, 2))
        assert asked.wait(60)
        assert not answer.done()
        go.set()
        assert judge(routes(answer.result(60)), TOKENS) == {"right": len(TOKENS)}
    toy.close()


def test_rows_that_a_device_does_not_come_to_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: nobody waits for ever, nothing is made up. Method: the worker is held up for longer than an answer waits,
    which says so; the next request has all of its rows, of the blocks of the first.
    """
    monkeypatch.setattr(ends, "LATE_S", 0.01)
    toy = Toy(late=True, blocks=4)
    go = hold(toy)
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


def test_rows_of_a_store_are_compared_before_anybody_believes_them(tmp_path: Path) -> None:
    """Goal: no answer comes between rows that have landed and their KV. Method: a second engine loads KV of which a bit
    has changed; its comparison goes on when the scheduler has asked twice how far the worker is since it began.
    """
    kept, store = dict[bytes, Any](), f"file://{tmp_path}"
    first = Toy(kept=kept, late=True, store=store, witness="flagged")
    first.ask("a", TOKENS)
    first.settle()
    kept[Asked("", TOKENS).block_hashes[1]]["layers.1"].view(torch.int32)[0, 2, 3] ^= 1
    other = Toy(kept=kept, late=True, store=store + "?mode=read", witness="flagged")
    view, compare, asked = other.scheduler.view, other.worker._compare, threading.Semaphore(0)
    assert view is not None
    generations = view.generations

    def seen(blocks: Any) -> Any:
        asked.release()
        return generations(blocks)

    def compared(come: Any) -> None:
        while asked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert asked.acquire(timeout=60)
        compare(come)

    other.worker._compare = compared  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ends, "LATE_S", 60.0)
        patch.setattr(type(view), "generations", lambda _self, blocks: seen(blocks))
        assert judge(routes(other.ask("b", TOKENS)), TOKENS) == {"right": 7, "missing": 4}
    for each in (first, other):
        each.close()


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
    behind = Behind(failed.append)
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

"""Requests end off the thread that schedules: it waits for nobody, and what is given out again is read before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from toy_engine import Asked, Toy, admitted, computed, judge

from cache_manager.errors import RowError
from kvroute.connector import Tokens, ends, routes, settings
from kvroute.rollout import RolloutStore, open_rollouts
from kvroute.routes import Routes

FIRST, SECOND = [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]
BLOCKS = [5, 2]


@pytest.fixture
def start() -> Iterator[Callable[..., Toy]]:
    made: list[Toy] = []
    yield lambda **said: made.append(Toy(**said)) or made[-1]  # type: ignore[func-returns-value]
    for toy in made:
        toy.close()


def compute(toy: Toy, tokens: list[int]) -> Asked:
    """A request is computed in one step, in the same blocks as any other."""
    request = admitted(toy, tokens, BLOCKS)
    computed(toy, request, len(tokens))
    toy.worker.end()
    request.num_computed_tokens = len(tokens)
    return request


def end(toy: Toy, tokens: list[int], name: str = "r") -> Future[dict[str, Any]]:
    """The request in the blocks is done; the scheduler's thread is not held up."""
    ended = toy.scheduler.forget("r")
    told = toy.scheduler.finished(name, BLOCKS, len(tokens), Tokens(tokens, len(tokens)), ended=ended)
    assert told is not None
    return told


def of(told: Future[dict[str, Any]], store: RolloutStore | None = None) -> Routes:
    return routes({"kv_transfer_params": told.result(60)}, rollouts=store)


def held(toy: Toy) -> threading.Event:
    """The worker's host is behind its device, until the event is set."""
    go = threading.Event()
    assert toy.worker._behind is not None
    toy.worker._behind.put(lambda: go.wait(60) and None)
    return go


def test_nobody_waits_for_a_worker_that_is_behind(start: Callable[..., Toy]) -> None:
    """Goal: the scheduler goes on, and gives blocks out again; both requests have their own rows. Method: a worker is
    held up while one request ends and another is computed in its blocks, under a version that came meanwhile.
    """
    toy = start(late=True, weights_version=1)
    go = held(toy)
    compute(toy, FIRST)
    first = end(toy, FIRST)
    toy.scheduler.weights.changed(2)
    compute(toy, SECOND)
    second = end(toy, SECOND)
    assert not first.done()
    assert not second.done()
    go.set()
    assert judge(of(first), FIRST) == {"right": 6}
    assert judge(of(second), SECOND) == {"right": 6}
    assert of(first).weights_versions == ((0, 6, 1),)
    assert of(second).weights_versions == ((0, 6, 2),)


def test_without_room_for_a_copy_rows_are_missing(start: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: never another request's rows. Method: there is one spare block, and two blocks are given out again."""
    monkeypatch.setattr(settings, "SPARES", 1)
    toy = start(late=True)
    for tokens, other in ((FIRST, SECOND), (SECOND, FIRST)):  # the spare one is free again
        go = held(toy)
        compute(toy, tokens)
        told = end(toy, tokens)
        compute(toy, other)
        toy.scheduler.forget("r")
        go.set()
        assert judge(of(told), tokens) == {"right": 4, "missing": 2}
        toy.worker.settle()


class Stuck:
    """A rollout store whose first put goes on when it is told to."""

    def __init__(self, store: Any) -> None:
        self._store, self._puts = store, 0
        self.began, self.go = threading.Event(), threading.Event()

    def put(self, name: str, found: Routes) -> Any:
        self._puts += 1
        if self._puts == 1:
            self.began.set()
            assert self.go.wait(60)
        return self._store.put(name, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def stuck(start: Callable[..., Toy], tmp_path: Path) -> tuple[Toy, Stuck]:
    """An engine whose rollout store does not come back from its first put."""
    toy = start(rollouts=f"file://{tmp_path}", weights_version=1)
    assert toy.scheduler._ends is not None
    toy.scheduler._ends._left._store = store = Stuck(open_rollouts(f"file://{tmp_path}"))  # type: ignore[assignment]
    return toy, store


def test_nobody_waits_for_a_store(stuck: tuple[Toy, Stuck]) -> None:
    """Goal: requests are computed and done while a store is stuck, and their rows are those of their blocks then.
    Method: three, one after the other in the same blocks; all are forgotten before the store goes on.
    """
    toy, store = stuck
    told = []
    for name, tokens in (("a", FIRST), ("b", SECOND), ("c", FIRST)):
        compute(toy, tokens)
        told.append(end(toy, tokens, name))
        assert store.began.wait(60)
    toy.scheduler.reset()
    toy.worker.begin(toy.scheduler.step({}))
    toy.worker.end()
    assert not any(each.done() for each in told)
    store.go.set()
    for each, tokens in zip(told, (FIRST, SECOND, FIRST), strict=True):
        assert judge(of(each, store._store), tokens) == {"right": 6}


def test_a_name_is_used_again_when_its_rows_are_gone(stuck: tuple[Toy, Stuck]) -> None:
    """Goal: rows of an earlier request are not found under the name of one that is computed. Method: a name comes again
    while the rows of its first request are on their way into the store.
    """
    toy, store = stuck
    compute(toy, FIRST)
    first = end(toy, FIRST)
    assert store.began.wait(60)
    toy.scheduler.arrived("again", "r")
    toy.scheduler.arrived("other", "s")
    assert not toy.scheduler.ready("again")
    store.go.set()
    first.result(60)
    while not toy.scheduler.ready("again"):
        threading.Event().wait(0.001)
    assert store.find("r") is None


def test_a_store_that_stays_stuck_bounds_what_waits(stuck: tuple[Toy, Stuck], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a limit, said to the client; nothing of an older request under a newer one's name. Method: room for the
    ends of two names, and three end; then the first name comes again and is not waited for any longer.
    """
    toy, store = stuck
    monkeypatch.setattr(ends, "ENDS_MAX", 2)
    monkeypatch.setattr(ends, "LATE_S", 0.01)
    told = []
    for name in ("a", "b", "c"):
        compute(toy, FIRST)
        told.append(end(toy, FIRST, name))
    with pytest.raises(RowError, match="2 at most, for the rollout store to take"):
        of(told[2], store._store)
    toy.scheduler.arrived("again", "a")
    while not toy.scheduler.ready("again"):
        threading.Event().wait(0.001)
    store.go.set()
    for each in told[:2]:
        each.result(60)
    assert store.find("a") is None
    assert judge(of(told[1], store._store), FIRST) == {"right": 6}


def test_an_answer_comes_whatever_happens(start: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no client waits for ever. Method: what makes routes of rows raises what nobody expects."""
    toy = start()
    compute(toy, FIRST)
    monkeypatch.setattr(Routes, "from_rows", lambda *_, **__: 1 // 0)
    with pytest.raises(RowError, match="ZeroDivisionError"):
        of(end(toy, FIRST))

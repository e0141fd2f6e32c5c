"""Requests end off the scheduling thread: it never waits, and the rows of a block are read before it is given out
again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from toy_ends import BLOCKS, FIRST, SECOND, compute, end, of
from toy_engine import Toy, held, judge
from waiting import GIVE_UP_S

from cache_manager.errors import RegionError, RowError
from cache_manager.regions.view import RegionView
from kvroute.connector import Key, Tokens, computations, cutting, left, routes
from kvroute.connector.left import LeftRoutes
from kvroute.rollout import open_rollouts
from kvroute.routes import Routes


class Stuck:
    """A rollout store whose first put waits until the test releases it."""

    def __init__(self, store: Any) -> None:
        self.store, self._puts = store, 0
        self.began, self.go = threading.Event(), threading.Event()

    def put(self, name: str, found: Routes) -> Any:
        self._puts += 1
        if self._puts == 1:
            self.began.set()
            assert self.go.wait(GIVE_UP_S)
        return self.store.put(name, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.fixture
def stuck(
    start: Callable[..., Toy], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Toy, Stuck]]:
    """An engine, with the limits of the parameter, whose rollout store does not return from its first put until the
    test is over."""
    store = Stuck(open_rollouts(f"file://{tmp_path}"))
    monkeypatch.setattr(left, "open_rollouts", lambda _: store)
    toy = start(rollouts=f"file://{tmp_path}", weights_version=1, limits=getattr(request, "param", {}))
    yield toy, store
    store.go.set()


def test_no_thread_of_the_engine_waits_for_a_store(stuck: tuple[Toy, Stuck]) -> None:
    """Goal: requests are computed and done while a store is stuck, and their rows are those of their blocks then.
    Method: three, one after the other in the same blocks; all are forgotten before the store goes on."""
    toy, store = stuck
    told = []
    for name, tokens in (("a", FIRST), ("b", SECOND), ("c", FIRST)):
        compute(toy, tokens)
        told.append(end(toy, tokens, name))
        assert store.began.wait(GIVE_UP_S)
    toy.scheduler.reset()
    toy.worker.begin(toy.scheduler.step({}))
    toy.worker.end()
    assert not any(each.done() for each in told)
    store.go.set()
    for each, tokens in zip(told, (FIRST, SECOND, FIRST), strict=True):
        assert judge(of(each, store.store), tokens) == {"right": 6}


@pytest.mark.parametrize("names", ["abc", "aaa"])
@pytest.mark.parametrize("stuck", [{"ends_max": 2}], indirect=True)
def test_a_store_that_stays_stuck_bounds_what_waits(stuck: tuple[Toy, Stuck], names: str) -> None:
    """Goal: a limit, which the client is told of. Method: room for two ends, and three end, of one key or of more."""
    toy, store = stuck
    told = []
    for name in names:
        compute(toy, FIRST)
        told.append(end(toy, FIRST, name))
    with pytest.raises(RowError, match="2 at most, for the rollout store to take"):
        of(told[2], store.store)
    store.go.set()
    assert judge(of(told[1], store.store), FIRST) == {"right": 6}


def test_an_answer_comes_whatever_happens(start: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no client waits for ever. Method: an unexpected error in the code that reads rows, once and always; in the
    code that makes routes of them; and in the code that reports missing ones."""
    toy = start()
    compute(toy, FIRST)
    read, fails = computations.rows_until, [1]
    with monkeypatch.context() as failing:
        failing.setattr(computations, "rows_until", lambda *of: read(*of) if not fails else fails.pop() // 0)
        assert judge(of(end(toy, FIRST)), FIRST) == {"right": 6}
        failing.setattr(computations, "rows_until", lambda *_: 1 // 0)
        with pytest.raises(RowError, match="ZeroDivisionError"):
            of(end(toy, FIRST))
    monkeypatch.setattr(cutting, "labels_of", lambda _: 1 // 0)
    with pytest.raises(RowError, match="ZeroDivisionError"):
        of(end(toy, FIRST))
    for at in ("put", "fail"):
        monkeypatch.setattr(LeftRoutes, at, lambda *_: 1 // 0)
    with pytest.raises(RowError, match="could not be left"):
        of(end(toy, FIRST))


def test_an_error_in_the_thread_is_told_to_those_who_wait(
    start: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: as above, where the region cannot be read. Method: that is so once, while a request waits; the next one has
    its rows."""
    toy = start(late=True)
    go = held(toy)
    compute(toy, SECOND)
    generation, errors = RegionView.generation, [RegionError("gone on purpose")]

    def once_faulty(view: RegionView, block: int) -> int:
        """The first question for the worker's progress raises."""
        if errors:
            raise errors.pop()
        return generation(view, block)

    monkeypatch.setattr(RegionView, "generation", once_faulty)
    with pytest.raises(RowError, match="gone on purpose"):
        of(end(toy, SECOND))
    go.set()
    compute(toy, FIRST)
    assert judge(of(end(toy, FIRST)), FIRST) == {"right": 6}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_leaves_nobody_waiting(start: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: as above, whatever ends the thread. Method: the interpreter tells it to exit; a request waits, and another
    one ends after that."""
    toy = start()
    compute(toy, FIRST)
    monkeypatch.setattr(LeftRoutes, "answer", lambda *_: sys.exit())
    for why in ("has ended", "it has ended"):
        with pytest.raises(RowError, match=why):
            of(end(toy, FIRST))
        for thread in threading.enumerate():
            if thread.name == "kvroute-ends":
                thread.join(60)


def test_an_answer_that_nobody_wants_costs_no_other_one(start: Callable[..., Toy]) -> None:
    """Goal: as above. Method: a client cancels the future of its data while the worker is behind."""
    toy = start(late=True)
    go = held(toy)
    compute(toy, FIRST)
    assert end(toy, FIRST).cancel()
    go.set()
    compute(toy, SECOND)
    assert judge(of(end(toy, SECOND)), SECOND) == {"right": 6}


def test_a_client_gets_the_rows_that_it_lacks(start: Callable[..., Toy]) -> None:
    """Goal: each turn of a conversation is sent once. Method: the rows of the second turn are requested from the end of
    the first on, in the middle of a block; both are merged, and merging with another conversation's first turn is
    refused."""
    toy, both = start(), [*FIRST, 7, *SECOND]
    toy.ask("first", FIRST)
    first = routes({"kv_transfer_params": told_from(toy, FIRST, 0).result(GIVE_UP_S)})
    toy.ask("second", both)
    told = told_from(toy, both, len(first))
    second = routes({"kv_transfer_params": told.result(GIVE_UP_S)})
    assert (second.start, second.stop) == (6, 13)
    assert judge(first.merge(second), both) == {"right": 13}
    said = {"index": 0, "prompt_token_ids": both[:9], "token_ids": [*both[9:], 5]}
    answer = routes({"id": "r", "choices": [said], "kv_transfer_params": told.result(GIVE_UP_S)})
    assert judge(answer.merge(first), both) == {"right": 13}
    other = routes({"kv_transfer_params": told_from(toy, [*SECOND, *both[6:]], 6).result(GIVE_UP_S)})
    with pytest.raises(RowError, match="hash of the first 6 tokens"):
        other.merge(first)


def told_from(toy: Toy, tokens: list[int], at: Any) -> Future[dict[str, Any]]:
    told = toy.scheduler.finished(Key("r"), toy.table, len(tokens), Tokens([*tokens, 5], min(9, len(tokens))), start=at)
    assert told is not None
    return told


@pytest.mark.parametrize("wrong", [-1, 7, True, "3", 2.0, None])
def test_a_start_that_is_no_position_of_the_prompt_is_refused(start: Callable[..., Toy], wrong: Any) -> None:
    """Goal: the error tells the client what was wanted. Method: values of other kinds, and beyond the prompt's six
    tokens."""
    toy = start()
    toy.ask("r", FIRST)
    with pytest.raises(RowError, match=f"kvroute.start: wanted a position of the prompt, from 0 to 6, got {wrong!r}"):
        of(told_from(toy, FIRST, wrong))


@pytest.mark.parametrize("apart", [False, True])
def test_a_refused_request_leaves_no_routes_of_an_earlier_one(
    start: Callable[..., Toy], tmp_path: Path, apart: bool
) -> None:
    """Goal: a row is of the request that asked. Method: the second request of a key has the same tokens, by other
    weights, and names a start that is none; the third one's end takes along what is to be forgotten."""
    toy = start(rollouts=f"{'apart:' * apart}file://{tmp_path}")
    with closing(open_rollouts(f"file://{tmp_path}")) as store:
        compute(toy, FIRST)
        assert judge(of(end(toy, FIRST, "k"), store), FIRST) == {"right": 6}
        toy.weights = 1
        compute(toy, FIRST)
        of_it = Tokens(FIRST, len(FIRST))
        told = toy.scheduler.finished(Key("k", of_client=True), BLOCKS, len(FIRST), of_it, start="first")
        assert told is not None
        with pytest.raises(RowError, match=r"kvroute\.start"):
            of(told, store)
        compute(toy, SECOND)
        of(end(toy, SECOND, "other"), store)
        said = {"id": "k", "prompt_token_ids": FIRST, "choices": [{"index": 0, "token_ids": [5]}]}
        with pytest.raises(RowError, match="no other request has had"):
            routes(said, rollouts=store, key="k", wait_s=GIVE_UP_S)


@pytest.mark.parametrize(("field", "named"), [(True, True), (False, False)])
def test_a_mistake_is_named_where_no_rollouts_are_left(
    start: Callable[..., Toy],
    field: bool,
    named: bool,
) -> None:
    """Goal: a client of the own field hears of its mistake; one that wants no rows has no answer about them. Method: a
    request names a start behind its prompt, and another one a sound start, in engines that leave no rollouts."""
    toy = start(rollouts="", field=field)
    for position, wrong in ((len(FIRST) + 1, True), (0, False)):
        compute(toy, FIRST)
        ended = toy.scheduler.forget("r")
        of_it = Tokens(FIRST, len(FIRST))
        answer = toy.scheduler.finished(Key("r"), BLOCKS, len(FIRST), of_it, ended=ended, start=position)
        assert (answer is not None) == (named and wrong)
        if answer is not None:
            error = answer.result(GIVE_UP_S)["kvroute"]["error"]["0"]
            assert error == "kvroute.start: wanted a position of the prompt, from 0 to 6, got 7"

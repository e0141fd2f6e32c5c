"""Rollouts that a scheduler leaves for clients: bound to the request's tokens, and never those of an earlier
request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toy_engine import Toy, admitted, judge
from waiting import GIVE_UP_S

import kvroute
from kvroute.connector import Tokens, ends, routes
from kvroute.rollout import RolloutHandle, RolloutStore, open_rollouts
from kvroute.rollout.local import LocalRollouts

TOKENS = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def engine(start: Callable[..., Toy], tmp_path: Path) -> Callable[..., Toy]:
    return partial(start, rollouts=f"file://{tmp_path}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with closing(open_rollouts(f"file://{tmp_path}")) as opened:
        yield opened


def arrive(toy: Toy, name: str, group: str | None = None) -> None:
    toy.scheduler.arrived(name, name, group)
    while not toy.scheduler.ready(name):
        time.sleep(0.001)


def told_of(begun: Future[dict[str, Any]] | None) -> dict[str, Any]:
    assert begun is not None
    return begun.result(GIVE_UP_S)


def answered(tokens: list[int], **more: Any) -> dict[str, Any]:
    """The answer of a front end that has ended request ``r`` by itself: only the toy's prompt tokens have rows."""
    said = {"prompt_token_ids": tokens[:3], "token_ids": [*tokens[3:], 7]}
    return {"id": "r", "choices": [{"index": 0, **said}], "kv_transfer_params": None, **more}


def test_rows_of_older_weights_are_not_those_of_the_same_tokens_again(
    engine: Callable[..., Toy], store: RolloutStore
) -> None:
    """Goal: a second epoch with the same id and, by greedy decoding, the same tokens does not get the first epoch's
    rows. Method: an engine has left a rollout; another one with new weights gets the same request; its front end
    answers first."""
    engine(weights_version=1).ask("r", TOKENS)
    engine(weights_version=1).ask("of another", TOKENS)
    assert routes(answered(TOKENS), rollouts=store, wait_s=0).weights_versions == ((0, 6, 1),)
    second = engine(weights_version=2)
    arrive(second, "r")
    with pytest.raises(kvroute.RowError, match="nor one in the store"):
        routes(answered(TOKENS), rollouts=store, wait_s=0)
    told = second.ask("r", TOKENS)
    for answer in (answered(TOKENS), answered(TOKENS, **told)):
        found = routes(answer, rollouts=store, wait_s=0)
        assert found.weights_versions == ((0, 6, 2),)
        assert judge(found, TOKENS) == {"right": 6}
    assert store.find("of another") is not None


def test_a_request_without_routes_leaves_no_older_ones(
    engine: Callable[..., Toy], store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a stream's client, who sees no error, finds nothing. Method: a worker is behind when its request ends."""
    monkeypatch.setattr(ends, "LATE_S", 0.0)
    engine().ask("r", TOKENS)
    toy = engine(late=True)
    arrive(toy, "r")
    admitted(toy, TOKENS, [5, 2])
    toy.scheduler.step({"r": 6})
    told = told_of(toy.scheduler.finished("r", [5, 2], 6, Tokens(TOKENS, 3)))
    with pytest.raises(kvroute.RowError, match="a worker that is behind"):
        routes(answered(TOKENS, kv_transfer_params=told), rollouts=store, wait_s=60)
    with pytest.raises(kvroute.RowError, match="nor one in the store"):
        routes(answered(TOKENS), rollouts=store, wait_s=0)


def test_a_request_comes_while_the_store_hangs(engine: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the thread that schedules waits for no store, of files neither. Method: the file system does not answer;
    the request is ready when it has."""
    toy, go, asked = engine(), threading.Event(), list[str]()
    find = LocalRollouts.find

    def held_up(self: LocalRollouts, name: str) -> RolloutHandle | None:
        asked.append(threading.current_thread().name)
        assert go.wait(60)
        return find(self, name)

    monkeypatch.setattr(LocalRollouts, "find", held_up)
    toy.scheduler.arrived("new", "new")
    assert not toy.scheduler.ready("new")
    go.set()
    while not toy.scheduler.ready("new"):
        time.sleep(0.001)
    assert asked == ["kvroute-rooms"]
    plain = engine(rollouts="response:")
    plain.scheduler.arrived("new", "new")
    assert plain.scheduler.ready("new")


def test_a_store_that_fails_when_a_request_comes_is_reported(
    engine: Callable[..., Toy], caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: the request is served. Method: a store that was closed; an id that no rollout can have."""
    toy = engine()
    assert toy.scheduler._ends is not None
    toy.scheduler._ends.make_room("x" * 999, None).result(GIVE_UP_S)
    toy.scheduler._ends._left.close()
    toy.scheduler._ends.make_room("r", None).result(GIVE_UP_S)
    assert [each.getMessage().partition(" that may")[0] for each in caplog.records] == [
        f"a rollout {'x' * 999}",
        "a rollout r",
    ]
    told = toy.ask("r", TOKENS)
    with pytest.raises(kvroute.RowError, match="closed"):
        routes(answered(TOKENS, **told))


def test_the_last_member_of_a_group_has_the_data_of_all(engine: Callable[..., Toy]) -> None:
    """Goal: vLLM sends on what comes with the last completion only, and the others carry nothing twice. Method: two of
    one request, one of another; three of one whose front end may end each by itself, so that any may be the last."""
    toy = engine()
    toy.ask("before", TOKENS)

    def told(name: str, group: str | None, *, cut: bool = False) -> list[str]:
        begun = toy.scheduler.finished(name, toy.table, 6, Tokens(TOKENS, 3, cut), group=group)
        return sorted(told_of(begun)["kvroute"]["rollouts"])

    for name, group in (("0_r", "r-1"), ("1_r", "r-1"), ("1_s", "s-1"), ("0_c", "c"), ("1_c", "c"), ("2_c", "c")):
        arrive(toy, name, group)
    assert told("1_r", "r-1") == ["1_r"]
    assert told("1_s", "s-1") == ["1_s"]
    assert told("0_r", "r-1") == ["0_r", "1_r"]
    assert told("5_1", None) == ["5_1"]
    assert told("0_c", "c", cut=True) == ["0_c"]
    assert told("1_c", "c", cut=True) == ["0_c", "1_c"]
    arrive(toy, "2_r", "r-1")  # vLLM sends the engine one after the other
    arrive(toy, "3_r", "r-1")
    assert told("3_r", "r-1") == ["3_r"]
    assert told("2_r", "r-1") == ["0_r", "1_r", "2_r", "3_r"]
    arrive(toy, "1_r", "r-1")  # the same id again, in an engine whose ids have nothing random
    assert told("0_r", "r-1") == ["0_r"]
    assert told("1_r", "r-1") == ["0_r", "1_r", "2_r", "3_r"]


class Elsewhere:
    """A rollout store in another process, which is slow to say what it has."""

    def __init__(self, store: RolloutStore) -> None:
        self.store, self.answers = store, threading.Event()

    def find(self, name: str) -> Any:
        assert self.answers.wait(GIVE_UP_S)
        return self.store.find(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_request_that_ends_before_it_is_ready_holds_no_siblings_rows_back(engine: Callable[..., Toy]) -> None:
    """Goal: the last completion's answer has the rows of all. Method: three of one prompt; one is done, one is aborted
    while a slow store is asked for an earlier request of its name, then the last one is done."""
    toy = engine()
    toy.ask("before", TOKENS)
    assert toy.scheduler._ends is not None
    left = toy.scheduler._ends._left
    left._store = slow = Elsewhere(left._store)  # type: ignore[assignment]
    slow.answers.set()
    arrive(toy, "0_r", "r")
    arrive(toy, "1_r", "r")
    first = told_of(toy.scheduler.finished("0_r", toy.table, 6, Tokens(TOKENS, 3), group="r"))
    slow.answers.clear()
    toy.scheduler.arrived("2_r", "2_r", "r")
    assert not toy.scheduler.ready("2_r")
    room = toy.scheduler._rooms["2_r"]
    toy.scheduler.unanswered(toy.scheduler.forget("2_r"), "2_r", "r")
    slow.answers.set()
    room.result(GIVE_UP_S)
    last = told_of(toy.scheduler.finished("1_r", toy.table, 6, Tokens(TOKENS, 3), group="r"))
    assert [sorted(each["kvroute"]["rollouts"]) for each in (first, last)] == [["0_r"], ["0_r", "1_r"]]

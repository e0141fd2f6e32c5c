"""Requests end off the scheduling thread: it never waits, and the rows of a block are read before it is given out
again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from toy_engine import Asked, Toy, admitted, held, judge, row_of, stepped
from waiting import GIVE_UP_S

from cache_manager.errors import RegionError, RowError
from cache_manager.regions.view import RegionView
from kvroute.connector import Key, Tokens, computations, cutting, left, routes, scheduler
from kvroute.connector.left import LeftRoutes
from kvroute.connector.limits import LIMITS
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.unread import UnreadRows
from kvroute.rollout import RolloutStore, open_rollouts
from kvroute.routes import Routes

FIRST, SECOND = [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]
BLOCKS = [5, 2]


def compute(toy: Toy, tokens: list[int]) -> None:
    """A request is computed in one step, in the same blocks as any other."""
    stepped(toy, admitted(toy, tokens, BLOCKS), len(tokens))


def end(toy: Toy, tokens: list[int], name: str = "r") -> Future[dict[str, Any]]:
    """The request in the blocks is done; the scheduler's thread is not held up."""
    ended = toy.scheduler.forget("r")
    told = toy.scheduler.finished(Key(name, True), BLOCKS, len(tokens), Tokens(tokens, len(tokens)), ended=ended)
    assert told is not None
    return told


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> list[SpareBlocks]:
    """The spare blocks of the engines that are started from here on."""
    made: list[SpareBlocks] = []

    def make(*arguments: Any) -> SpareBlocks:
        made.append(SpareBlocks(*arguments))
        return made[-1]

    monkeypatch.setattr(scheduler, "SpareBlocks", make)
    return made


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[UnreadRows]:
    """As :func:`spares`, the rows that are still to be read."""
    made: list[UnreadRows] = []

    def make(*arguments: Any) -> UnreadRows:
        made.append(UnreadRows(*arguments))
        return made[-1]

    monkeypatch.setattr(scheduler, "UnreadRows", make)
    return made


def of(told: Future[dict[str, Any]], store: RolloutStore | None = None) -> Routes:
    return routes({"kv_transfer_params": told.result(GIVE_UP_S)}, rollouts=store)


def test_no_request_waits_for_a_worker_that_is_behind(
    start: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the scheduler goes on, and gives blocks out again; both requests have their own rows. Method: a worker is
    held up while one request ends and another is computed in its blocks, under a version that came meanwhile."""
    toy = start(late=True, weights_version=1)
    go = held(toy)
    compute(toy, FIRST)
    first = end(toy, FIRST)
    toy.scheduler.weights.changed(2)
    compute(toy, SECOND)
    second = end(toy, SECOND)
    assert not first.done()
    assert not second.done()
    with monkeypatch.context() as patch:
        done, still = threading.Event(), UnreadRows.still
        patch.setattr(UnreadRows, "still", lambda rows: done.wait(GIVE_UP_S) and still(rows))
        go.set()
        toy.worker.settle()
        done.set()  # nothing is read before the worker has done it all
    assert judge(of(first), FIRST) == {"right": 6}
    assert judge(of(second), SECOND) == {"right": 6}
    assert of(first).weights_versions == ((0, 6, 1),)
    assert of(second).weights_versions == ((0, 6, 2),)


def test_without_room_for_a_copy_rows_are_missing(start: Callable[..., Toy]) -> None:
    """Goal: never another request's rows. Method: there is one spare block, and two blocks are given out again."""
    toy = start(late=True, limits={"spares_max": 1})
    for tokens, other in ((FIRST, SECOND), (SECOND, FIRST)):  # the spare one is free again
        go = held(toy)
        compute(toy, tokens)
        told = end(toy, tokens)
        compute(toy, other)
        toy.scheduler.forget("r")
        go.set()
        assert judge(of(told), tokens) == {"right": 4, "missing": 2}
        toy.worker.settle()


@pytest.mark.parametrize("version", [None, 1])
def test_rows_that_no_step_writes_any_more_need_no_spare_block(
    spares: list[SpareBlocks], start: Callable[..., Toy], version: int | None
) -> None:
    """Goal: a worker that is one step behind costs no row that was there. Method: of eight blocks all rows
    but the last one's are written, there is one spare block, and all are given out, in two steps; with labels, too."""
    toy = start(late=True, blocks=16, weights_version=version, limits={"spares_max": 1})
    tokens, blocks = [i % 7 for i in range(32)], list(range(8))
    request = admitted(toy, tokens, blocks)
    stepped(toy, request, 16)
    if version is not None:
        toy.scheduler.weights.changed(2)
    stepped(toy, request, 12)
    toy.worker.settle()
    go = held(toy)
    stepped(toy, request, 4)
    ended = toy.scheduler.forget("r")
    told = toy.scheduler.finished(Key("r", True), blocks, len(tokens), Tokens(tokens, len(tokens)), ended=ended)
    for given in ([6, 1], [0, 2, 3, 4, 5, 7]):
        toy.scheduler.given(given)
        toy.worker.begin(toy.scheduler.step({}))
        toy.worker.end()
    go.set()
    assert told is not None
    assert judge(of(told), tokens) == {"right": 32}
    assert of(told).weights_versions == (() if version is None else ((0, 16, 1), (16, 32, 2)))
    toy.worker.settle()
    assert len(spares[0]) == 1


def test_spare_blocks_of_a_request_that_goes_on_are_free_when_their_rows_are_written(
    spares: list[SpareBlocks], start: Callable[..., Toy]
) -> None:
    """Goal: what was kept at a preemption holds no spare block until the request ends. Method: it takes one over; the
    worker writes; the next block that is given out is none of its own."""
    toy = start(late=True)
    go, free = held(toy), len(spares[0])
    preempted(toy, 6)
    toy.scheduler.given([5, 2])
    toy.worker.begin(toy.scheduler.step({}))
    toy.worker.end()
    assert len(spares[0]) < free
    go.set()
    toy.worker.settle()
    toy.scheduler.given([3])
    toy.scheduler.step({})
    assert len(spares[0]) == free


def test_a_worker_that_is_done_while_its_blocks_are_given_out(
    start: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a request whose rows have just been written waits for their copies, and is not told that they are late.
    Method: the worker is done when the scheduling thread has found that it is not, and takes spare blocks."""
    toy = start(late=True)
    go = held(toy)
    compute(toy, FIRST)
    told = end(toy, FIRST)
    take_over = SpareBlocks.take_over

    def late(spares: SpareBlocks, blocks: list[int]) -> Any:
        go.set()
        toy.worker.settle()
        time.sleep(0.05)  # a hundred looks of the thread that waits for the worker
        return take_over(spares, blocks)

    monkeypatch.setattr(SpareBlocks, "take_over", late)
    compute(toy, SECOND)
    assert judge(of(told), FIRST) == {"right": 6}


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


SAID = [*FIRST, 7, 2, 8]
"""A prompt of four tokens and an answer of five."""


def preempted(toy: Toy, read: int) -> Asked:
    """The engine has computed a number of tokens of a request, sampled one more, and takes its blocks away."""
    request = admitted(toy, SAID, [5, 2, 3])
    request.all_token_ids, request.num_prompt_tokens = SAID[: read + 1], 4
    stepped(toy, request, read)
    toy.scheduler.preempted(request)
    return request


def again(toy: Toy, blocks: list[int]) -> Routes:
    """It is computed from its first token, in other blocks, to its end."""
    request = admitted(toy, SAID, blocks)
    stepped(toy, request, len(SAID))
    ended = toy.scheduler.forget("r")
    told = toy.scheduler.finished(Key("r"), blocks, len(SAID), Tokens([*SAID, 5], 4), ended=ended)
    assert told is not None
    return of(told)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("happens", ["reset", "changed", "nothing"])
def test_a_token_keeps_the_row_that_it_was_sampled_with(start: Callable[..., Toy], late: bool, happens: str) -> None:
    """Goal: when a request is computed again by other weights, its earlier tokens keep the rows of the first
    computation. Method: two preemptions; after the first the weights change, and all KV is forgotten or kept; blocks
    come again."""
    toy = start(late=late, weights_version=1)
    preempted(toy, 6)
    toy.worker.settle()
    if happens != "nothing":
        toy.weights = 1
        toy.scheduler.weights.changed(2)
    if happens == "reset":
        toy.scheduler.reset()
    preempted(toy, 8)
    found = again(toy, [5, 2, 3])
    if happens == "nothing":
        assert (judge(found, SAID), found.weights_versions) == ({"right": 9}, ((0, 9, 1),))
    else:
        assert found.weights_versions == ((0, 6, 1), (6, 9, 2))
        assert judge(found, SAID, [0] * 6 + [1] * 3) == {"right": 9}


@pytest.mark.parametrize(("changed", "due"), [(True, {"missing": 6, "right": 3}), (False, {"right": 9})])
def test_rows_that_could_not_be_kept(start: Callable[..., Toy], changed: bool, due: dict[str, int]) -> None:
    """Goal: a row of other weights does not take the place of one that was lost; one of the same weights does. Method:
    the blocks of a preempted request are given out while the worker is behind, and nothing is spare.
    """
    toy = start(late=True, weights_version=1, limits={"spares_max": 0})
    go = held(toy)
    preempted(toy, 6)
    if changed:
        toy.weights = 1
        toy.scheduler.weights.changed(2)
    admitted(toy, SAID, [5, 2, 3])
    toy.worker.begin(toy.scheduler.step({}))
    toy.worker.end()
    go.set()
    assert judge(again(toy, [5, 2, 3]), SAID, [int(changed)] * 9) == due


def test_a_lost_row_is_that_of_a_later_computation_by_its_weights(start: Callable[..., Toy]) -> None:
    """Goal: a row that was lost is given back by whatever computation of the same weights has it, before others come.
    Method: the rows of a first computation are lost, a second one by the same weights has them, a third one by others
    goes on."""
    toy = start(late=True, weights_version=1, limits={"spares_max": 0})
    go = held(toy)
    preempted(toy, 6)
    preempted(toy, 8)
    go.set()
    toy.worker.settle()
    toy.weights = 1
    toy.scheduler.weights.changed(2)
    routes_found = again(toy, [1, 6, 0])
    assert judge(routes_found, SAID, [0] * 8 + [1]) == {"right": 9}
    assert routes_found.weights_versions == ((0, 8, 1), (8, 9, 2))


@pytest.mark.parametrize(("wanted", "computed"), [(0, 0), (0, 3), (4, 3), (4, 0)])
def test_a_request_that_is_aborted_before_it_is_computed_again_leaves_what_was_kept(
    start: Callable[..., Toy], wanted: int, computed: int
) -> None:
    """Goal: the rows that tokens were sampled with are its client's, however the request ends. Method: it is preempted,
    and ends without a block, or when a part of it has been computed again, by other weights; its client wants all rows,
    or those behind a position."""
    toy = start(weights_version=1)
    preempted(toy, 8)
    toy.weights = 1
    toy.scheduler.weights.changed(2)
    blocks = [1, 6, 0] if computed else []
    if computed:
        stepped(toy, admitted(toy, SAID, blocks), computed)
    ended = toy.scheduler.forget("r")
    told = toy.scheduler.finished(Key("r"), blocks, computed, Tokens(SAID, 4, cut=True), ended=ended, start=wanted)
    assert told is not None
    left = of(told)
    assert (left.start, left.stop) == (wanted, 8)
    assert left.valid.all()
    assert all((left.ids[i] == row_of(SAID[: wanted + i + 1])).all() for i in range(8 - wanted))
    assert left.weights_versions == ((wanted, 8, 1),)


@pytest.mark.parametrize("before", [False, True])
def test_a_forgetting_loses_only_the_rows_of_the_last_steps(start: Callable[..., Toy], before: bool) -> None:
    """Goal: a reset does not wait for the worker, loses only rows that the worker has not written, and marks lost rows
    as missing. Method: a request's second step is held up, it is preempted after other weights have come or ``before``,
    and all is forgotten."""
    toy = start(late=True, weights_version=1)
    request = admitted(toy, SAID, [5, 2, 3])
    request.all_token_ids, request.num_prompt_tokens = SAID[:7], 4
    for n in (4, 2):
        go = held(toy) if n == 2 else None
        stepped(toy, request, n)
        if go is None:
            toy.worker.settle()
    if before:
        toy.scheduler.preempted(request)
    toy.weights = 1
    toy.scheduler.weights.changed(2)
    if not before:
        toy.scheduler.preempted(request)
    toy.scheduler.reset()
    assert go is not None
    go.set()
    found = again(toy, [5, 2, 3])
    assert judge(found, SAID, [0] * 4 + [1] * 5) == {"right": 7, "missing": 2}
    assert found.weights_versions == ((0, 4, 1), (6, 9, 2))


def test_a_forgetting_takes_no_row_that_a_late_step_writes_over(start: Callable[..., Toy]) -> None:
    """Goal: a rejected draft's row is not taken for that of the token in its place. Method: drafts behind the prompt
    are rejected, the step that computes over them is held up, the request is preempted, and all is forgotten."""
    toy = start(late=True, weights_version=1)
    request = admitted(toy, [*SAID[:4], 0, 0], [5, 2, 3])
    stepped(toy, request, 6)
    toy.worker.settle()
    go = held(toy)
    request.num_prompt_tokens, request.num_computed_tokens, request.tokens, request.all_token_ids = 4, 4, SAID, SAID[:7]
    stepped(toy, request, 2)
    toy.weights = 1
    toy.scheduler.preempted(request)
    toy.scheduler.reset()
    go.set()
    assert judge(again(toy, [5, 2, 3]), SAID, [0] * 4 + [1] * 5) == {"right": 7, "missing": 2}


def test_a_forgetting_takes_no_row_that_an_older_step_writes_over(start: Callable[..., Toy]) -> None:
    """Goal: as above, of more steps than the scheduler remembers. Method: the draft's row is computed over in the first
    of six steps that are held up."""
    toy, tokens = start(late=True, weights_version=1), [*SAID, 6, 1, 4]
    request = admitted(toy, [*tokens[:4], 0, 0], [5, 2, 3])
    stepped(toy, request, 6)
    toy.worker.settle()
    go = held(toy)
    request.num_prompt_tokens, request.num_computed_tokens = 4, 4
    request.tokens, request.all_token_ids = tokens, tokens[:11]
    for _ in range(LIMITS.steps_max + 2):
        stepped(toy, request, 1)
    toy.weights = 1
    toy.scheduler.preempted(request)
    toy.scheduler.reset()
    go.set()
    request = admitted(toy, tokens, [5, 2, 3])
    stepped(toy, request, len(tokens))
    told = toy.scheduler.finished(
        Key("r"), [5, 2, 3], len(tokens), Tokens([*tokens, 5], 4), ended=toy.scheduler.forget("r")
    )
    assert told is not None
    assert judge(of(told), tokens, [1] * len(tokens)) == {"right": 2, "missing": 10}


@pytest.mark.parametrize("ends_as", ["nobody asks", "refused", "too many", "behind", "asked from behind it"])
def test_what_was_kept_of_a_request_is_let_go_at_its_end(
    spares: list[SpareBlocks], unread: list[UnreadRows], start: Callable[..., Toy], ends_as: str
) -> None:
    """Goal: spare blocks that keep the rows of a preempted request's tokens are free again, however the request ends.
    Method: the rows are copied to spare blocks, since the worker is behind; then each way to end."""
    limits = {"ends_max": 0 if ends_as == "too many" else 9, "answer_s": 0.01 if ends_as == "behind" else 60.0}
    toy = start(late=True, limits=limits)
    go, free = held(toy), len(spares[0])
    preempted(toy, 4 if ends_as == "asked from behind it" else 6)
    request = admitted(toy, SAID, [5, 2, 3])
    toy.worker.begin(toy.scheduler.step({}))
    toy.worker.end()
    request.num_computed_tokens = 0
    assert len(spares[0]) < free
    ended, of_it = toy.scheduler.forget("r"), Tokens([*SAID, 5], 4)
    if ends_as == "nobody asks":
        toy.scheduler.unanswered(ended, Key("r"))
    else:
        if ends_as == "asked from behind it":
            go.set()
        begin = {"refused": -1, "asked from behind it": 4}.get(ends_as, 0)
        told = toy.scheduler.finished(Key("r"), [5, 2, 3], len(SAID), of_it, ended=ended, start=begin)
        assert told is not None
        assert told.result(GIVE_UP_S)
    assert len(spares[0]) == free
    assert [len(rows) for rows in unread] == [0]
    go.set()


def test_nothing_is_kept_of_a_prompt_without_an_answer(start: Callable[..., Toy]) -> None:
    """Goal: the rows of a token are of the pass that it was sampled with. Method: preempted in the middle of a prompt,
    before new weights.
    """
    toy = start(weights_version=1)
    request = admitted(toy, SAID, [5, 2, 3])
    request.num_prompt_tokens = len(SAID)
    stepped(toy, request, 6)
    toy.scheduler.preempted(request)
    toy.weights = 1
    toy.scheduler.weights.changed(2)
    assert again(toy, [1, 6, 0]).weights_versions == ((0, 9, 2),)


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

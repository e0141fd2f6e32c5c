"""Rows of requests that have lost their blocks stay readable until they are read: in their blocks, or in spare ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from toy_ends import FIRST, SAID, SECOND, again, compute, end, of, preempted
from toy_engine import Toy, admitted, held, judge, stepped
from waiting import GIVE_UP_S

from kvroute.connector import Key, Tokens, scheduler
from kvroute.connector.limits import LIMITS
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.unread import UnreadRows


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

"""The process that stores rollouts reads the rows of ended requests, and none of another life."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from toy_engine import Toy, admitted, held, judge, stepped
from toy_takers import FIRST, PROMPT, SECOND, Takers, by_key, compute, end, left

from cache_manager.errors import RowError
from kvroute.connector import Key, Tokens
from kvroute.rollout import RolloutStore


@pytest.mark.parametrize("late", [False, True])
def test_rows_are_found_by_handle_and_by_key(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore, late: bool
) -> None:
    """Goal: what a store in the engine's process gives, with the versions. Method: two requests in the same blocks,
    weights that change between them, with which all is forgotten; the engine's process reads no row."""
    toy = start_apart(late=late, weights_version=1)
    for name, tokens, version in (("a", FIRST, 1), ("b", SECOND, 2)):
        if version > 1:
            toy.scheduler.weights.changed(version)
            toy.scheduler.reset()
        compute(toy, tokens)
        found = left(end(toy, tokens, name), left_apart)
        assert judge(found, tokens) == {"right": 6}
        assert found.weights_versions == ((0, 6, version),)
        assert by_key(tokens, name, left_apart).valid.all()
    assert taker().counters["stored"] == 2
    assert taker().counters["read_here"] == 0


def test_blocks_that_are_given_out_before_the_process_has_read_them(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore
) -> None:
    """Goal: the engine's process reads what it gives out, and those rows are stored; never the next request's. Method:
    the process is stopped with a question that names the blocks; another request is computed there."""
    toy = start_apart()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    first = end(toy, FIRST, "a")
    taker.wait_until_asked()
    compute(toy, SECOND)
    toy.worker.settle()
    taker.kill(signal.SIGCONT)
    second = end(toy, SECOND, "b")
    assert judge(left(first, left_apart), FIRST) == {"right": 6}
    assert judge(left(second, left_apart), SECOND) == {"right": 6}
    assert taker().counters["read_here"] == 1


def test_rows_that_are_forgotten_before_the_process_has_read_them(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore
) -> None:
    """Goal: as above, of a reset, which leaves each block its life. Method: the same, by other weights."""
    toy = start_apart(weights_version=1)
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    told = end(toy, FIRST)
    taker.wait_until_asked()
    toy.scheduler.weights.changed(2)
    toy.scheduler.reset()
    toy.worker.begin(toy.scheduler.step({}))
    toy.worker.end()
    toy.worker.settle()
    taker.kill(signal.SIGCONT)
    found = left(told, left_apart)
    assert judge(found, FIRST) == {"right": 6}
    assert found.weights_versions == ((0, 6, 1),)


def test_a_worker_that_stays_behind_costs_its_own_request_alone(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore
) -> None:
    """Goal: the client is told why, the request counts as unstored, and the next one has its rows. Method: the worker
    is held up for longer than an answer may take."""
    toy = start_apart(late=True, limits={"answer_s": 0.05})
    go = held(toy)
    compute(toy, FIRST)
    with pytest.raises(RowError, match=r"written by the worker within 0\.05 s, got a worker that is behind"):
        left(end(toy, FIRST, "a"), left_apart)
    assert taker().counters["unstored"] == 1
    go.set()
    compute(toy, SECOND)
    toy.worker.settle()
    assert judge(left(end(toy, SECOND, "b"), left_apart), SECOND) == {"right": 6}


def test_a_store_that_fails_costs_its_own_request_alone(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore
) -> None:
    """Goal: the client has the store's own words, and the others their rows. Method: four wait for one question; one
    has an id that no rollout can have, one a key that is no text."""
    toy = start_apart()
    compute(toy, FIRST)
    taker.kill(signal.SIGSTOP)
    before = end(toy, FIRST, "before")
    taker.wait_until_asked()
    told = [end(toy, FIRST, name) for name in ("a", "x" * 999, "b", "\ud800")]
    taker.kill(signal.SIGCONT)
    with pytest.raises(RowError, match="rollout id: wanted at most 200 bytes"):
        left(told[1], left_apart)
    with pytest.raises(RowError, match="UnicodeEncodeError"):
        left(told[3], left_apart)
    for each in (before, told[0], told[2], end(toy, FIRST, "after")):
        assert judge(left(each, left_apart), FIRST) == {"right": 6}
    assert taker().counters["unstored"] == 2


def test_a_request_that_was_preempted(start_apart: Callable[..., Toy], left_apart: RolloutStore) -> None:
    """Goal: each token has the row that it was sampled with, where each was read by another process. Method: other
    weights come after a preemption; the rows of the first computation lie in spare blocks, those of the second in its
    own."""
    toy, tokens = start_apart(late=True, weights_version=1), [*FIRST, 2, 8]
    go = held(toy)
    request = admitted(toy, tokens, [5, 2])
    request.all_token_ids, request.num_prompt_tokens = tokens[:7], PROMPT
    stepped(toy, request, 6)
    toy.scheduler.preempted(request)
    toy.weights = 1
    toy.scheduler.weights.changed(2)
    request = admitted(toy, tokens, [5, 2])
    stepped(toy, request, 8)
    go.set()
    told = end(toy, tokens)
    found = left(told, left_apart)
    assert judge(found, tokens, [0] * 6 + [1] * 2) == {"right": 8}
    assert found.weights_versions == ((0, 6, 1), (6, 8, 2))


def test_rows_that_are_missing_everywhere(
    start_apart: Callable[..., Toy], taker: Takers, left_apart: RolloutStore
) -> None:
    """Goal: they are missing in the rollout, too, and the others are there. Method: a router's ids that are none."""
    toy = start_apart()
    toy.loses = {1, 2}
    toy.ask("r", FIRST)
    told = toy.scheduler.finished(Key("s"), toy.table, 6, Tokens([*FIRST, 7], PROMPT))
    assert told is not None
    assert judge(left(told, left_apart), FIRST) == {"right": 4, "missing": 2}
    assert taker().counters["read_here"] == 2

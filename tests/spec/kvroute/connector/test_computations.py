"""A token keeps the row that it was sampled with, whatever is computed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from toy_ends import SAID, again, of, preempted
from toy_engine import Toy, admitted, held, judge, row_of, stepped

from kvroute.connector import Key, Tokens


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

"""The two ends of a connector, driven by a small engine of our own: rows are those of the tokens, or missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import Asked, Toy, judge
from waiting import GIVE_UP_S

import kvroute
from kvroute.connector import routes, unseen
from kvroute.connector.meter import SECONDS

Start = Callable[..., Toy]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
asked = st.lists(st.tuples(prompts, st.lists(st.integers(1, 9), max_size=5)), min_size=1, max_size=6)


@examples(40)
@given(asked, st.booleans())
def test_every_row_is_that_of_its_tokens(what: list[tuple[list[int], list[int]]], late: bool) -> None:
    """Goal: hits, chunks and blocks given out again lose and mix nothing. Method: prompts over two tokens, so that many
    share a beginning, through a pool of nine blocks.
    """
    toy = Toy(late=late)
    for i, (tokens, chunks) in enumerate(what):
        assert judge(routes(toy.ask(str(i), tokens, chunks)), tokens) == {"right": len(tokens)}
    toy.worker.settle()
    toy.worker.blocks.assert_consistent()
    assert not toy.worker.missing
    toy.close()


@examples(20)
@given(st.integers(0, 19), st.integers(1, 20), st.booleans())
def test_ids_that_no_expert_has_cost_their_own_row_only(lost: int, n: int, late: bool) -> None:
    """Goal: rows that were not captured are missing, all others are there. Method: one token's ids are -1, which the
    rows' dtype does not have; the other rows of the step were refused with it before."""
    toy = Toy(late=late)
    toy.loses, tokens = {lost}, [i % 5 for i in range(n)]
    found = routes(toy.ask("r", tokens))
    assert judge(found, tokens) == Counter({"right": n - (lost < n), "missing": int(lost < n)})
    assert toy.worker.missing.total() == int(lost < n)
    toy.close()


@pytest.mark.parametrize("late", [False, True])
def test_another_engine_gets_the_rows_of_the_kv_that_it_loads(start: Start, outside: Any, late: bool) -> None:
    """Goal: rows of loaded KV come without the last router's choice, or with it if a setting says so; rows that the
    engine computed are whole. Method: a second engine with the first one's KV and store of rows; then KV of which a bit
    has changed."""
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    kept, store = outside(tokens[:8], tokens, late=late)
    for witness in ("missing", "flagged"):
        other = start(kept=kept, late=late, store=store, witness=witness)
        for name, loaded in (("c", 8), ("again", 0)):
            answer = other.ask(name, tokens)
            assert other.loaded == loaded
            found = routes(answer)
            assert found.layer_ids == (0, 1)
            if witness == "missing":
                assert judge(found, tokens) == {"partly": 8, "right": 3}
                assert found.known.tolist() == [[True, False]] * 8 + [[True, True]] * 3
                assert found.missing == ((0, 8),)
            else:
                assert judge(found, tokens) == {"right": len(tokens)}
            assert unseen(answer) == (((0, 8),) if witness == "flagged" else ())
    hashes = Asked("", tokens).block_hashes
    kept[hashes[1]]["layers.1"].view(torch.int32)[0, 2, 3] ^= 1
    other = start(kept=kept, late=late, store=store)
    assert judge(routes(other.ask("d", tokens)), tokens) == {"partly": 4, "right": 3, "missing": 4}
    assert other.worker.missing == {"rows of other KV than was loaded": 4}


@examples(20)
@given(
    st.sets(st.integers(0, 3), max_size=2),
    st.lists(st.integers(1, 9), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_what_was_computed_from_kv_that_did_not_come_is_computed_again(
    tmp_path_factory: Any, fails: set[int], chunks: list[int], later: bool, late: bool
) -> None:
    """Goal: no row of a wrong computation, and no row lost for later requests. Method: loads of some blocks fail; every
    row is right in the end, also for requests that hit the same blocks."""
    tokens, kept = [i * i % 7 for i in range(18)], dict[bytes, Any]()
    said = {"store": f"file://{tmp_path_factory.mktemp('rows')}", "witness": "flagged"}
    first = Toy(kept=kept, late=late, **said)
    first.ask("a", tokens)
    first.settle()
    said |= {"store": said["store"] + "?mode=read"}
    other = Toy(kept=kept, later=later, late=late, **said)
    other.fails = set(fails)
    assert judge(routes(other.ask("b", tokens, chunks)), tokens) == {"right": len(tokens)}
    assert judge(routes(other.ask("c", tokens)), tokens) == {"right": len(tokens)}
    assert other.loaded == 0, "hit locally"
    for each in (other, first):
        each.close()


@pytest.mark.parametrize("later", [False, True])
def test_what_is_computed_here_is_whole_whatever_was_loaded_before(start: Start, outside: Any, later: bool) -> None:
    """Goal: only positions whose KV came from outside lose the last router's choice. Method: an engine loads two
    blocks, of which the second fails and is computed again; then the blocks of another engine, which loaded both, are
    given to other requests, and the same prompt is computed without KV from outside."""
    tokens = list(range(11))
    kept, store = outside(tokens)
    other = start(kept=kept, later=later, store=store)
    other.fails = {1}
    assert routes(other.ask("b", tokens)).missing == ((0, 4),)
    other = start(kept=kept, later=later, blocks=4, store=store)
    assert routes(other.ask("c", tokens)).missing == ((0, 8),)
    assert routes(other.ask("d", [7] * 13)).complete
    kept.clear()
    found = routes(other.ask("e", tokens))
    assert found.complete
    assert judge(found, tokens) == {"right": 11}
    assert other.loaded == 0


def test_after_new_weights_nothing_is_readable(start: Start, tmp_path: Path) -> None:
    """Goal: keys and memory of earlier weights are gone, and rows of the new ones are there. Method: a reset of both
    ends; the store has nothing either; every row is checked."""
    tokens, kept = list(range(9)), dict[bytes, Any]()
    toy = start(kept=kept, store=f"file://{tmp_path}")
    toy.ask("a", tokens)
    toy.settle()
    toy.scheduler.reset()
    toy.cached.clear()
    assert judge(routes(toy.ask("b", tokens)), tokens) == {"right": 9}
    assert toy.loaded == 0


def test_an_engine_that_says_again_where_its_rows_are(start: Start) -> None:
    """Goal: an engine may repeat its handshake when it wakes up, before the worker's next step. Method: it does so when
    the weights have another name, which the worker does not know yet."""
    toy, tokens = start(), [3, 1, 4, 1, 5, 9]
    assert judge(routes(toy.ask("a", tokens)), tokens) == {"right": len(tokens)}
    toy.scheduler.reset()
    toy.scheduler.weights.changed(7)
    view = toy.scheduler.view
    toy.scheduler.attach(toy.worker.handshake())
    assert toy.scheduler.view is view
    toy.cached.clear()
    found = routes(toy.ask("b", tokens))
    assert (judge(found, tokens), found.weights_versions) == ({"right": len(tokens)}, ((0, len(tokens), 7),))


def test_tokens_before_any_block_are_refused(start: Start) -> None:
    """Goal: an engine whose pool was never heard of hands out no row of an earlier life. Method: a step without one."""
    with pytest.raises(kvroute.ConfigError, match="before any block"):
        start().scheduler.step({"a": 3})


def test_a_copy_of_a_block_that_is_hit_in_part_has_no_rows_behind_the_hit(start: Start) -> None:
    """Goal: the rows of another request's own tokens stay behind. Method: a request goes on in a copy of a block of
    which it shares two tokens, and computes the third; a copy for a block that nobody was given here brings nothing."""
    toy, tokens = start(), [3, 1, 4, 1]
    rows, worker = toy.scheduler, toy.worker

    def step(request: Asked, block: int, copies: list[tuple[int, int]], ids: list[int]) -> None:
        rows.given([block])
        rows.matched(request, 0, 0, later=False)
        rows.admitted(request, [block], 0)
        worker.begin(rows.step({request.request_id: len(ids)}, copies=copies))
        for hook in toy.hooks:
            hook(torch.tensor([[at, at + 1] for at in ids]))
        worker.slots = block * 4 + request.num_computed_tokens + torch.arange(len(ids))
        worker.end()

    step(Asked("a", tokens), 0, [], [0, 1, 2, 3])
    second = Asked("b", [*tokens[:2], 5, 9])
    second.num_computed_tokens = 2
    rows.given([7])
    step(second, 1, [(0, 1), (0, 7)], [6])
    worker.settle()
    copied = worker.blocks.read("routing", [1, 7], 0, 8)
    assert copied.valid.tolist() == [True, True, True, False] + [False] * 4
    assert copied.values[:3, 0, 0].tolist() == [0, 1, 6]


def test_the_wait_of_each_answer_is_timed(start: Start) -> None:
    """Goal: an operator sees how long answers wait for rows. Method: two answers, and the scheduler's own meter."""
    toy = start(limits={"metrics_s": 0.0})
    for name in ("a", "b"):
        toy.ask(name, [1, 2, 3, 4, 5])
    toy.settle()
    taken = toy.scheduler.meter.take()
    assert taken is not None
    waits_s = taken[SECONDS]["answer"]
    assert len(waits_s) == 2
    assert all(0 <= wait_s < GIVE_UP_S for wait_s in waits_s)

"""Routing weights in an engine's answers: of the pass that made each id, or missing with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_engine import Toy, admitted, held, stepped
from toy_pair import PROMPT, SAID, handed_over, makers, two
from toy_requests import row_of, weights_of

from cache_manager.errors import ConfigError, RowError
from kvroute import RoutingWeights
from kvroute.capture.step_weights import FORM, NO_WEIGHTS, OTHER_TOKENS, StepWeights
from kvroute.connector import Key, Tokens, routes, routing_weights
from kvroute.connector.settings import Common
from kvroute.routing import routing_spec

Start = Callable[..., Toy]
FIRST = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def assert_right(found: RoutingWeights, tokens: Sequence[int], by: Sequence[int] | None = None) -> None:
    """Every id and every bit of a weight is that of its token by the weights ``by`` that computed it."""
    assert found.routes.valid.all()
    assert len(found) == len(tokens)
    for i in range(len(tokens)):
        weights = by[i] if by else 0
        assert (found.routes.ids[i] == row_of(tokens[: i + 1], weights)).all(), i
        assert found.weights[i].tobytes() == weights_of(tokens[: i + 1], weights).tobytes(), i


@pytest.mark.parametrize("late", [False, True])
def test_each_id_has_its_weight(start: Start, late: bool) -> None:
    """Goal: bit for bit, in chunks, in hits and in blocks that come again. Method: three requests, of which the second
    hits the first one's blocks and the third has them taken away."""
    toy = start(routing_weights=True, late=late)
    for name, tokens in (("a", FIRST), ("b", [*FIRST, 7, 8]), ("c", list(range(30))), ("d", FIRST)):
        assert_right(routing_weights(toy.ask(name, tokens, [3, 64])), tokens)


def test_weights_come_back_with_their_kv(start: Start, outside: Any) -> None:
    """Goal: a store, and an engine that starts again. Method: KV and rows of other weights are loaded, the rest is
    computed; an engine that wants no weights of that store, or wants some where there are none, gets no rows of it."""
    kept, store = outside(FIRST, routing_weights=True)
    toy = start(kept=kept, store=store, witness="flagged", routing_weights=True)
    assert_right(routing_weights(toy.ask("a", FIRST)), FIRST)
    assert toy.loaded == 8
    plain = start(kept=kept, store=store, witness="flagged")
    assert routes(plain.ask("a", FIRST)).valid.all()
    assert plain.loaded == 0


def test_a_new_model_has_weights_of_its_own(start: Start, tmp_path: Path) -> None:
    """Goal: an update. Method: a reset of both ends; the store has nothing of it either."""
    toy = start(kept={}, store=f"file://{tmp_path}", routing_weights=True)
    toy.ask("a", FIRST)
    toy.settle()
    toy.scheduler.reset()
    toy.cached.clear()
    toy.weights = 1
    toy.kept = {}
    assert_right(routing_weights(toy.ask("b", FIRST)), FIRST, [1] * 9)


def test_decode_has_the_weights_that_prefill_computed_with() -> None:
    """Goal: prefill and decode apart. Method: two engines whose weights differ for the same tokens."""
    with two(routing_weights=True) as (first, second):
        ticket = handed_over(first, PROMPT)
        answer = second.ask("d", PROMPT, brought=len(PROMPT), ticket=ticket, more=SAID)
        assert_right(routing_weights(answer), [*PROMPT, *SAID], makers(len(PROMPT), len(SAID)))


@pytest.mark.parametrize("late", [False, True])
def test_a_token_keeps_the_weights_that_it_was_sampled_with(start: Start, late: bool) -> None:
    """Goal: preemption, and an update meanwhile. Method: a request loses its blocks after six tokens, other blocks are
    given out while the worker may be behind, and it is computed again by other weights."""
    toy = start(late=late, weights_version=1, routing_weights=True)
    go = held(toy) if late else None
    tokens = [*FIRST[:4], 7, 2, 8, 1, 6]
    request = admitted(toy, tokens, [5, 2, 3])
    request.all_token_ids, request.num_prompt_tokens = tokens[:7], 4
    stepped(toy, request, 6)
    toy.scheduler.preempted(request)
    toy.weights = 1
    toy.scheduler.weights.changed(2)
    if go is not None:
        go.set()
        toy.worker.settle()
    request = admitted(toy, tokens, [5, 2, 3])
    stepped(toy, request, len(tokens))
    ended = toy.scheduler.forget("r")
    bound = Tokens([*tokens, 5], 4)
    told = toy.scheduler.finished(Key("r"), [5, 2, 3], len(tokens), bound, ended=ended)
    assert told is not None
    found = routing_weights({"kv_transfer_params": told.result(60)})
    assert_right(found, tokens, [0] * 6 + [1] * 3)


def test_a_pass_without_weights_has_no_ids_either(start: Start) -> None:
    """Goal: never one without the other. Method: routers that tell none in one step, and one that tells no number."""
    toy = start(routing_weights=True)
    toy.quiet = True
    lost = routing_weights(toy.ask("a", FIRST))
    assert not lost.routes.valid.any()
    assert np.isnan(lost.weights).all()
    assert list(toy.worker.missing) == [NO_WEIGHTS["a call in each pass"].partition(":")[0]]
    toy.quiet = False
    toy.cached.clear()
    assert_right(routing_weights(toy.ask("b", FIRST)), FIRST)

    class Infinite(Toy):
        def weigh(self, prefixes: Any) -> None:
            weights = np.stack([weights_of(prefix) for prefix in prefixes])
            weights[2, 1, 0] = np.inf
            assert isinstance(self.worker.weights, StepWeights)
            for layer in self.layers:
                self.worker.weights.hook(layer)(torch.from_numpy(weights[:, layer].copy()))

    infinite = Infinite(routing_weights=True)
    try:
        found = routing_weights(infinite.ask("a", FIRST))
        assert found.routes.missing == ((2, 3),)
        assert not found.routes.known[2].any()
    finally:
        infinite.close()


def test_who_has_no_weights_says_so(start: Start) -> None:
    """Goal: bad input is named. Method: an answer without weights, one with those of other ids or with one changed
    character, and an engine that has no hook for them."""
    plain = start().ask("a", FIRST)
    with pytest.raises(RowError, match=r"wanted an answer with weights beside its routes: .*routing_weights, got one"):
        routing_weights(plain)
    answer = start(routing_weights=True).ask("a", FIRST)
    other = start(routing_weights=True).ask("a", [*FIRST[:8], 7])
    beside = answer["kv_transfer_params"]["kvroute"]
    own = beside["routing_weights"]["0"]
    beside["routing_weights"]["0"] = other["kv_transfer_params"]["kvroute"]["routing_weights"]["0"]
    with pytest.raises(RowError, match="checksum"):
        routing_weights(answer)
    record = own["record"]
    for wrong, wanted in (
        ({"format": own["format"], "record": record[:-8]}, "wanted 160 bytes"),
        (
            {"format": own["format"], "record": record[:40] + ("A" if record[40] != "A" else "B") + record[41:]},
            "checks",
        ),
        ({"format": "kvroute.routing_weights/2", "record": record}, "wanted kvroute.routing_weights/1"),
        ({"record": record}, "wanted an object of kvroute.routing_weights/1"),
    ):
        beside["routing_weights"]["0"] = wrong
        with pytest.raises(RowError, match=wanted):
            routing_weights(answer)
    with pytest.raises(
        ConfigError, match="routing_weights: wanted expert ids alone: this engine's hook has no weights"
    ):
        Common.of({"routing_weights": True})


def test_why_a_step_has_no_weights() -> None:
    """Goal: each way in which a pass is not one of each router is named. Method: hooks that are called too often, not
    at all, with one memory, with other widths, types and numbers of tokens."""
    spec = routing_spec(num_experts=8, top_k=2, layer_ids=[1, 3], num_layers=4, block_tokens=4)
    weights = StepWeights(spec)
    one, two_rows = torch.rand(3, 2), torch.rand(3, 2)

    def taken(first: Any, *second: Any) -> Any:
        weights.begin()
        weights.hook(1)(first)
        for value in second:
            weights.hook(3)(value)
        return weights.take(3)

    assert torch.equal(taken(one, two_rows), torch.stack([one, two_rows], 1))
    assert taken(one) == NO_WEIGHTS["a call in each pass"]
    assert taken(one, two_rows, two_rows) == NO_WEIGHTS["one call a pass"]
    assert taken(one, one) == NO_WEIGHTS["values in memory of their own"]
    assert taken(one, torch.rand(3, 3)) == FORM
    assert taken(one.double(), two_rows.double()) == FORM
    assert taken(torch.rand(2, 2), torch.rand(2, 2)) == OTHER_TOKENS

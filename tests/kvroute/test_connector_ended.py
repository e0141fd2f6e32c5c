"""Whose rows an answer has when its request ends while the worker, its drafts or its loads are under way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import Asked, Toy, admitted, begun, computed, held, judge, seen

from cache_manager.errors import RegionError
from kvroute.connector import ends, routes
from kvroute.routes import Routes

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def seen_late(toy: Toy, tokens: int, go: threading.Event) -> Routes:
    """What is answered when the device goes on only after the request has ended."""
    told = begun(toy, tokens, toy.scheduler.forget("r"))
    threading.Event().wait(0.02)
    assert not told.done()
    go.set()
    return routes({"kv_transfer_params": told.result(60)})


def test_a_rejected_draft_is_not_taken_for_the_token_in_its_place() -> None:
    """Goal: an answer has its own last row. Method: a step computes a token and two drafts, which are rejected; the
    next one, the token in their place, which ends the request while the device is late.
    """
    toy = Toy(late=True)
    draft, right = [3, 1, 4, 7, 7], [3, 1, 4, 2]
    request = admitted(toy, draft, [5, 2])
    computed(toy, request, 5)
    toy.worker.end()
    toy.worker.settle()
    request.tokens, request.num_computed_tokens = right, 3
    go = held(toy)
    computed(toy, request, 1)
    toy.worker.end()
    request.num_computed_tokens = 4
    assert judge(seen_late(toy, 4, go), right) == {"right": 4}
    toy.close()


def test_a_step_that_began_before_it_was_thought_to_is_waited_for() -> None:
    """Goal: as above, of an engine that schedules ahead. Method: a step is sent before the drafts before it are
    rejected, and a third one after that; the second one ends the request.
    """
    toy = Toy(late=True)
    right = PROMPT[:5]
    request = admitted(toy, [*right[:4], 7, 7, 7], [5, 2])
    computed(toy, request, 7)
    toy.worker.end()
    toy.worker.settle()
    request.num_computed_tokens = 7
    second = toy.scheduler.step({"r": 1})
    request.num_computed_tokens = 8 - 3
    go = held(toy)
    request.tokens, request.num_computed_tokens = right, 4  # as the worker knows
    computed(toy, request, 1, second)
    toy.worker.end()
    request.num_computed_tokens = 5
    toy.scheduler.step({"r": 1})
    request.num_computed_tokens = 6
    assert judge(seen_late(toy, 5, go), right) == {"right": 5}
    toy.close()


def test_an_answer_waits_for_no_step_that_has_none_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an engine that schedules ahead does not wait for what it scheduled. Method: the step behind the last row is
    held up for longer than the test takes, of a request with and without rejected drafts.
    """
    monkeypatch.setattr(ends, "LATE_S", 0.05)
    for rejected in (0, 2):
        toy = Toy(late=True)
        request = admitted(toy, PROMPT, [5, 2, 3])
        computed(toy, request, 4 + rejected)
        toy.worker.end()
        request.num_computed_tokens += 4 + rejected  # as far as is known when the next step is sent
        toy.worker.settle()
        go = held(toy)
        meta = toy.scheduler.step({"r": 1})
        request.num_computed_tokens = 4
        computed(toy, request, 1, meta)
        toy.worker.end()
        request.num_computed_tokens = 5
        assert judge(seen(toy, 4, toy.scheduler.forget("r")), PROMPT[:4]) == {"right": 4}
        go.set()
        toy.close()


def test_an_aborted_request_waits_for_the_comparison_of_what_it_loads(tmp_path: Path) -> None:
    """Goal: rows of a store are handed out when they have been compared. Method: a request is aborted between the
    landing of its rows and their comparison; its last row is one of those, and its KV is other KV.
    """
    kept, store = dict[bytes, Any](), f"file://{tmp_path}"
    first = Toy(kept=kept, late=True, store=store, witness="flagged")
    first.ask("a", PROMPT)
    first.settle()
    hashes = Asked("", PROMPT).block_hashes
    kept[hashes[1]]["layers.1"].view(torch.int32)[0, 2, 3] ^= 1
    other = Toy(kept=kept, late=True, store=store + "?mode=read", witness="flagged")
    request = admitted(other, PROMPT, [5, 2, 3], external=8)
    compare, landed, go = other.worker._compare, threading.Event(), threading.Event()

    def compared(*come: Any) -> None:
        landed.set()
        assert go.wait(60)
        compare(*come)

    other.worker._compare = compared  # type: ignore[method-assign]
    computed(other, request, 3)
    for block, each in zip((5, 2), hashes, strict=False):
        for name, page in kept[each].items():
            other.kv[name][block] = page
    other.worker.end()
    assert landed.wait(60)
    assert judge(seen_late(other, 8, go), PROMPT[:8]) == {"right": 4, "missing": 4}
    for each in (first, other):
        each.close()


@pytest.mark.parametrize("late", [False, True])
def test_kv_that_never_came_has_no_rows(tmp_path: Path, late: bool) -> None:
    """Goal: rows without KV to compare them with are nobody's. Method: a request is aborted while its KV comes; its
    rows have come before.
    """
    kept, store = dict[bytes, Any](), f"file://{tmp_path}"
    first = Toy(kept=kept, store=store, witness="flagged")
    first.ask("a", PROMPT)
    first.settle()
    other = Toy(kept=kept, late=late, later=True, store=store + "?mode=read", witness="flagged")
    request = admitted(other, PROMPT, [5, 2, 3], external=8, later=True)
    other.worker.begin(other.scheduler.step({}))
    other.worker.end()
    other.settle()
    assert other.worker.blocks.complete([5, 2]).all()
    assert request.num_computed_tokens == 8
    assert not seen(other, 8, other.scheduler.forget("r")).valid.any()
    for each in (first, other):
        each.close()


def test_a_token_that_is_computed_again_is_whole(tmp_path: Path) -> None:
    """Goal: of a prompt whose KV came whole an engine computes the last token again, for its logits: that row is its
    own, what the last router chose too. Method: two full blocks come, then a step computes the eighth token.
    """
    kept, store = dict[bytes, Any](), f"file://{tmp_path}"
    first = Toy(kept=kept, store=store)
    first.ask("a", PROMPT)
    first.settle()
    other = Toy(kept=kept, later=True, store=store + "?mode=read")
    request = admitted(other, PROMPT[:8], [5, 2], external=8, later=True)
    other.worker.begin(other.scheduler.step({}))
    for block, each in zip(other.table, request.block_hashes, strict=True):
        for name, page in kept[each].items():
            other.kv[name][block] = page
    other.worker.end()
    other.scheduler.loaded("r")
    request.num_computed_tokens = 7
    computed(other, request, 1)
    other.worker.end()
    request.num_computed_tokens = 8
    found = seen(other, 8, other.scheduler.forget("r"))
    assert found.known.tolist() == [[True, False]] * 7 + [[True, True]]
    assert judge(found, PROMPT[:8]) == {"partly": 7, "right": 1}
    for each in (first, other):
        each.close()


def test_a_scheduler_that_attaches_again_lets_the_first_region_go() -> None:
    """Goal: no leak. Method: two workers, one after the other."""
    first, second = Toy(late=True), Toy()
    view = first.scheduler.view
    assert view is not None
    first.scheduler.attach(second.worker.handshake())
    with pytest.raises(RegionError, match="closed"):
        view.generations([0])
    assert first.scheduler.view is not None
    assert first.scheduler.view.generations([0]).tolist() == [0]
    for each in (first, second):
        each.close()

"""A worker whose device, store or own thread is late or faulty: rows that never come are missing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import TOKENS, Asked, Toy, admitted, computed, held, judge, stepped
from toy_seen import begun, seen
from waiting import GIVE_UP_S

from cache_manager.job import RestoreJob
from kvroute.connector import routes
from kvroute.connector.behind import Behind
from kvroute.connector.messages import Loads, StepMeta
from kvroute.routes import Routes
from kvroute.witness import Run

Start = Callable[..., Toy]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def seen_late(toy: Toy, tokens: int, go: threading.Event) -> Routes:
    """What is answered when the device goes on only after the request has ended."""
    told = begun(toy, tokens, toy.scheduler.forget("r"))
    threading.Event().wait(0.02)
    assert not told.done()
    go.set()
    return routes({"kv_transfer_params": told.result(GIVE_UP_S)})


def test_a_step_that_began_before_it_was_thought_to_is_waited_for(start: Start) -> None:
    """Goal: an answer has its own last row, not that of a rejected draft in its place, where an engine schedules ahead.
    Method: a step is sent before the drafts before it are rejected, and a third one after that; the second one ends the
    request.
    """
    toy = start(late=True)
    right = PROMPT[:5]
    request = admitted(toy, [*right[:4], 7, 7, 7], [5, 2])
    stepped(toy, request, 7)
    toy.worker.settle()
    second = toy.scheduler.step({"r": 1})
    request.num_computed_tokens = 8 - 3
    go = held(toy)
    request.tokens, request.num_computed_tokens = right, 4  # as the worker knows
    stepped(toy, request, 1, second)
    toy.scheduler.step({"r": 1})
    request.num_computed_tokens = 6
    assert judge(seen_late(toy, 5, go), right) == {"right": 5}


def test_an_answer_waits_for_no_step_that_has_none_of_its_rows(start: Start) -> None:
    """Goal: an engine that schedules ahead does not wait for what it scheduled. Method: the step behind the last row is
    held up for longer than the test takes, of a request with and without rejected drafts.
    """
    for rejected in (0, 2):
        toy = start(late=True, limits={"answer_s": 0.05})
        request = admitted(toy, PROMPT, [5, 2, 3])
        stepped(toy, request, 4 + rejected)  # as far as is known when the next step is sent
        toy.worker.settle()
        go = held(toy)
        meta = toy.scheduler.step({"r": 1})
        request.num_computed_tokens = 4
        stepped(toy, request, 1, meta)
        assert judge(seen(toy, 4, toy.scheduler.forget("r")), PROMPT[:4]) == {"right": 4}
        go.set()


def test_an_aborted_request_waits_for_the_comparison_of_what_it_loads(start: Start, outside: Any) -> None:
    """Goal: rows of a store are handed out only after their comparison. Method: a request is aborted between the
    landing of its rows and their comparison; its last row is one of them, and its KV is not the KV of those rows."""
    kept, store = outside(PROMPT, late=True)
    hashes = Asked("", PROMPT).block_hashes
    kept[hashes[1]]["layers.1"].view(torch.int32)[0, 2, 3] ^= 1
    other = start(kept=kept, late=True, store=store, witness="flagged")
    request = admitted(other, PROMPT, [5, 2, 3], external=8)
    compare, landed, go = other.worker.carrier.compare, threading.Event(), threading.Event()

    def compared(*come: Any) -> None:
        landed.set()
        assert go.wait(GIVE_UP_S)
        compare(*come)

    other.worker.carrier.compare = compared  # type: ignore[method-assign]
    computed(other, request, 3)
    for block, each in zip((5, 2), hashes, strict=False):
        for name, page in kept[each].items():
            other.kv[name][block] = page
    other.worker.end()
    assert landed.wait(GIVE_UP_S)
    assert judge(seen_late(other, 8, go), PROMPT[:8]) == {"right": 4, "missing": 4}


@pytest.mark.parametrize("late", [False, True])
def test_kv_that_never_came_has_no_rows(start: Start, outside: Any, late: bool) -> None:
    """Goal: rows without KV to compare them with are not handed out. Method: a request is aborted while its KV comes,
    after its rows have come."""
    kept, store = outside(PROMPT)
    other = start(kept=kept, late=late, later=True, store=store, witness="flagged")
    request = admitted(other, PROMPT, [5, 2, 3], external=8, later=True)
    other.worker.begin(other.scheduler.step({}))
    other.worker.end()
    other.settle()
    assert other.worker.blocks.complete([5, 2]).all()
    assert request.num_computed_tokens == 8
    assert not seen(other, 8, other.scheduler.forget("r")).valid.any()


def test_what_did_not_come_is_not_compared(start: Start, outside: Any) -> None:
    """Goal: a load counts as far as it has come. Method: KV of two blocks comes between steps, and that of the second
    one does not; of a block that came in part, the part counts."""
    kept, store = outside(PROMPT)
    for computed_tokens, blocks in ((8, [5, 2]), (6, [5, 2]), (4, [5]), (0, [])):
        toy = start(kept=kept, store=store, witness="flagged", later=True)
        request = admitted(toy, PROMPT, [5, 2, 3], external=8, later=True)
        toy.worker.begin(toy.scheduler.step({}))
        toy.worker.end()
        request.num_computed_tokens = computed_tokens
        toy.scheduler.loaded("r")
        landed = toy.scheduler.step({}).loads.landed
        assert [(run.blocks, run.tokens) for run in landed] == [(blocks, computed_tokens)] * bool(blocks)


def test_a_step_whose_end_never_came_is_not_forgotten(start: Start) -> None:
    """Goal: what has become of blocks is known although a pass ended in an error. Method: a step gives blocks out and
    has no end; the next one computes in them."""
    toy = start()
    toy.ask("before", PROMPT)
    request = admitted(toy, PROMPT[::-1], [5, 2, 3])
    toy.worker.begin(toy.scheduler.step({}))
    stepped(toy, request, len(PROMPT))
    assert toy.worker.blocks.counters.feed_gaps == 0
    assert judge(seen(toy, len(PROMPT), toy.scheduler.forget("r")), PROMPT[::-1]) == {"right": len(PROMPT)}


def test_a_token_that_is_computed_again_is_whole(start: Start, outside: Any) -> None:
    """Goal: of a prompt whose KV came whole an engine computes the last token again, for its logits: that row is the
    engine's own, the last router's choice included. Method: two full blocks come, then a step computes the eighth
    token."""
    kept, store = outside(PROMPT)
    other = start(kept=kept, later=True, store=store)
    request = admitted(other, PROMPT[:8], [5, 2], external=8, later=True)
    other.worker.begin(other.scheduler.step({}))
    for block, each in zip(other.table, request.block_hashes, strict=True):
        for name, page in kept[each].items():
            other.kv[name][block] = page
    other.worker.end()
    other.scheduler.loaded("r")
    request.num_computed_tokens = 7
    stepped(other, request, 1)
    found = seen(other, 8, other.scheduler.forget("r"))
    assert found.known.tolist() == [[True, False]] * 7 + [[True, True]]
    assert judge(found, PROMPT[:8]) == {"partly": 7, "right": 1}


@pytest.mark.parametrize(("late", "drafts"), [(False, True), (True, True), (True, False)])
def test_slots_are_those_of_the_pass(start: Start, late: bool, drafts: bool) -> None:
    """Goal: no row goes to another token. Method: the engine uses the memory of the slots again before the step's end,
    as a draft model does, or, without one, as soon as the step has ended, while the worker's host is behind.
    """
    toy = start(late=late, drafts=drafts)
    request, slots = admitted(toy, PROMPT, [5, 2, 3]), torch.zeros(11, dtype=torch.int64)
    computed(toy, request, 11)
    assert toy.worker.slots is not None
    toy.worker.slots = slots.copy_(toy.worker.slots)
    go = held(toy) if late else None
    if drafts:
        slots.copy_(slots.flip(0))
    toy.worker.end()
    slots.zero_()
    if go:
        go.set()
    assert judge(seen(toy, 11), PROMPT) == {"right": 11}


def _twice(toy: Toy) -> None:
    toy.hooks[0](torch.zeros((2, 2), dtype=torch.int64))


def _nowhere(toy: Toy) -> None:
    toy.worker.slots = None


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("spoil", [_twice, _nowhere])
def test_what_a_step_without_ids_has_written_over_is_missing(
    start: Start, late: bool, spoil: Callable[[Toy], None]
) -> None:
    """Goal: a row is of the KV that is there. Method: two rejected drafts are computed over by a step whose rows are
    lost, for one reason or another.
    """
    toy, right = start(late=late), [3, 1, 4, 2, 6]
    request = admitted(toy, [3, 1, 4, 7, 7], [5, 2])
    stepped(toy, request, 5)
    request.tokens, request.num_computed_tokens = right, 3
    computed(toy, request, 2)
    spoil(toy)
    toy.worker.end()
    found = judge(seen(toy, 5), right)
    assert not found["wrong"]
    assert found["missing"] >= 2


def test_a_store_that_is_stuck_holds_up_one_step_and_for_one_limit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: every wait ends. Method: the store never answers; a step with two loads, and one with another load."""
    toy = start(store=f"file://{tmp_path}", witness="flagged", limits={"restore_s": 0.2})
    go, waits = threading.Event(), list[float]()
    wait = RestoreJob.wait

    def waited(job: RestoreJob, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait(job, timeout_s)

    monkeypatch.setattr(RestoreJob, "wait", waited)
    assert toy.worker.store is not None
    monkeypatch.setattr(type(toy.worker.store), "get_into", lambda *_: go.wait(GIVE_UP_S) and [])
    feed, keys = toy.scheduler.feed, toy.scheduler.keys
    for blocks in ([1, 2], [3]):
        feed.renew(blocks)
        for block in blocks:
            feed.restore({keys.adopt(bytes([block]) * 32): block})
        toy.worker.begin(StepMeta(None, feed.take(), loads=Loads(runs=[Run(-1, blocks, TOKENS * len(blocks))])))
        toy.worker.end()
    assert sum(waits) <= 3 * 0.2
    assert len(waits) == 3  # each job once
    go.set()


def test_an_answer_waits_for_its_own_rows_alone(start: Start) -> None:
    """Goal: a worker that hangs delays no answer whose rows are written. Method: a request ends whose last step the
    worker has not reached; another one, written before, ends after it and is answered first."""
    toy = start(late=True)
    there = admitted(toy, PROMPT, [5, 2, 3])
    stepped(toy, there, len(PROMPT))
    toy.worker.settle()
    ended = toy.scheduler.forget("r")
    go, late = held(toy), PROMPT[::-1]
    waits = admitted(toy, late, [6, 7, 8])
    stepped(toy, waits, len(late))
    last = begun(toy, len(late), toy.scheduler.forget("r"))
    toy.table = [5, 2, 3]
    first = begun(toy, len(PROMPT), ended).result(GIVE_UP_S)
    assert judge(routes({"kv_transfer_params": first}), PROMPT) == {"right": len(PROMPT)}
    assert not last.done()
    go.set()
    assert judge(routes({"kv_transfer_params": last.result(GIVE_UP_S)}), late) == {"right": len(late)}


def test_a_step_whose_host_part_fails_leaves_no_row(start: Start) -> None:
    """Goal: a half-done step leaves no readable row, and the engine goes on. Method: one call after the device's work
    raises; a strict worker says so at the next step."""
    toy = start(late=True)
    toy.ask("r", PROMPT)
    toy.behind.put(lambda: 1 // 0)
    toy.worker.settle()
    assert not toy.worker.blocks.complete(toy.table[:2]).any()
    with pytest.raises(ZeroDivisionError):
        toy.ask("s", PROMPT)


def test_an_answer_of_a_step_whose_feed_fails_has_no_rows_and_waits_for_none(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: an answer waits for its step, not for a time limit. Method: the operations on blocks cannot be applied,
    once."""
    toy = start(late=True, strict=False, limits={"answer_s": 300.0})
    applied, fails = toy.worker.blocks.apply, [True]

    def apply(operations: bytes) -> None:
        if fails:
            raise RuntimeError(fails.pop())
        applied(operations)

    monkeypatch.setattr(toy.worker.blocks, "apply", apply)
    assert judge(routes(toy.ask("lost", PROMPT)), PROMPT).keys() == {"missing"}
    assert judge(routes(toy.ask("after", [7, *PROMPT])), [7, *PROMPT]).keys() == {"right"}


PENDING = 16


def test_calls_are_done_in_order_and_room_is_waited_for() -> None:
    """Goal: no call is lost, out of order or waits for ever. Method: more calls than there is room for, one that
    raises, from a thread that is held up in between; then a close that cannot wait."""
    done, failed, go = list[int](), list[BaseException](), threading.Event()
    behind = Behind("behind", failed.append, PENDING)
    behind.put(lambda: go.wait(GIVE_UP_S) and None)
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(
            lambda: [behind.put(lambda i=i: done.append(7 // (i - 3))) for i in range(PENDING + 3)]
        )  # type: ignore[misc]
        assert not behind.settle(0.01)
        assert not done
        go.set()
        putting.result(GIVE_UP_S)
    assert behind.settle(60)
    assert done == [7 // (i - 3) for i in range(PENDING + 3) if i != 3]
    assert [type(each) for each in failed] == [ZeroDivisionError]
    behind.put(sys.exit)  # not even this ends the thread: others wait for it
    assert behind.settle(60)
    assert [type(each) for each in failed] == [ZeroDivisionError, SystemExit]
    stop = threading.Event()
    behind.put(lambda: stop.wait(GIVE_UP_S) and None)
    assert not behind.close(0.01)
    stop.set()
    assert behind.close(60)

"""Rows cross from a prefill engine to a decode engine, beside KV that other software brings: the rules of
``crossing``."""

from __future__ import annotations

from typing import Any

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from toy_crossing import ToyCrossing
from toy_engine import Asked, judge
from toy_lent import early_ticket, lent
from toy_pair import (
    ALL,
    DECODE,
    OWN,
    PREFILL,
    PROMPT,
    SAID,
    handed_over,
    makers,
    taken,
    two,
)

from kvroute.connector import missing, routes, tickets
from kvroute.connector.carriers.port import Admission


@examples(30)
@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=16),
    st.lists(st.integers(1, 9), max_size=5),
    st.lists(st.integers(0, 9), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_decode_answers_with_the_rows_of_the_kv_that_it_was_given(
    prompt: list[int], chunks: list[int], said: list[int], late: bool, cached: bool
) -> None:
    """Goal: every row of the answer is there, from the engine that made its KV, the last and partial block included.
    Method: any prompt in any chunks, some of it in decode's own cache; prefill's rows differ from decode's."""
    with two(late=late) as (first, second):
        local = 0
        if cached:
            second.ask("before", prompt[: len(prompt) // 2])
            local = min(len(prompt) // 2 // 4, (len(prompt) - 1) // 4) * 4
        ticket = handed_over(first, prompt, chunks)
        answer = second.ask("d", prompt, [1], brought=len(prompt), ticket=ticket, more=said)
        tokens = [*prompt, *said]
        assert judge(routes(answer), tokens, makers(len(prompt), len(said), local)) == {"right": len(tokens)}
        assert missing(answer) == ()
        for each in (first, second):
            each.worker.settle()
            each.worker.blocks.assert_consistent()
            assert not each.worker.missing


def test_an_id_that_is_used_again() -> None:
    """Goal: a second fetch by any engine brings nothing, and reports that. Method: the same ticket twice at one decode
    engine, then at another."""
    with two() as (first, second):
        third = ToyCrossing()
        ticket = handed_over(first, PROMPT)
        assert taken(second, ticket) == ({"right": ALL}, [])
        for name, toy in (("again", second), ("other", third)):
            toy.cached.clear()
            verdict, (why,) = taken(toy, ticket, name=name)
            assert verdict == {"right": OWN, "missing": ALL - OWN}
            assert "gone" in why or "pulled" in why
        third.close()


@pytest.mark.parametrize("late", [False, True])
def test_blocks_that_are_given_out_again_while_they_are_lent(late: bool) -> None:
    """Goal: prefill lends a copy. Method: prefill computes other prompts over the blocks before decode asks."""
    with two(late=late) as (first, second):
        ticket = handed_over(first, PROMPT)
        for i in range(4):
            first.ask(f"other-{i}", [i + 3] * 30)
        assert taken(second, ticket) == ({"right": ALL}, [])


@pytest.mark.parametrize("version", [None, 2])
def test_weights_that_are_reset_at_prefill(version: int | None) -> None:
    """Goal: rows of earlier weights do not go out. Method: prefill's weights change between a ticket and its fetch, by
    a decode engine that knows prefill from before.
    """
    with two(weights_version=1) as (first, second):
        assert taken(second, handed_over(first, PROMPT[::-1]), PROMPT[::-1]) == ({"right": ALL}, [])
        ticket = handed_over(first, PROMPT)
        first.scheduler.weights.changed(version)
        first.scheduler.reset()
        first.cached.clear()
        first.ask("other", [7])
        verdict, (why,) = taken(second, ticket)
        assert verdict == {"right": OWN, "missing": ALL - OWN}
        assert "weights_version" in why


def test_a_full_queue_of_commands_costs_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a step ends, with its rows, whatever the node takes; a reset is never refused. Method: no command has room
    while a request that is lent ends early, and while the weights change."""
    with two(weights_version=1) as (first, second):
        ticket, rows = handed_over(first, PROMPT), first.scheduler
        request = Asked("early", PROMPT)
        rows.matched(request, 0, 0, later=False)
        rows.admitted(request, [9], 0, lends=True)
        rows.forget("early")
        monkeypatch.setattr("transfer.node.COMMANDS_MAX", 0)
        meta = rows.step({})
        assert meta.carrier.withdrawn, "the worker is told, and its node takes no command"
        first.worker.begin(meta)
        first.worker.end()
        rows.weights.changed(2)
        rows.reset()
        first.cached.clear()
        answer = first.ask("other", [7, 8])
        assert judge(routes(answer), [7, 8], [1, 1]) == {"right": 2}
        monkeypatch.undo()
        _, (why,) = taken(second, ticket)
        assert "weights_version" in why


def test_weights_of_another_version_are_refused_by_name() -> None:
    """Goal: a refusal names the field and both values. Method: engines of versions 4 and 5, and of other models."""
    for mine, theirs, words in (
        ({"weights_version": 4}, {"weights_version": 5}, ("weights_version", "4", "5")),
        ({"weights": "m"}, {"weights": "n"}, ("model", "m", "n")),
    ):
        first, second = ToyCrossing(**mine), ToyCrossing(**theirs)
        verdict, (why,) = taken(second, handed_over(first, PROMPT))
        assert verdict["missing"] == ALL - OWN
        assert why.startswith("refused: ")
        assert all(word in why for word in words)
        first.close()
        second.close()


def test_kv_of_two_weights_is_not_lent() -> None:
    """Goal: rows of two versions never get one name. Method: prefill's weights change and its KV stays, before a prompt
    and in the middle of one; then a reset."""
    with two() as (first, second):
        first.ask("before", [1, 2, 3])
        first.between = lambda: first.scheduler.weights.changed()
        for name in ("middle", "whole"):
            ticket = handed_over(first, PROMPT, [4, 7], name)
            assert ticket == {"why": tickets.MIXED}
            second.cached.clear()
            verdict, why = taken(second, ticket, name=name)
            assert (verdict, why) == ({"right": OWN, "missing": ALL - OWN}, [tickets.MIXED])
            first.between = lambda: None
        assert not lent(first).counters.offers_in_flight


def test_rows_that_were_not_captured_are_missing_alone() -> None:
    """Goal: KV came, a row did not. Method: prefill loses two rows; in the block of each the others are there."""
    with two() as (first, second):
        first.loses = {1, 9}
        answer = second.ask("d", PROMPT, brought=len(PROMPT), ticket=handed_over(first, PROMPT), more=SAID)
        found = routes(answer)
        assert judge(found, [*PROMPT, *SAID], makers(len(PROMPT), len(SAID))) == {"right": ALL - 2, "missing": 2}
        assert found.missing == ((1, 2), (9, 10))
        assert missing(answer) == (
            (1, 2, "prefill had rows of 3 of the 4 tokens"),
            (9, 10, "prefill had rows of 1 of the 2 tokens"),
        )


@examples(20)
@given(st.sets(st.integers(0, 2), min_size=1), st.booleans())
def test_rows_came_and_their_kv_did_not(fails: set[int], late: bool) -> None:
    """Goal: rows are not handed out where their KV is missing. Method: rows have landed; then blocks of KV fail, and
    decode computes from the first of them on."""
    with two(late=late) as (first, second):
        ticket = handed_over(first, PROMPT)
        second.unbrought = set(fails)
        answer = second.ask("d", PROMPT, [3], brought=len(PROMPT), ticket=ticket, more=SAID)
        good = min(fails) * 4
        by = [PREFILL] * good + [DECODE] * (ALL - good)
        assert judge(routes(answer), [*PROMPT, *SAID], by) == {"right": ALL}


@pytest.mark.parametrize("chunks", [[6, 5], [8, 3], [11]])
def test_a_prompt_that_is_computed_again_is_lent_anew(chunks: list[int]) -> None:
    """Goal: rows are of the computation whose KV goes over. Method: prefill's request is preempted after its first
    chunk, or after all, and computed again by other weights in other blocks; what it had lent is gone.
    """
    with two() as (first, second):
        old = list[Any]()

        def preempt() -> None:
            first.between = lambda: None
            old.append(early_ticket(first))
            request = first.request
            assert request is not None
            given = [first.free.pop(0) for _ in first.table]
            first.free += first.table
            first.table = given
            first.scheduler.given(given)
            assert first.scheduler.matched(request, 0, 0, later=False) == 0
            first.scheduler.admitted(request, given, 0, lends=True)
            first.weights, request.num_computed_tokens = 2, 0

        first.between = preempt
        ticket = handed_over(first, PROMPT, chunks)
        assert ticket["id"] != old[0]["id"]
        verdict, (why,) = taken(second, old[0])
        assert verdict["missing"] == ALL - OWN
        assert why.startswith("gone")
        second.cached.clear()
        answer = second.ask("e", PROMPT, brought=len(PROMPT), ticket=ticket, more=SAID)
        by = [2] * (len(PROMPT) - 1) + [DECODE] * OWN
        assert judge(routes(answer), [*PROMPT, *SAID], by) == {"right": ALL}


def test_a_reason_that_comes_behind_the_end_is_of_no_request() -> None:
    """Goal: the scheduler keeps nothing of requests that have ended, and a name that comes again has no reasons of
    before. Method: the worker's reasons come before the request's end, and once more behind it."""
    reasons = {"d": {0: "gone"}}
    with two() as (_, second):
        assert second.ask("d", PROMPT, brought=len(PROMPT), more=SAID)
        carrier = second.scheduler.carrier
        assert carrier.why("d") == {}
        assert second.request is not None
        carrier.admitted(Admission(second.request, second.table, 0, 0, False, None))
        carrier.told(reasons)
        assert carrier.why("d") == reasons["d"]
        assert carrier.ended("d") == reasons["d"]
        carrier.told(reasons)
        assert carrier.why("d") == {}


def test_kv_that_fails_to_load_at_prefill_is_lent_anew() -> None:
    """Goal: as above, in the same blocks. Method: prefill's first block is lent; then it turns out that its KV has not
    come, and the prompt is computed again from there on."""
    with two() as (first, second):
        old = list[Any]()

        def fail() -> None:
            first.between = lambda: None
            old.append(early_ticket(first))
            assert first.request is not None
            first.worker.begin(first.scheduler.step({}))
            first.worker.fail(set(first.table[:1]))
            first.worker.end()
            first.worker.failures()
            first.weights, first.request.num_computed_tokens = 2, 0

        first.between = fail
        ticket = handed_over(first, PROMPT, [6, 5])
        assert ticket["id"] != old[0]["id"]
        answer = second.ask("e", PROMPT, brought=len(PROMPT), ticket=ticket, more=SAID)
        by = [2] * (len(PROMPT) - 1) + [DECODE] * OWN
        assert judge(routes(answer), [*PROMPT, *SAID], by) == {"right": ALL}

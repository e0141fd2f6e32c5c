"""Tickets pass through clients: whatever clients do to them, decode answers with rows of its own tokens."""

from __future__ import annotations

from typing import Any

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from toy_crossing import ToyCrossing
from toy_pair import ALL, OWN, PROMPT, handed_over, taken, two
from toy_requests import TOKENS, Asked
from waiting import until

from kvroute.connector.carriers.by_transfer import TICKET_TAKEN


@examples(25)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=40) | st.binary(max_size=16).map(bytes.hex),
        lambda each: (
            st.lists(each, max_size=3)
            | st.dictionaries(st.sampled_from(["id", "address", "tokens", "digest", "kv", "why"]), each, max_size=5)
        ),
        max_leaves=6,
    )
)
def test_whatever_a_client_sends_as_a_ticket(ticket: Any) -> None:
    """Goal: an invalid ticket neither ends a process nor brings rows. Method: any JSON value."""
    toy = TOYS[0] if TOYS else ToyCrossing()
    TOYS[:] = [toy]
    toy.cached.clear()
    verdict, _ = taken(toy, ticket, name="d")
    assert verdict == {"right": OWN, "missing": ALL - OWN}


TOYS: list[ToyCrossing] = []


def test_a_ticket_of_another_prompt() -> None:
    """Goal: rows are of the answer's tokens. Method: prompts of another length, and of one other token."""
    with two() as (first, second):
        for prompt, words in ((PROMPT[:-2], "9 tokens, decode's 11"), ([*PROMPT[:-1], 6], "the hash")):
            verdict, (why,) = taken(second, handed_over(first, prompt))
            assert verdict == {"right": OWN, "missing": ALL - OWN}
            assert words in why
            second.cached.clear()


def test_a_ticket_of_other_kv() -> None:
    """Goal: rows come beside the KV of their own computation alone. Method: a prompt is computed twice, and a router
    mixes the answers up: one's ticket goes with the other's parameters, or with parameters of no name."""
    with two() as (first, second):
        names = [{"remote_engine_id": "e", "remote_request_id": name} for name in ("p0", "p1")]
        ticket = handed_over(first, PROMPT, kv=names[0])
        for kv, got in ((names[1], "p1"), ({"remote_engine_id": "e"}, "None")):
            verdict, (why,) = taken(second, ticket, kv=kv)
            assert verdict == {"right": OWN, "missing": ALL - OWN}
            assert why == f"the ticket is of other KV: remote_request_id: wanted p0, got {got}"
            second.cached.clear()
        assert taken(second, ticket, kv=names[0] | {"transfer_id": "decode's own"})[0] == {"right": ALL}


def test_a_prompt_whose_last_token_is_left_to_decode() -> None:
    """Goal: all of its rows, beside a state as of linear attention, which prefill hands over before that token. Method:
    prefill is given all tokens but the last; with another one before it the rows are missing."""
    with two() as (first, second):
        verdict, why = taken(second, handed_over(first, PROMPT[:-1]))
        assert (verdict, list(why)) == ({"right": ALL}, [])
        second.cached.clear()
        verdict, (reason,) = taken(second, handed_over(first, [*PROMPT[:-2], 6]), name="other")
        assert verdict == {"right": OWN, "missing": ALL - OWN}
        assert "the hash" in reason


def test_addresses_that_clients_make_up_fill_neither_memory_nor_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: what a process keeps has a limit. Method: tickets with other addresses each time, and with a very long
    one."""
    with two() as (first, second):
        ticket = handed_over(first, PROMPT)
        for i in range(5):
            _, (why,) = taken(second, ticket | {"address": f"nowhere-{i}"})
            assert f"nowhere-{i}" in why
            second.cached.clear()
        _, (why,) = taken(second, ticket | {"address": "x" * 1000})
        assert "an invalid ticket" in why
        blocks = -(-(len(PROMPT) - 1) // 4)
        assert list(second.worker.missing.values()) == [5 * 4 * blocks]
    assert len([each for each in caplog.records if "have no rows" in each.message]) == 1


def test_a_request_that_ends_before_a_step_fetches_nothing() -> None:
    """Goal: rows land in no life that another request has. Method: a request with a ticket ends before the next step,
    and its blocks are given to another one."""
    with two(blocks=20) as (first, second):
        ticket, rows = handed_over(first, PROMPT), second.scheduler
        request, table = Asked("r", PROMPT), [0, 1, 2]
        rows.matched(request, 0, len(PROMPT), later=True)
        rows.given(table)
        rows.admitted(request, table, len(PROMPT), ticket=ticket)
        rows.forget("r")
        rows.given(table)
        assert rows.step({}).carrier.fetches == []


def test_a_fetch_whose_step_cannot_be_applied_is_over() -> None:
    """Goal: no request waits for a fetch that nobody begins, and none stays noted. Method: the blocks' part of the step
    that begins it is damaged; the request goes on without rows, and says why."""
    with two(blocks=20, late=True, strict=False) as (first, second):
        ticket, rows, worker = handed_over(first, PROMPT), second.scheduler, second.worker
        request, table = Asked("r", PROMPT), [0, 1, 2]
        rows.matched(request, 0, len(PROMPT), later=True)
        rows.given(table)
        rows.admitted(request, table, len(PROMPT), ticket=ticket)
        step = rows.step({})
        step.before = b"damaged"
        worker.begin(step)
        worker.end()
        worker.settle()
        until(lambda: worker.carrier.crossing.node.counters.pulls_in_flight == 0)  # type: ignore[union-attr]
        assert worker.arrived({"r"}) == {"r"}
        second.hear()
        assert set(rows.forget("r").why) == {0, 1, 2}
        assert sum(worker.missing.values()) == 3 * TOKENS


def test_a_ticket_brings_rows_to_one_request() -> None:
    """Goal: of two requests with one ticket, completions of a prompt, the first has its rows and the second the reason.
    Method: both are admitted in one step; each goes on when it is due."""
    with two(blocks=20) as (first, second):
        ticket, rows, worker = handed_over(first, PROMPT), second.scheduler, second.worker
        tables = {"0_r": [0, 1, 2], "1_r": [3, 4, 5]}
        for name, table in tables.items():
            request = Asked(name, PROMPT)
            assert rows.matched(request, 0, len(PROMPT), later=True) == len(PROMPT)
            rows.given(table)
            rows.admitted(request, table, len(PROMPT), ticket=ticket)
        worker.begin(rows.step({}))
        worker.end()
        came, gone = set(tables), dict[str, int]()
        until(lambda: worker.carrier.crossing.node.counters.pulls_in_flight == 0)  # type: ignore[union-attr]
        while len(gone) < 2:
            for name in worker.arrived(came):
                gone[name] = int(worker.blocks.read("routing", tables[name], 0, len(PROMPT) - 1).valid.sum())
            came = set()
            second.hear()
        assert gone == {"0_r": len(PROMPT) - 1, "1_r": 0}
        assert {name: set(rows.forget(name).why.values()) for name in tables} == {"0_r": set(), "1_r": {TICKET_TAKEN}}
        assert worker.missing == {TICKET_TAKEN: 3 * TOKENS}

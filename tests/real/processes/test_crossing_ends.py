"""Rows cross between a prefill and a decode engine, one of which is a process that ends or stands still."""

from __future__ import annotations

from functools import partial

import pytest
from toy_crossing import ToyCrossing
from toy_engine import judge
from toy_lent import early_ticket, installed, lent
from toy_pair import (
    ALL,
    OWN,
    PREFILL,
    PROMPT,
    SAID,
    handed_over,
    makers,
    taken,
    two,
)
from toy_side import Side, sides
from waiting import until

from kvroute.connector import missing, routes
from kvroute.connector.carriers import by_transfer
from transfer import TransferLimits


def test_prefill_that_ends_before_the_fetch() -> None:
    """Goal: decode answers with the rows that it computed. Method: SIGKILL between the ticket and the fetch; then
    another prefill engine, from which all rows come."""
    with sides(fetch_s=3.0) as (first, second):
        ticket = first.ask(name="p", tokens=PROMPT, lends=True)["ticket"]
        first.kill()
        assert taken(second, ticket) == ({"right": OWN, "missing": ALL - OWN}, [by_transfer.LATE.format(3.0)])
        other = Side(weights=PREFILL)
        second.cached.clear()
        ticket = other.ask(name="p", tokens=PROMPT, lends=True)["ticket"]
        assert taken(second, ticket, name="e") == ({"right": ALL}, [])
        other.close()


HASTY = {"transfer": TransferLimits(retry_s=0.4, retries_max=3, early_s=0.4), "fetch_s": 60.0}
"""A peer that is gone is noticed soon, and what is on its way is waited for until then."""


@pytest.mark.parametrize("chunks", [[4, 7], [4, 4, 3], [9, 2]])
def test_prefill_that_ends_in_the_middle_of_a_prompt(chunks: list[int]) -> None:
    """Goal: rows that have arrived stay, and the rest is missing. Method: decode gets its ticket and fetches when the
    first chunk is computed; prefill is killed after that chunk has arrived, while decode waits for the second."""
    with sides(**HASTY) as (first, second):
        ticket = first.ask(name="p", tokens=PROMPT, chunks=chunks, lends=True, early=True)["ticket"]
        landed = chunks[0] // 4 * 4
        second.waiting = lambda: installed(second) >= landed and first.kill()
        verdict, why = taken(second, ticket)
        assert verdict == {"right": OWN + landed, "missing": ALL - OWN - landed}
        assert why == ["timeout: 3 retries"]


def test_prefill_that_ends_when_all_was_fetched() -> None:
    """Goal: rows that have landed outlive prefill. Method: SIGKILL when the rows have landed, before decode's first
    step."""
    with sides() as (first, second):
        ticket = first.ask(name="p", tokens=PROMPT, lends=True)["ticket"]
        second.between = lambda: first.kill()
        assert taken(second, ticket) == ({"right": ALL}, [])


def test_prefill_that_hangs() -> None:
    """Goal: decode goes on without rows; rows that come before its end are in its answer, but not those of the block in
    which decode has begun to compute; later rows land nowhere. Method: prefill is stopped; it goes on in the middle of
    one answer, and behind the end of another one, when that one's blocks are another prompt's."""
    behind = [by_transfer.LATE.format(0.2)]
    with sides(fetch_s=0.2) as (first, second):
        ticket = first.ask(name="p", tokens=PROMPT, lends=True)["ticket"]
        first.hang()

        def come() -> None:
            first.go_on()
            until(lambda: not second.worker.carrier.crossing.node.counters.pulls_in_flight)

        second.between = come
        late = len(PROMPT) % 4 - 1  # of the last block, without the token that decode computes
        assert taken(second, ticket) == ({"right": ALL - late, "missing": late}, behind)
        second.between = lambda: None
        ticket = first.ask(name="q", tokens=PROMPT[::-1], lends=True)["ticket"]
        first.hang()
        verdict, why = taken(second, ticket, PROMPT[::-1], name="e")
        assert (verdict, why) == ({"right": OWN, "missing": ALL - OWN}, behind)
        other = [i % 7 for i in range(33)]  # all blocks that there are
        second.cached.clear()
        assert judge(routes(second.ask("other", other)), other) == {"right": 33}
        table, before = second.table, installed(second)
        first.go_on()
        until(lambda: not second.worker.carrier.crossing.node.counters.pulls_in_flight)
        rows = second.worker.blocks.read("routing", table, 0, 33)
        assert rows.valid.all()
        assert installed(second) == before


def test_decode_that_ends() -> None:
    """Goal: offers that are no longer fetched are not kept. Method: decode is killed before it fetches, and while it
    does."""
    limits = {"lease_s": 5.0, "transfer": TransferLimits(lease_s=5.0), "fetch_s": 60.0}
    with two(limits=limits) as (first, _):
        for early in (False, True):
            decode = Side()
            decode.ask(name="up", tokens=[1])  # it has started: a lease is long beside what it does from here on
            if early:  # it waits for blocks that do not come
                first.between = partial(_fetched_by, first, decode)
            ticket = handed_over(first, PROMPT, [4, 7])
            if not early:
                decode.tell(name="d", tokens=PROMPT, brought=len(PROMPT), ticket=ticket)
            decode.kill()
            decode.close()
            until(lambda: not lent(first).counters.offers_in_flight)
            first.between = lambda: None


def _fetched_by(first: ToyCrossing, decode: Side) -> None:
    """Another side fetches the first chunk of a prompt that is being computed."""
    first.between = lambda: None
    decode.tell(name="d", tokens=PROMPT, brought=len(PROMPT), ticket=early_ticket(first))
    until(lambda: lent(first).counters.records_sent > 0)


def test_weights_that_are_reset_at_decode() -> None:
    """Goal: rows of earlier weights land nowhere. Method: a reset while a fetch waits for prefill's second chunk."""
    with sides() as (first, second):
        ticket = first.ask(name="p", tokens=PROMPT, chunks=[4, 7], lends=True, early=True)["ticket"]

        def reset() -> None:
            if installed(second) >= 4 and second.scheduler.weights.version is None:
                second.scheduler.weights.changed(2)
                second.scheduler.reset()

        second.waiting = reset
        answer = second.ask("d", PROMPT, brought=len(PROMPT), ticket=ticket, more=SAID)
        verdict = judge(routes(answer), [*PROMPT, *SAID], makers(len(PROMPT), len(SAID)))
        assert verdict == {"right": OWN, "missing": ALL - OWN}
        assert {why for *_, why in missing(answer)} == {"reset"}


def test_rows_come_when_their_kv_was_computed_again_and_a_step_was_lost() -> None:
    """Goal: a late row does not land beside KV that decode has computed in the same life. Method: prefill stands still,
    KV fails to load, decode computes the prompt again in the same blocks and then loses a step, so that it forgets all
    rows; prefill goes on."""
    with sides() as (first, second):
        ticket = first.ask(name="p", tokens=PROMPT, lends=True)["ticket"]
        first.hang()
        second.unbrought, second.waits = {0}, False
        node = second.worker.carrier.crossing.node

        def come() -> None:
            second.between = lambda: None
            second.worker.begin(second.scheduler.step({"d": 1}))
            second.worker.end()  # its slots are not known
            first.go_on()
            until(lambda: not node.counters.pulls_in_flight)

        second.between = come
        answer = second.ask("d", PROMPT, [8], brought=len(PROMPT), ticket=ticket, more=SAID)
        assert judge(routes(answer), [*PROMPT, *SAID]) == {"right": ALL - 8, "missing": 8}
        assert installed(second) == 0
        assert second.worker.blocks.counters.installs_of_another_origin_dropped > 0

"""Prefill and decode sessions face to face, by example: which peer owns a transfer, and how it ends on both sides."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from session_pair import (
    D_RUN,
    E_RUN,
    LIMITS,
    NAMESPACE,
    OTHER,
    P_RUN,
    PARTS,
    D,
    E,
    P,
    Pair,
    T,
    blocks,
    bulk_of,
    pull_of,
    pulled,
    refused,
    waits,
    want,
    wanted,
)

from cache_manager.record import HEADER_NBYTES_MIN
from transfer.actions import OfferedBlock, Reason, Release, Send
from transfer.counters import Counters
from transfer.errors import LocalProtocolError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    Absent,
    Ack,
    Bye,
    Entry,
    Gone,
    Later,
    Message,
    Outcome,
    Pull,
    Range,
    Records,
    Renew,
    TransferId,
)
from transfer.offers import Offers
from transfer.pulls import Pulls

NEXT = TransferId(b"the transfer id2")


# ---------------------------------------------------------------- runs


def test_a_restarted_decode_owns_nothing_of_its_old_run() -> None:
    """Goal: no record and no end of a transfer for another run, though it has the old one's name. Method: the new run
    asks for it, and gets what was sent to the old one."""
    pair = pulled()
    records = next(message for message in pair.said if isinstance(message, Records))
    for message in (Ack(E_RUN, T), pull_of(want(1), epoch=7, run=E_RUN)):
        assert pair.prefill.receive(D, message, 1.0) == [Send(D, Gone(E_RUN, T, Outcome.FOREIGN))]
    pair.decode = Pulls(Identity(E_RUN, NAMESPACE, PARTS), LIMITS, Counters())
    pair.decode.pull(P, T, wanted(1), pair, 1.0)
    pair.hear(D, P, records, bulk_of(records))
    assert not pair.installed
    assert pair.decode.counters.stale_messages == 1
    pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    assert pair.outcomes == [Outcome.EXPIRED]


def test_a_restarted_prefill_has_nothing() -> None:
    pair = pulled()
    pair.prefill = Pair().prefill
    pair.pass_time(LIMITS.retry_s + LIMITS.early_s + 1)
    assert (pair.result.reason, pair.result.detail) == (Reason.GONE, "unknown")
    assert {m.reason for m in pair.result.missing} == {Reason.GONE}
    assert pair.prefill.counters.unknown_transfers == 1


def test_after_a_lost_peer_is_found_what_is_missing_is_asked_for_again() -> None:
    """Goal: prefill may have been started anew, and is asked without a pause. Method: the peer is lost and found."""
    pair = pulled()
    assert pair.decode.peer_found(P, 0.0) == [], "nothing was lost"
    pair.decode.peer_lost(P)
    (pull,) = pair.decode.peer_found(P, 0.0)
    assert isinstance(pull.message, Pull)
    assert (pull.message.epoch, pull.message.wanted) == (2, want(1))


# ---------------------------------------------------------------- leases


def test_a_lease_that_ends_is_the_end() -> None:
    """Goal: an offer that was pulled and one that never was are released. Method: a peer pulls one and is silent; its
    message comes at the very moment: it is late, and counted."""
    pair = pulled()
    pair.offer(blocks(1), TransferId(bytes(16)))
    actions = pair.prefill.receive(D, Ack(D_RUN, T), LIMITS.lease_s)
    assert [a.message for a in actions if isinstance(a, Send)] == 2 * [Gone(D_RUN, T, Outcome.EXPIRED)]
    assert [a.outcome for a in actions if isinstance(a, Release)] == 2 * [Outcome.EXPIRED]
    assert (pair.prefill.counters.late_messages, pair.prefill.counters.acked) == (1, 0)


@pytest.mark.parametrize("said", [Renew(D_RUN, T), pull_of([])], ids=lambda m: type(m).__name__)
def test_a_lease_is_renewed_by_messages_and_ends_at_its_bound(said: Message) -> None:
    pair = pulled()
    while pair.now_s + 5 < LIMITS.lease_max_s:
        pair.now_s += 5
        pair.hear(P, D, said)
        pair.do(P, pair.prefill.tick(pair.now_s))
        assert not pair.released
    pair.hear(P, D, said)
    pair.do(P, pair.prefill.tick(LIMITS.lease_max_s))
    assert pair.outcomes == [Outcome.EXPIRED]


def test_decode_renews_while_it_waits() -> None:
    """Goal: a slow transfer does not lose its lease. Method: its records never come, and it is not asked for again."""
    pair = pulled(TransferLimits(lease_s=3, lease_max_s=600, retry_s=50, retries_max=2))
    pair.pass_time(40)
    assert not pair.released
    assert sum(isinstance(m, Renew) for m in pair.said) >= 40 / 3 - 1


@pytest.mark.parametrize(("heard_s", "lease_ms"), [(6.25, 1_200), (2.25, 1_200), (7.75, 600), (0.25, 1)])
@pytest.mark.parametrize("kind", [Later, Records])
def test_a_pull_whose_prefill_is_silent_ends_once_and_does_not_babble(
    heard_s: float, lease_ms: int, kind: type[Message]
) -> None:
    """Goal: whatever lease prefill announces, however late, decode renews it in time, and asks at a bounded rate.
    Method: decode receives one message, whose record is damaged if it has one."""
    decode, actions = Pair().decode, list[Any]()
    actions += decode.pull(P, T, wanted(2), Pair(), 0.0)
    now_s = 0.0
    sent_s = list[float]()
    while decode.in_flight:
        due_s = decode.next_due_s()
        if now_s < heard_s <= due_s:
            now_s = heard_s
            messages = [action.message for action in actions if isinstance(action, Send)]
            epoch = max(message.epoch for message in messages if isinstance(message, Pull))
            message: Any = Later(D_RUN, T, epoch, lease_ms)
            bulk = []
            if kind is Records:
                message = Records(D_RUN, T, epoch, lease_ms, [Entry(0, 0, bytes(HEADER_NBYTES_MIN))])
                bulk = [memoryview(bytes(PARTS[0].nbytes))]
            actions += decode.receive(P, message, bulk, now_s)
        now_s = max(now_s, min(due_s, decode.next_due_s()))
        said = decode.tick(now_s)
        sent_s += [now_s for action in said if isinstance(action, Send)]
        actions += said
    assert [a.reason for a in actions if not isinstance(a, Send)] == [Reason.TIMEOUT]
    assert now_s <= 2 * (LIMITS.retries_max + 1) * LIMITS.retry_s
    assert len(actions) <= now_s / max(lease_ms / 3000, 0.02) + 10
    silences_s = [after_s - before_s for before_s, after_s in pairwise(sent_s) if before_s > heard_s]
    assert max(silences_s) <= max(lease_ms, 60) / 1000


def test_a_pull_from_a_peer_that_has_refused_another_is_asked_for_as_any() -> None:
    """Goal: no busy loop. Method: a peer refuses a transfer, and is pulled from again; it never answers."""
    pair = pulled()
    pair.hear(D, P, Identity(P_RUN, OTHER, PARTS).refuse(D_RUN, T))
    assert pair.result.reason is Reason.REFUSED
    (first,) = pair.decode.pull(P, NEXT, wanted(1), pair, pair.now_s)
    assert isinstance(first.message, Pull)
    pair.now_s += LIMITS.lease_s / 2
    pair.decode.tick(pair.now_s)
    assert pair.decode.next_due_s() > pair.now_s


def test_an_ack_is_repeated_until_it_is_heard_and_changes_nothing_twice() -> None:
    gone = 0

    def lose(message: Message) -> bool:
        nonlocal gone
        gone += isinstance(message, Gone)
        return isinstance(message, Gone) and gone < 3

    pair = Pair(lose=lose)
    pair.offer(blocks(1))
    pair.pull(1)
    assert len(pair.finished) == 1
    pair.pass_time(3 * LIMITS.retry_s)
    assert pair.decode.next_due_s() == math.inf
    assert (len(pair.finished), len(pair.released), pair.prefill.counters.late_messages) == (1, 1, 2)


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_reset_ends_everything_on_both_sides(side: str) -> None:
    pair = pulled()
    session, who = (pair.prefill, P) if side == "P" else (pair.decode, D)
    pair.do(who, session.reset(OTHER))
    pair.talk()
    assert pair.outcomes == [Outcome.RESET if side == "P" else Outcome.ABORTED]
    assert pair.result.reason is (Reason.GONE if side == "P" else Reason.RESET)
    pair.pull(1, transfer=TransferId(bytes(16)))  # refused: the other side is as it was
    assert pair.finished[-1].reason is Reason.REFUSED


def test_a_reference_used_again_gives_no_row_of_the_next_tenant() -> None:
    """Goal: a stale reference is no way to another prompt's rows. Method: let a lease end, give its block's memory to
    another request and offer that; then ask under the old id, for the old key and the new one, as owner and stranger.
    """
    pair, memory, first, later = pulled(), bytearray(PARTS[0].nbytes), blocks(1)[0], blocks(10)[9]
    sent = pair.prefill.counters.records_sent
    pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    memory[:] = later.records[0].payload  # type: ignore[union-attr]
    pair.offer([OfferedBlock(0, later.key, (replace(later.records[0], payload=memory), None))], NEXT)
    for who, run, reason in ((D, D_RUN, Outcome.EXPIRED), (E, E_RUN, Outcome.FOREIGN)):
        for name in (first.key, later.key):
            pair.hear(P, who, pull_of([Range(0, 3, name)], 7 + name[0], run=run))
            pair.talk()
            assert pair.said.pop() == Gone(run, T, reason)
    pair.hear(P, E, pull_of(want(1, 1), transfer=NEXT, run=E_RUN))  # the new id for the old tokens
    pair.talk()
    assert isinstance(pair.said.pop(), Absent)
    assert pair.prefill.counters.records_sent == sent


def test_an_id_is_used_once() -> None:
    """Goal: no entry is overwritten, no block leaks. Method: a session refuses ids that it knows, in flight or
    ended."""
    pair = Pair()
    pair.offer(blocks(1))
    for _ in range(2):
        assert "16 bytes that are new" in refused(lambda: pair.offer(blocks(3)))
        assert pair.prefill.in_flight == 1 - len(pair.released)
        pair.do(P, pair.prefill.withdraw(T))
    assert [release.transfer for release in pair.released] == [T]


@pytest.mark.parametrize("end", ["aborted", "timed out", "reset", "gone"])
def test_records_that_come_after_the_end_are_placed_nowhere(end: str) -> None:
    """Goal: the landing blocks may be given away when the pull is over. Method: keep its records back until then; they
    come in the middle of the next pull from the same peer, into whose blocks they would fit.
    """
    pair = pulled()
    (late, *_) = [message for message in pair.said if isinstance(message, Records)]
    if end == "aborted":
        pair.do(D, pair.decode.abort(T))
    elif end == "timed out":
        pair.lose = lambda _: True
        pair.pass_time(LIMITS.retry_s * (LIMITS.retries_max + 2))
    elif end == "reset":
        pair.do(D, pair.decode.reset(NAMESPACE))
    else:
        pair.do(P, pair.prefill.withdraw(T))
    pair.talk()
    assert pair.result.installed == 0
    pair.lose = lambda _: True
    pair.pull(1, transfer=NEXT)
    before = pair.decode.counters.stale_messages
    pair.hear(D, P, late, bulk_of(late))
    assert not pair.installed
    assert pair.decode.counters.stale_messages == before + 1


KINDS = [Pull, Records, Renew, Ack, Absent, Gone, Later]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("after", [0, 1], ids=["from the first", "but the first"])
def test_both_sides_end_whichever_message_is_always_lost(kind: type[Message], after: int) -> None:
    """Goal: no lost notice hangs either side. Method: lose every message of one kind, or every further one; half an
    hour later neither side holds anything, each has been told once, and every block not reported missing is there."""
    heard = 0

    def lose(message: Message) -> bool:
        nonlocal heard
        heard += isinstance(message, kind)
        return isinstance(message, kind) and heard > after

    pair = Pair(lose=lose)
    offered = blocks(5, without=((1, 2),))
    pair.offer(offered[:4], is_open=True)
    pair.pull(5)
    pair.do(P, pair.prefill.grow(T, offered[4:], 0.0) + pair.prefill.seal(T, 0.0))
    pair.talk()
    pair.pass_time(LIMITS.lease_max_s + LIMITS.lease_s, step_s=1.0)
    assert set(pair.outcomes) < {Outcome.ACKED, Outcome.EXPIRED, Outcome.ABORTED}
    assert len(pair.outcomes) == 1
    assert pair.prefill.in_flight == pair.decode.in_flight == 0
    missing = {(m.part, m.index) for m in pair.result.missing}
    there = {(part, i) for part in range(2) for i in range(5)} - missing
    assert sorted(pair.installed) == sorted((p, i, bytes(offered[i].records[p].payload)) for p, i in there)  # type: ignore[union-attr]
    assert (1, 2) in missing


# ---------------------------------------------------------------- bounds


def test_full_tables_are_an_answer() -> None:
    """Goal: nothing grows without a bound. Method: fill each table."""
    pair = Pair(TransferLimits(transfers_max=2, remembered_max=2))
    names = [TransferId(bytes([i]) * 16) for i in range(8)]
    for name in names[:2]:
        pair.offer(blocks(1), name)
    assert "transfers_max" in refused(lambda: pair.offer(blocks(1), names[2]))
    assert pair.prefill.in_flight == 2
    for peer, name in ((P, names[0]), (E, names[1])):
        pair.decode.pull(peer, name, wanted(1), pair, 0.0)
    assert "transfers_max" in refused(lambda: pair.decode.pull(P, names[2], wanted(1), pair, 0.0))
    assert pair.decode.in_flight == 2
    for i, name in enumerate(names):
        if i > 1:
            pair.offer(blocks(1), name)
        pair.do(P, pair.prefill.withdraw(name))
    assert (pair.prefill.in_flight, pair.prefill.counters.aborted) == (0, 8)
    for name in names[-2:]:
        assert "wanted 16 bytes that are new" in refused(lambda name=name: pair.offer(blocks(1), name))
    pair.offer(blocks(1), names[-3])  # of the latest two alone it is known that they have ended


def test_early_pulls_are_bounded_and_of_their_peer() -> None:
    """Goal: made-up ids cost a peer its own wait. Method: more of them than there is room, and a thief of one."""
    pair = Pair(TransferLimits(transfers_max=2))
    names = [TransferId(bytes([i]) * 16) for i in range(3)]
    said = [pair.prefill.receive(D, pull_of(want(1), transfer=name), 0.0) for name in names]
    assert [[type(a.message) for a in actions] for actions in said] == [[Later], [Later], [Later, Gone]]
    assert said[2][1].message == Gone(D_RUN, names[0], Outcome.UNKNOWN)
    (foreign,) = pair.prefill.receive(E, pull_of(want(1), 9, names[2]), 0.0)
    assert foreign.message == Gone(D_RUN, names[2], Outcome.FOREIGN)
    assert pair.prefill.receive(D, Renew(D_RUN, names[2]), 0.0) == []
    (heard,) = pair.prefill.receive(D, Ack(D_RUN, names[2]), 0.0)
    assert heard.message == Gone(D_RUN, names[2], Outcome.UNKNOWN)
    for other in (Bye(E_RUN), Bye(D_RUN)):
        assert [waits(pair, name) for name in names] == [False, True, False], "another run has gone"
        pair.hear(P, D, other)
    assert pair.prefill.in_flight == 0
    assert not any(waits(pair, name) for name in names)


def test_prefill_that_closes_tells_every_peer_that_waits() -> None:
    """Method: of two transfers one is offered, and one is still to come."""
    pair = pulled()
    pair.pull(1, transfer=NEXT)
    pair.do(P, pair.prefill.close())
    pair.talk()
    assert [(each.reason, each.detail) for each in pair.finished] == 2 * [(Reason.GONE, "aborted")]


def test_a_pull_that_waits_for_its_offer_ends_with_a_reset() -> None:
    """Goal: a peer with other weights never owns a later offer. Method: reset prefill while a pull waits."""
    pair = Pair()
    pair.pull(1)
    pair.do(P, pair.prefill.reset(OTHER))
    pair.talk()
    assert (pair.result.reason, pair.result.detail) == (Reason.GONE, "reset")
    assert not waits(pair)


# ---------------------------------------------------------------- several peers


def test_records_that_cannot_be_read_end_their_own_offer_alone() -> None:
    """Goal: a lender's mistake costs its own transfer. Method: two offers are pulled, and the memory of the first one's
    last record is gone; the second is sent whole, the first one's end says why, and its peer is told."""
    offers = Offers(Identity(P_RUN, NAMESPACE, PARTS), LIMITS, Counters())
    offered = blocks(2)
    memory = memoryview(bytearray(PARTS[1].nbytes))
    rows, kv = offered[1].records
    assert kv is not None
    broken = OfferedBlock(1, offered[1].key, (rows, replace(kv, payload=memory)))
    offers.offer(T, [offered[0], broken], 0.0)
    offers.offer(NEXT, blocks(2), 0.0)
    for of, who, run in ((T, D, D_RUN), (NEXT, E, E_RUN)):
        offers.receive(who, pull_of(want(2), 1, of, run), 0.0)
    memory.release()
    sent = list[tuple[TransferId, int]]()
    while (send := offers.next_records()) is not None:
        assert isinstance(send.message, Records)
        sent.append((send.message.transfer, len(send.message.entries)))
    assert sum(n for of, n in sent if of == NEXT) == 4
    assert sum(n for of, n in sent if of == T) < 4
    assert offers.next_due_s() <= 0.0
    gone, release = offers.tick(0.0)
    assert gone == Send(D, Gone(D_RUN, T, Outcome.ABORTED))
    assert isinstance(release, Release)
    assert (release.transfer, release.outcome) == (T, Outcome.ABORTED)
    assert "cannot be read" in release.detail
    assert "released memoryview" in release.detail
    assert (offers.counters.engine_errors, offers.in_flight) == (1, 1)
    assert offers.tick(0.0) == []


@pytest.mark.parametrize("ends", ["reset", "close"])
def test_an_offer_whose_records_cannot_be_read_is_released_whatever_comes(ends: str) -> None:
    """Goal: each offer is released once. Method: everything ends before the next tick."""
    offers = Offers(Identity(P_RUN, NAMESPACE, PARTS), LIMITS, Counters())
    (block,) = blocks(1)
    memory = memoryview(bytearray(PARTS[0].nbytes))
    rows, kv = block.records
    assert rows is not None
    offers.offer(T, [OfferedBlock(0, block.key, (replace(rows, payload=memory), kv))], 0.0)
    offers.receive(D, pull_of(want(1)), 0.0)
    memory.release()
    assert offers.next_records() is None
    actions = offers.reset(OTHER) if ends == "reset" else offers.close()
    assert [action.transfer for action in actions if isinstance(action, Release)] == [T]
    assert offers.tick(0.0) == []


@pytest.mark.parametrize("numbers", [{"generation": -1}, {"generation": 1 << 64}, {"origin": -1}, {"origin": 1 << 64}])
def test_numbers_that_no_header_has_are_refused(numbers: dict[str, int]) -> None:
    """Goal: a record of which no header can be made is not taken. Method: each number too small, and too large."""
    offers = Offers(Identity(P_RUN, NAMESPACE, PARTS), LIMITS, Counters())
    (block,) = blocks(1)
    rows, kv = block.records
    assert rows is not None
    wrong = OfferedBlock(0, block.key, (replace(rows, **numbers), kv))
    with pytest.raises(LocalProtocolError, match=f"block 0: .*{next(iter(numbers))} {next(iter(numbers.values()))}"):
        offers.offer(T, [wrong], 0.0)
    assert offers.in_flight == 0


def test_records_that_were_refused_are_tried_again_whatever_another_peer_refuses() -> None:
    """Goal: a peer that reads gets its records. Method: another one pulls again and again, and reads nothing."""
    offers = Offers(Identity(P_RUN, NAMESPACE, PARTS), LIMITS, Counters())
    for of in (T, NEXT):
        offers.offer(of, blocks(1), 0.0)
    offers.receive(D, pull_of(want(1)), 0.0)
    refused = offers.next_records()
    assert refused is not None
    offers.unsent(refused, 0.0)
    sent, now_s = list[Peer](), 0.0
    for epoch in range(1, 20):
        now_s += LIMITS.resend_s / 2
        offers.receive(E, pull_of(want(1), epoch, NEXT, E_RUN), now_s)
        offers.tick(now_s)
        while (send := offers.next_records()) is not None:
            sent.append(send.peer)
            if send.peer == E:
                offers.unsent(send, now_s)
    assert D in sent

"""Prefill and decode sessions face to face, by example: which peer owns a transfer, and how it ends on both sides."""

from __future__ import annotations

from dataclasses import replace
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
    hello,
    pulled,
    refused,
    space,
    want,
    wanted,
)

from transfer.actions import OfferedBlock, Reason, Release, Send
from transfer.counters import Counters
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    Absent,
    Ack,
    Bye,
    Gone,
    Hello,
    Later,
    Message,
    Outcome,
    Pull,
    Range,
    Records,
    Refuse,
    Renew,
    TransferId,
    Welcome,
)
from transfer.offers import Offers

NEXT = TransferId(b"the transfer id2")


# ---------------------------------------------------------------- runs


def test_a_restarted_decode_owns_nothing_of_its_old_run() -> None:
    pair = pulled()
    pair.hear(P, D, hello(E_RUN))  # the same name, another run
    assert pair.prefill.receive(D, Ack(E_RUN, T), 1.0) == [Send(D, Gone(T, Outcome.FOREIGN))]
    (refuse,) = pair.prefill.receive(D, Ack(D_RUN, T), 1.0)  # a late message of the old run
    assert isinstance(refuse.message, Refuse)
    assert refuse.message.field == "hello"
    pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    assert pair.outcomes == [Outcome.EXPIRED]


def test_a_restarted_prefill_is_greeted_again_and_has_nothing() -> None:
    pair = pulled()
    pair.prefill = Pair().prefill
    pair.pass_time(LIMITS.retry_s + LIMITS.early_s + 1)
    assert (pair.result.reason, pair.result.detail) == (Reason.GONE, "unknown")
    assert {m.reason for m in pair.result.missing} == {Reason.GONE}
    assert pair.prefill.counters.unknown_transfers == 1


def test_after_another_welcome_what_is_missing_is_asked_for_again() -> None:
    """Goal: a prefill that greets anew has forgotten its transfers. Method: a pull, then another run's welcome."""
    pair = pulled()
    (pull,) = pair.decode.receive(P, Welcome(E_RUN, space(), list(PARTS), 1000, D_RUN), [], 0.0)
    assert isinstance(pull.message, Pull)
    assert (pull.message.epoch, pull.message.wanted) == (2, want(1))


# ---------------------------------------------------------------- leases


def test_a_peer_that_lets_a_lease_end_is_cut_off() -> None:
    """Goal: the link keeps nothing for a peer that does not read. Method: a peer pulls one offer and is silent; the
    other offer is never pulled. A message that comes at the very moment is late, counted and refused."""
    pair = pulled()
    pair.offer(blocks(1), TransferId(bytes(16)))
    actions = pair.prefill.receive(D, Ack(D_RUN, T), LIMITS.lease_s)
    assert [a.message for a in actions if isinstance(a, Send)] == 2 * [Gone(T, Outcome.EXPIRED)]
    assert [a.outcome for a in actions if isinstance(a, Release)] == 2 * [Outcome.EXPIRED]
    pair.do(P, actions)
    assert pair.cut == [D]
    counters = pair.prefill.counters
    assert (counters.slow_peers, counters.late_messages, counters.acked) == (1, 1, 0)


@pytest.mark.parametrize("said", [Renew(D_RUN, T), Pull(D_RUN, T, 1, [])], ids=lambda m: type(m).__name__)
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


@pytest.mark.parametrize(("welcomed_s", "lease_ms"), [(6.25, 1_200), (2.25, 1_200), (7.75, 600), (0.25, 1)])
def test_a_pull_whose_prefill_is_silent_ends_once_and_does_not_babble(welcomed_s: float, lease_ms: int) -> None:
    """Goal: whatever lease prefill announces, however late, decode asks at a bounded rate. Method: decode receives only
    a welcome."""
    decode, actions = Pair().decode, list[Any]()
    actions += decode.pull(P, T, wanted(2), Pair(), 0.0)
    now_s = 0.0
    while decode.in_flight:
        due_s = decode.next_due_s()
        if now_s < welcomed_s <= due_s:
            now_s = welcomed_s
            actions += decode.receive(P, Welcome(P_RUN, space(), list(PARTS), lease_ms, D_RUN), [], now_s)
        now_s = max(now_s, min(due_s, decode.next_due_s()))
        actions += decode.tick(now_s)
    assert [a.reason for a in actions if not isinstance(a, Send)] == [Reason.TIMEOUT]
    assert now_s <= (LIMITS.retries_max + 1) * LIMITS.retry_s
    assert len(actions) <= now_s / max(lease_ms / 3000, 0.02) + 10


@pytest.mark.parametrize("end", [Bye(P_RUN), Refuse("parts", "others", "these", D_RUN)])
def test_no_renewal_is_sent_to_a_peer_that_has_gone(end: Message) -> None:
    """Goal: no busy loop. Method: a welcomed peer reports that the transfer is over, and is pulled from again; it never
    answers."""
    pair = pulled()
    pair.hear(D, P, end)
    (first,) = pair.decode.pull(P, NEXT, wanted(1), pair, pair.now_s)
    assert isinstance(first.message, Hello), "it is greeted anew"
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
    assert not pair.decode._pulls
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
    pair.pull(1, transfer=TransferId(bytes(16)))  # greeted anew, and refused: the other side is as it was
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
    pair.hear(P, E, hello(E_RUN))
    for who, run, reason in ((D, D_RUN, Outcome.EXPIRED), (E, E_RUN, Outcome.FOREIGN)):
        for name in (first.key, later.key):
            pair.hear(P, who, Pull(run, T, 7 + name[0], [Range(0, 3, name)]))
            pair.talk()
            assert pair.said.pop() == Gone(T, reason)
    pair.hear(P, E, Pull(E_RUN, NEXT, 1, want(1, 1)))  # the new id for the old tokens
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


KINDS = [Hello, Welcome, Pull, Records, Renew, Ack, Absent, Gone, Later]


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
    """Goal: nothing grows without a bound. Method: fill each table; of peers, one that owns nothing makes room."""
    pair = Pair(TransferLimits(transfers_max=2, peers_max=2, remembered_max=2))
    names = [TransferId(bytes([i]) * 16) for i in range(8)]
    for name in names[:2]:
        pair.offer(blocks(1), name)
    assert "transfers_max" in refused(lambda: pair.offer(blocks(1), names[2]))
    assert pair.prefill.in_flight == 2
    for peer, name in ((P, names[0]), (E, names[1])):
        pair.decode.pull(peer, name, wanted(1), pair, 0.0)
    assert "transfers_max" in refused(lambda: pair.decode.pull(P, names[2], wanted(1), pair, 0.0))
    assert pair.decode.in_flight == 2
    lonely = Pair(TransferLimits(peers_max=1)).decode
    lonely.pull(P, names[0], wanted(1), pair, 0.0)
    assert "peers_max" in refused(lambda: lonely.pull(E, names[1], wanted(1), pair, 0.0))
    for peer in (b"1", b"2", b"3"):
        (answer,) = pair.prefill.receive(peer, hello(), 0.0)
        assert isinstance(answer.message, Welcome)
    assert pair.prefill.counters.forgotten_peers == 1
    for peer, name in ((b"2", names[0]), (b"3", names[1])):
        pair.prefill.receive(peer, Pull(D_RUN, name, 1, []), 0.0)
    (answer,) = pair.prefill.receive(E, hello(E_RUN), 0.0)
    assert answer.message.field == "peers"
    for i, name in enumerate(names):
        if i > 1:
            pair.offer(blocks(1), name)
        pair.do(P, pair.prefill.withdraw(name))
    assert list(pair.prefill._ended) == names[-2:]
    assert (pair.prefill.in_flight, pair.prefill.counters.aborted) == (0, 8)


def test_early_pulls_are_bounded_and_of_their_peer() -> None:
    """Goal: made-up ids cost a peer its own wait. Method: more of them than there is room, and a thief of one."""
    pair = Pair(TransferLimits(transfers_max=2))
    for peer in (D, E):
        pair.prefill.receive(peer, hello(), 0.0)
    names = [TransferId(bytes([i]) * 16) for i in range(3)]
    said = [pair.prefill.receive(D, Pull(D_RUN, name, 1, want(1)), 0.0) for name in names]
    assert [[type(a.message) for a in actions] for actions in said] == [[Later], [Later], [Later, Gone]]
    assert said[2][1].message == Gone(names[0], Outcome.UNKNOWN)
    (foreign,) = pair.prefill.receive(E, Pull(D_RUN, names[2], 9, want(1)), 0.0)
    assert foreign.message == Gone(names[2], Outcome.FOREIGN)
    assert pair.prefill.receive(D, Renew(D_RUN, names[2]), 0.0) == []
    (heard,) = pair.prefill.receive(D, Ack(D_RUN, names[2]), 0.0)
    assert heard.message == Gone(names[2], Outcome.UNKNOWN)
    assert list(pair.prefill._early) == [names[1]]
    pair.hear(P, D, Bye(D_RUN))
    assert pair.prefill.in_flight == 0
    assert not pair.prefill._early
    (stranger,) = pair.prefill.receive(D, Ack(D_RUN, names[2]), 0.0)
    assert isinstance(stranger.message, Refuse)
    assert pair.prefill.counters.stranger_messages == 1


def test_a_pull_that_waits_for_its_offer_ends_with_a_reset() -> None:
    """Goal: a peer with other weights never owns a later offer. Method: reset prefill while a pull waits."""
    pair = Pair()
    pair.pull(1)
    pair.do(P, pair.prefill.reset(OTHER))
    pair.talk()
    assert (pair.result.reason, pair.result.detail) == (Reason.GONE, "reset")
    assert not pair.prefill._early


# ---------------------------------------------------------------- several peers


def test_two_pulls_greet_their_peer_once() -> None:
    """Goal: a hello that is on its way is not said again before its time. Method: two pulls, and then the retry."""
    pair = Pair()
    (first,) = pair.decode.pull(P, T, wanted(1), pair, 0.0)
    assert isinstance(first.message, Hello)
    assert pair.decode.pull(P, NEXT, wanted(1), pair, 0.0) == []
    assert pair.decode.tick(LIMITS.retry_s) == [first]


def test_a_pull_after_its_peer_was_lost_says_hello_at_once() -> None:
    """Goal: prefill that was started anew is asked without a pause. Method: the peer is lost just after its welcome."""
    pair = Pair()
    pair.offer(blocks(1))
    pair.pull(1)
    pair.decode.peer_lost(P)
    again = TransferId(bytes(16))
    actions = pair.decode.pull(P, again, wanted(1), pair, pair.now_s)
    assert [type(action.message) for action in actions if isinstance(action, Send)] == [Hello]


def test_records_that_were_refused_are_tried_again_whatever_another_peer_refuses() -> None:
    """Goal: a peer that reads gets its records. Method: another one pulls again and again, and reads nothing."""
    offers = Offers(Identity(P_RUN, NAMESPACE, PARTS), LIMITS, Counters())
    for peer, run, of in ((D, D_RUN, T), (E, E_RUN, TransferId(bytes(16)))):
        offers.receive(peer, hello(run), 0.0)
        offers.offer(of, blocks(1), 0.0)
    offers.receive(D, Pull(D_RUN, T, 1, want(1)), 0.0)
    refused = offers.next_records()
    assert refused is not None
    offers.unsent(refused, 0.0)
    sent, now_s = list[Peer](), 0.0
    for epoch in range(1, 20):
        now_s += LIMITS.resend_s / 2
        offers.receive(E, Pull(E_RUN, TransferId(bytes(16)), epoch, want(1)), now_s)
        offers.tick(now_s)
        while (send := offers.next_records()) is not None:
            sent.append(send.peer)
            if send.peer == E:
                offers.unsent(send, now_s)
    assert D in sent

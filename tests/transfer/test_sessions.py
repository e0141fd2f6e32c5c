"""Prefill and decode sessions face to face, by example: what each rule of docs/protocol.md says, and each race."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_pair import D_RUN, E_RUN, LIMITS, NAMESPACE, P_RUN, PARTS, D, E, P, Pair, T, blocks, payload, wanted

import transfer.offer
import transfer.pull
from cache_manager.errors import ConfigError
from cache_manager.record import pack_header
from transfer.actions import Finished, Missing, OfferedBlock, Reason, Send, WantedBlock
from transfer.decode import DecodeSession
from transfer.errors import IncompatiblePeerError, LocalProtocolError
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.messages import (
    Abort,
    Ack,
    Bye,
    Credit,
    Entry,
    Gone,
    GoneReason,
    Hello,
    Message,
    Outcome,
    Part,
    Pull,
    Records,
    Refuse,
    Released,
    Renew,
    TransferId,
    Want,
    Welcome,
    encode,
)


def outcomes(pair: Pair) -> list[Outcome]:
    return [release.outcome for release in pair.released]


@pytest.mark.parametrize("table", [transfer.offer, transfer.pull], ids=lambda t: t.__name__)
def test_every_life_can_end_and_an_end_is_final(table) -> None:
    """Goal: no state is a trap, none is out of reach. Method: walk the table."""
    transitions = table.TRANSITIONS
    ends = {state for state, row in transitions.items() if not row}
    first = next(iter(transitions))

    def reach(start: object) -> set[object]:
        seen, todo = {start}, [start]
        while todo:
            new = set(transitions[todo.pop()].values()) - seen
            seen |= new
            todo += new
        return seen

    assert reach(first) == set(table.State)
    assert all(reach(state) & ends for state in table.State)
    assert {event for row in transitions.values() for event in row} == set(table.Event)


def test_a_transfer_crosses() -> None:
    pair = Pair()
    assert pair.prefill.offer(T, blocks(5, without=((1, 3),)), 0.0)
    pair.pull(5)
    assert sorted(pair.installed) == [(p, i, payload(p, i)) for p in range(2) for i in range(5) if (p, i) != (1, 3)]
    (finished,) = pair.finished
    assert finished.result.missing == (Missing(1, 3, Reason.ABSENT),)
    assert (finished.result.installed, finished.result.reason, finished.result.acknowledged) == (9, None, True)
    assert outcomes(pair) == [Outcome.ACKED]
    assert pair.prefill.in_flight == pair.decode.in_flight == 0


def test_decode_asks_only_for_what_it_wants() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(4), 0.0)
    pair.do(D, pair.decode.pull(P, T, [WantedBlock(2, blocks(4)[2].key, (1,))], 0.0))
    pair.talk()
    assert pair.installed == [(1, 2, payload(1, 2))]
    assert outcomes(pair) == [Outcome.ACKED]


def test_who_wants_nothing_lets_prefill_go() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(2), 0.0)
    pair.pull(0)
    assert outcomes(pair) == [Outcome.ACKED]
    assert pair.finished[0].result.complete
    assert not any(isinstance(m, Pull) for m in pair.said)


def test_release_waits_for_the_link() -> None:
    """Goal: no block is given away under a link that still reads it. Method: acknowledge while the link holds on."""
    pair = Pair()
    pair.hold = True
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    assert pair.finished
    assert not pair.released
    assert pair.prefill.in_flight == 1
    pair.let_go()
    assert outcomes(pair) == [Outcome.ACKED]


@pytest.mark.parametrize("end", ["abort", "expire", "reset", "peer aborts", "bye"])
def test_every_end_waits_for_the_link(end: str) -> None:
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.hold = True
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    assert pair.held
    if end == "abort":
        pair.do(P, pair.prefill.abort(T))
    elif end == "expire":
        pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    elif end == "reset":
        pair.do(P, pair.prefill.reset(b"another namespac"))
    elif end == "bye":
        pair.hear(P, D, Bye(D_RUN))
    else:
        pair.hear(P, D, Abort(D_RUN, T, "changed my mind"))
    assert not pair.released
    assert pair.prefill.next_records() is None
    pair.let_go()
    expected = {"expire": Outcome.EXPIRED, "reset": Outcome.RESET}.get(end, Outcome.ABORTED)
    assert outcomes(pair) == [expected]


def test_the_ack_follows_the_last_installation() -> None:
    """Method: the sink looks whether an ack was said while it is still installing."""
    pair = Pair()
    pair.prefill.offer(T, blocks(3), 0.0)

    def place(_) -> bool:
        assert not any(isinstance(message, Ack) for message in pair.said)
        assert not pair.finished
        return True

    pair.place = place
    pair.pull(3)
    assert pair.finished[0].result.complete


def test_a_block_with_another_owner_is_missing_and_said_so() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(2), 0.0)
    pair.place = lambda install: install.index != 1
    pair.pull(2)
    assert set(pair.finished[0].result.missing) == {Missing(0, 1, Reason.STALE), Missing(1, 1, Reason.STALE)}
    assert pair.finished[0].result.installed == 2


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 5))
def test_whatever_is_lost_all_of_it_arrives_once_or_is_missing(lost: list[bool], n: int) -> None:
    """Goal: losses cost time, no rows and no credit. Method: lose what Hypothesis says, then nothing."""
    losses = iter(lost)
    pair = Pair(lose=lambda _: next(losses, False))
    pair.prefill.offer(T, blocks(n), 0.0)
    pair.pull(n)
    pair.pass_time(80)
    (finished,) = pair.finished
    assert len(set(pair.installed)) == len(pair.installed) == finished.result.installed
    assert finished.result.installed + len(finished.result.missing) == 2 * n
    assert len(pair.released) == 1
    assert pair.prefill.in_flight == pair.decode.in_flight == 0
    if sum(lost) == 0:
        assert finished.result.complete


def test_a_lost_record_starts_a_new_epoch_with_new_credit() -> None:
    """Goal: credit does not leak. Method: lose as much as the credit allows, again and again, but one at a time."""
    lost: list[Records] = []

    def lose(message) -> bool:
        if isinstance(message, Records) and len(lost) < 2:
            lost.append(message)
            return True
        return False

    pair = Pair(lose=lose)
    pair.prefill.offer(T, blocks(5), 0.0)
    pair.pull(5)
    pair.pass_time(30)
    assert pair.finished[0].result.complete
    assert pair.finished[0].result.attempts > 1


def test_a_lost_credit_is_made_up_for_by_the_next() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Credit) and message.nbytes < 300)
    pair.prefill.offer(T, blocks(5), 0.0)
    pair.pull(5)
    pair.pass_time(30)
    assert pair.finished[0].result.complete


def test_doubled_credit_is_no_more_credit() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(9), 0.0)
    pair.hear(P, D, Hello(D_RUN, NAMESPACE, list(PARTS), 0, 1 << 20))
    pair.hear(P, D, Pull(D_RUN, T, 1, [Want(i, blocks(9)[i].key, 1) for i in range(9)], 128))
    for _ in range(5):
        pair.hear(P, D, Credit(D_RUN, T, 1, 192))
    pair.talk()
    assert sum(len(m.entries) for m in pair.said if isinstance(m, Records)) == 3


def test_doubled_records_and_welcomes_cost_nothing() -> None:
    """Goal: what the link doubles moves no credit and starts no epoch. Method: everything is said twice to decode."""
    pair = Pair()
    doubled: list[Message] = []

    def lose(message: Message) -> bool:
        if isinstance(message, (Records, Welcome)) and message not in doubled:
            doubled.append(message)
            bulk = [payload(e.part, e.index) for e in message.entries] if isinstance(message, Records) else []
            for _ in range(2):
                pair.hear(D, P, message, [memoryview(b) for b in bulk])
            return True
        return False

    pair.lose = lose
    pair.prefill.offer(T, blocks(8), 0.0)
    pair.pull(8)
    assert pair.finished[0].result.attempts == 1
    assert len(pair.installed) == 16
    granted = [m.nbytes for m in pair.said if isinstance(m, Credit)]
    assert granted
    assert max(granted) <= LIMITS.credit_nbytes + sum(PARTS[p].nbytes for p, _, _ in pair.installed)
    assert pair.decode.counters.duplicate_records == 16


def test_a_block_of_another_prompt_is_absent() -> None:
    """Goal: rows of other tokens do not even travel. Method: ask under a key that prefill's block does not have."""
    pair = Pair()
    pair.prefill.offer(T, blocks(2), 0.0)
    pair.do(D, pair.decode.pull(P, T, [WantedBlock(0, blocks(2)[1].key, (0,)), wanted(2)[1]], 0.0))
    pair.talk()
    assert pair.finished[0].result.missing == (Missing(0, 0, Reason.ABSENT),)
    assert pair.prefill.counters.key_mismatches == 1
    assert pair.decode.counters.corrupt_records == 0


def test_an_older_pull_or_credit_changes_nothing() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(3), 0.0)
    pair.hear(P, D, Hello(D_RUN, NAMESPACE, list(PARTS), 0, 1 << 20))
    newer, older = (Pull(D_RUN, T, epoch, [Want(0, blocks(1)[0].key, 1)], 64) for epoch in (2, 1))
    pair.hear(P, D, newer)
    pair.talk()
    pair.said.clear()
    for late in (older, newer, Credit(D_RUN, T, 1, 1 << 30), Ack(D_RUN, T, 1, 5, 0)):
        pair.hear(P, D, late)
    pair.talk()
    assert not pair.said
    assert not pair.released
    assert pair.prefill.counters.stale_messages == 4


def test_a_record_of_an_older_epoch_is_as_good_but_moves_no_credit() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Records) and message.epoch == 1)
    pair.prefill.offer(T, blocks(2), 0.0)
    pair.pull(2)
    first = next(m for m in pair.said if isinstance(m, Records))
    pair.lose = lambda message: isinstance(message, Records)
    pair.pass_time(LIMITS.retry_s + 0.5)
    bulk = [memoryview(payload(e.part, e.index)) for e in first.entries]
    before = len(pair.said)
    pair.hear(D, P, first, bulk)
    assert len(pair.installed) == len(first.entries)
    assert not [m for m in pair.said[before:] if isinstance(m, Credit)]
    pair.lose = lambda _: False
    pair.pass_time(10)
    assert pair.finished[0].result.complete
    assert len(pair.installed) == 4


def test_a_transfer_belongs_to_who_pulled_first() -> None:
    """Goal: two peers, one transfer. Method: a second one pulls, renews, acks and aborts; only it is told so."""
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    pair.hear(P, E, Hello(E_RUN, NAMESPACE, list(PARTS), 0, 1 << 20))
    pair.hear(P, E, Hello(D_RUN, NAMESPACE, list(PARTS), 0, 1 << 20))  # the other's run under her own name
    want = [Want(0, blocks(1)[0].key, 3)]
    forged = [Pull(D_RUN, T, 9, want, 999), Renew(D_RUN, T), Ack(D_RUN, T, 9, 2, 0), Abort(D_RUN, T, "")]
    for message in forged:
        answer = pair.prefill.receive(E, encode(message), [], 1.0)
        assert answer == [Send(E, Gone(T, GoneReason.FOREIGN))]
    assert pair.prefill.counters.foreign_messages == len(forged)
    assert not pair.released
    pair.do(P, pair.prefill.tick(LIMITS.lease_s))  # nothing of it renewed the lease
    assert outcomes(pair) == [Outcome.EXPIRED]


def test_a_restarted_decode_owns_nothing_of_its_old_run() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    pair.hear(P, D, Hello(E_RUN, NAMESPACE, list(PARTS), 0, 1 << 20))  # the same name, another run
    assert pair.prefill.receive(D, encode(Ack(E_RUN, T, 9, 0, 0)), [], 1.0) == [Send(D, Gone(T, GoneReason.FOREIGN))]
    (refuse,) = pair.prefill.receive(D, encode(Ack(D_RUN, T, 9, 0, 0)), [], 1.0)  # a late one of the old run
    assert isinstance(refuse.message, Refuse)
    assert refuse.message.field == "hello"
    pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    assert outcomes(pair) == [Outcome.EXPIRED]


def test_a_restarted_prefill_is_greeted_again_and_has_nothing() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    pair.prefill = type(pair.prefill)(Identity(E_RUN, NAMESPACE, PARTS), LIMITS)
    pair.pass_time(LIMITS.retry_s + 1)
    (finished,) = pair.finished
    assert (finished.result.reason, finished.result.detail) == (Reason.GONE, "unknown")
    assert {m.reason for m in finished.result.missing} == {Reason.GONE}
    assert pair.prefill.counters.unknown_transfers == 1


@pytest.mark.parametrize(
    ("parts", "namespace", "field"),
    [
        (PARTS, b"another namespac", "namespace"),
        (PARTS[:1], NAMESPACE, "parts"),
        ((msgspec.structs.replace(PARTS[0], fingerprint=bytes(16)), PARTS[1]), NAMESPACE, "rows layout"),
        ((PARTS[0], msgspec.structs.replace(PARTS[1], block_tokens=8)), NAMESPACE, "kv record"),
    ],
)
def test_peers_that_do_not_mean_the_same_refuse(parts: tuple[Part, ...], namespace: bytes, field: str) -> None:
    pair = Pair(d_parts=parts, d_namespace=namespace)
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1, parts=(0,))
    (finished,) = pair.finished
    assert finished.result.reason is Reason.REFUSED
    assert finished.result.detail.startswith(f"{field}: wanted ")
    with pytest.raises(IncompatiblePeerError, match=field):
        check_peer(Identity(P_RUN, NAMESPACE, PARTS), namespace, parts)


def test_decode_checks_the_welcome_too() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Hello))
    pair.pull(1)
    pair.hear(D, P, Welcome(P_RUN, b"another namespac", list(PARTS), 0, 1000, D_RUN))
    assert pair.finished[0].result.reason is Reason.REFUSED


def test_a_lease_is_renewed_by_messages_and_ends_at_its_bound() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.hear(P, D, Hello(D_RUN, NAMESPACE, list(PARTS), 0, 1 << 20))
    pair.hear(P, D, Pull(D_RUN, T, 1, [], 0))
    while pair.now_s + 5 < LIMITS.lease_max_s:
        pair.now_s += 5
        pair.hear(P, D, Renew(D_RUN, T))
        pair.do(P, pair.prefill.tick(pair.now_s))
        assert not pair.released
    pair.hear(P, D, Renew(D_RUN, T))
    pair.do(P, pair.prefill.tick(LIMITS.lease_max_s))
    assert outcomes(pair) == [Outcome.EXPIRED]


def test_decode_renews_while_it_waits() -> None:
    """Goal: a slow transfer does not lose its lease. Method: a record now and then, nothing to say otherwise."""
    pair = Pair(
        TransferLimits(lease_s=3, lease_max_s=600, retry_s=50, retries_max=2, credit_nbytes=200),
        lose=lambda message: isinstance(message, Records),
    )
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    pair.pass_time(40)
    assert not pair.released
    assert sum(isinstance(m, Renew) for m in pair.said) >= 40 / 3 - 1


def test_a_lease_of_a_millisecond_does_not_make_decode_babble() -> None:
    decode = DecodeSession(Identity(D_RUN, NAMESPACE, PARTS), LIMITS)
    decode.pull(P, T, wanted(2), 0.0)
    decode.receive(P, encode(Welcome(P_RUN, NAMESPACE, list(PARTS), 0, 1, D_RUN)), [], 0.0)
    now_s, said = 0.0, 0
    while (due_s := decode.next_due_s()) is not None and due_s < LIMITS.retry_s:
        now_s = max(now_s, due_s)
        said += len(decode.tick(now_s))
    assert said <= 101


def test_a_message_after_the_end_is_counted_and_refused() -> None:
    """Method: an ack that comes at the very moment the lease ends is late."""
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    gone = pair.prefill.receive(D, encode(Ack(D_RUN, T, 1, 2, 0)), [], LIMITS.lease_s)
    assert [a.message for a in gone if isinstance(a, Send)] == 2 * [Gone(T, GoneReason.EXPIRED)]
    assert [a.outcome for a in gone if not isinstance(a, Send)] == [Outcome.EXPIRED]
    assert pair.prefill.counters.late_messages == 1
    assert pair.prefill.counters.acked == 0


def test_an_ack_is_repeated_until_it_is_heard_and_changes_nothing_twice() -> None:
    lost = []

    def lose(message) -> bool:
        lost.append(message)
        return isinstance(message, Released) and sum(isinstance(m, Released) for m in lost) < 3

    pair = Pair(lose=lose)
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    assert not pair.finished
    pair.pass_time(3 * LIMITS.retry_s)
    assert pair.finished[0].result.acknowledged
    assert len(pair.released) == 1
    assert pair.prefill.counters.late_messages == 2


def test_a_pull_nobody_answers_ends() -> None:
    pair = Pair(lose=lambda _: True)
    pair.pull(2)
    pair.pass_time(LIMITS.retry_s * (LIMITS.retries_max + 2))
    (finished,) = pair.finished
    assert finished.result.reason is Reason.TIMEOUT
    assert {m.reason for m in finished.result.missing} == {Reason.TIMEOUT}
    assert len(finished.result.missing) == 4


@pytest.mark.parametrize(("welcomed_s", "lease_ms"), [(6.25, 1_200), (6.5, 3_000), (2.25, 1_200), (7.75, 600)])
def test_a_pull_that_was_looked_at_early_ends_once(welcomed_s: float, lease_ms: int) -> None:
    """Prefill says a lease shorter than the pause before a retry, whenever it says so, and is then silent."""
    decode = DecodeSession(Identity(D_RUN, NAMESPACE, PARTS), LIMITS)
    actions = decode.pull(P, T, wanted(2), 0.0) or []
    for quarter in range(1, 200):
        now_s = quarter / 4
        if now_s == welcomed_s:
            welcome = Welcome(P_RUN, NAMESPACE, list(PARTS), 0, lease_ms, D_RUN)
            actions += decode.receive(P, encode(welcome), [], now_s)
        actions += decode.tick(now_s)
    (finished,) = [a for a in actions if isinstance(a, Finished)]
    assert finished.result.reason is Reason.TIMEOUT
    assert not decode.in_flight


def test_a_damaged_record_is_asked_for_again() -> None:
    damaged = []
    pair = Pair()

    def lose(message) -> bool:
        if isinstance(message, Records) and not damaged:
            damaged.append(message)
            bad = [memoryview(b"x" + payload(e.part, e.index)[1:]) for e in message.entries]
            pair.hear(D, P, message, bad)
            flipped = [Entry(e.part, e.index, e.header[:70] + b"?" + e.header[71:]) for e in message.entries]
            good = [memoryview(payload(e.part, e.index)) for e in message.entries]
            pair.hear(D, P, Records(T, 1, flipped), good)
            swapped = [Entry(e.part, e.index + 2, e.header) for e in message.entries]
            pair.hear(D, P, Records(T, 1, swapped), good)  # sound, but another block's
            pair.hear(D, P, message, good[:-1])  # a frame is missing
            pair.hear(D, P, message, [g[:-1] for g in good])
            return True
        return False

    pair.lose = lose
    pair.prefill.offer(T, blocks(5), 0.0)
    pair.pull(5)
    assert pair.decode.counters.corrupt_records == 8
    assert pair.decode.counters.bad_messages == 1
    assert not [i for i in pair.installed if i[2][:1] == b"x"]
    pair.pass_time(10)
    assert pair.finished[0].result.complete
    assert len(pair.installed) == 10


def test_records_from_somebody_else_are_dropped() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    (records, *_) = [m for m in pair.said if isinstance(m, Records)]
    pair.hear(D, E, records, [memoryview(payload(e.part, e.index)) for e in records.entries])
    assert not pair.installed
    assert pair.decode.counters.foreign_messages == 1


def test_what_the_link_refuses_is_sent_again() -> None:
    """Goal: a full link costs nothing but time. Method: refuse a hello, a pull and records, once each."""
    pair = Pair()
    pair.prefill.offer(T, blocks(2), 0.0)
    (hello,) = pair.decode.pull(P, T, wanted(2), 0.0)
    pair.decode.unsent(hello, 0.0)
    assert pair.decode.next_due_s() == LIMITS.resend_s
    (hello,) = pair.decode.tick(LIMITS.resend_s)
    (welcome,) = pair.prefill.receive(D, encode(hello.message), [], 0.0)
    (pull,) = pair.decode.receive(P, encode(welcome.message), [], 0.0)
    pair.decode.unsent(pull, 0.0)
    (pull,) = pair.decode.tick(1.0)
    assert pull.message.epoch == 2
    assert pair.prefill.receive(D, encode(pull.message), [], 1.0) == []
    first = pair.prefill.next_records()
    pair.prefill.unsent(first, 1.0)
    assert pair.prefill.next_records() is None
    assert pair.prefill.tick(1.0) == []
    assert pair.prefill.next_records() is None
    pair.prefill.tick(1.0 + LIMITS.resend_s)
    again = pair.prefill.next_records()
    assert again == first
    pair.do(P, [again])
    pair.talk()
    assert pair.finished[0].result.complete


def test_full_tables_are_an_answer() -> None:
    limits = TransferLimits(transfers_max=2, peers_max=2, remembered_max=2, credit_nbytes=200)
    pair = Pair(limits)
    names = [TransferId(bytes([i]) * 16) for i in range(6)]
    assert [pair.prefill.offer(t, blocks(1), 0.0) for t in names[:3]] == [True, True, False]
    assert pair.prefill.in_flight == 2
    assert pair.decode.pull(P, names[0], wanted(1), 0.0)
    assert pair.decode.pull(E, names[1], wanted(1), 0.0)
    assert pair.decode.pull(P, names[2], wanted(1), 0.0) is None
    assert pair.decode.in_flight == 2
    for peer in (b"1", b"2", b"3"):  # who owns nothing is forgotten for a newcomer
        (answer,) = pair.prefill.receive(peer, encode(Hello(D_RUN, NAMESPACE, list(PARTS), 0, 999)), [], 0.0)
        assert isinstance(answer.message, Welcome)
    for t in names:
        pair.prefill.abort(t)
        pair.prefill.offer(t, blocks(1), 0.0) if t not in names[:2] else None
    assert len(pair.prefill._ended) <= limits.remembered_max


def test_who_asks_for_a_block_a_thousand_times_gets_it_once() -> None:
    """Goal: what a peer says cannot make this side hold more than it offered."""
    pair = Pair()
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.hear(P, D, Hello(D_RUN, NAMESPACE, list(PARTS), 0, 1 << 20))
    pair.hear(P, D, Pull(D_RUN, T, 1, 1000 * [Want(0, blocks(1)[0].key, 255)], 1 << 40))
    pair.talk()
    sent = [(e.part, e.index) for m in pair.said if isinstance(m, Records) for e in m.entries]
    assert sent == [(0, 0), (1, 0)]
    assert pair.prefill.counters.records_absent == 6


def test_offers_that_end_early_leave_nothing_behind() -> None:
    pair = Pair(TransferLimits(transfers_max=4, remembered_max=4, credit_nbytes=200))
    for i in range(200):
        name = TransferId(i.to_bytes(16, "little"))
        assert pair.prefill.offer(name, blocks(1), 0.0)
        pair.do(P, pair.prefill.abort(name))
    assert len(pair.prefill._expiries) <= 9
    assert pair.prefill.in_flight == 0


def test_peers_that_own_transfers_are_not_forgotten() -> None:
    pair = Pair(TransferLimits(peers_max=1, credit_nbytes=200), lose=lambda m: isinstance(m, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    (refuse,) = pair.prefill.receive(E, encode(Hello(E_RUN, NAMESPACE, list(PARTS), 0, 999)), [], 0.0)
    assert refuse.message.field == "peers"


def test_a_reset_ends_everything_on_both_sides() -> None:
    for side in "PD":
        pair = Pair(lose=lambda message: isinstance(message, Records))
        pair.prefill.offer(T, blocks(1), 0.0)
        pair.pull(1)
        session, who = (pair.prefill, P) if side == "P" else (pair.decode, D)
        pair.do(who, session.reset(b"another namespac"))
        pair.talk()
        assert outcomes(pair) == [Outcome.RESET if side == "P" else Outcome.ABORTED]
        (finished,) = pair.finished
        assert finished.result.reason is (Reason.GONE if side == "P" else Reason.RESET)
        pair.pull(1, transfer=TransferId(bytes(16)))  # greeted anew, and refused: the other side is as it was
        assert pair.finished[-1].result.reason is Reason.REFUSED


def test_goodbyes() -> None:
    for side in "PD":
        pair = Pair(lose=lambda message: isinstance(message, Records))
        pair.prefill.offer(T, blocks(1), 0.0)
        pair.pull(1)
        pair.do(*((P, pair.prefill.close()) if side == "P" else (D, pair.decode.close())))
        pair.talk()
        assert outcomes(pair) == [Outcome.ABORTED]
        assert len(pair.finished) == 1


def test_wrong_calls_change_nothing() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(1), 0.0)
    other = TransferId(bytes(16))
    bad = OfferedBlock(0, bytes([9]) * 32, blocks(1)[0].records)  # records of another key
    for name, offered in ((T, blocks(1)), (b"short", blocks(1)), (other, 2 * blocks(1)), (other, [bad])):
        with pytest.raises(LocalProtocolError):
            pair.prefill.offer(name, offered, 0.0)
    assert pair.prefill.in_flight == 1
    for name, want in ((b"short", wanted(1)), (other, 2 * wanted(1)), (other, wanted(1, (7,)))):
        with pytest.raises(LocalProtocolError):
            pair.decode.pull(P, name, want, 0.0)
    assert pair.decode.in_flight == 0
    pair.pull(1)
    with pytest.raises(LocalProtocolError, match="pulled before"):
        pair.decode.pull(P, T, wanted(1), 0.0)
    with pytest.raises(ConfigError, match="credit_nbytes"):
        DecodeSession(Identity(D_RUN, NAMESPACE, PARTS), TransferLimits(credit_nbytes=100))
    with pytest.raises(ConfigError, match="lease_s"):
        TransferLimits(lease_s=5, lease_max_s=1)


@given(st.binary(max_size=80), st.lists(st.binary(max_size=8), max_size=2), st.sampled_from("PD"))
def test_hostile_bytes_change_nothing_but_a_counter(frame: bytes, bulk: list[bytes], side: str) -> None:
    pair = Pair()
    session = pair.prefill if side == "P" else pair.decode
    assert session.receive(E, frame, [memoryview(b) for b in bulk], 0.0) == []
    assert session.counters.bad_messages == 1
    assert session.in_flight == 0


@pytest.mark.parametrize("frame_nbytes_max", [64, 100, 1 << 20])
def test_joined_frames_stay_within_what_the_peer_takes(frame_nbytes_max: int) -> None:
    """Goal: payloads share frames as far as the hello allows, and a message is the same however they do."""
    pair = Pair(TransferLimits(credit_nbytes=1 << 20))
    pair.prefill.offer(T, blocks(6), 0.0)
    pair.prefill.receive(D, encode(Hello(D_RUN, NAMESPACE, list(PARTS), 0, frame_nbytes_max)), [], 0.0)
    pair.prefill.receive(
        D, encode(Pull(D_RUN, T, 1, [Want(i, b.key, 3) for i, b in enumerate(blocks(6))], 999)), [], 0.0
    )
    send = pair.prefill.next_records()
    assert send is not None
    assert isinstance(send.message, Records)
    assert all(len(frame) <= frame_nbytes_max for frame in send.bulk)
    assert len(send.bulk) == {64: 12, 100: 6, 1 << 20: 1}[frame_nbytes_max]
    assert b"".join(send.bulk) == b"".join(payload(e.part, e.index) for e in send.message.entries)
    pair.prefill.let_go(send)
    assert pair.prefill.counters.records_sent == len(send.message.entries) == 12


def test_bulk_that_is_cut_elsewhere_costs_the_message_and_nothing_else() -> None:
    pair = Pair(TransferLimits(credit_nbytes=1 << 20), lose=lambda m: isinstance(m, Records))
    pair.prefill.offer(T, blocks(2), 0.0)
    pair.pull(2)
    (message,) = [m for m in pair.said if isinstance(m, Records)]
    whole = b"".join(payload(e.part, e.index) for e in message.entries)
    unknown = msgspec.structs.replace(message, entries=[msgspec.structs.replace(e, part=7) for e in message.entries])
    for wrong, bulk in [(message, [whole[:-1]]), (message, [whole, b"x"]), (message, [whole[:70], whole[70:]]),
                        (message, []), (message, [whole + b"x"]), (unknown, [whole])]:  # fmt: skip
        before = pair.decode.counters.bad_messages
        assert pair.decode.receive(P, encode(wrong), [memoryview(b) for b in bulk], 0.0) == []
        assert pair.decode.counters.bad_messages == before + 1
    pair.hear(D, P, message, [memoryview(whole[:64]), memoryview(whole[64:])])
    assert len(pair.installed) == 4


def test_sealing_ahead_changes_nothing_but_when() -> None:
    """Goal: a header sealed before it is asked for is the one that is sent; what ended or was pulled is not sealed."""
    pair, other, ended = Pair(), TransferId(b"b" * 16), TransferId(b"c" * 16)
    pair.prefill.offer(ended, blocks(3), 0.0)
    pair.prefill.abort(ended)
    pair.prefill.offer(T, blocks(3, without=((1, 1),)), 0.0)
    turns = 1
    while pair.prefill.seal_ahead(2):
        turns += 1
        assert turns < 20
    sealed = dict(pair.prefill._transfers[T].sealed)
    offered = [(p, b.index, r) for b in blocks(3) for p, r in enumerate(b.records) if r and (p, b.index) != (1, 1)]
    assert sealed == {(p, i): pack_header(r.seal()) for p, i, r in offered}
    pair.prefill.offer(other, blocks(3), 0.0)
    pair.pull(3)
    sent = {(e.part, e.index): e.header for m in pair.said if isinstance(m, Records) for e in m.entries}
    assert sent == sealed
    assert pair.finished[0].result.installed == 5


def test_what_was_pulled_is_sealed_as_it_is_sent() -> None:
    pair = Pair(lose=lambda m: isinstance(m, Records))
    pair.prefill.offer(T, blocks(3), 0.0)
    pair.pull(1)
    assert not pair.prefill.seal_ahead(9)
    assert set(pair.prefill._transfers[T].sealed) == {(0, 0), (1, 0)}

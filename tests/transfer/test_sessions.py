"""Prefill and decode sessions face to face, by example: what crosses, epochs, credit, and what is damaged or lost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_pair import (
    D_RUN,
    LIMITS,
    PARTS,
    D,
    E,
    P,
    Pair,
    T,
    blocks,
    outcomes,
    payload,
    pulled,
    record,
    space,
    want,
    wanted,
)

from cache_manager.record import pack_header
from transfer.actions import Install, Missing, Reason, Send
from transfer.errors import RemoteProtocolError
from transfer.limits import TransferLimits
from transfer.messages import (
    Ack,
    Credit,
    Entry,
    Hello,
    Message,
    Outcome,
    Pull,
    Records,
    TransferId,
    Welcome,
)


def test_a_transfer_crosses() -> None:
    pair = Pair()
    assert pair.prefill.offer(T, blocks(5, without=((1, 3),)), 0.0) == []
    pair.pull(5)
    assert sorted(pair.installed) == [(p, i, payload(p, i)) for p in range(2) for i in range(5) if (p, i) != (1, 3)]
    (finished,) = pair.finished
    assert finished.result.missing == (Missing(1, 3, Reason.ABSENT),)
    assert (finished.result.installed, finished.result.reason) == (9, None)
    assert outcomes(pair) == [Outcome.ACKED]
    assert pair.prefill.in_flight == pair.decode.in_flight == 0


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
    assert pair.decode.counters.attempts > 1


def test_records_of_an_older_epoch_earn_no_credit() -> None:
    """Goal: credit is of the epoch that granted it. Method: late records of the first in the second, then own ones.

    The late ones are installed all the same.
    """
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(5), 0.0)
    pair.pull(5)
    pair.pass_time(LIMITS.retry_s + 0.5)
    assert [message.epoch for message in pair.said if isinstance(message, Pull)] == [1, 2]

    def credits_for(epoch: int, *indexes: int) -> int:
        entries = [Entry(0, index, record(0, index).pack()) for index in indexes]
        bulk = [memoryview(payload(0, index)) for index in indexes]
        said = pair.decode.receive(P, Records(T, epoch, entries), bulk, pair.now_s)
        assert sum(isinstance(action, Install) for action in said) == len(indexes)
        return sum(isinstance(action, Send) and isinstance(action.message, Credit) for action in said)

    assert [credits_for(1, 0, 1), credits_for(2, 2), credits_for(2, 3)] == [0, 0, 1]


def test_doubled_credit_is_no_more_credit() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(9), 0.0)
    pair.hear(P, D, Hello(D_RUN, space(), list(PARTS), 0, 1 << 20))
    pair.hear(P, D, Pull(D_RUN, T, 1, want(9, 1), 128))
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
    assert pair.decode.counters.attempts == 1
    assert len(pair.installed) == 16
    granted = [m.nbytes for m in pair.said if isinstance(m, Credit)]
    assert granted
    assert max(granted) <= LIMITS.credit_nbytes + sum(PARTS[p].nbytes for p, _, _ in pair.installed)
    assert pair.decode.counters.duplicate_records == 16


def test_an_older_pull_or_credit_changes_nothing() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(3), 0.0)
    pair.hear(P, D, Hello(D_RUN, space(), list(PARTS), 0, 1 << 20))
    newer, older = (Pull(D_RUN, T, epoch, want(1, 1), 64) for epoch in (2, 1))
    pair.hear(P, D, newer)
    pair.talk()
    pair.said.clear()
    for late in (older, newer, Credit(D_RUN, T, 1, 1 << 30), Ack(D_RUN, T, 1, 5, 0)):
        pair.hear(P, D, late)
    pair.talk()
    assert not pair.said
    assert not pair.released
    assert pair.prefill.counters.stale_messages == 4


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
    assert pair.bad_messages == 1
    assert not [i for i in pair.installed if i[2][:1] == b"x"]
    pair.pass_time(10)
    assert pair.finished[0].result.complete
    assert len(pair.installed) == 10


def test_records_from_somebody_else_are_dropped() -> None:
    pair = pulled()
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
    (welcome,) = pair.prefill.receive(D, hello.message, 0.0)
    (pull,) = pair.decode.receive(P, welcome.message, [], 0.0)
    pair.decode.unsent(pull, 0.0)
    (pull,) = pair.decode.tick(1.0)
    assert pull.message.epoch == 2
    assert pair.prefill.receive(D, pull.message, 1.0) == []
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


def test_who_asks_for_a_block_a_thousand_times_gets_it_once() -> None:
    """Goal: what a peer says cannot make this side hold more than it offered."""
    pair = Pair()
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.hear(P, D, Hello(D_RUN, space(), list(PARTS), 0, 1 << 20))
    pair.hear(P, D, Pull(D_RUN, T, 1, 1000 * want(1, 255), 1 << 40))
    pair.talk()
    sent = [(e.part, e.index) for m in pair.said if isinstance(m, Records) for e in m.entries]
    assert sent == [(0, 0), (1, 0)]
    assert pair.prefill.counters.records_absent == 6


@pytest.mark.parametrize("frame_nbytes_max", [64, 100, 1 << 20])
def test_joined_frames_stay_within_what_the_peer_takes(frame_nbytes_max: int) -> None:
    """Goal: payloads share frames as far as the hello allows, and a message is the same however they do."""
    pair = Pair(TransferLimits(credit_nbytes=1 << 20))
    pair.prefill.offer(T, blocks(6), 0.0)
    pair.prefill.receive(D, Hello(D_RUN, space(), list(PARTS), 0, frame_nbytes_max), 0.0)
    pair.prefill.receive(D, Pull(D_RUN, T, 1, want(6), 999), 0.0)
    send = pair.prefill.next_records()
    assert send is not None
    assert isinstance(send.message, Records)
    assert all(len(frame) <= frame_nbytes_max for frame in send.bulk)
    assert len(send.bulk) == {64: 12, 100: 6, 1 << 20: 1}[frame_nbytes_max]
    assert b"".join(send.bulk) == b"".join(payload(e.part, e.index) for e in send.message.entries)
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
        with pytest.raises(RemoteProtocolError):
            pair.decode.receive(P, wrong, [memoryview(b) for b in bulk], 0.0)
    pair.hear(D, P, message, [memoryview(whole[:64]), memoryview(whole[64:])])
    assert len(pair.installed) == 4


def test_sealing_ahead_changes_nothing_but_when() -> None:
    """Goal: a header sealed before it is asked for is the one that is sent; what ended or was pulled is not sealed."""
    pair, other, ended = Pair(), TransferId(b"b" * 16), TransferId(b"c" * 16)
    pair.prefill.offer(ended, blocks(3), 0.0)
    pair.prefill.withdraw(ended)
    pair.prefill.offer(T, blocks(3, without=((1, 1),)), 0.0)
    turns = 1
    while pair.prefill.sum_ahead(2):
        turns += 1
        assert turns < 20
    sealed = dict(pair.prefill._offers[T].headers)
    offered = [(p, b.index, r) for b in blocks(3) for p, r in enumerate(b.records) if r and (p, b.index) != (1, 1)]
    assert sealed == {(p, i): pack_header(r.seal()) for p, i, r in offered}
    pair.prefill.offer(other, blocks(3), 0.0)
    pair.pull(3)
    sent = {(e.part, e.index): e.header for m in pair.said if isinstance(m, Records) for e in m.entries}
    assert sent == sealed
    assert pair.finished[0].result.installed == 5

"""Prefill and decode sessions face to face, by example: complete transfers, epochs, and messages that are damaged, lost
or refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_pair import (
    D_RUN,
    LIMITS,
    D,
    E,
    P,
    Pair,
    T,
    blocks,
    bulk_of,
    key,
    payload,
    pull_of,
    pulled,
    record,
    refused,
    waits,
    want,
    wanted,
)

from cache_manager.errors import BlockBusyError
from cache_manager.record import HEADER_NBYTES_MAX, OfferedRecord
from transfer.actions import Missing, OfferedBlock, Reason, WantedBlock
from transfer.errors import RemoteProtocolError
from transfer.kept import KeptBuffers
from transfer.limits import TransferLimits
from transfer.messages import (
    Ack,
    Entry,
    Gone,
    Later,
    Message,
    Outcome,
    Pull,
    Range,
    Records,
    TransferId,
)
from transfer.offer import PACKED_MAX, Offer


def test_a_transfer_crosses() -> None:
    """Goal: rows that prefill has arrive, others are reported absent; the ack follows the last installation, and ends
    the offer."""
    pair = Pair()
    pair.offer(blocks(5, without=((1, 3),)))
    pair.place = lambda *_: not pair.finished and not any(isinstance(message, Ack) for message in pair.said)
    pair.pull(5)
    assert sorted(pair.installed) == [(p, i, payload(p, i)) for p in range(2) for i in range(5) if (p, i) != (1, 3)]
    assert (pair.result.missing, pair.result.installed) == ((Missing(1, 3, Reason.ABSENT),), 9)
    assert pair.result.reason is None
    assert pair.outcomes == [Outcome.ACKED]
    assert pair.prefill.in_flight == pair.decode.in_flight == 0
    counters = pair.decode.counters
    assert (counters.done, counters.failed, counters.records_installed, counters.records_absent) == (1, 0, 9, 1)


def test_a_block_with_another_owner_is_missing_and_a_busy_one_asked_for_again() -> None:
    pair, busy = Pair(), {(0, 2)}

    def place(*at: int) -> bool:
        if at in busy:
            busy.discard(at)
            raise BlockBusyError("block", "one at rest", "one in motion")
        return at[1] != 1

    pair.place = place
    pair.offer(blocks(3))
    pair.pull(3)
    assert not pair.finished
    pair.pass_time(LIMITS.retry_s)
    assert set(pair.result.missing) == {Missing(0, 1, Reason.STALE), Missing(1, 1, Reason.STALE)}
    assert (pair.result.installed, pair.decode.counters.postponed_records) == (4, 1)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 5))
def test_under_any_loss_each_record_arrives_once_or_is_missing(lost: list[bool], n: int) -> None:
    """Goal: losses cost time and no rows. Method: lose the messages that Hypothesis chooses, then none."""
    losses = iter(lost)
    pair = Pair(lose=lambda _: next(losses, False))
    pair.offer(blocks(n))
    pair.pull(n)
    pair.pass_time(80)
    assert len(set(pair.installed)) == len(pair.installed) == pair.result.installed
    assert pair.result.installed + len(pair.result.missing) == 2 * n
    assert len(pair.released) == 1
    assert pair.prefill.in_flight == pair.decode.in_flight == 0
    assert any(lost) or pair.result.complete


def test_repeated_and_late_messages_change_nothing() -> None:
    """Goal: doubled records start no epoch; an older pull is ignored. Method: every message is sent again."""
    pair, doubled = Pair(), list[Message]()

    def lose(message: Message) -> bool:
        if isinstance(message, Records) and message not in doubled:
            doubled.append(message)
            for _ in range(2):
                pair.hear(D, P, message, bulk_of(message))
            return True
        return False

    pair.lose = lose
    pair.offer(blocks(8))
    pair.pull(8)
    assert [message.epoch for message in pair.said if isinstance(message, Pull)] == [1]
    assert (len(pair.installed), pair.decode.counters.duplicate_records) == (16, 16)

    pair = Pair()
    pair.offer(blocks(3))
    newer, older = (pull_of(want(1, 1), epoch) for epoch in (2, 1))
    pair.hear(P, D, newer)
    pair.talk()
    pair.said.clear()
    for late in (older, newer):
        pair.hear(P, D, late)
    pair.talk()
    assert not pair.said
    assert pair.prefill.counters.stale_messages == 2


def test_a_damaged_record_is_asked_for_again() -> None:
    """Goal: only verified records are installed. Method: wrong bytes, headers, places, sizes and frames; then the
    truth. Bulk that is cut elsewhere than records end costs the message and nothing else."""
    pair = pulled(TransferLimits(retry_s=2))
    (message,) = [m for m in pair.said if isinstance(m, Records)]
    good, counters = bulk_of(message), pair.decode.counters
    flipped = [Entry(e.part, e.index, e.header[:70] + b"?" + e.header[71:]) for e in message.entries]
    for entries, bulk in (
        (message.entries, [memoryview(b"x" + bytes(view)[1:]) for view in good]),
        (flipped, good),
        (message.entries, [view[:-1] for view in good]),
    ):
        before = counters.corrupt_records
        pair.hear(D, P, Records(D_RUN, T, 1, 10_000, entries), bulk)
        assert counters.corrupt_records == before + 2
    swapped = [Entry(e.part, e.index + 2, e.header) for e in message.entries]  # sound, but another block's
    pair.hear(D, P, Records(D_RUN, T, 1, 10_000, swapped), good)
    assert counters.duplicate_records == 2
    whole = b"".join(good)
    unknown = msgspec.structs.replace(message, entries=[msgspec.structs.replace(e, part=7) for e in message.entries])
    for wrong, frames in [(message, [whole[:-1]]), (message, [whole[:70], whole[70:], b"x"]), (message, []),
                          (message, [whole + b"x"]), (message, good[:-1]), (unknown, [whole])]:  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            pair.decode.receive(P, wrong, [memoryview(b) for b in frames], 0.0)
    pair.hear(D, E, message, good)
    assert counters.foreign_messages == 1
    assert not pair.installed
    pair.lose = lambda _: False
    pair.pass_time(3)
    assert pair.result.complete


def test_what_the_link_refuses_is_sent_again() -> None:
    """Goal: a full link costs nothing but time. Method: refuse pulls and records; a pull that was refused before the
    link was connected is sent as soon as it is."""
    pair = Pair()
    pair.offer(blocks(2))
    (first,) = pair.decode.pull(P, T, wanted(2), pair, 0.0)
    pair.decode.unsent(first, 0.0)
    assert pair.decode.next_due_s() == LIMITS.resend_s
    (again,) = pair.decode.peer_found(P, 0.0)
    assert (again.message.epoch, again.message.wanted) == (2, first.message.wanted)
    assert pair.decode.peer_found(P, 0.0) == []
    pair.decode.unsent(again, 0.0)
    (pull,) = pair.decode.tick(2 * LIMITS.resend_s)
    assert pull.message.epoch == 3
    assert pair.prefill.receive(D, pull.message, 1.0) == []
    records = pair.prefill.next_records()
    pair.prefill.unsent(records, 1.0)
    assert pair.prefill.tick(1.0) == []
    assert pair.prefill.next_records() is None
    pair.prefill.tick(1.0 + LIMITS.resend_s)
    sent = pair.prefill.next_records()
    assert sent.message.entries[:1] == records.message.entries[:1]
    pair.do(P, [sent])
    pair.talk()
    assert pair.result.complete


def test_records_that_are_refused_again_and_again_are_tried_less_and_less_often() -> None:
    """Goal: a peer that is gone costs little until its lease ends, and one that reads again gets records at the old
    pace. Method: refuse every message for a while, then one now and then."""
    pair = Pair()
    pair.offer(blocks(2))
    pair.prefill.receive(D, pull_of(want(2)), 0.0)
    tries = 0
    now_s = 0.0
    while now_s < LIMITS.lease_s / 2:
        pair.prefill.tick(now_s)
        send = pair.prefill.next_records()
        if send is not None:
            tries += 1
            pair.prefill.unsent(send, now_s)
        now_s += LIMITS.resend_s
    assert 6 <= tries <= 12
    pair.prefill.tick(now_s + LIMITS.retry_s)
    assert pair.prefill.next_records() is not None, "this one is sent"
    refused = pair.prefill.next_records()
    pair.prefill.unsent(refused, now_s)
    assert pair.prefill.next_due_s() == now_s + LIMITS.resend_s


def test_an_unreachable_peer_is_tried_with_a_pause_of_its_own_that_grows() -> None:
    """Goal: an absent peer costs little, and no other peer waits. Method: refuse every message to one of two."""
    pair = Pair()
    for peer, name in ((P, T), (E, TransferId(bytes(16)))):
        (first,) = pair.decode.pull(peer, name, wanted(1), pair, 0.0)
        pair.decode.unsent(first, 0.0)
    tries, now_s = 0, 0.0
    while now_s < 2.0:
        now_s = pair.decode.next_due_s()
        for send in pair.decode.tick(now_s):
            if send.peer == E:
                tries += 1
                pair.decode.unsent(send, now_s)
    assert 4 <= tries <= 12


def test_a_block_asked_for_a_thousand_times_is_sent_once() -> None:
    """Goal: no message of a peer can make this side hold more than it offered."""
    pair = Pair()
    pair.offer(blocks(1))
    pair.hear(P, D, pull_of(1000 * want(1, 255)))
    pair.talk()
    assert [(e.part, e.index) for m in pair.said if isinstance(m, Records) for e in m.entries] == [(0, 0), (1, 0)]
    assert pair.prefill.counters.records_absent == 6


def test_messages_begin_small_and_grow() -> None:
    """Goal: the first rows are on their way early. Method: the sizes of an attempt's messages; small payloads share a
    frame.
    """
    pair = Pair(TransferLimits(records_nbytes_max=16 * 64))
    pair.offer(blocks(60))
    pair.pull(60, (0,))
    sizes = [len(m.entries) for m in pair.said if isinstance(m, Records)]
    assert sizes == [2, 4, 8, 16, 16, 14]
    assert pair.result.complete


# ---------------------------------------------------------------- offers that are early, and that grow


def grow(pair: Pair, *indices: int) -> None:
    pair.do(P, pair.prefill.grow(T, [blocks(9)[i] for i in indices], pair.now_s))
    pair.talk()


def seal(pair: Pair) -> None:
    pair.do(P, pair.prefill.seal(T, pair.now_s))
    pair.talk()


def test_an_open_offer_is_answered_as_its_blocks_come() -> None:
    """Goal: a block crosses when a step has filled it, and after the last chunk one is left. Method: pull all of four
    blocks of an offer that has one, add the others in any order, and seal it without the last.
    """
    pair = Pair()
    pair.offer(blocks(1), is_open=True)
    pair.pull(4)
    assert sorted(pair.installed) == [(0, 0, payload(0, 0)), (1, 0, payload(1, 0))]
    grow(pair, 2)
    assert {index for _, index, _ in pair.installed} == {0, 2}
    assert not pair.finished
    grow(pair, 1)
    seal(pair)
    assert set(pair.result.missing) == {Missing(part, 3, Reason.ABSENT) for part in (0, 1)}
    assert pair.result.installed == len(set(pair.installed)) == 6
    assert pair.outcomes == [Outcome.ACKED]


def test_a_pull_before_its_offer_waits_for_it() -> None:
    """Goal: an id that prefill does not know yet is "later", for a bounded time, however often the pull is repeated.
    Method: pull first and offer within the time; then ask often, and never offer."""
    pair = Pair()
    pair.pull(3)
    assert isinstance(pair.said[-1], Later)
    pair.pass_time(LIMITS.early_s - 0.1)
    pair.offer(blocks(3))
    assert pair.result.complete
    assert (pair.prefill.counters.early_pulls, pair.decode.counters.told_later) == (1, 1)

    pair = Pair(TransferLimits(retry_s=0.25, early_s=1.0, retries_max=50))
    pair.pull(2)
    pair.pass_time(1.25)
    assert (pair.result.reason, pair.result.detail, len(pair.result.missing)) == (Reason.GONE, "unknown", 4)
    pair.pass_time(2.0)
    assert not waits(pair)


def test_a_slow_prefill_outlasts_every_retry_but_not_the_lease() -> None:
    """Goal: a pull waits for an offer that grows, and no longer than its own ``lease_max_s``, whatever prefill answers.
    Method: prefill adds nothing; then a prefill that never ends the offer sends only ``Later``."""
    pair = Pair()
    pair.offer(blocks(1), is_open=True)
    pair.pull(2)
    pair.pass_time(LIMITS.lease_max_s - 2)
    assert not pair.finished
    assert pair.decode.counters.told_later > LIMITS.retries_max
    pair.pass_time(LIMITS.retry_s + 2)
    assert {(m.part, m.index) for m in pair.result.missing} == {(0, 1), (1, 1)}
    assert len(pair.released) == 1

    pair = Pair(lose=lambda message: isinstance(message, (Gone, Later)))
    pair.pull(2)
    while not pair.finished and pair.now_s < 3 * LIMITS.lease_max_s:
        pair.pass_time(1.0)
        if not pair.finished:
            epoch = max(message.epoch for message in pair.said if isinstance(message, Pull))
            pair.hear(D, P, Later(D_RUN, T, epoch, 10_000))
    assert (pair.result.reason, pair.now_s) == (Reason.TIMEOUT, LIMITS.lease_max_s)
    assert "lease_max_s" in pair.result.detail


def test_a_large_offer_does_not_hold_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: adding blocks sums a bounded number of records; the others are trusted and sent. Method: count the sums."""
    sums, pack, one = [], OfferedRecord.pack, blocks(1)[0]
    monkeypatch.setattr(OfferedRecord, "pack", lambda record: sums.append(1) or pack(record))
    offer, count = Offer(T, 0.0, 0.0, owner=(D, D_RUN)), PACKED_MAX
    offer.grow(OfferedBlock(i, one.key, one.records) for i in range(count))
    assert len(sums) == PACKED_MAX
    offer.want(pull_of([Range(0, 3, one.key * count)]))
    sent = []
    while offer.wanted:
        message = offer.take(LIMITS.records_nbytes_max, 10_000, KeptBuffers()).message
        assert isinstance(message, Records)
        sent += [(entry.part, entry.index, entry.header) for entry in message.entries]
    headers = [pack(record) for record in one.records if record is not None]
    assert sent == [(part, index, headers[part]) for index in range(count) for part in (0, 1)]
    assert len(sums) == 2 * count, "no record is summed twice"


def test_wrong_calls_change_nothing() -> None:
    """Goal: a mistake of the engine is reported, and harms no transfer in flight. Method: each, then a pull of all."""
    pair, other = Pair(), TransferId(bytes(16))
    pair.offer(blocks(2), is_open=True)
    ours, bad = pair.prefill, OfferedBlock(5, blocks(1)[0].key, blocks(2)[1].records)  # records of another key
    odd = [OfferedBlock(5, key(5), (replace(record(0, 5), valid=bytes(n)), None)) for n in (0, 7, HEADER_NBYTES_MAX)]
    for call in (
        *(lambda n=n, o=o: ours.offer(n, o, 0.0) for n, o in ((T, []), (b"short", []), (other, 2 * blocks(1)))),
        *(lambda o=o: ours.grow(T, o, 0.0) for o in (blocks(1), [blocks(5)[4]] * 2, [bad], *([o] for o in odd))),
        lambda: ours.grow(other, [], 0.0),
        *(
            lambda n=n, w=w: pair.decode.pull(P, n, w, pair, 0.0)
            for n, w in (
                (b"short", wanted(1)),
                (other, 2 * wanted(1)),
                (other, wanted(1, (7,))),
                (other, wanted(1, ())),
            )
        ),
    ):
        assert refused(call).startswith("LocalProtocolError")
    seal(pair)
    for call in (lambda: ours.grow(T, [blocks(4)[3]], 0.0), lambda: ours.seal(T, 0.0)):
        assert "wanted an open offer" in refused(call)
    assert (ours.in_flight, pair.decode.in_flight) == (1, 0)
    pair.pull(2)
    assert pair.result.complete
    assert "pulled before" in refused(lambda: pair.decode.pull(P, T, wanted(1), pair, 0.0))
    assert ours.grow(T, [blocks(4)[3]], 0.0) == []
    assert "lease_s" in refused(lambda: TransferLimits(lease_s=5, lease_max_s=1))


def test_retries_are_counted_from_the_last_progress() -> None:
    """Goal: a pull that goes on is not given up. Method: of each attempt one message of records arrives, and there are
    more attempts than retries."""
    heard = set[int]()

    def lose(message: Message) -> bool:
        if not isinstance(message, Records):
            return False
        is_lost = message.epoch in heard
        heard.add(message.epoch)
        return is_lost

    pair = Pair(lose=lose)
    pair.offer(blocks(2 * LIMITS.retries_max))
    pair.pull(2 * LIMITS.retries_max)
    pair.pass_time(LIMITS.lease_max_s)
    assert pair.result.complete
    assert len(heard) > LIMITS.retries_max + 1


def test_blocks_with_different_parts_are_asked_for_one_by_one() -> None:
    """Goal: no record is sent that nobody wants. Method: neighbours of which some are wanted in part."""
    pair, asked = Pair(), ((0, 1), (0,), (0,), (1,), (0, 1))
    pair.offer(blocks(len(asked)))
    some = [WantedBlock(i, key(i), parts) for i, parts in enumerate(asked)]
    pair.do(D, pair.decode.pull(P, T, some, pair, pair.now_s))
    pair.talk()
    sent = [
        (entry.part, entry.index) for message in pair.said if isinstance(message, Records) for entry in message.entries
    ]
    assert sorted(sent) == sorted((part, i) for i, parts in enumerate(asked) for part in parts)
    assert pair.result.complete


def test_a_later_attempt_takes_back_what_an_earlier_one_waits_for() -> None:
    """Goal: blocks that nobody waits for any more are not sent as they come. Method: the second attempt wants one of
    two blocks that are not there yet."""
    pair = Pair()
    pair.offer([], is_open=True)
    pair.hear(P, D, pull_of(want(2)))
    pair.hear(P, D, pull_of(want(1, start=1), epoch=2))
    grow(pair, 0, 1)
    sent = [
        (entry.part, entry.index) for message in pair.said if isinstance(message, Records) for entry in message.entries
    ]
    assert sorted(sent) == [(0, 1), (1, 1)]

"""Pulls that come before their offer, offers that grow, and peers that are not reachable yet."""

from __future__ import annotations

import pytest
from session_pair import D_RUN, LIMITS, PARTS, D, E, P, Pair, T, blocks, outcomes, payload, space, want, wanted

from transfer.actions import Missing, OfferedBlock, Reason
from transfer.errors import LocalProtocolError
from transfer.limits import TransferLimits
from transfer.messages import Ack, Credit, Gone, Hello, Later, Outcome, Pull, Records, TransferId


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
    assert pair.prefill.offer(T, blocks(1), 0.0, is_open=True) == []
    pair.pull(4)
    assert sorted(pair.installed) == [(0, 0, payload(0, 0)), (1, 0, payload(1, 0))]
    grow(pair, 2)
    assert {index for _, index, _ in pair.installed} == {0, 2}
    assert not pair.finished
    grow(pair, 1)
    seal(pair)
    (finished,) = pair.finished
    assert set(finished.result.missing) == {Missing(part, 3, Reason.ABSENT) for part in (0, 1)}
    assert finished.result.installed == len(set(pair.installed)) == 6
    assert outcomes(pair) == [Outcome.ACKED]


def test_a_pull_before_its_offer_waits_for_it() -> None:
    """Goal: an id that prefill does not know yet is "later". Method: pull first, offer within the time."""
    pair = Pair()
    pair.pull(3)
    assert [type(m) for m in pair.said if isinstance(m, (Later, Gone))] == [Later]
    pair.pass_time(LIMITS.early_s - 0.1)
    pair.do(P, pair.prefill.offer(T, blocks(3), pair.now_s))
    pair.talk()
    assert pair.finished[0].result.complete
    assert len(pair.installed) == 6
    assert pair.prefill.counters.early_pulls == 1


def test_an_id_that_is_never_offered_is_gone_in_time() -> None:
    """Goal: the wait is bounded, however often the pull is said again. Method: ask often, and never offer."""
    limits = TransferLimits(retry_s=0.25, early_s=1.0, retries_max=50, credit_nbytes=200)
    pair = Pair(limits)
    pair.pull(2)
    pair.pass_time(limits.early_s + 0.25)
    (finished,) = pair.finished
    assert (finished.result.reason, finished.result.detail) == (Reason.GONE, "unknown")
    assert len(finished.result.missing) == 4
    pair.pass_time(2 * limits.early_s)
    assert not pair.prefill._expected


def test_early_pulls_are_bounded_and_of_their_peer() -> None:
    """Goal: made-up ids cost a peer its own wait. Method: more of them than there is room, and a thief of one."""
    limits = TransferLimits(transfers_max=2, credit_nbytes=200)
    pair = Pair(limits)
    for peer in (D, E):
        pair.prefill.receive(peer, Hello(D_RUN, space(), list(PARTS), 0, 1 << 20), 0.0)
    names = [TransferId(bytes([i]) * 16) for i in range(3)]
    said = [pair.prefill.receive(D, Pull(D_RUN, name, 1, want(1), 99), 0.0) for name in names]
    assert [[type(a.message) for a in actions] for actions in said] == [[Later], [Later], [Later, Gone]]
    assert said[2][1].message == Gone(names[0], Outcome.UNKNOWN)
    (foreign,) = pair.prefill.receive(E, Pull(D_RUN, names[2], 9, want(1), 99), 0.0)
    assert foreign.message == Gone(names[2], Outcome.FOREIGN)
    assert pair.prefill.receive(D, Credit(D_RUN, names[2], 1, 99), 0.0) == []
    (heard,) = pair.prefill.receive(D, Ack(D_RUN, names[2], 1, 0, 2), 0.0)
    assert heard.message == Gone(names[2], Outcome.ACKED)
    assert list(pair.prefill._expected) == [names[1]]
    assert pair.prefill.in_flight == 0


def test_a_slow_prefill_outlasts_every_retry_but_not_the_lease() -> None:
    """Goal: a pull waits for an offer that grows, and no longer than ``lease_max_s``. Method: prefill adds nothing."""
    pair = Pair()
    pair.prefill.offer(T, blocks(1), 0.0, is_open=True)
    pair.pull(2)
    pair.pass_time(LIMITS.lease_max_s - 2)
    assert not pair.finished
    assert pair.decode.counters.told_later > LIMITS.retries_max
    pair.pass_time(LIMITS.retry_s + 2)
    (finished,) = pair.finished
    assert {(m.part, m.index) for m in finished.result.missing} == {(0, 1), (1, 1)}
    assert len(pair.released) == 1


def test_a_pull_ends_though_prefill_promises_for_ever() -> None:
    """Goal: no promise of a peer keeps decode waiting longer than its own bound. Method: only ``Later`` is heard."""
    pair = Pair(lose=lambda message: isinstance(message, (Records, Gone)))
    pair.prefill.offer(T, blocks(1), 0.0, is_open=True)
    pair.pull(2)
    while not pair.finished and pair.now_s < 3 * LIMITS.lease_max_s:
        if pair.prefill.in_flight == 0:  # it never ends there
            pair.prefill._ended.clear()
            pair.prefill.offer(T, blocks(1), pair.now_s, is_open=True)
        pair.pass_time(1.0)
    (finished,) = pair.finished
    assert finished.result.reason is Reason.TIMEOUT
    assert "lease_max_s" in finished.result.detail
    assert pair.now_s <= LIMITS.lease_max_s + LIMITS.retry_s + 1


@pytest.mark.parametrize("end", ["withdraw", "reset", "crash"])
def test_an_open_offer_that_ends_is_told(end: str) -> None:
    """Goal: decode does not wait for blocks that will not come. Method: prefill ends it, or starts anew."""
    pair = Pair()
    pair.prefill.offer(T, blocks(1), 0.0, is_open=True)
    pair.pull(2)
    if end == "withdraw":
        pair.do(P, pair.prefill.withdraw(T))
    elif end == "reset":
        pair.do(P, pair.prefill.reset(pair.prefill.identity.namespace))
    else:
        pair.prefill = type(pair.prefill)(pair.prefill.identity, LIMITS)
    pair.talk()
    pair.pass_time(LIMITS.retry_s + LIMITS.early_s + 1)
    (finished,) = pair.finished
    assert finished.result.reason is Reason.GONE
    assert finished.result.installed == 2


def test_wrong_growth_changes_nothing() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(2), 0.0, is_open=True)
    other = OfferedBlock(5, blocks(1)[0].key, blocks(2)[1].records)
    for wrong in (blocks(1), [blocks(5)[4]] * 2, [other]):
        with pytest.raises(LocalProtocolError):
            pair.prefill.grow(T, wrong, 0.0)
    seal(pair)
    for late in (lambda: pair.prefill.grow(T, [blocks(4)[3]], 0.0), lambda: pair.prefill.seal(T, 0.0)):
        with pytest.raises(LocalProtocolError, match="wanted an open offer"):
            late()
    with pytest.raises(LocalProtocolError, match="wanted one that was offered"):
        pair.prefill.grow(TransferId(bytes(16)), [], 0.0)
    pair.pull(2)
    assert pair.finished[0].result.complete
    assert pair.prefill.grow(T, [blocks(4)[3]], 0.0) == []


def test_the_first_pull_pays_no_pause() -> None:
    """Goal: what the link refused before it was connected is said as soon as it is. Method: no time passes."""
    pair = Pair()
    (hello,) = pair.decode.pull(P, T, wanted(1), 0.0)
    pair.decode.unsent(hello, 0.0)
    (again,) = pair.decode.peer_found(P, 0.0)
    assert again.message == hello.message
    assert pair.decode.peer_found(P, 0.0) == []


def test_an_unreachable_peer_is_tried_with_a_pause_of_its_own_that_grows() -> None:
    """Goal: a peer that is not there costs little, and no other peer waits. Method: refuse all for one of two."""
    pair = Pair(TransferLimits(retry_s=2.0, retries_max=3, credit_nbytes=200))
    for peer, name in ((P, T), (E, TransferId(bytes(16)))):
        (hello,) = pair.decode.pull(peer, name, wanted(1), 0.0)
        pair.decode.unsent(hello, 0.0)
    tries, now_s = 0, 0.0
    while now_s < 2.0:
        now_s = pair.decode.next_due_s()
        for send in pair.decode.tick(now_s):
            if send.peer == E:
                tries += 1
                pair.decode.unsent(send, now_s)
    assert 4 <= tries <= 12

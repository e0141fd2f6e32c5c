"""Classes of published bugs between prefill and decode for which no other test stands; see ``docs/faults.md``."""

from __future__ import annotations

import secrets

import pytest
from session_pair import (
    D_RUN,
    E_RUN,
    LIMITS,
    NAMESPACE,
    PARTS,
    D,
    E,
    P,
    Pair,
    T,
    blocks,
    key,
    payload,
    space,
    want,
)

from cache_manager.record import OfferedRecord
from transfer.actions import Finished, OfferedBlock
from transfer.errors import LocalProtocolError
from transfer.messages import (
    Absent,
    Ack,
    Credit,
    Gone,
    Hello,
    Message,
    Outcome,
    Pull,
    Range,
    Records,
    TransferId,
    Welcome,
)
from transfer.node import Node, new_transfer

LATER = TransferId(b"the transfer id2")


def in_memory(memory: bytearray, name: int) -> list[OfferedBlock]:
    """A block of ``rows`` only, as it lies in a pool, offered under the key ``name``."""
    record = OfferedRecord(key(name), PARTS[0].fingerprint, 1, 1, b"\x0f" + bytes(7), memoryview(memory))
    return [OfferedBlock(0, key(name), (record, None))]


@pytest.mark.parametrize("end", ["acked", "expired", "aborted"])
def test_a_reference_used_again_gives_no_row_of_the_next_tenant(end: str) -> None:
    """Goal: a stale reference is no way to another prompt's rows. Method: end a transfer, give its block's memory to
    another request and offer that; then ask under the old id, for the old key and the new one, as owner and stranger.
    """
    memory = bytearray(payload(0, 0))
    pair = Pair(lose=lambda message: end != "acked" and isinstance(message, Records))
    pair.prefill.offer(T, in_memory(memory, 0), 0.0)
    pair.pull(1, parts=(0,))
    if end == "aborted":
        pair.do(P, pair.prefill.withdraw(T))
    elif end == "expired":
        pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    pair.talk()
    assert [release.outcome.value for release in pair.released] == [end]
    assert pair.prefill.counters.records_sent == 1
    memory[:] = payload(0, 9)
    assert pair.prefill.offer(LATER, in_memory(memory, 9), pair.now_s) == []

    pair.lose = lambda _: False
    pair.hear(P, E, Hello(E_RUN, space(), list(PARTS), 0, 1 << 20))
    pair.said.clear()
    for who, run, reason in ((D, D_RUN, Outcome(end)), (E, E_RUN, Outcome.FOREIGN)):
        for name in (0, 9):
            pair.hear(P, who, Pull(run, T, 7 + name, [Range(0, 3, key(name))], 1 << 20))
            pair.talk()
            assert pair.said.pop() == Gone(T, reason)
    pair.hear(P, E, Pull(E_RUN, LATER, 1, want(1, 1), 1 << 20))  # the new id for the old tokens
    pair.talk()
    assert isinstance(pair.said.pop(), Absent)
    assert pair.prefill.counters.records_sent == 1
    assert pair.prefill.counters.key_mismatches == 1


def test_an_id_is_used_once(prefill: Node) -> None:
    """Goal: no entry is overwritten, no block leaks. Method: a node and a session refuse one that they
    know, in flight or ended, and what is held under it is what was held.
    """
    assert len({new_transfer() for _ in range(200)}) == 200
    prefill.offer(T)
    with pytest.raises(LocalProtocolError, match="wanted one that is not lent"):
        prefill.offer(T)

    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="16 bytes that are new"):
            pair.prefill.offer(T, blocks(3), 0.0)
        assert pair.prefill.in_flight == 1 - len(pair.released)
        pair.do(P, pair.prefill.withdraw(T))
    assert [release.transfer for release in pair.released] == [T]
    pair.hear(P, D, Hello(D_RUN, space(), list(PARTS), 0, 1 << 20))
    pair.hear(P, D, Pull(D_RUN, secrets.token_bytes(16), 1, want(1, 1), 1 << 20))
    assert pair.prefill.in_flight == 0, "a pull makes no transfer"
    assert pair.prefill.counters.early_pulls == 1


@pytest.mark.parametrize("end", ["aborted", "timed out", "reset", "gone"])
def test_records_that_come_after_the_end_are_placed_nowhere(end: str) -> None:
    """Goal: the landing blocks may be given away when the pull is over. Method: keep its records back until then; they
    come in the middle of the next pull from the same peer, into whose blocks they would fit.
    """
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    (late, *_) = [message for message in pair.said if isinstance(message, Records)]
    bulk = [memoryview(payload(entry.part, entry.index)) for entry in late.entries]
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
    assert len(pair.finished) == 1
    assert pair.finished[0].result.installed == 0
    pair.lose = lambda _: True
    pair.pull(1, transfer=LATER)
    before = pair.decode.counters.stale_messages
    pair.hear(D, P, late, bulk)
    assert not pair.installed
    assert pair.decode.counters.stale_messages == before + 1


@pytest.mark.parametrize(
    "kind", [Hello, Welcome, Pull, Records, Credit, Ack, Absent, Gone], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("after", [0, 1], ids=["from the first", "but the first"])
def test_whatever_is_never_heard_both_sides_end(kind: type[Message], after: int) -> None:
    """Goal: no lost notice hangs anybody. Method: lose every message of one kind, or every further one; half an hour
    later nobody holds anything, each side has been told once, and what is not reported missing is there.
    """
    heard = 0

    def lose(message: Message) -> bool:
        nonlocal heard
        heard += isinstance(message, kind)
        return isinstance(message, kind) and heard > after

    pair = Pair(lose=lose)
    pair.prefill.offer(T, blocks(5, without=((1, 2),)), 0.0)
    pair.pull(5)
    pair.pass_time(LIMITS.lease_max_s + LIMITS.lease_s, step_s=1.0)
    (finished,) = pair.finished
    assert isinstance(finished, Finished)
    (release,) = pair.released
    assert release.outcome in (Outcome.ACKED, Outcome.EXPIRED, Outcome.ABORTED)
    assert pair.prefill.in_flight == pair.decode.in_flight == 0
    missing = {(m.part, m.index) for m in finished.result.missing}
    assert sorted(pair.installed) == [
        (part, i, payload(part, i)) for part in range(2) for i in range(5) if (part, i) not in missing
    ]
    assert (1, 2) in missing

"""Prefill and decode sessions face to face, by example: whose a transfer is, and how it ends on both sides."""

from __future__ import annotations

import msgspec
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
    outcomes,
    pulled,
    space,
    wanted,
)

import transfer.offer
import transfer.pull
from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from transfer.actions import Finished, OfferedBlock, Reason, Release, Send
from transfer.errors import IncompatiblePeerError, LocalProtocolError
from transfer.identity import Identity, check_peer, part_of
from transfer.limits import TransferLimits
from transfer.messages import (
    Ack,
    Credit,
    Gone,
    Hello,
    Outcome,
    Part,
    Pull,
    Records,
    Refuse,
    TransferId,
    Welcome,
)
from transfer.pulls import Pulls


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


def test_a_restarted_decode_owns_nothing_of_its_old_run() -> None:
    pair = pulled()
    pair.hear(P, D, Hello(E_RUN, space(), list(PARTS), 0, 1 << 20))  # the same name, another run
    assert pair.prefill.receive(D, Ack(E_RUN, T, 9, 0, 0), 1.0) == [Send(D, Gone(T, Outcome.FOREIGN))]
    (refuse,) = pair.prefill.receive(D, Ack(D_RUN, T, 9, 0, 0), 1.0)  # a late one of the old run
    assert isinstance(refuse.message, Refuse)
    assert refuse.message.field == "hello"
    pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    assert outcomes(pair) == [Outcome.EXPIRED]


def test_a_restarted_prefill_is_greeted_again_and_has_nothing() -> None:
    pair = pulled()
    pair.prefill = type(pair.prefill)(Identity(E_RUN, NAMESPACE, PARTS), LIMITS)
    pair.pass_time(LIMITS.retry_s + LIMITS.early_s + 1)
    (finished,) = pair.finished
    assert (finished.result.reason, finished.result.detail) == (Reason.GONE, "unknown")
    assert {m.reason for m in finished.result.missing} == {Reason.GONE}
    assert pair.prefill.counters.unknown_transfers == 1


@pytest.mark.parametrize(
    ("parts", "namespace", "field", "theirs"),
    [
        (PARTS, OTHER, "namespace.weights_version", "2"),
        (PARTS, Namespace("m", 1, rank=1, world=2), "namespace.rank", "1"),
        (PARTS, Namespace("m", 1, salt="tenant"), "namespace.salt", ""),
        (PARTS[:1], NAMESPACE, "parts", "rows"),
        ((msgspec.structs.replace(PARTS[0], fingerprint=bytes(16)), PARTS[1]), NAMESPACE, "rows.fingerprint", "00"),
        (
            (msgspec.structs.replace(PARTS[0], fields={"routing.dtype": "u2"}), PARTS[1]),
            NAMESPACE,
            "rows.routing",
            "u2",
        ),
        ((PARTS[0], msgspec.structs.replace(PARTS[1], block_tokens=8)), NAMESPACE, "kv.block_tokens", "8"),
        ((PARTS[0], msgspec.structs.replace(PARTS[1], nbytes=48)), NAMESPACE, "kv.nbytes", "48"),
        ((PARTS[0], msgspec.structs.replace(PARTS[1], name="another")), NAMESPACE, "parts", "rows, another"),
        ((PARTS[0], msgspec.structs.replace(PARTS[1], replicated=True)), NAMESPACE, "kv.replicated", "True"),
    ],
)
def test_peers_that_do_not_mean_the_same_refuse(
    parts: tuple[Part, ...], namespace: Namespace, field: str, theirs: str
) -> None:
    """Goal: a refusal names the field and both values, on both sides; a salt, which may be a secret, as a digest."""
    pair = Pair(d_parts=parts, d_namespace=namespace)
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1, parts=(0,))
    (finished,) = pair.finished
    assert finished.result.reason is Reason.REFUSED
    assert finished.result.detail.startswith(field)
    assert f", got {theirs}" in finished.result.detail
    assert "tenant" not in finished.result.detail
    assert not any(isinstance(message, (Pull, Records)) for message in pair.said)
    with pytest.raises(IncompatiblePeerError, match=field):
        check_peer(Identity(P_RUN, NAMESPACE, PARTS), space(namespace), parts)


@pytest.mark.parametrize("replicated", [True, False])
def test_replicated_rows_cross_between_unequal_ranks(replicated: bool) -> None:
    """Goal: rows that every rank has are fetched from any rank; where one part is not, ranks have to be equal."""
    parts = tuple(msgspec.structs.replace(part, replicated=replicated or part is PARTS[0]) for part in PARTS)
    pair = Pair(d_parts=parts, d_namespace=Namespace("m", 1, rank=1, world=2))
    pair.prefill.identity = Identity(P_RUN, Namespace("m", 1, rank=3, world=8), parts)
    pair.prefill.offer(T, blocks(2), 0.0)
    pair.pull(2)
    result = pair.finished[0].result
    assert (result.installed, result.reason) == ((4, None) if replicated else (0, Reason.REFUSED))
    assert replicated or result.detail == "namespace.rank: wanted 3, got 1"


def test_a_part_says_what_its_layout_is() -> None:
    """Goal: a refusal for another layout shows what differs, not two fingerprints."""
    mine, theirs = (
        part_of("rows", RecordLayout((AuxBlockDataSpec("r", (2, 4), "uint8", 16, attrs={"num_experts": n}),)))
        for n in (128, 256)
    )
    own = Identity(P_RUN, NAMESPACE, (mine,))
    with pytest.raises(IncompatiblePeerError) as refused:
        check_peer(own, own.space, (theirs,))
    assert (refused.value.field, refused.value.wanted, refused.value.got) == ("rows.r.num_experts", "128", "256")


def test_decode_checks_the_welcome_too() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Hello))
    pair.pull(1)
    pair.hear(D, P, Welcome(P_RUN, space(OTHER), list(PARTS), 0, 1000, D_RUN))
    assert pair.finished[0].result.reason is Reason.REFUSED


def test_after_another_welcome_what_is_missing_is_asked_for_again() -> None:
    """Goal: a prefill that greets anew has forgotten what it owed. Method: a pull, then another run's welcome."""
    pair = pulled()
    sent = pair.decode.receive(P, Welcome(E_RUN, space(), list(PARTS), 0, 1000, D_RUN), [], 0.0)
    (pull,) = [action.message for action in sent]
    assert isinstance(pull, Pull)
    assert (pull.epoch, len(pull.wanted)) == (2, 1)


def test_a_peer_that_lets_a_lease_end_is_cut_off() -> None:
    """Goal: the link keeps nothing for who does not read. Method: it pulls and is silent; nobody pulls the other."""
    pair = pulled()
    pair.prefill.offer(TransferId(bytes(16)), blocks(1), 0.0)
    pair.do(P, pair.prefill.tick(LIMITS.lease_s))
    assert outcomes(pair) == [Outcome.EXPIRED, Outcome.EXPIRED]
    assert pair.cut == [D]
    assert pair.prefill.counters.slow_peers == 1


def test_a_lease_is_renewed_by_messages_and_ends_at_its_bound() -> None:
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.hear(P, D, Hello(D_RUN, space(), list(PARTS), 0, 1 << 20))
    pair.hear(P, D, Pull(D_RUN, T, 1, [], 0))
    while pair.now_s + 5 < LIMITS.lease_max_s:
        pair.now_s += 5
        pair.hear(P, D, Credit(D_RUN, T, 1, 0))
        pair.do(P, pair.prefill.tick(pair.now_s))
        assert not pair.released
    pair.hear(P, D, Credit(D_RUN, T, 1, 0))
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
    assert sum(isinstance(m, Credit) for m in pair.said) >= 40 / 3 - 1


def test_a_lease_of_a_millisecond_does_not_make_decode_babble() -> None:
    decode = Pulls(Identity(D_RUN, NAMESPACE, PARTS), LIMITS)
    decode.pull(P, T, wanted(2), 0.0)
    decode.receive(P, Welcome(P_RUN, space(), list(PARTS), 0, 1, D_RUN), [], 0.0)
    now_s, said = 0.0, 0
    while (due_s := decode.next_due_s()) is not None and due_s < LIMITS.retry_s:
        now_s = max(now_s, due_s)
        said += len(decode.tick(now_s))
    assert said <= 101


def test_a_message_after_the_end_is_counted_and_refused() -> None:
    """Method: an ack that comes at the very moment the lease ends is late."""
    pair = pulled()
    gone = pair.prefill.receive(D, Ack(D_RUN, T, 1, 2, 0), LIMITS.lease_s)
    assert [a.message for a in gone if isinstance(a, Send)] == 2 * [Gone(T, Outcome.EXPIRED)]
    assert [a.outcome for a in gone if isinstance(a, Release)] == [Outcome.EXPIRED]
    assert pair.prefill.counters.late_messages == 1
    assert pair.prefill.counters.acked == 0


def test_an_ack_is_repeated_until_it_is_heard_and_changes_nothing_twice() -> None:
    lost = []

    def lose(message) -> bool:
        lost.append(message)
        return isinstance(message, Gone) and sum(isinstance(m, Gone) for m in lost) < 3

    pair = Pair(lose=lose)
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    assert len(pair.finished) == 1
    assert pair.decode.next_due_s() is not None
    pair.pass_time(3 * LIMITS.retry_s)
    assert pair.decode.next_due_s() is None or not pair.decode._pulls
    assert len(pair.finished) == 1
    assert len(pair.released) == 1
    assert pair.prefill.counters.late_messages == 2


@pytest.mark.parametrize(("welcomed_s", "lease_ms"), [(6.25, 1_200), (6.5, 3_000), (2.25, 1_200), (7.75, 600)])
def test_a_pull_that_was_looked_at_early_ends_once(welcomed_s: float, lease_ms: int) -> None:
    """Prefill says a lease shorter than the pause before a retry, whenever it says so, and is then silent."""
    decode = Pulls(Identity(D_RUN, NAMESPACE, PARTS), LIMITS)
    actions = decode.pull(P, T, wanted(2), 0.0) or []
    for quarter in range(1, 200):
        now_s = quarter / 4
        if now_s == welcomed_s:
            welcome = Welcome(P_RUN, space(), list(PARTS), 0, lease_ms, D_RUN)
            actions += decode.receive(P, welcome, [], now_s)
        actions += decode.tick(now_s)
    (finished,) = [a for a in actions if isinstance(a, Finished)]
    assert finished.result.reason is Reason.TIMEOUT
    assert not decode.in_flight


def test_full_tables_are_an_answer() -> None:
    limits = TransferLimits(transfers_max=2, peers_max=2, remembered_max=2, credit_nbytes=200)
    pair = Pair(limits)
    names = [TransferId(bytes([i]) * 16) for i in range(6)]
    assert [pair.prefill.offer(t, blocks(1), 0.0) for t in names[:3]] == [[], [], None]
    assert pair.prefill.in_flight == 2
    assert pair.decode.pull(P, names[0], wanted(1), 0.0)
    assert pair.decode.pull(E, names[1], wanted(1), 0.0)
    assert pair.decode.pull(P, names[2], wanted(1), 0.0) is None
    assert pair.decode.in_flight == 2
    for peer in (b"1", b"2", b"3"):  # who owns nothing is forgotten for a newcomer
        (answer,) = pair.prefill.receive(peer, Hello(D_RUN, space(), list(PARTS), 0, 999), 0.0)
        assert isinstance(answer.message, Welcome)
    assert pair.prefill.counters.forgotten_peers == 1
    for t in names:
        pair.prefill.withdraw(t)
        pair.prefill.offer(t, blocks(1), 0.0) if t not in names[:2] else None
    assert len(pair.prefill._ended) <= limits.remembered_max


def test_offers_that_end_early_leave_nothing_behind() -> None:
    pair = Pair(TransferLimits(transfers_max=4, remembered_max=4, credit_nbytes=200))
    for i in range(200):
        name = TransferId(i.to_bytes(16, "little"))
        assert pair.prefill.offer(name, blocks(1), 0.0) == []
        pair.do(P, pair.prefill.withdraw(name))
    assert len(pair.prefill._expiries) <= 17
    assert pair.prefill.in_flight == 0


def test_peers_that_own_transfers_are_not_forgotten() -> None:
    pair = Pair(TransferLimits(peers_max=1, credit_nbytes=200), lose=lambda m: isinstance(m, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    (refuse,) = pair.prefill.receive(E, Hello(E_RUN, space(), list(PARTS), 0, 999), 0.0)
    assert refuse.message.field == "peers"


def test_a_reset_ends_everything_on_both_sides() -> None:
    for side in "PD":
        pair = pulled()
        session, who = (pair.prefill, P) if side == "P" else (pair.decode, D)
        pair.do(who, session.reset(OTHER))
        pair.talk()
        assert outcomes(pair) == [Outcome.RESET if side == "P" else Outcome.ABORTED]
        (finished,) = pair.finished
        assert finished.result.reason is (Reason.GONE if side == "P" else Reason.RESET)
        pair.pull(1, transfer=TransferId(bytes(16)))  # greeted anew, and refused: the other side is as it was
        assert pair.finished[-1].result.reason is Reason.REFUSED


def test_wrong_calls_change_nothing() -> None:
    pair = Pair()
    pair.prefill.offer(T, blocks(1), 0.0)
    other = TransferId(bytes(16))
    bad = OfferedBlock(0, bytes([9]) * 32, blocks(1)[0].records)  # records of another key
    for name, offered in ((T, blocks(1)), (b"short", blocks(1)), (other, 2 * blocks(1)), (other, [bad])):
        with pytest.raises(LocalProtocolError):
            pair.prefill.offer(name, offered, 0.0)
    assert pair.prefill.in_flight == 1
    for name, wrong in ((b"short", wanted(1)), (other, 2 * wanted(1)), (other, wanted(1, (7,)))):
        with pytest.raises(LocalProtocolError):
            pair.decode.pull(P, name, wrong, 0.0)
    assert pair.decode.in_flight == 0
    pair.pull(1)
    with pytest.raises(LocalProtocolError, match="pulled before"):
        pair.decode.pull(P, T, wanted(1), 0.0)
    with pytest.raises(ConfigError, match="credit_nbytes"):
        Pulls(Identity(D_RUN, NAMESPACE, PARTS), TransferLimits(credit_nbytes=100))
    with pytest.raises(ConfigError, match="lease_s"):
        TransferLimits(lease_s=5, lease_max_s=1)

"""Which sides may exchange rows: the fields on which they have to agree, and the text of a refusal."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_pair import D_RUN, NAMESPACE, OTHER, P_RUN, PARTS, D, P, Pair, T, blocks, space, wanted

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from transfer.actions import Reason
from transfer.errors import IncompatiblePeerError
from transfer.identity import Identity, check_peer, part_of
from transfer.messages import Abort, Part, Records, TransferId


def part(at: int, **changed: Any) -> tuple[Any, ...]:
    return tuple(msgspec.structs.replace(p, **changed) if i == at else p for i, p in enumerate(PARTS))


@pytest.mark.parametrize(
    ("parts", "namespace", "field", "ours"),
    [
        (PARTS, OTHER, "namespace.weights_version", "2"),
        (PARTS, Namespace("m", 1, rank=1, world=2), "namespace.rank", "1"),
        (PARTS, Namespace("m", 1, salt="tenant"), "namespace.salt", ""),
        (PARTS[:1], NAMESPACE, "parts", "['rows']"),
        (part(0, fingerprint=bytes(16)), NAMESPACE, "rows.fingerprint", "00"),
        (part(0, fields={"routing.dtype": "u2"}), NAMESPACE, "rows.routing", "u2"),
        (part(1, block_tokens=8), NAMESPACE, "kv.block_tokens", "8"),
        (part(1, nbytes=48), NAMESPACE, "kv.nbytes", "48"),
        (part(1, name="another"), NAMESPACE, "parts", "['rows', 'another']"),
        (part(0, name="rows, kv")[:1], NAMESPACE, "parts", "['rows, kv']"),
        (part(1, replicated=True), NAMESPACE, "kv.replicated", "True"),
    ],
)
def test_peers_that_do_not_mean_the_same_refuse(parts: Any, namespace: Namespace, field: str, ours: str) -> None:
    """Goal: a refusal names the field and both values; a salt, which may be a secret, as a digest; and prefill's offer
    stays for a peer that fits."""
    pair = Pair(d_parts=parts, d_namespace=namespace)
    pair.offer(blocks(1))
    pair.pull(1, parts=(0,))
    assert pair.result.reason is Reason.REFUSED
    assert pair.result.detail.startswith(f"peer's {field}")
    assert f"wanted {ours}" in pair.result.detail
    assert "tenant" not in pair.result.detail
    assert not any(isinstance(message, (Abort, Records)) for message in pair.said)
    assert (pair.prefill.in_flight, pair.prefill.counters.refused_pulls, pair.decode.counters.refusals) == (1, 1, 1)
    with pytest.raises(IncompatiblePeerError, match=field):
        check_peer(Identity(P_RUN, NAMESPACE, PARTS), space(namespace), parts)


def test_a_refusal_without_a_difference_ends_the_pull() -> None:
    """Goal: a digest that was damaged, or made otherwise, is an end with a reason, not a wait."""
    pair = Pair()
    pair.offer(blocks(1))
    (send,) = pair.decode.pull(P, T, wanted(1), pair, 0.0)
    pair.hear(P, D, msgspec.structs.replace(send.message, identity=bytes(16)))
    pair.talk()
    assert (pair.result.reason, pair.result.detail[:24]) == (Reason.REFUSED, "peer's identity is equal")


small = st.integers(0, 1)
namespaces = st.builds(
    lambda version, tenant, rank: Namespace("m", version, salt="t" * tenant, rank=rank, world=2), small, small, small
)
kinds_of_part = st.builds(
    lambda name, nbytes, replicated, fields: Part("ab"[name], bytes(16), 8 + nbytes, 4, replicated, fields),
    *(small, small, st.booleans()),
    st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["1", "none", "null"]), max_size=2),
)
identities = st.builds(
    lambda namespace, parts: Identity(P_RUN, namespace, tuple(parts)),
    namespaces,
    st.lists(kinds_of_part, min_size=1, max_size=2),
)


@given(identities, identities, st.randoms(use_true_random=False))
def test_digests_are_equal_where_nothing_differs(own: Identity, other: Identity, dice: Random) -> None:
    """Goal: prefill refuses by the digest exactly where decode finds a field to name. Method: identities of few values,
    so that many are alike; the order in which fields are written down does not count."""
    shuffled = []
    for one in other.parts:
        fields = list(one.fields.items())
        dice.shuffle(fields)
        shuffled.append(msgspec.structs.replace(one, fields=dict(fields)))
    other = Identity(D_RUN, other.namespace, tuple(shuffled))
    try:
        check_peer(own, other.space, other.parts)
    except IncompatiblePeerError:
        assert own.digest != other.digest
    else:
        assert own.digest == other.digest


def test_the_digest_is_as_the_protocol_says() -> None:
    """Goal: no change of the code changes the digest without a new protocol. Method: the bytes, put together here."""
    part = Part("rows", b"f" * 16, 64, 4, True, {"b": "2", "a": "1"})
    own = Identity(P_RUN, Namespace("m", 1, rank=3, world=8), (part,))
    space = [own.space.model, own.space.weights_version, own.space.salt, 0, 0]
    text = msgspec.msgpack.encode([space, [["rows", b"f" * 16, 64, 4, True, {"a": "1", "b": "2"}]]])
    assert own.digest == hashlib.blake2b(text, digest_size=16, person=b"kvroute.peer/1").digest()


def test_each_pull_from_a_peer_that_refuses_is_refused_at_once() -> None:
    """Goal: every request learns why its rows do not come, before it is answered. Method: pulls one after another."""
    pair = Pair(d_namespace=OTHER)
    for number in range(3):
        pair.pull(1, transfer=TransferId(bytes([number]) * 16))
        assert [each.reason for each in pair.finished] == [Reason.REFUSED] * (number + 1)


@pytest.mark.parametrize("replicated", [True, False])
def test_replicated_rows_cross_between_unequal_ranks(replicated: bool) -> None:
    """Goal: rows that every rank has are fetched from any rank; if some part is not on every rank, ranks have to be
    equal."""
    parts = tuple(msgspec.structs.replace(part, replicated=replicated or part is PARTS[0]) for part in PARTS)
    pair = Pair(d_parts=parts, d_namespace=Namespace("m", 1, rank=1, world=2))
    pair.prefill.identity = Identity(P_RUN, Namespace("m", 1, rank=3, world=8), parts)
    pair.offer(blocks(2))
    pair.pull(2)
    assert (pair.result.installed, pair.result.reason) == ((4, None) if replicated else (0, Reason.REFUSED))
    assert replicated or pair.result.detail == "peer's namespace.rank: wanted 1, got 3"


def test_a_part_says_what_its_layout_is() -> None:
    """Goal: a refusal for another layout shows the differing fields, not fingerprints; an identity that no peer would
    accept is refused."""
    mine, theirs = (
        part_of("rows", RecordLayout((AuxBlockDataSpec("r", (2, 4), "uint8", 16, attrs={"num_experts": n}),)))
        for n in (128, 256)
    )
    own = Identity(P_RUN, NAMESPACE, (mine,))
    with pytest.raises(IncompatiblePeerError) as error:
        check_peer(own, own.space, (theirs,))
    assert (error.value.field, error.value.wanted, error.value.got) == ("rows.r.num_experts", "128", "256")
    for run, parts in ((b"short", PARTS), (P_RUN, ()), (P_RUN, part(0, nbytes=0)), (P_RUN, part(0, nbytes=1 << 29))):
        with pytest.raises(ConfigError):
            Identity(run, NAMESPACE, parts)  # type: ignore[arg-type]

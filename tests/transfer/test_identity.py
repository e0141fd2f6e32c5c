"""Which sides may exchange rows: the fields on which they have to agree, and the text of a refusal."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from session_pair import D_RUN, NAMESPACE, OTHER, P_RUN, PARTS, D, P, Pair, blocks, space

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from transfer.actions import Reason
from transfer.errors import IncompatiblePeerError
from transfer.identity import Identity, check_peer, part_of
from transfer.messages import Hello, Pull, Records, TransferId, Welcome


def part(at: int, **changed: Any) -> tuple[Any, ...]:
    return tuple(msgspec.structs.replace(p, **changed) if i == at else p for i, p in enumerate(PARTS))


@pytest.mark.parametrize(
    ("parts", "namespace", "field", "theirs"),
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
def test_peers_that_do_not_mean_the_same_refuse(parts: Any, namespace: Namespace, field: str, theirs: str) -> None:
    """Goal: a refusal names the field and both values, on both sides; a salt, which may be a secret, as a digest."""
    pair = Pair(d_parts=parts, d_namespace=namespace)
    pair.offer(blocks(1))
    pair.pull(1, parts=(0,))
    assert pair.result.reason is Reason.REFUSED
    assert pair.result.detail.startswith(field)
    assert f", got {theirs}" in pair.result.detail
    assert "tenant" not in pair.result.detail
    assert not any(isinstance(message, (Pull, Records)) for message in pair.said)
    with pytest.raises(IncompatiblePeerError, match=field):
        check_peer(Identity(P_RUN, NAMESPACE, PARTS), space(namespace), parts)
    pair = Pair(lose=lambda message: isinstance(message, Hello))  # decode checks the welcome, too
    pair.pull(1)
    pair.hear(D, P, Welcome(P_RUN, space(namespace), list(parts), 1000, D_RUN))
    assert pair.result.reason is Reason.REFUSED


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
    assert replicated or pair.result.detail == "namespace.rank: wanted 3, got 1"


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

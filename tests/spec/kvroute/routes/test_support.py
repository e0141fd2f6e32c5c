"""Sampling supports: what was drawn from comes back, bound to its tokens, and a shifted or foreign one is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import Shape

from cache_manager.errors import RowError
from kvroute.replay import ReplayError, prime_rl, skyrl
from kvroute.routes import Routes, SamplingSupport, wire
from kvroute.routes.token_hash import token_hashes

SHAPE = Shape()
TOKENS = [5, 9, 13, 21, 33, 21]
ROWS = [[13, 2, 40], [21], None, [8, 21, 7]]


def made() -> SamplingSupport:
    return SamplingSupport.of(ROWS, TOKENS, 2)


def routes_of(tokens: list[int]) -> Routes:
    """As an answer has them: bound to the prompt and to the tokens with a row."""
    n = len(tokens) - 1
    ids = SHAPE.ids(range(n), 0)
    routes = Routes(ids, np.ones(n, bool), SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers)
    return routes.bind(tokens, (2, n)) if n >= 2 else routes.bind(tokens)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]]]:
    """Tokens, the first position of an answer, and for each of its tokens what it was drawn from, or nothing."""
    tokens = draw(st.lists(st.integers(0, 50), min_size=1, max_size=30))
    start = draw(st.integers(0, len(tokens)))
    others = st.sets(st.integers(0, (1 << 31) - 1) | st.integers(0, 50), max_size=6)
    rows = [draw(st.just([]) | others.map(lambda ids, t=token: list({t, *ids}))) for token in tokens[start:]]
    return tokens, start, rows


@given(drawn(), st.data())
def test_supports_come_back_as_they_were(case: tuple[list[int], int, list[list[int]]], data: st.DataObject) -> None:
    """Goal: what a sampler kept is what a trainer gets, position by position. Method: the sets, kept apart; through
    a record beside routes, and as a trainer's padded rows."""
    tokens, start, rows = case
    support = SamplingSupport.of(rows, [*tokens, *data.draw(st.lists(st.integers(0, 9), max_size=3))], start)
    assert [support.row(start + i).tolist() for i in range(len(rows))] == [sorted(row) for row in rows]
    assert {p for a, b in support.missing for p in range(a, b)} == {start + i for i, row in enumerate(rows) if not row}
    support.validate(tokens, loss_mask=[0] * start + [bool(row) for row in rows])
    width = max(map(len, rows), default=0)
    assert [[i for i in row if i >= 0] for row in support.padded(width).tolist()] == [sorted(row) for row in rows]
    routes = routes_of(tokens)
    record = routes.to_bytes(support)
    assert SamplingSupport.of_record(record) == support
    assert Routes.from_bytes(record) == routes
    changed, at = bytearray(record), data.draw(st.integers(0, 8 * len(record) - 1))
    changed[at // 8] ^= 1 << (at % 8)
    for wrong in (changed, record[:-1], record + b"\0"):
        for read in (Routes.from_bytes, SamplingSupport.of_record):
            with pytest.raises(RowError):
                read(wrong)


def test_a_record_without_support_is_of_the_version_before() -> None:
    """Goal: old readers take what has no support, and refuse the rest by its number. Method: the bytes of both."""
    plain, both = routes_of(TOKENS).to_bytes(), routes_of(TOKENS).to_bytes(made())
    assert (plain[8:10], both[8:10]) == (b"\4\0", b"\5\0")
    assert b"support" not in plain
    assert SamplingSupport.of_record(plain) is None
    for record, number in ((plain, 5), (both, 4)):
        header = wire.unpack(record[: wire.FIXED_NBYTES + wire.header_nbytes(record)])
        text = record[wire.FIXED_NBYTES :][: wire.header_nbytes(record)]
        fixed = record[:8] + number.to_bytes(2, "little") + record[10:16]
        head = fixed + wire._sum(fixed, text) + text
        with pytest.raises(RowError, match=f"routes record version: wanted {header.version}, .*got {number}"):
            wire.unpack(head)


def test_the_bytes_are_those_of_the_format() -> None:
    """Goal: no change of the format by accident. Method: the part's bytes and its entry in the header, written down."""
    record = routes_of(TOKENS).to_bytes(made())
    assert np.frombuffer(record[-44:], "<i4").tolist() == [3, 1, 0, 3, 2, 13, 40, 21, 7, 8, 21]
    hashes = token_hashes(TOKENS, {2, 5, 6})
    header = wire.unpack(record[: wire.FIXED_NBYTES + wire.header_nbytes(record)])
    assert header.support == wire.SupportPart(4, 7, 2, hashes, wire.sum_of(record[-44:]))
    assert b'"support":{"ids":7,"rows":4,"start":2,"sum":"' in record


def test_every_byte_of_a_support_counts() -> None:
    """Goal: no other id is a trainer's. Method: a record's last id becomes the next one, which nothing else forbids."""
    record = routes_of(TOKENS).to_bytes(made())
    changed = record[:-4] + (int.from_bytes(record[-4:], "little") + 1).to_bytes(4, "little")
    for read in (Routes.from_bytes, SamplingSupport.of_record):
        with pytest.raises(RowError, match="routes record support checksum"):
            read(changed)


def test_a_support_of_another_sequence_is_not_put_beside_routes() -> None:
    """Goal: a record is of one sequence. Method: routes of tokens of which the last that was read differs."""
    other = [*TOKENS[:3], 22, *TOKENS[4:]]
    with pytest.raises(RowError, match="hash of the first 5 tokens"):
        routes_of(other).to_bytes(made())
    unbound = Routes(routes_of(TOKENS).ids, np.ones(5, bool), SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers)
    with pytest.raises(RowError, match="routes: wanted parts of one sequence"):
        unbound.to_bytes(made())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[13], [13], [33], [21]], "sampling support of position 3: wanted ids with its token 21"),
        ([[13], [21], [21], [33]], "sampling support of position 4: wanted ids with its token 33"),  # shifted by one
        ([[13, 13]], "support.ids of position 2: wanted increasing ids"),
        ([[13, -1]], "support.ids: wanted ids of a vocabulary"),
        ([[13, 1 << 31]], "support.ids: wanted ids of a vocabulary"),
        ([[13.0]], "sampling support of position 2: wanted integers"),
        ([[13]] * 5, "tokens: wanted 7 or more"),
    ],
)
def test_what_no_sampler_can_have_drawn_from_is_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        SamplingSupport.of(rows, TOKENS, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": [3, 1, 0, 2]}, "support.ids: wanted 6"),
        ({"counts": [3, 1, -1, 4]}, "support.counts: wanted 0 to 7"),
        ({"ids": [2, 13, 40, 21, 8, 7, 21]}, "support.ids of position 5: wanted increasing ids"),
        ({"ids": [2, 13, 40, 21, 7, 7, 21]}, "support.ids of position 5"),
        ({"start": -1}, "support.start"),
        ({"start": 1}, "support.token_hashes: wanted a hash of the first 5 tokens"),
        ({"token_hashes": ()}, "support.token_hashes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"counts": [3, 1, 0, 3], "ids": [2, 13, 40, 21, 7, 8, 21], "start": 2}
    hashes = token_hashes(TOKENS, [6])
    assert SamplingSupport(**fields, token_hashes=hashes).row(5).tolist() == [7, 8, 21]
    with pytest.raises(RowError, match=message):
        SamplingSupport(**{**fields, "token_hashes": hashes, **changes})


def test_a_trainer_finds_supports_of_other_tokens_and_positions_without_one() -> None:
    """Goal: no loss is normalised over another token's support. Method: another sequence, and a loss where a support
    is missing, is before the first or behind the last."""
    made().validate(TOKENS, loss_mask=[0, 0, 1, 1, 0, 1])
    with pytest.raises(RowError, match="hash of the first 2 tokens"):
        made().validate([5, 8, *TOKENS[2:]])
    for position in (1, 4, 6):
        mask = [int(i == position) for i in range(7)]
        with pytest.raises(RowError, match=f"position {position}: wanted a sampling support"):
            made().validate([*TOKENS, 3], loss_mask=mask)
    with pytest.raises(RowError, match="sampling support of position 2: wanted 2 ids at most, got 3"):
        made().padded(2)
    with pytest.raises(RowError, match="position: wanted one inside"):
        made().row(6)


def test_supports_are_values() -> None:
    """Goal: nobody changes what others read. Method: the arrays are copies, and read-only."""
    ids = np.array([2, 13, 40, 21, 7, 8, 21], np.int32)
    support = SamplingSupport(np.array([3, 1, 0, 3]), ids, 2, token_hashes(TOKENS, [6]))
    ids[:] = 0
    assert support.row(2).tolist() == [2, 13, 40]
    assert not support.ids.flags.writeable
    assert not support.counts.flags.writeable
    assert made() == made()
    assert made() != SamplingSupport.of([[13]], TOKENS, 2)
    assert made() != ROWS
    assert repr(made()) == "SamplingSupport(positions 2..5, 7 ids, 1 missing)"


# For trainers --------------------------------------------------------------------------------------------------------


@given(drawn(), st.integers(0, 3))
def test_trainers_get_each_token_s_support(case: tuple[list[int], int, list[list[int]]], more: int) -> None:
    """Goal: the row that a trainer normalises a token over is that token's. Method: prime-rl's reading of its bytes,
    and SkyRL's rows, position by position, with tokens behind the last support."""
    tokens, start, rows = case
    support = SamplingSupport.of(rows, tokens, start)
    expected = [[] for _ in range(start)] + [sorted(row) for row in rows] + [[] for _ in range(more)]
    trains = [bool(row) for row in expected]
    mask = prime_rl.sampling_mask(support, trains)
    counts, ids = (np.frombuffer(mask[name], np.int32).tolist() for name in ("counts", "ids"))
    assert [[ids.pop(0) for _ in range(count)] for count in counts] == expected
    assert ids == []
    for prompt in {start, start // 2, len(tokens)}:
        width = max(map(len, expected))
        (padded,) = skyrl.rollout_sample_support([support], [prompt], [trains[prompt:]], top_k=width)
        assert padded.shape == (len(expected) - prompt, width)
        assert [[i for i in row if i >= 0] for row in padded.tolist()] == expected[prompt:]
        assert padded.flags.writeable
        assert padded.dtype == np.int32


def test_a_trainer_gets_no_token_with_a_loss_and_without_a_support() -> None:
    """Goal: nothing is trained over the whole vocabulary in silence. Method: a missing support with a loss, supports
    behind the sample, and one that is wider than the trainer's top-k."""
    none = [0, 0, 1, 1, 0, 1]
    assert prime_rl.sampling_mask(made(), [bool(i) for i in none])["counts"] == bytes(
        np.array([0, 0, 3, 1, 0, 3], "<i4")
    )
    with pytest.raises(RowError, match="position 4: wanted a sampling support"):
        prime_rl.sampling_mask(made(), [False, False, True, True, True, True])
    with pytest.raises(ReplayError, match="mask: wanted 6 tokens or more"):
        prime_rl.sampling_mask(made(), [True] * 5)
    with pytest.raises(RowError, match="position 4: wanted a sampling support"):
        skyrl.rollout_sample_support([made()], [2], [[1, 1, 1, 1]], top_k=3)
    with pytest.raises(RowError, match="position 2: wanted 2 ids at most, got 3"):
        skyrl.rollout_sample_support([made()], [2], [none[2:]], top_k=2)
    with pytest.raises(ReplayError, match="sample 0: wanted supports of the first 5 tokens"):
        skyrl.rollout_sample_support([made()], [2], [[0, 0, 0]], top_k=3)
    for samples in (([], [], []), ([made()], [2, 3], [none[2:]])):
        with pytest.raises(ReplayError, match="prompts, loss_masks: wanted one of each"):
            skyrl.rollout_sample_support(*samples, top_k=3)

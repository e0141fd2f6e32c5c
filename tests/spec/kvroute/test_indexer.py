"""Rows of a sparse attention's indexer: their spec, their one form, and their bytes outside memory."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import RowError, SpecError
from cache_manager.publish import Rows
from kvroute.indexer import canonical, indexer_spec, indexer_spec_from_hf, of_layers, pack, unpack
from kvroute.replay.rows import ReplayError
from kvroute.replay.slime import miles_indexer_topk


@st.composite
def rows_of(draw: st.DrawFn) -> Any:
    """Canonical rows whose choices are full, short, empty, side by side, or far apart."""
    layers, k, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 80))
    seed = draw(st.integers(0, 1 << 16))
    random = np.random.default_rng(seed)
    widest = draw(st.sampled_from([1, 3, 300, 1 << 20]))
    rows = np.full((tokens, layers, k), -1, np.int32)
    for choice in rows.reshape(-1, k):
        count = k if random.random() < 0.6 else random.integers(0, k + 1)
        choice[:count] = np.cumsum(random.integers(1, widest + 1, count)) + random.integers(-1, 1 << 20)
    return rows


@given(rows_of())
def test_what_is_packed_comes_back(rows: Any) -> None:
    data = pack(rows)
    back = unpack(data)
    assert (back.shape, back.dtype) == (rows.shape, np.int32)
    assert back.tobytes() == rows.tobytes()
    assert unpack(bytearray(data)).tobytes() == rows.tobytes()


@given(rows_of(), st.data())
def test_a_changed_bit_and_a_cut_are_refused(rows: Any, data: st.DataObject) -> None:
    packed = bytearray(pack(rows))
    place = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        packed = packed[:place]
    else:
        packed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RowError, match="indexer record"):
        unpack(packed)


@given(rows_of(), st.data())
def test_rows_that_are_not_canonical_are_not_packed(rows: Any, data: st.DataObject) -> None:
    """Goal: nothing is packed that would not come back. Method: two numbers of one choice change places, or one number
    is another; the rows are canonical still, and come back, or are refused by token and layer."""
    if not rows.size:
        return
    changed = rows.copy()
    choice = changed.reshape(-1, rows.shape[2])[data.draw(st.integers(0, rows.size // rows.shape[2] - 1))]
    i, j = data.draw(st.integers(0, rows.shape[2] - 1)), data.draw(st.integers(0, rows.shape[2] - 1))
    choice[i], choice[j] = choice[j], choice[i]
    if data.draw(st.booleans()):
        choice[i] = data.draw(st.sampled_from([-2, -1, 0, 7, (1 << 31) - 1]))
    count = int((choice >= 0).sum())
    right = bool((np.diff(choice[:count].astype(np.int64)) > 0).all() and (choice[count:] == -1).all())
    if right and (choice[:count] >= 0).all():
        assert unpack(pack(changed)).tobytes() == changed.tobytes()
    else:
        with pytest.raises(RowError, match=r"indexer row of token \d+ layer \d+: wanted increasing positions, then -1"):
            pack(changed)


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 3), np.int32),
        np.zeros((2, 0, 3), np.int32),
        np.zeros((2, 3, 0), np.int32),
        np.zeros((2, 3, 1), np.int64),
        np.zeros((2, 3, 1), np.float32),
    ],
    ids=lambda rows: f"{rows.dtype} {rows.shape}",
)
def test_what_are_no_rows_is_not_packed(rows: Any) -> None:
    """Goal: the field, what was wanted and what came, and no bytes. Method: other axes and types."""
    with pytest.raises(RowError, match=r"indexer rows: wanted int32 \[tokens, layers, k\], got " + str(rows.dtype)):
        pack(rows)


@given(rows_of(), st.data())
def test_rows_have_one_packed_form(rows: Any, data: st.DataObject) -> None:
    """Goal: what unpacks is what pack writes, byte for byte. Method: a byte of a record's body is another, under a
    right sum; the record is refused, or is that of the rows that come of it."""
    packed = pack(rows)
    fixed, body = packed[:36], bytearray(packed[52:])
    if not body:
        return
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] = data.draw(st.sampled_from([0, 1, 2, 127, 128, 254, 255]))
    changed = fixed + xxhash.xxh3_128(fixed + bytes(body)).digest() + bytes(body)
    try:
        back = unpack(changed)
    except RowError:
        return
    assert pack(back) == changed


def test_a_claim_makes_no_memory() -> None:
    """Method: a header of 2^40 tokens, with its right sum."""
    fixed = struct.pack("<8sIIIQQ", b"KVROUTEI", 1, 61, 2048, 1 << 40, 0)
    with pytest.raises(RowError, match="as many choices as it claims"):
        unpack(fixed + xxhash.xxh3_128(fixed).digest())


@pytest.mark.parametrize(
    ("k", "tokens", "first", "wanted"),
    [
        ((1 << 30) + 1, 1, 0, "rows of at most"),
        ((1 << 32) - 1, 0, 0, "rows of at most"),
        (4, 1, -7, "positions from 0"),
        (4, 1, (1 << 31) - 2, "positions from 0"),
    ],
)
def test_a_record_of_right_sum_is_no_proof_of_its_numbers(k: int, tokens: int, first: int, wanted: str) -> None:
    """Goal: neither memory nor a position is made of what nobody packs. Method: one choice of three neighbours."""
    fixed = struct.pack("<8sIIIQQ", b"KVROUTEI", 1, 1, k, tokens, 0)
    body = struct.pack("<Ii", (1 << 31) + 3, first) * tokens
    with pytest.raises(RowError, match=f"indexer record: wanted {wanted}"):
        unpack(fixed + xxhash.xxh3_128(fixed + body).digest() + body)


END = 1 << 31


@given(st.lists(st.sampled_from([-END, -END + 1, -2, -1, 0, 1, 5, END - 2, END - 1]), min_size=1, max_size=4))
def test_numbers_at_the_ends_are_no_way_around(numbers: list[int]) -> None:
    """Goal: a difference that int32 has no place for makes no row canonical. Method: any row of numbers at the ends: it
    comes back, or is refused, as its numbers say."""
    row = np.array([[numbers]], np.int64).astype(np.int32)
    count = sum(number >= 0 for number in numbers)
    chosen = numbers[:count]
    is_canonical = chosen == sorted(set(chosen)) and min(chosen, default=0) >= 0
    if is_canonical and numbers[count:] == [-1] * (len(numbers) - count):
        assert unpack(pack(row)).tobytes() == row.tobytes()
    else:
        with pytest.raises(RowError, match="indexer row of token 0 layer 0: wanted increasing positions, then -1"):
            pack(row)


@given(st.sampled_from([0, 1, END - 2, END - 1]), st.sampled_from([0, 1, END - 258, END - 257, END - 256, END - 255]))
def test_a_wide_gap_leads_to_a_position(first: int, more: int) -> None:
    """Goal: no record makes a row that is not canonical. Method: three positions, with a wide gap about the largest."""
    fixed = struct.pack("<8sIIIQQ", b"KVROUTEI", 1, 1, 3, 1, 1)
    body = struct.pack("<IiBBQI", 3, first, 255, 5, 0, more)
    record = fixed + xxhash.xxh3_128(fixed + body).digest() + body
    due = [first, first + 256 + more, first + 262 + more]
    if due[-1] < END:
        assert unpack(record).tolist() == [[due]]
        assert pack(unpack(record)) == record
    else:
        with pytest.raises(RowError, match="indexer record: wanted"):
            unpack(record)


def test_neighbours_have_no_gaps() -> None:
    """Goal: as above. Method: positions 5 and 6 with the gap between them, where their first one is due alone."""
    fixed = struct.pack("<8sIIIQQ", b"KVROUTEI", 1, 1, 2, 1, 0)
    body = struct.pack("<IiB", 2, 5, 0)
    with pytest.raises(RowError, match="wanted positions side by side as their first one"):
        unpack(fixed + xxhash.xxh3_128(fixed + body).digest() + body)


def test_choices_have_one_form() -> None:
    """Goal: the same set is the same row. Method: two orders, with what an indexer fills up with."""
    choices = np.array([[[5, 2, 9, 0]], [[-1, 2, 0, 5]]])
    rows = canonical(choices, [5, 5], 5)
    assert rows.tolist() == [[[0, 2, 5, -1, -1]], [[0, 2, 5, -1, -1]]]
    with pytest.raises(RowError, match="token 1 layer 0: wanted distinct positions, got 3"):
        canonical([[[1, 2]], [[3, 3]]], [4, 4], 2)
    with pytest.raises(RowError, match="positions: wanted below 2147483647, got 8589934592"):
        canonical([[[(1 << 32) + 5]]], [1 << 33], 1)
    with pytest.raises(RowError, match=r"wanted integers \[2, layers, up to 1\]"):
        canonical(choices, [5, 5], 1)


def test_layers_that_share_a_choice_have_no_row_of_their_own() -> None:
    spec = indexer_spec_from_hf(
        {"index_topk": 2, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}, 16
    )
    assert (spec.row_shape, spec.attrs["sources"]) == ((2, 2), (0, 0, 2, 2))
    rows = np.array([[[0, 1], [2, 3]]], np.int32)
    assert of_layers(spec, rows, [0, 1, 2, 3]).tolist() == [[[0, 1], [0, 1], [2, 3], [2, 3]]]
    with pytest.raises(RowError, match="layer 4: wanted one with sparse attention"):
        of_layers(spec, rows, [4])
    for sources in ([0, 2, 2], [1, 1], [-1, -1], [0, -1, 1], [0.0, 0.5], "0", [[0]], [None], 0):
        with pytest.raises(SpecError, match="sources"):
            indexer_spec(2, sources, 16)
    with pytest.raises(SpecError, match="a model with an indexer"):
        indexer_spec_from_hf({"num_hidden_layers": 4}, 16)
    with pytest.raises(SpecError, match="the first full"):
        indexer_spec_from_hf({"index_topk": 2, "num_hidden_layers": 2, "indexer_types": ["shared", "full"]}, 16)


def test_miles_gets_whole_rows_or_an_error() -> None:
    """Method: miles' own shape and dtype, as its check of a sample wants them; a row that is missing."""
    values = np.arange(24, dtype=np.int32).reshape(4, 2, 3)
    rows = miles_indexer_topk(Rows(values, np.array([True, True, True, False])), 4)
    assert (rows.shape, rows.dtype, rows.flags.c_contiguous) == ((3, 2, 3), np.int32, True)
    assert rows.tobytes() == values[:3].tobytes()
    with pytest.raises(ReplayError, match="indexer row 1: wanted one"):
        miles_indexer_topk(Rows(values, np.array([True, False, True, False])), 4)
    with pytest.raises(ReplayError, match="wanted int32"):
        miles_indexer_topk(Rows(values, np.ones(4, bool)), 6)

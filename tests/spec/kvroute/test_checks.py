"""What makes a row sound, at the speed of arrays and by the plain meaning of the words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute import checks
from kvroute.checks import check_ids, valid_rows
from kvroute.routing import routing_spec, weights_version_spec

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "uint32", "int64"]


def is_sound(row: NDArray[Any], num_experts: int) -> bool:
    """The plain meaning of a sound row ``[layers, top_k]``."""
    return all(all(0 <= i < num_experts for i in layer) and len(set(layer)) == len(layer) for layer in row.tolist())


@st.composite
def ids_and_experts(draw: st.DrawFn) -> tuple[NDArray[Any], int]:
    """Ids ``[n, layers, top_k]`` that are mostly sound, of any dtype and memory order, and the number of experts."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    experts = draw(st.sampled_from([4, 5, 100, 128, 200, 256, 300, 65_536, 1 << 32]))
    n, layers, k = draw(st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    limits = np.iinfo(dtype)
    seeded = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = min(experts, int(limits.max) + 1, 400)
    ids = np.argsort(seeded.random((n, layers, top)), axis=2)[:, :, :k].astype(dtype)
    for _ in range(draw(st.integers(0, 2)) if n else 0):
        at = tuple(draw(st.integers(0, size - 1)) for size in ids.shape)
        value = draw(st.sampled_from([0, -1, 1, experts - 1, experts, int(limits.max)]))
        ids[at] = np.array([value]).astype(dtype)[0]  # may wrap
    if draw(st.booleans()):
        ids = np.asfortranarray(ids)
    return ids, experts


@example((np.array([[[0, 1]], [[2, -1]]], np.int8), 256), 1)  # in one byte, -1 is not expert 255
@given(ids_and_experts(), st.sampled_from([1, 600]))
def test_valid_rows_are_those_that_a_router_can_have_chosen(drawn: tuple[NDArray[Any], int], times: int) -> None:
    ids, experts = drawn
    ids = np.tile(ids, (times, 1, 1))  # few are sorted, many compared column by column
    spec = routing_spec(experts, ids.shape[2], range(ids.shape[1]), ids.shape[1], block_tokens=8)
    expected = [is_sound(row, experts) for row in ids]
    assert valid_rows(spec, ids).tolist() == expected
    if all(expected):
        check_ids(ids, experts, range(ids.shape[1]))
    else:
        with pytest.raises(RowError, match="row "):
            check_ids(ids, experts, range(ids.shape[1]))


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Goal: a repeat is found and named in whichever chunk and columns it lies. Method: small chunks, one repeat at a
    time; then repeats of different columns in one chunk, which a planted fault had hidden."""
    monkeypatch.setattr(checks, "IDS_AT_ONCE", chunk)
    monkeypatch.setattr(checks, "FEW_IDS", 0)
    spec = routing_spec(16, 3, (2, 5), 8, block_tokens=8)
    for bad in range(20):
        ids = np.tile(np.arange(3, dtype=np.int32), (20, 2, 1))
        ids[bad, 1, 2] = 1
        assert np.flatnonzero(~valid_rows(spec, ids)).tolist() == [bad]
        with pytest.raises(RowError, match=rf"row {bad + 40} layer 5: wanted distinct ids, got \[0, 1, 1\]"):
            check_ids(ids, 16, (2, 5), range(40, 60))
    ids = np.tile(np.arange(3, dtype=np.uint8), (6, 2, 1))
    ids[1, 0, 1], ids[3, 0, 2], ids[4, 1, 2] = 0, 0, 1
    assert valid_rows(spec, ids).tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((2, 2, 2), np.uint8), r"shape \(n, 1, 2\)"),
        (np.zeros((2, 2), np.uint8), r"shape \(n, 1, 2\)"),
        (np.zeros((2, 1, 2)), "float64"),
    ],
)
def test_ids_of_another_shape_are_refused(ids: NDArray[Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        valid_rows(routing_spec(4, 2, (0,), 1, block_tokens=8), ids)
    with pytest.raises(RowError, match="a routing spec"):
        valid_rows(weights_version_spec(8), ids)

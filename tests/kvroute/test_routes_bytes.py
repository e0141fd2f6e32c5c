"""Routes outside memory: they come back as they were, a changed byte is noticed, and the format does not move."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import SHAPES, Shape, shapes

from cache_manager.errors import RowError
from kvroute.routes import Routes

SHAPE = SHAPES[0]

GOLDEN_START = (
    "4b56524f55544553"  # KVROUTES
    "0100"  # version
    "0000"
    "e0000000"  # 224 bytes of header
)
GOLDEN_HEADER = (
    b'{"dtype":"uint8","format":"kvroute.routes/2","layer_ids":[1],"num_experts":4,"num_layers":2,"shape":[3,1,2],'
    b'"start":10,"token_hashes":[[14,"000102030405060708090a0b0c0d0e0f"]],"weights_versions":[[10,12,7]]}'
)
GOLDEN_ROWS = bytes([1, 0, 255, 255, 2, 3]) + b"\x05"


def golden() -> Routes:
    ids = np.array([[[1, 0]], [[9, 9]], [[2, 3]]])
    hashes = ((14, bytes(range(16))),)
    return Routes(ids, np.array([True, False, True]), (1,), 4, 2, 10, ((10, 12, 7),), hashes)


@st.composite
def routes(draw: st.DrawFn) -> Routes:
    shape: Shape = draw(shapes())
    start, valid = draw(st.integers(0, 40)), draw(st.lists(st.booleans(), max_size=20))
    cuts = sorted(draw(st.sets(st.integers(start, start + len(valid)), max_size=4)))
    versions = tuple((a, b, draw(st.integers(0, 2))) for a, b in pairwise(cuts) if draw(st.booleans()))
    made = shape.routes(start, valid, versions=versions)
    return made.bind(list(range(start + len(valid) + 1))) if draw(st.booleans()) else made


@given(routes())
def test_routes_come_back_as_they_were(made: Routes) -> None:
    encoded = made.to_bytes()
    for again in (Routes.from_bytes(encoded), Routes.from_bytes(bytearray(encoded), checked=True)):
        assert again == made
    assert Routes.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_the_bytes_are_those_of_the_format() -> None:
    """Goal: no change of the format by accident. Method: every byte, written down."""
    encoded = golden().to_bytes()
    assert encoded.hex().startswith(GOLDEN_START)
    assert encoded[16:32].hex() == "c849f889f6a5a4dc8a9f3b71a286991d"
    assert encoded[32:].startswith(GOLDEN_HEADER + b" ")
    assert encoded[32 + 224 :] == GOLDEN_ROWS
    assert len(encoded) == 32 + 224 + len(GOLDEN_ROWS)
    assert (32 + 224) % 64 == 0


def test_the_json_is_that_of_the_format() -> None:
    assert golden().to_json() == {
        "format": "kvroute.routes/2",
        "dtype": "uint8",
        "shape": (3, 1, 2),
        "start": 10,
        "layer_ids": (1,),
        "num_experts": 4,
        "num_layers": 2,
        "weights_versions": ((10, 12, 7),),
        "token_hashes": ((14, "000102030405060708090a0b0c0d0e0f"),),
        "valid": "BQ==",
        "data": "AQD//wID",
        "checksum": "287f7493018a2bec",
    }


@given(routes(), st.data())
def test_one_changed_bit_is_noticed(made: Routes, data: st.DataObject) -> None:
    encoded = bytearray(made.to_bytes())
    at = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[at // 8] ^= 1 << (at % 8)
    with pytest.raises(RowError):
        Routes.from_bytes(encoded, checked=True)


@given(routes(), st.data())
def test_a_cut_or_longer_record_is_noticed(made: Routes, data: st.DataObject) -> None:
    encoded = made.to_bytes()
    with pytest.raises(RowError):
        Routes.from_bytes(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(RowError):
        Routes.from_bytes(encoded + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=400) | st.binary(max_size=300).map(lambda b: b"KVROUTES\x01\x00\x00\x00" + b))
def test_foreign_bytes_are_a_row_error(given_bytes: bytes) -> None:
    with pytest.raises(RowError):
        Routes.from_bytes(given_bytes)


def test_rows_that_no_router_chose_do_not_come_back_unless_trusted() -> None:
    """Goal: who wrote the bytes may be wrong, with a sum that is right. Method: such routes, made by the back door."""
    ids = np.array([[[1, 1]]], np.uint8)
    wrong = Routes.checked(ids, np.array([True]), (0,), 4, 1)
    with pytest.raises(RowError, match="row 0 layer 0: wanted distinct ids"):
        Routes.from_bytes(wrong.to_bytes())
    with pytest.raises(RowError, match="row 0 layer 0: wanted distinct ids"):
        Routes.from_json(wrong.to_json())
    assert Routes.from_bytes(wrong.to_bytes(), checked=True) == wrong
    wild = Routes.checked(np.array([[[200, 1]]], np.uint8), np.array([True]), (0,), 4, 1)
    with pytest.raises(RowError, match=r"row 0 layer 0: wanted ids in \[0, 4\), got 200"):
        Routes.from_bytes(wild.to_bytes())


def test_lengths_are_checked_although_the_sum_is_right() -> None:
    """Goal: what a record says of itself is what it is. Method: bytes too many and too few, summed anew."""
    encoded = golden().to_bytes()
    for wrong in (encoded + b"\0", encoded[:-1], encoded[:200]):
        sums = xxhash.xxh3_128_digest(wrong[:16] + wrong[32:])
        with pytest.raises(RowError, match="routes record"):
            Routes.from_bytes(wrong[:16] + sums + wrong[32:])


def test_what_comes_back_belongs_to_nobody_else() -> None:
    encoded = bytearray(golden().to_bytes())
    again = Routes.from_bytes(encoded)
    encoded[-7:] = bytes(7)
    assert again == golden()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "kvroute.routes/1"}, "routes.format"),
        ({"dtype": "int8"}, "routes.dtype"),
        ({"shape": [1 << 30, 1, 2]}, "routes.shape"),
        ({"shape": [3, 0, 2]}, "routes.shape"),
        ({"data": "AQD//wI="}, "routes.data"),
        ({"data": "AQD//wI*"}, "routes.data"),
        ({"valid": "Bg=="}, "routes.checksum"),
        ({"start": 11}, "routes.checksum"),
        ({"token_hashes": [[14, "00"]]}, "routes"),
        ({"more": 1}, "an object of kvroute.routes/2"),
        ({"layer_ids": "1"}, "an object of kvroute.routes/2"),
    ],
)
def test_an_object_that_was_changed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        Routes.from_json({**golden().to_json(), **change})

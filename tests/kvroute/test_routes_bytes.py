"""Routes outside memory: they come back as they were, a changed byte is noticed, and the format does not move."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import SHAPES, Shape, cellwise, shapes

from cache_manager.errors import RowError
from kvroute.routes import Routes

SHAPE = SHAPES[0]

GOLDEN_START = (
    "4b56524f55544553"  # KVROUTES
    "0200"  # version
    "0000"
    "20010000"  # 288 bytes of header
)
GOLDEN_HEADER = (
    b'{"dtype":"uint8","format":"kvroute.routes/3","layer_ids":[1,2],"missing_layers":[3],"num_experts":4,'
    b'"num_layers":4,"shape":[3,2,2],"start":10,"token_hashes":[[14,"000102030405060708090a0b0c0d0e0f"]],'
    b'"unknown":[[2,12,13]],"weights_versions":[[10,12,7]]}'
)
GOLDEN_ROWS = bytes([1, 0, 3, 1, 255, 255, 255, 255, 2, 3, 255, 255]) + b"\x05"


def golden() -> Routes:
    """Of four layers the first is dense, the last is missing; a whole row, none, and one without its second layer."""
    ids = np.array([[[1, 0], [3, 1]], [[9, 9], [9, 9]], [[2, 3], [9, 9]]])
    hashes, known = ((14, bytes(range(16))),), np.array([[True, True], [False, False], [True, False]])
    return Routes(ids, known, (1, 2), 4, 4, 10, ((10, 12, 7),), hashes, (3,))


@st.composite
def routes(draw: st.DrawFn) -> Routes:
    shape: Shape = draw(shapes())
    made = draw(cellwise(shape, rows_max=20, start=draw(st.integers(0, 40))))
    cuts = sorted(draw(st.sets(st.integers(made.start, made.stop), max_size=4)))
    versions = tuple((a, b, draw(st.integers(0, 2))) for a, b in pairwise(cuts) if draw(st.booleans()))
    made = replace(made, valid=made.known, weights_versions=versions)
    return made.bind(list(range(made.stop + 1))) if draw(st.booleans()) else made


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
    assert encoded[16:32].hex() == "9e400705cd743cba7adb3f70fd7bca86"
    assert encoded[32:].startswith(GOLDEN_HEADER + b" ")
    assert encoded[32 + 288 :] == GOLDEN_ROWS
    assert len(encoded) == 32 + 288 + len(GOLDEN_ROWS)
    assert (32 + 288) % 64 == 0


def test_the_json_is_that_of_the_format() -> None:
    assert golden().to_json() == {
        "format": "kvroute.routes/3",
        "dtype": "uint8",
        "shape": (3, 2, 2),
        "start": 10,
        "layer_ids": (1, 2),
        "num_experts": 4,
        "num_layers": 4,
        "weights_versions": ((10, 12, 7),),
        "token_hashes": ((14, "000102030405060708090a0b0c0d0e0f"),),
        "missing_layers": (3,),
        "unknown": ((2, 12, 13),),
        "valid": "BQ==",
        "data": "AQADAf////8CA///",
        "checksum": "f3cf6ff04b568721",
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


@given(st.binary(max_size=400) | st.binary(max_size=300).map(lambda b: b"KVROUTES\x02\x00\x00\x00" + b))
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


@pytest.mark.parametrize(
    ("unknown", "missing_layers", "message"),
    [
        ([[2, 11, 12]], [3], "routes.unknown"),  # of a row of which nothing is known
        ([[1, 12, 13], [2, 12, 13]], [3], "routes.unknown"),  # nothing is left of the row
        ([[2, 12, 13], [1, 12, 13]], [3], "routes.unknown: wanted increasing"),
        ([[2, 10, 13], [2, 12, 13]], [3], "routes.unknown: wanted increasing"),  # work would be what it claims
        ([[2, 10, 11], [2, 11, 13]], [3], "routes.unknown"),
        ([[2, 12, 14]], [3], "routes.unknown"),
        ([[3, 12, 13]], [3], "routes.unknown"),
        ([[2, 12, 12]], [3], "routes.unknown"),
        ([[2, 12, 13]], [2], "routes.missing_layers"),
        ([[2, 12, 13]], [3, 3], "routes.missing_layers"),
        ([[2, 12, 13]], [4], "routes.missing_layers"),
    ],
)
def test_cells_that_cannot_be_are_refused_although_the_sum_is_right(
    unknown: list[list[int]], missing_layers: list[int], message: str
) -> None:
    """Goal: one thing has one spelling, and claims cost nothing. Method: other claims, summed anew."""
    told = json.loads(json.dumps(golden().to_json())) | {"unknown": unknown, "missing_layers": missing_layers}
    header = {k: v for k, v in told.items() if k not in ("valid", "data", "checksum")}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    summed = xxhash.xxh3_64_hexdigest(text + b64decode(told["valid"]) + b64decode(told["data"]))
    with pytest.raises(RowError, match=message):
        Routes.from_json(told | {"checksum": summed})


def test_a_routes_record_of_the_version_before_is_refused_by_name() -> None:
    encoded = golden().to_bytes()
    with pytest.raises(RowError, match="version 2, got b'KVROUTES' version 1"):
        Routes.from_bytes(encoded[:8] + b"\1\0" + encoded[10:])


def test_what_comes_back_belongs_to_nobody_else() -> None:
    encoded = bytearray(golden().to_bytes())
    again = Routes.from_bytes(encoded)
    encoded[-13:] = bytes(13)
    assert again == golden()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "kvroute.routes/2"}, "routes.format: wanted kvroute.routes/3"),
        ({"dtype": "int8"}, "routes.dtype"),
        ({"shape": [1 << 30, 1, 2]}, "routes.shape"),
        ({"shape": [3, 0, 2]}, "routes.shape"),
        ({"shape": [3, 3, 2]}, "routes.shape"),
        ({"data": "AQADAf////8CA/8="}, "routes.data"),
        ({"data": "AQADAf////8CA//*"}, "routes.data"),
        ({"unknown": []}, "routes.checksum"),
        ({"valid": "Bg=="}, "routes.checksum"),
        ({"start": 11}, "routes.checksum"),
        ({"token_hashes": [[14, "00"]]}, "routes"),
        ({"more": 1}, "an object of kvroute.routes/3"),
        ({"layer_ids": "1"}, "an object of kvroute.routes/3"),
    ],
)
def test_an_object_that_was_changed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        Routes.from_json({**golden().to_json(), **change})

"""Routes outside memory: decoding restores them, a changed byte is noticed, and the format does not change."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from a_store import a_store
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import of_shapes

from cache_manager.errors import RowError
from kvroute.routes import Layout, Routes, wire
from kvroute.routes.parts import ROWS_MAX
from kvroute.routes.routes import checked_routes, routes_of_record

GOLDEN_START = (
    "4b56524f55544553"  # KVROUTES
    "0400"  # version
    "0000"
    "60010000"  # 352 bytes of header
)
GOLDEN_HEADER = (
    b'{"by_cell":true,"layout":{"layer_ids":[1,2],"missing_layers":[3],"num_experts":4,"num_layers":4,"top_k":2},"name":"a",'
    b'"part_layers":1,"part_tokens":2,"rows":3,"start":10,"sums":"k57cSddswYLPd3rTW3s5QuC/nFYn5WLIa8DelMUFWLI=",'
    b'"token_hashes":[[14,"AAECAwQFBgcICQoLDA0ODw=="]],"turns":[1,2,4],'
    b'"weights_versions":[[10,12,7]]}'
)
GOLDEN_PARTS = bytes([1, 0, 255, 255, 2, 3, 3, 1, 255, 255, 255, 255])


def golden() -> Routes:
    """Of four layers the first is dense, the last is missing; a whole row, none, and one without its second layer."""
    ids = np.array([[[1, 0], [3, 1]], [[9, 9], [9, 9]], [[2, 3], [9, 9]]])
    hashes, known = ((14, bytes(range(16))),), np.array([[True, True], [False, False], [True, False]])
    return Routes(ids, known, (1, 2), 4, 4, 10, ((10, 12, 7),), hashes, (3,))


def header_of(record: bytes) -> wire.Header:
    at = wire.FIXED_NBYTES + wire.header_nbytes(record[: wire.FIXED_NBYTES])
    return wire.unpacked_header(record[:at])


def golden_with(**changes: Any) -> bytes:
    """The golden record with other claims, summed anew."""
    _, parts = wire.record(golden())
    header = msgspec.structs.replace(header_of(golden().to_bytes()), **changes)
    return b"".join((header.pack(), parts))


@st.composite
def records(draw: st.DrawFn) -> tuple[Routes, bytes]:
    """Routes, bound to tokens or not, and their record in parts of any size."""
    made = draw(of_shapes(20, draw(st.integers(0, 40))))[1]
    made = made.bind(list(range(made.stop + 1))) if draw(st.booleans()) else made
    part = draw(st.none() | st.integers(1, made.ids.shape[1])), draw(st.none() | st.integers(1, 9))
    header, parts = wire.record(made, *part, draw(st.sampled_from(["", "who"])))
    return made, b"".join((header.pack(), parts))


@given(records())
def test_routes_come_back_as_they_were(given_record: tuple[Routes, bytes]) -> None:
    """Goal: one format for every reader. Method: as bytes, as JSON, and part by part as a store does."""
    made, record = given_record
    for again in (Routes.from_bytes(record), Routes.from_bytes(bytearray(record))):
        assert again == made
    assert Routes.from_json(json.loads(json.dumps(made.to_json()))) == made
    header = header_of(record)
    at = len(record) - header.nbytes
    assert (at % 64, header.mask.tolist()) == (0, made.mask.tolist())
    for a, b in {(0, len(made)), (len(made) // 3, len(made) // 2)}:
        for layers in ([0], list(range(header.layers))):
            needed = header.needed(layers, [(a, b)])
            parts = [(run, record[at + header.starts(*run)[0] :][: header.nbytes_of(run)]) for run in needed]
            (ids,) = header.ids(parts, layers, [(a, b)])
            expected = made.slice(made.start + a, made.start + b)
            found = routes_of_record(header, ids, a, layers)
            assert np.array_equal(found.ids, expected.ids[:, layers])
            assert np.array_equal(found.known, expected.known[:, layers])
            assert found.routed_layers == made.routed_layers
            hashes = made.token_hashes if b == len(made) else expected.token_hashes
            assert (found.weights_versions, found.token_hashes) == (expected.weights_versions, hashes)


def test_the_bytes_are_those_of_the_format() -> None:
    """Goal: no change of the format by accident. Method: every byte, written down."""
    made, parts = wire.record(golden(), 1, 2, "a")
    header = made.pack()
    assert header.hex().startswith(GOLDEN_START)
    assert header[16:32].hex() == "a3530e91f086ae922bcdf421a333e992"
    assert bytes(header[32:]).rstrip(b" ") == GOLDEN_HEADER
    assert (len(header), len(header) % 64) == (32 + 352, 0)
    assert parts == GOLDEN_PARTS
    whole = golden().to_bytes()
    assert whole[-12:] == bytes([1, 0, 3, 1, 255, 255, 255, 255, 2, 3, 255, 255])
    assert golden().to_json() == {"format": "kvroute.routes/4", "record": b64encode(whole).decode()}


@given(records(), st.data())
def test_one_changed_bit_a_cut_and_a_longer_record_are_noticed(
    given_record: tuple[Routes, bytes], data: st.DataObject
) -> None:
    record = given_record[1]
    changed, at = bytearray(record), data.draw(st.integers(0, 8 * len(record) - 1))
    changed[at // 8] ^= 1 << (at % 8)
    shorter = record[: data.draw(st.integers(0, len(record) - 1))]
    for wrong in (changed, shorter, record + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(RowError):
            Routes.from_bytes(wrong)


@pytest.mark.parametrize(
    ("rows", "holed", "message"),
    [
        (ROWS_MAX + 1, False, f"rows: wanted at most {ROWS_MAX}"),
        (ROWS_MAX, True, "wanted what is known in fewer turns"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(rows: int, holed: bool, message: str) -> None:
    """Goal: a rollout whose put succeeded can be read. Method: one row too many, and every other row missing, whose
    turns are more than a header holds; as bytes, and put to a store."""
    known = np.arange(rows) % 2 == 0 if holed else np.ones(rows, np.bool_)
    made = checked_routes(Layout((0,), 2, 1, 1), np.zeros((rows, 1, 1), np.uint8), known)
    store = a_store()
    for write in (made.to_bytes, lambda: store.put("x", made)):
        with pytest.raises(RowError, match=message):
            write()


def test_no_memory_is_taken_for_what_a_record_claims() -> None:
    """Goal: a hostile answer is refused, and ends no trainer. Method: a record whose header is sound, says that 2^36
    ids follow, and has none."""
    layout = Layout(tuple(range(64)), 4096, 64, 64)
    claims = wire.Header(layout=layout, rows=1 << 24, start=0, part_layers=64, part_tokens=512)
    head = msgspec.structs.replace(claims, sums=bytes(8 * claims.parts)).pack()
    with pytest.raises(RowError, match=r"routes record: wanted [0-9]+ bytes"):
        Routes.from_bytes(head)
    with pytest.raises(RowError, match=r"routes record: wanted [0-9]+ bytes"):
        Routes.from_json({"format": "kvroute.routes/4", "record": b64encode(head).decode()})


def test_rows_that_no_router_chose_do_not_come_back() -> None:
    """Goal: routes of a faulty writer are refused, though their checksum is right. Method: such routes, made by
    internal calls."""
    for ids, message in (([1, 1], "wanted distinct ids"), ([200, 1], r"wanted ids in \[0, 4\), got 200")):
        wrong = checked_routes(Layout((0,), 4, 1, 2), np.array([[ids]], np.uint8), np.array([True]))
        with pytest.raises(RowError, match="row 0 layer 0: " + message):
            Routes.from_bytes(wrong.to_bytes())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": (1, 2, 6)}, "routes.turns: wanted increasing numbers below 6"),
        ({"turns": (1, 2, 2)}, "routes.turns"),
        ({"turns": (4, 2)}, "routes.turns"),
        ({"turns": (1 << 40,)}, r"at .*turns"),
        ({"turns": (-1,)}, r"at .*turns"),
        ({"by_cell": False}, "routes.turns: wanted increasing numbers below 3"),
        ({"rows": 2}, "routes record: wanted"),
        ({"rows": 1 << 25}, "rows: wanted at most"),
        ({"part_layers": 3}, "part_layers: wanted 1 to 2"),
        ({"part_tokens": 0}, r"at .*part_tokens"),
        ({"part_tokens": 1 << 63}, r"at .*part_tokens"),
        ({"sums": b""}, "routes record sums: wanted 8 bytes"),
        ({"sums": bytes(8)}, "routes record part 0 checksum"),
        ({"weights_versions": ((9, 12, 7),)}, "weights_versions"),
        ({"token_hashes": ((14, b"short"),)}, "token_hashes"),
    ],
)
def test_claims_that_cannot_be_are_refused_although_the_sum_is_right(changes: dict[str, Any], message: str) -> None:
    """Goal: one value has one encoding, and false claims cost nothing. Method: other claims, summed anew."""
    assert Routes.from_bytes(golden_with()) == golden()
    with pytest.raises(RowError, match=message):
        Routes.from_bytes(golden_with(**changes))


@pytest.mark.parametrize("lost", [b'"missing_layers":[2]', b'"missing_layers":[]3', b'"missing_layerz":[3]'])
def test_an_invalid_header_is_refused_although_the_sum_is_right(lost: bytes) -> None:
    header = wire.record(golden())[0].pack()
    text = bytes(header[32:]).replace(b'"missing_layers":[3]', lost)
    fixed = bytes(header[:16])
    with pytest.raises(RowError, match="routes record header: wanted a header of routes"):
        wire.unpacked_header(fixed + xxhash.xxh3_128(fixed + text).digest() + text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "kvroute.routes/3"}, "routes.format: wanted kvroute.routes/4"),
        ({"record": "AQAD*"}, "routes.record: wanted base64"),
        ({"record": "AR=="}, "routes.record: wanted bytes, in base64's one spelling"),
        ({"more": 1}, "an object of kvroute.routes/4"),
    ],
)
def test_an_object_that_was_changed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        Routes.from_json({**golden().to_json(), **change})

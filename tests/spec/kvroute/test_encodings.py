"""Routes in answers: they decode to the same routes, a changed byte is noticed, no missing row becomes a zero."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from base64 import b64decode, b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector import own_field
from kvroute.encodings import ENCODINGS, decode, encode, npy_array, refusal
from kvroute.routes import Routes
from kvroute.routing import routing_spec

GOLDEN = Path(__file__).parent / "golden" / "encodings"
UNMASKED = ("sglang", "vllm", "lightllm")
"""The encodings that cannot say that a row is missing."""
EXPERTS_MAX = {"vllm": 1 << 16, "lightllm": 1 << 15}
EXPERTS = (4, 127, 128, 129, 254, 255, 256, 257, 300, 40_000, 70_000)


def spec_of(routes: Routes) -> AuxBlockDataSpec:
    return routing_spec(routes.num_experts, routes.top_k, routes.routed_layers, routes.num_layers, block_tokens=8)


@st.composite
def routes(draw: st.DrawFn, *, complete: bool = False) -> Routes:
    experts = draw(st.sampled_from(EXPERTS))
    layers = draw(st.integers(1, 5))
    layer_ids = tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    rows, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 3))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.argsort(seed.random((rows, len(layer_ids), min(experts, 400))), axis=2)[..., :top_k]
    ids = experts - 1 - ids  # the highest ids too
    valid = np.ones(rows, np.bool_) if complete else seed.random(rows) < draw(st.sampled_from([0.3, 0.9, 1.0]))
    kept = layer_ids
    if not complete and draw(st.booleans()):  # some layers of some rows are not known, and some of none
        valid = valid[:, None] & (seed.random((rows, len(layer_ids))) < 0.8)
        kept = tuple(sorted(draw(st.sets(st.sampled_from(layer_ids), min_size=1))))
        columns = [layer_ids.index(layer) for layer in kept]
        ids, valid = ids[:, columns], valid[:, columns]
    lost = tuple(layer for layer in layer_ids if layer not in kept)
    start = draw(st.integers(0, 1000))
    versions = ((start, start + rows, 7),) if rows and draw(st.booleans()) else ()
    return Routes(ids, valid, kept, experts, layers, start, versions, missing_layers=lost)


def as_json(told: Any) -> Any:
    return json.loads(json.dumps(told))


def through(encoding: str, told: Any, routes: Routes) -> Routes:
    return decode(as_json(told), spec_of(routes), encoding, routes.start)


def unversioned(routes: Routes) -> Routes:
    """Without versions, and with a column for each layer that has a router: what the other encodings can express."""
    layers, there = routes.routed_layers, np.isin(routes.routed_layers, routes.layer_ids)
    ids, known = np.zeros((len(routes), len(layers), routes.top_k), int), np.zeros((len(routes), len(layers)), bool)
    ids[:, there], known[:, there] = routes.ids, routes.known
    return Routes(ids, known, layers, routes.num_experts, routes.num_layers, routes.start)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(given_routes=routes())
def test_every_encoding_comes_back_or_is_refused(encoding: str, given_routes: Routes) -> None:
    """Goal: never wrong, never silent. Method: an encoding that is not refused decodes to the same routes, missing rows
    included."""
    told, why = encode(given_routes, encoding), refusal(given_routes, encoding)
    refused = encoding in UNMASKED and not given_routes.complete
    refused |= given_routes.num_experts > EXPERTS_MAX.get(encoding, 1 << 32)
    assert (told is None) == refused == (why is not None)
    if told is not None:
        back = through(encoding, told, given_routes)
        assert back == (given_routes if encoding == "kvroute" else unversioned(given_routes))


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(given_routes=routes(complete=True), data=st.data())
def test_a_changed_answer_is_an_error_or_has_one_spelling(
    encoding: str, given_routes: Routes, data: st.DataObject
) -> None:
    """Goal: hostile text costs an error and nothing else. Method: the answer with characters changed, cut or added.

    Without a checksum a changed id can be another expert's: then the decoded routes are exactly those of the changed
    text.
    """
    told = encode(given_routes, encoding)
    assume(told is not None)
    text = json.dumps(told)
    at, stop = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    piece = data.draw(st.text(st.characters(codec="ascii"), max_size=4))
    try:
        changed = json.loads(text[:at] + piece + text[min(stop, at + 4) :])
    except ValueError:
        return
    try:
        back = decode(changed, spec_of(given_routes), encoding, given_routes.start)
    except RowError:
        return
    if not (encoding == "nemo" and ("int16" in changed[:16] or "int32" in changed[:16])):  # a wider dtype is read too
        assert as_json(encode(back, encoding)) == changed


@pytest.mark.parametrize("rows", [1 << 40, 1 << 24, 1000])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_huge_claim_costs_nothing(encoding: str, rows: int) -> None:
    """Goal: bounded memory. Method: answers that claim many rows and contain few; the memory that decoding allocates is
    traced."""
    routes = Routes(np.array([[[1, 0]]]), np.array([True]), (1,), num_experts=4, num_layers=2)
    told = encode(routes, encoding)
    claimed: Any = {
        "kvroute": lambda: told | {"record": told["record"][:-4]},
        "sglang": lambda: told[:8] * 3 + "A",
        "vllm": lambda: _npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, 2, 2), }}", b"\0\0\1\0"),
        "lightllm": lambda: told | {"shape": [rows, 1, 2]},
        "nemo": lambda: told.replace("1x1x2", f"{rows}x1x2"),
        "fastdeploy": lambda: told[:-2] + "A",
    }[encoding]()
    tracemalloc.start()
    try:
        with pytest.raises(RowError, match="wanted"):
            decode(claimed, spec_of(routes), encoding)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 200_000


def _npy(header: str, body: bytes, version: bytes = b"\x01\x00") -> str:
    text = header.encode("latin-1").ljust(117) + b"\n"
    return b64encode(b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + body).decode()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (_npy("{'descr': '|O', 'fortran_order': False, 'shape': (1, 2, 2), }", b"\0" * 4), "dtype: wanted |u1"),
        (_npy("{'descr': '|u1', 'fortran_order': True, 'shape': (1, 2, 2), }", b"\0" * 4), "fortran_order True"),
        (_npy("{'descr': '<u2', 'fortran_order': False, 'shape': (1, 2, 2), }", b"\0" * 8), "got <u2"),
        (_npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4,), }", b"\0" * 4), "three dimensions"),
        (_npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 4), }", b"\0" * 4), r"shape: wanted \(rows, 2"),
        (_npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 2), }", b"\0" * 4), "data: wanted 8 bytes"),
        (_npy("{'descr': '\x8cu1', 'fortran_order': False, 'shape': (1, 2, 2), }", b"\0" * 4), "dtype: wanted |u1"),
        (_npy("__import__('os')", b""), "three dimensions"),
        (_npy("{}", b"", b"\x02\x00"), "version 1.0"),
        (b64encode(b"\x93NUMPY\x01\x00\xff\xff").decode(), "header of at most"),
    ],
)
def test_a_npy_of_another_array_is_refused_and_the_difference_named(told: str, message: str) -> None:
    spec = routing_spec(num_experts=4, top_k=2, layer_ids=(1,), num_layers=2, block_tokens=8)
    with pytest.raises(RowError, match=message.replace("|", r"\|")):
        decode(told, spec, "vllm")


def test_the_own_field_of_each_completion_is_found_by_its_number() -> None:
    """Goal: no completion gets another one's rows. Method: an engine's output and a server's answer whose completions
    come in another order; a number that none has; completions without the field."""
    rows = {1: "of the second", 0: "of the first"}
    output = SimpleNamespace(outputs=[SimpleNamespace(index=i, routed_experts=of) for i, of in rows.items()])
    answer = {"choices": [{"index": i, "routed_experts": of} for i, of in rows.items()]}
    for found in (output, answer):
        assert [own_field.of(found, i) for i in (0, 1, 2)] == ["of the first", "of the second", None]
    for empty in (SimpleNamespace(outputs=[SimpleNamespace(index=0)]), {"choices": [{"index": 0}]}, {}):
        assert own_field.of(empty, 0) is None


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2, 3 ", "three dimensions"),
        (" x\n y", "three dimensions"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999, 2, 3), }", "three dimensions"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (999999999999, 2, 3), }", "wanted 23999999999976 bytes"),
        ("{'descr': '|S0', 'fortran_order': False, 'shape': (999999999, 2, 3), }", "integers, little endian, got |S0"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 3), }", "integers, little endian, got <f4"),
        ("{'descr': '<u1', 'fortran_order': False, 'shape': (0, 999999999999, 999999999999), }", "at most 65536"),
    ],
)
def test_an_engines_own_field_that_is_none_is_refused(header: str, message: str) -> None:
    """Goal: an answer is judged without memory for what it claims, and without an error that has no field's name.
    Method: headers with which numpy's own reader ends in Python's tokeniser, in an overflow, or takes the claim."""
    with pytest.raises(RowError, match=f"routed_experts.*{re.escape(message)}"):
        own_field.unpacked(_npy(header, b"\0" * 24))
    with pytest.raises(RowError, match=f"routed_experts.*{re.escape(message)}"):
        npy_array(b64decode(_npy(header, b"\0" * 24)))
    ids = np.arange(12, dtype="<u2").reshape(1, 3, 4)
    file = io.BytesIO()
    np.save(file, ids)
    assert np.array_equal(own_field.unpacked(b64encode(file.getvalue()).decode()), ids)
    flat = np.arange(12, dtype="<i4")
    assert np.array_equal(own_field.unpacked(b64encode(flat.tobytes()).decode()), flat)


def test_what_is_missing_is_named() -> None:
    valid = np.array([True, False, False, True])
    ids = np.tile([[0, 1]], (4, 1, 1))
    routes = Routes(ids, valid, (0,), 4, 1, start=10)
    for encoding in UNMASKED:
        assert refusal(routes, encoding) == "2 of 4 rows are missing: positions [11, 13)"
    lacks = Routes(ids, np.ones(4, bool), (0,), 4, 2, start=10, missing_layers=(1,))
    for encoding in UNMASKED:
        told = refusal(lacks, encoding)
        assert told == "4 of 4 rows are missing: positions [10, 14), of which 10 lacks layer 1"


def test_more_experts_than_an_encoding_has_ids_for_are_refused() -> None:
    """Goal: no id is cut short. Method: position canaries, whose ids have 32 bits."""
    routes = Routes(np.array([[[1 << 31]]]), np.array([True]), (0,), num_experts=1 << 32, num_layers=1)
    for encoding, bits in {"sglang": 32, "vllm": 16, "lightllm": 16, "nemo": 32, "fastdeploy": 32}.items():
        assert encode(routes, encoding) is None
        assert f"ids of {bits} bits" in str(refusal(routes, encoding))


def golden_routes() -> dict[str, Routes]:
    """A dense-first model with few experts and one with many; ids by a formula that any language can repeat."""
    found = {}
    for name, experts, layer_ids, num_layers, start in (("few", 128, (1, 2), 3, 0), ("many", 300, (0, 1), 2, 5)):
        n, layers, k = 4, len(layer_ids), 3
        ids = np.array(
            [[[(7 * t + 11 * i + 31 * j) % experts for j in range(k)] for i in range(layers)] for t in range(n)]
        )
        found[name] = Routes(ids, np.ones(n, np.bool_), layer_ids, experts, num_layers, start, ((start, start + 2, 7),))
        valid = np.array([True, True, False, True])
        found[f"{name}-missing"] = Routes(ids, valid, layer_ids, experts, num_layers, start)
        cells, lost = np.stack([valid, valid & [True, False, True, True]], axis=1), (num_layers,)
        found[f"{name}-cells"] = Routes(ids, cells, layer_ids, experts, num_layers + 1, start, missing_layers=lost)
    return found


@pytest.mark.parametrize("name", golden_routes())
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_bytes_are_those_of_the_golden_file(encoding: str, name: str) -> None:
    """Goal: a format is not changed by accident. Method: stored files, which are read and written again here."""
    routes = golden_routes()[name]
    golden = json.loads((GOLDEN / f"{encoding}-{name}.json").read_text())
    assert as_json(encode(routes, encoding)) == golden
    if golden is not None:
        back = decode(golden, spec_of(routes), encoding, routes.start)
        assert back == (routes if encoding == "kvroute" else unversioned(routes))


@pytest.mark.parametrize("encoding", ["sglang", "vllm"])
def test_rows_of_a_model_with_other_layers_are_refused(encoding: str) -> None:
    """Goal: dense-first models are not read a layer off. Method: routes of layers 1 and 2 read as layers 0 and 1."""
    ids = np.tile([[1, 2], [3, 0]], (3, 1, 1))
    routes = Routes(ids, np.ones(3, np.bool_), (1, 2), num_experts=4, num_layers=3)
    other = routing_spec(num_experts=4, top_k=2, layer_ids=(0, 1), num_layers=3, block_tokens=8)
    with pytest.raises(RowError, match="layer 2: wanted zeros"):
        decode(encode(routes, encoding), other, encoding)


@pytest.mark.parametrize("junk", [None, 5, [], {}, "", "AAA", "ä", {"shape": [1, 1, 2], "dtype": "uint8", "data": [3]}])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_anything_else_is_a_row_error(encoding: str, junk: Any) -> None:
    spec = routing_spec(num_experts=4, top_k=2, layer_ids=(1,), num_layers=2, block_tokens=8)
    if junk or encoding not in ("sglang", "fastdeploy") or not isinstance(junk, str):  # no text is no row there
        with pytest.raises(RowError):
            decode(junk, spec, encoding)


def test_a_row_of_zeros_is_no_row() -> None:
    """Goal: a row that an engine lost is not replayed as expert 0. Method: routes whose middle row is overwritten."""
    routes = Routes(np.tile([[1, 2]], (3, 1, 1)), np.ones(3, np.bool_), (0,), num_experts=300, num_layers=1)
    raw = bytearray(b64decode(encode(routes, "sglang")))
    raw[8:16] = bytes(8)
    with pytest.raises(RowError, match=r"row 1 layer 0: wanted distinct ids, got \[0, 0\]"):
        decode(b64encode(raw).decode(), spec_of(routes), "sglang")

"""Routes in HTTP answers: they come back as they were, a changed byte is noticed, nothing missing becomes a zero."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import RowError
from kvroute.routes import Routes
from kvroute.serving.encodings import decode, encode, refusal, sglang, vllm


@st.composite
def routes(draw: st.DrawFn, *, complete: bool = False) -> Routes:
    experts = draw(st.sampled_from([4, 255, 256, 257, 300, 70_000]))
    layers = draw(st.integers(1, 5))
    layer_ids = tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    rows, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 3))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.argsort(seed.random((rows, len(layer_ids), min(experts, 400))), axis=2)[..., :top_k]
    ids = experts - 1 - ids  # the highest ids too
    valid = np.ones(rows, np.bool_) if complete else seed.random(rows) < draw(st.sampled_from([0.3, 0.9, 1.0]))
    start = draw(st.integers(0, 1000))
    versions = ((start, start + rows, 7),) if rows and draw(st.booleans()) else ()
    return Routes(ids, valid, layer_ids, experts, layers, start, versions)


@given(routes())
def test_routes_come_back_as_they_were(given_routes: Routes) -> None:
    """Goal: nothing is lost on the way. Method: through JSON text and back."""
    assert decode(json.loads(json.dumps(encode(given_routes)))) == given_routes


@given(routes(), st.data())
def test_one_changed_character_is_noticed(given_routes: Routes, data: st.DataObject) -> None:
    """Goal: never wrong. Method: another character anywhere in the JSON text, fields and payload alike."""
    text = json.dumps(encode(given_routes))
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]))
    try:
        changed = json.loads(text[:at] + other + text[at + 1 :])
    except ValueError:
        return
    if isinstance(changed, dict) and changed == encode(given_routes):
        return  # white space
    with pytest.raises(RowError):
        decode(changed)


def test_bits_of_base64_that_say_nothing_are_not_ignored() -> None:
    """Goal: one object, one spelling. Method: found by the test above: the last character before the padding."""
    encoded = encode(Routes(np.array([[[1]]]), np.array([True]), (0,), num_experts=4, num_layers=1))
    assert encoded["data"] == "AQ=="
    with pytest.raises(RowError, match="as base64 has it"):
        decode(encoded | {"data": "AR=="})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.dictionaries(st.text(), s)))
def test_anything_else_is_a_row_error(junk: Any) -> None:
    with pytest.raises(RowError):
        decode(junk)


def test_a_huge_claim_costs_nothing() -> None:
    encoded = encode(Routes(np.array([[[1]]]), np.array([True]), (0,), num_experts=4, num_layers=1))
    for shape in ([1 << 60, 1, 1], [1, 1 << 40, 1 << 40], [-1, 1, 1], [1, 0, 1]):
        with pytest.raises(RowError):
            decode(encoded | {"shape": shape})


@given(routes(complete=True))
def test_sglang_clients_read_the_same_ids(given_routes: Routes) -> None:
    """Goal: SGLang's own decoding gives the ids. Method: that decoding, as its documentation has it."""
    text = sglang(given_routes)
    assert text is not None
    rows = np.frombuffer(b64decode(text), np.int32).reshape(-1, given_routes.num_layers, given_routes.top_k)
    _same_ids(rows, given_routes)


@given(routes(complete=True))
def test_vllm_clients_read_the_same_ids(given_routes: Routes) -> None:
    """Goal: vLLM's own decoding gives the ids, in the narrow type that it has. Method: that decoding."""
    if given_routes.num_experts > 1 << 16:
        return
    text = vllm(given_routes)
    assert text is not None
    rows = np.load(io.BytesIO(b64decode(text)), allow_pickle=False)
    assert rows.dtype == (np.uint8 if given_routes.num_experts <= 256 else np.uint16)
    _same_ids(rows, given_routes)


def _same_ids(rows: np.ndarray[Any, Any], expected: Routes) -> None:
    assert rows.shape == (len(expected), expected.num_layers, expected.top_k)
    assert np.array_equal(rows[:, list(expected.layer_ids)], expected.ids)
    dense = [layer for layer in range(expected.num_layers) if layer not in expected.layer_ids]
    assert not rows[:, dense].any()


@given(routes())
def test_a_missing_row_is_never_spelled_as_ids(given_routes: Routes) -> None:
    """Goal: never silent. Method: the encodings without a mask are None exactly when a row is missing."""
    refused = not given_routes.complete
    assert (sglang(given_routes) is None) == refused == (refusal("sglang", given_routes) is not None)
    refused |= given_routes.num_experts > 1 << 16
    assert (vllm(given_routes) is None) == refused == (refusal("vllm", given_routes) is not None)
    assert refusal("kvroute", given_routes) is None


def test_what_is_missing_is_named() -> None:
    valid = np.array([True, False, False, True])
    ids = np.tile([[0, 1]], (4, 1, 1))
    assert refusal("vllm", Routes(ids, valid, (0,), 4, 1, start=10)) == "2 of 4 rows are missing: positions [11, 13)"

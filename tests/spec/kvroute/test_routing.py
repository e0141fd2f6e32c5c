"""Routing specs, and what makes a row sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import SpecError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routing import routing_spec

LAYERS = st.integers(1, 64).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1).map(sorted))
)


@given(LAYERS, st.integers(1, 70_000), st.integers(1, 16), st.integers(1, 64))
def test_a_spec_holds_every_id_in_the_narrowest_type(
    layers: tuple[int, list[int]], num_experts: int, top_k: int, block_tokens: int
) -> None:
    num_layers, layer_ids = layers
    top_k = min(top_k, num_experts)
    spec = routing_spec(num_experts, top_k, iter(layer_ids), num_layers, block_tokens)
    assert spec.row_shape == (len(layer_ids), top_k)
    assert spec.attrs == {"num_experts": num_experts, "layer_ids": tuple(layer_ids), "num_layers": num_layers}
    assert np.iinfo(spec.dtype).min == 0
    assert np.iinfo(spec.dtype).max >= num_experts - 1
    narrower = {"uint8": -1, "uint16": 255, "uint32": 65_535}[spec.dtype]
    assert num_experts - 1 > narrower
    assert AuxBlockDataSpec.from_json(spec.to_json()).fingerprint == spec.fingerprint


def test_what_the_trainer_must_know_is_part_of_the_fingerprint() -> None:
    """Goal: H13, two layer maps of one shape never mix. Method: change one attribute at a time."""
    base = {"num_experts": 200, "top_k": 2, "layer_ids": (1, 2), "num_layers": 4, "block_tokens": 16}
    changes = ({}, {"num_experts": 201}, {"layer_ids": (2, 3)}, {"num_layers": 5}, {"top_k": 3}, {"block_tokens": 32})
    fingerprints = {routing_spec(**{**base, **change}).fingerprint for change in changes}  # type: ignore[arg-type]
    assert len(fingerprints) == len(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, r"num_experts: wanted an integer in \[1, 4294967296\], got 0"),
        ({"num_experts": True}, "num_experts"),
        ({"num_experts": 8.0}, "num_experts"),
        ({"top_k": 0}, r"top_k: wanted an integer in \[1, 8\], got 0"),
        ({"top_k": 9}, "top_k.*got 9"),
        ({"layer_ids": ()}, "layer_ids: wanted at least one layer"),
        ({"layer_ids": (1, 1)}, "layer_ids: wanted distinct layers, got 1 twice"),
        ({"layer_ids": (2, 1)}, "layer_ids: wanted increasing layers, got 1 after 2"),
        ({"layer_ids": (1, 4)}, r"layer_ids\[1\]: wanted an integer in \[0, 3\], got 4"),
        ({"layer_ids": (-1, 2)}, r"layer_ids\[0\]"),
        ({"layer_ids": ("1",)}, r"layer_ids\[0\]"),
        ({"num_layers": 0}, "num_layers"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    good = {"num_experts": 8, "top_k": 2, "layer_ids": (1, 3), "num_layers": 4, "block_tokens": 16}
    routing_spec(**good)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=message):
        routing_spec(**{**good, **change})

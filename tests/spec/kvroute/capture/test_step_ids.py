"""The ids of a step are those that the routers called back with, or there are none, with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvroute.capture.step_ids import NO_ID, StepIds
from kvroute.checks import valid_rows
from kvroute.routing import routing_spec

SPEC = routing_spec(num_experts=8, top_k=2, layer_ids=[1, 3], num_layers=4, block_tokens=4)


def made(beside: bool, tokens: int = 16) -> StepIds:
    """One on a CPU, or one that brings a pass together in a buffer, as beside a device, in memory of the host."""
    ids = StepIds(SPEC, tokens, torch.device("cpu"))
    ids.buffer = torch.full((tokens, *SPEC.row_shape), NO_ID, dtype=torch.int32) if beside else None
    return ids


def call(ids: StepIds, tokens: int, layers: Any = (1, 3), *, value: int = 5, dtype: Any = torch.int32) -> None:
    for layer in layers:
        ids.hook(layer)(torch.tensor([[layer, value]] * tokens).to(dtype))


BESIDE = pytest.mark.parametrize("beside", [False, True])


@BESIDE
@given(steps=st.lists(st.integers(1, 16), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_each_step_has_its_own_ids(beside: bool, steps: list[int], seed: int) -> None:
    """Goal: ids of one step never appear in the next. Method: steps of any lengths, layers in any order."""
    ids, random = made(beside), np.random.default_rng(seed)
    for tokens in steps:
        ids.begin()
        chosen = random.integers(0, 8, (tokens, 2, 2)).astype(np.int32)
        for layer in random.permutation([0, 1]):
            ids.hook((1, 3)[layer])(torch.from_numpy(chosen[:, layer].copy()))
        assert ids.take(tokens).tolist() == chosen.tolist()  # type: ignore[union-attr]


@BESIDE
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64])
def test_ids_are_integers_of_any_size(dtype: torch.dtype, beside: bool) -> None:
    """Goal: kernels that route inside report their choices in two bytes. Method: each dtype, and an unsupported one."""
    ids = made(beside)
    ids.begin()
    call(ids, 1, dtype=dtype)
    assert ids.take(1).tolist() == [[[1, 5], [3, 5]]]  # type: ignore[union-attr]
    ids.begin()
    call(ids, 1, dtype=torch.float32)
    found = ids.take(1)
    assert "are not integers" in found if isinstance(found, str) else (found == NO_ID).all()


@BESIDE
def test_a_layer_that_was_not_recorded_is_detected(beside: bool) -> None:
    """Goal: no silent zeros, with or without Python in the step. Method: one layer's hook is not called, after a step
    in which all were.
    """
    ids = made(beside)
    for layers in (1, 3), (1,):
        ids.begin()
        call(ids, 2, layers)
        found = ids.take(2)
    assert "compiled" in found if isinstance(found, str) else (found == NO_ID).all()


@BESIDE
def test_ids_from_before_a_step_are_not_part_of_it(beside: bool) -> None:
    """Goal: an engine that warms up leaves nothing behind. Method: a pass outside of any step, and half a pass."""
    ids = made(beside)
    call(ids, 3, (1, 3, 1))
    ids.begin()
    call(ids, 1, value=4)
    assert ids.take(2 if beside else 1).tolist() == [[[1, 4], [3, 4]], [[NO_ID] * 2] * 2][: 1 + beside]  # type: ignore[union-attr]


FLAT = torch.zeros((3, 2), dtype=torch.int32)


def refused(*calls: tuple[int, torch.Tensor], reason: str, beside_too: bool = True) -> StepIds:
    """A step of two tokens with these calls has no ids, beside a device either; what was made for a device."""
    ids, beside = made(False), made(True)
    for layer, values in calls:
        ids.hook(layer)(values)
        beside.hook(layer)(values)
    assert reason in ids.take(2)
    assert "compiled" in ids.take(2)  # and the next step begins empty
    assert not beside_too or (beside.take(2) == NO_ID).all()  # type: ignore[union-attr]
    return beside


@pytest.mark.parametrize("apart", [0, 1])
def test_routers_that_share_memory_are_refused(apart: int) -> None:
    """Goal: a router that uses a buffer again has overwritten a layer. Method: both layers hand over one tensor, or
    the second one what lies a token behind the first."""
    refused((1, FLAT[:2]), (3, FLAT[apart : apart + 2]), reason="memory")


@pytest.mark.parametrize("other", [torch.bool, torch.int64, torch.float32])
def test_what_does_not_fit_the_step_has_a_reason(other: torch.dtype) -> None:
    """Goal: nothing but the choices of this step's tokens is taken for them, and the reason is the true one. Method: a
    second call, other tokens in one layer or in all (a graph's padding, which a device may have), the second layer's
    values of another dtype, and another number of experts in one layer or in all (a shared one behind the others)."""
    two, three, odd = FLAT[:2], FLAT.clone(), torch.ones((2, 2), dtype=other)
    refused((1, two), (1, two), (3, three[:2]), reason="twice")
    refused((1, two), (3, three), reason="other tokens")
    beside = refused((1, FLAT), (3, three), reason="other tokens", beside_too=False)
    assert "more tokens" in beside.take(17)
    refused((1, two), (3, odd), reason="not of the type")
    three_experts = torch.zeros((2, 3), dtype=torch.int32)
    refused((1, two), (3, three_experts), reason="another number of experts")
    refused((1, three_experts), (3, three_experts), reason="another number of experts")


@pytest.mark.parametrize("second", [[1, 3], [1]])
def test_two_passes_of_a_step_have_no_ids(second: list[int]) -> None:
    """Goal: no step gets rows of another pass. Method: a second pass of fewer tokens, or half a pass."""
    ids = made(True)
    ids.begin()
    call(ids, 4)
    call(ids, 2, second)
    assert "twice" in ids.take(4)
    ids.begin()
    call(ids, 4)
    assert ids.take(4).tolist() == [[[1, 5], [3, 5]]] * 4  # type: ignore[union-attr]


def test_invalid_wide_ids_stay_invalid() -> None:
    """Goal: no id is cut to a valid one. Method: ids of 64 bits, of which the lower 32 are an expert's id."""
    ids = made(True)
    ids.begin()
    for layer in (1, 3):
        ids.hook(layer)(torch.tensor([[(1 << 32) + 3, 2 - (1 << 32)]]) + layer)
    assert not valid_rows(SPEC, ids.take(1).numpy()).any()  # type: ignore[union-attr]


def weighed(ids: StepIds, tokens: int, seed: int, layers: Any = (1, 3)) -> tuple[Any, Any]:
    """A pass with weights of any bits, of infinities and numbers that are none, too; its ids and these bits."""
    random = np.random.default_rng(seed)
    chosen = random.integers(0, 8, (tokens, 2, 2)).astype(np.int32)
    bits = random.integers(-(1 << 31), 1 << 31, (tokens, 2, 2)).astype(np.int32)
    for layer in layers:
        place = (1, 3).index(layer)
        ids.hook(layer)(torch.from_numpy(chosen[:, place].copy()))
        ids.hook_weights(layer)(torch.from_numpy(bits[:, place].copy()).view(torch.float32))
    return chosen, bits


def test_weights_are_of_the_pass_of_their_ids() -> None:
    """Goal: of one pass both, bit for bit, or neither. Method: passes of other lengths; one whose second layer tells no
    weights, or another's, or in another type; two passes."""
    ids = StepIds(SPEC, 16, torch.device("cpu"), weights=True)
    for seed, tokens in enumerate((5, 16, 1)):
        ids.begin()
        chosen, bits = weighed(ids, tokens, seed)
        rows = ids.take(tokens)
        assert isinstance(rows, torch.Tensor)
        its_ids, weights = ids.split(rows.numpy())
        assert its_ids.tolist() == chosen.tolist()
        assert weights.dtype == np.float32
        assert weights.tobytes() == bits.tobytes()
    shared = torch.rand(3, 2)
    for wrong in (None, torch.rand(3, 2).double(), torch.rand(2, 2), torch.rand(3, 3), shared):
        ids.begin()
        call(ids, 3)
        ids.hook_weights(1)(shared)
        if wrong is not None:
            ids.hook_weights(3)(wrong)
        assert (ids.take(3) == NO_ID).all()  # type: ignore[union-attr]
    ids.begin()
    weighed(ids, 3, 0)
    weighed(ids, 2, 1)
    assert "twice" in ids.take(3)
    assert not np.isfinite(ids.split(torch.full((1, 4, 2), NO_ID, dtype=torch.int32).numpy())[1]).any()

"""The ids of a step are those that the routers called back with, or there is a reason why there are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvroute.capture.step_ids import NOTHING, StepIds
from kvroute.checks import valid_rows
from kvroute.routing import routing_spec

SPEC = routing_spec(num_experts=8, top_k=2, layer_ids=[1, 3], num_layers=4, block_tokens=4)
CPU = torch.device("cpu")


def buffered(max_tokens: int) -> StepIds:
    """One that brings a pass together in a buffer, as on a device, in memory that numpy can read."""
    ids = StepIds(SPEC, max_tokens, CPU)
    ids._buffer = torch.full((max_tokens, *SPEC.row_shape), NOTHING, dtype=torch.int32)
    return ids


@pytest.mark.parametrize("make", [lambda: StepIds(SPEC, 16, CPU), lambda: buffered(16)])
@given(steps=st.lists(st.integers(1, 16), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_each_step_has_its_own_ids(make: object, steps: list[int], seed: int) -> None:
    """Goal: nothing of one step is in the next. Method: steps of any lengths, layers in any order."""
    ids, random = make(), np.random.default_rng(seed)  # type: ignore[operator]
    hooks = {layer: ids.hook(layer) for layer in (1, 3)}
    for tokens in steps:
        ids.begin()
        chosen = random.integers(0, 8, (tokens, 2, 2)).astype(np.int32)
        for layer in random.permutation([0, 1]):
            hooks[(1, 3)[layer]](torch.from_numpy(chosen[:, layer].copy()))
        assert ids.take(tokens).tolist() == chosen.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64])
def test_ids_are_integers_of_any_size(dtype: torch.dtype) -> None:
    """Goal: kernels that route inside say what they chose in two bytes. Method: each dtype, and one that is none."""
    for each in (StepIds(SPEC, 4, CPU), buffered(4)):
        each.begin()
        for layer in (1, 3):
            each.hook(layer)(torch.tensor([[layer, 5]]).to(dtype))
        assert each.take(1).tolist() == [[[1, 5], [3, 5]]]
    each = StepIds(SPEC, 4, CPU)
    for layer in (1, 3):
        each.hook(layer)(torch.tensor([[layer, 5.0]]))
    assert each.take(1) == "a router's ids are no integers"


def test_a_layer_that_nobody_recorded_is_seen() -> None:
    """Goal: no silent zeros, with or without Python in the step. Method: one layer's hook is not called, after a step
    in which all were.
    """
    for each in (StepIds(SPEC, 4, CPU), buffered(4)):
        each.begin()
        for layer in (1, 3):
            each.hook(layer)(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32) + layer)
        each.take(2)
        each.begin()
        each.hook(1)(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
        found = each.take(2)
        assert "compiled" in found if isinstance(found, str) else (found == NOTHING).all()


def test_what_was_called_before_a_step_is_not_of_it() -> None:
    """Goal: an engine that warms up leaves nothing behind. Method: a pass outside of any step, and half a one."""
    for each in (StepIds(SPEC, 4, CPU), buffered(4)):
        for layer in (1, 3, 1):
            each.hook(layer)(torch.tensor([[layer, 5]] * 3, dtype=torch.int32))
        each.begin()
        for layer in (1, 3):
            each.hook(layer)(torch.tensor([[layer, 4]], dtype=torch.int32))
        found = each.take(2 if each._buffer is not None else 1)
        assert found.tolist() == [[[1, 4], [3, 4]], [[NOTHING] * 2] * 2][: len(found)]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([(1, 2), (1, 2), (3, 2)], "twice"),
        ([(1, 2), (3, 3)], "other tokens"),
        ([(1, 3), (3, 3)], "other tokens"),
    ],
)
def test_what_does_not_fit_the_step_has_a_reason(calls: list[tuple[int, int]], reason: str) -> None:
    ids, again = StepIds(SPEC, 4, CPU), buffered(4)
    for each in (ids, again):
        for layer, tokens in calls:
            each.hook(layer)(torch.zeros((tokens, 2), dtype=torch.int32))
    assert reason in ids.take(2)
    assert "compiled" in ids.take(2)  # and the next step begins empty
    found = again.take(2)
    assert isinstance(found, torch.Tensor)
    if calls != [(1, 3), (3, 3)]:  # a graph's padding has other tokens, too
        assert (found == NOTHING).all()


def test_routers_that_share_memory_are_refused() -> None:
    """Goal: a router that uses a buffer again has overwritten a layer. Method: both layers hand over one tensor."""
    ids, again, buffer = StepIds(SPEC, 4, CPU), buffered(4), torch.zeros((2, 2), dtype=torch.int32)
    for each in (ids, again):
        each.hook(1)(buffer)
        each.hook(3)(buffer)
    assert "memory" in ids.take(2)
    assert (again.take(2) == NOTHING).all()  # type: ignore[union-attr]
    assert "more tokens" in again.take(5)


def test_two_passes_of_a_step_have_no_ids() -> None:
    """Goal: no row of another pass. Method: a second pass of fewer tokens, or half a one."""
    for second in ([1, 3], [1]):
        ids = buffered(4)
        ids.begin()
        for calls, tokens in (([1, 3], 4), (second, 2)):
            for layer in calls:
                ids.hook(layer)(torch.tensor([[layer, 5]] * tokens, dtype=torch.int32))
        assert "twice" in ids.take(4)
        ids.begin()
        for layer in (1, 3):
            ids.hook(layer)(torch.tensor([[layer, 5]] * 4, dtype=torch.int32))
        assert ids.take(4).tolist() == [[[1, 5], [3, 5]]] * 4  # type: ignore[union-attr]


def test_wide_ids_that_are_none_stay_such() -> None:
    """Goal: no id is cut to one that there is. Method: 64 bits, of which the lower 32 are an expert's."""
    ids = buffered(1)
    ids.begin()
    for layer in (1, 3):
        ids.hook(layer)(torch.tensor([[(1 << 32) + 3, 2 - (1 << 32)]]) + layer)
    assert not valid_rows(SPEC, ids.take(1).numpy()).any()  # type: ignore[union-attr]

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
    """One that copies, as on a device, in memory that numpy can read."""
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
        chosen = random.integers(0, 8, (tokens, 2, 2)).astype(np.int32)
        for layer in random.permutation([0, 1]):
            hooks[(1, 3)[layer]](torch.from_numpy(chosen[:, layer].copy()))
        assert (ids.take(tokens) == chosen).all()


def test_a_layer_that_nobody_recorded_is_seen() -> None:
    """Goal: no silent zeros, with or without Python in the step. Method: one layer's hook is not called."""
    ids, again = StepIds(SPEC, 4, CPU), buffered(4)
    for each in (ids, again):
        each.hook(1)(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    assert "compiled" in ids.take(2)
    rows = again.take(2)
    assert (rows[:, 1] == NOTHING).all()
    assert not valid_rows(SPEC, rows).any()


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([(1, 2), (1, 2), (3, 2)], "twice"),
        ([(1, 2), (3, 3)], "other tokens"),
        ([(1, 3), (3, 3)], "other tokens"),
    ],
)
def test_what_does_not_fit_the_step_has_a_reason(calls: list[tuple[int, int]], reason: str) -> None:
    ids = StepIds(SPEC, 4, CPU)
    for layer, tokens in calls:
        ids.hook(layer)(torch.zeros((tokens, 2), dtype=torch.int32))
    assert reason in ids.take(2)
    assert "compiled" in ids.take(2)  # and the next step begins empty


def test_routers_that_share_memory_are_refused() -> None:
    """Goal: a router that uses a buffer again has overwritten a layer. Method: both layers hand over one tensor."""
    ids, buffer = StepIds(SPEC, 4, CPU), torch.zeros((2, 2), dtype=torch.int32)
    ids.hook(1)(buffer)
    ids.hook(3)(buffer)
    assert "memory" in ids.take(2)
    assert "more tokens" in buffered(4).take(5)

"""The capture launch, in Triton's interpreter, against its specification: the same bytes, the same counts.

Each case runs with a program for each token, and with programs that take groups of tokens in turn.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from budget import examples
from hypothesis import example, given
from hypothesis import strategies as st

import kvroute
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from kvroute.capture import kernel, naive
from kvroute.capture.plan import NOTHING, Check, Plan, check_words

BLOCK_TOKENS = 4
WAYS = (naive.capture_rows, kernel.capture_rows, partial(kernel.capture_rows, group=kernel.GROUP_TOKENS))


def routing(experts: int, top_k: int, layers: int) -> AuxBlockDataSpec:
    return kvroute.routing_spec(experts, top_k, range(1, layers + 1), layers + 1, BLOCK_TOKENS)


class World:
    """Equal buffers, one for each way, and everything that a launch is given."""

    def __init__(self, specs: list[AuxBlockDataSpec], blocks: int) -> None:
        self.plan, self.slots_end = Plan.of(RecordLayout(specs)), blocks * BLOCK_TOKENS
        before = torch.randint(0, 256, (blocks, self.plan.record_nbytes), dtype=torch.uint8)
        self.rows = [before.clone() for _ in WAYS]
        self.checks = [torch.from_numpy(check_words()) for _ in WAYS]
        self.bad = [torch.zeros(64, dtype=torch.int32) for _ in WAYS]

    def capture(self, by_name: dict[str, list[torch.Tensor | None]], slots: torch.Tensor) -> list[int]:
        """Every way, and that they agree; the check words."""
        sources = [by_name[spec.name] for spec in self.plan.specs]
        for way, capture_rows in enumerate(WAYS):
            capture_rows(sources, slots, self.rows[way], self.plan, self.slots_end, self.checks[way], self.bad[way])
            np.testing.assert_array_equal(self.rows[way].numpy(), self.rows[0].numpy())
            assert self.checks[way].tolist() == self.checks[0].tolist()
            assert self.bad[way].tolist() == self.bad[0].tolist()
        return self.checks[0].tolist()


def chosen(layers: int, tokens: int, experts: int, top_k: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """``[layers, tokens, top_k]`` of sound rows."""
    return torch.rand(layers, tokens, experts).argsort(-1)[..., :top_k].to(dtype)


@st.composite
def passes(draw: st.DrawFn) -> tuple[int, int, int, int, torch.dtype, str, int]:
    top_k = draw(st.sampled_from([1, 2, 6, 8, 16]))
    layers = draw(st.sampled_from([1, 2, 3, 17]))
    experts = draw(st.sampled_from([max(top_k, 4), 128, 256, 384]))
    tokens = draw(st.sampled_from([0, 1, 3, 19]))
    source = draw(st.sampled_from([torch.int16, torch.int32, torch.int64]))
    strides = draw(st.sampled_from(["plain", "one buffer", "wider", "transposed"]))
    return top_k, layers, experts, tokens, source, strides, draw(st.integers(0, 1 << 30))


def laid(values: torch.Tensor, strides: str) -> list[torch.Tensor | None]:
    """``values [layers, tokens, top_k]`` as a router may hand them out."""
    layers, tokens, top_k = values.shape
    if strides == "one buffer":  # [tokens, layers, top_k]
        return list(values.transpose(0, 1).contiguous().unbind(1))
    if strides == "wider":  # columns of shared experts behind the routed ones
        wide = torch.full((layers, tokens, top_k + 2), 7, dtype=values.dtype)
        wide[:, :, :top_k] = values
        return [layer[:, :top_k] for layer in wide]
    if strides == "transposed":
        return [layer.t().contiguous().t() for layer in values]
    return list(values.contiguous().unbind(0))


@examples(30, deadline=None)
@example((2, 128, 256, 3, torch.int32, "plain", 1))
@given(passes())
def test_the_launch_is_its_specification(case: tuple[int, int, int, int, torch.dtype, str, int]) -> None:
    """Goal: what a device stores and counts is what the plain loop does. Method: any shape, dtype and stride, random
    slots, a fifth of them padding, and a few ids broken: too large, negative, twice, zero."""
    top_k, layers, experts, tokens, source, strides, seed = case
    torch.manual_seed(seed)
    world = World([routing(experts, top_k, layers), kvroute.logprob_spec(BLOCK_TOKENS)], blocks=5)
    ids = chosen(layers, tokens, experts, top_k, source)
    if tokens and seed % 2:
        broken = torch.randint(0, 30, ids.shape)
        ids[broken == 0], ids[broken == 1] = experts, -1
        ids[torch.rand(layers, tokens) < 0.1] = 0
        ids[0, 0, -1] = ids[0, 0, 0]
    slots = torch.randperm(5 * BLOCK_TOKENS)[:tokens]
    slots[torch.rand(tokens) < 0.2] = -1
    words = world.capture({"routing": laid(ids, strides), "logprob": [torch.randn(tokens, 1)]}, slots)
    if not seed % 2:
        assert words[: Check.TOKENS] == check_words().tolist()[: Check.TOKENS]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "float32"])
def test_rows_of_every_dtype(dtype: str) -> None:
    """Goal: every width that a spec can have. Method: values up to the dtype's last, as the specification stores."""
    world = World([AuxBlockDataSpec("indexer_topk", (3, 5), dtype, BLOCK_TOKENS)], blocks=2)
    if dtype == "float32":
        values = torch.randn(3, 6, 5)
    else:
        values = torch.randint(0, min(np.iinfo(dtype).max, (1 << 31) - 1), (3, 6, 5), dtype=torch.int64)
    words = world.capture({"indexer_topk": list(values.unbind(0))}, torch.tensor([7, -1, 0, 5, 3, 2]))
    assert words[: Check.TOKENS] == check_words().tolist()[: Check.TOKENS]


def test_several_specs_in_one_launch() -> None:
    """Goal: one launch a step, whatever rides along. Method: routing, log-probabilities and a sparse indexer's ids in
    one record; then one layer of one spec was not recorded."""
    indexer = AuxBlockDataSpec("indexer_topk", (2, 16), "uint16", BLOCK_TOKENS, {"num_experts": 4096})
    world = World([routing(256, 8, 5), kvroute.logprob_spec(BLOCK_TOKENS), indexer], blocks=3)
    given: dict[str, list[torch.Tensor | None]] = {
        "routing": list(chosen(5, 6, 256, 8).unbind(0)),
        "logprob": [torch.randn(6, 1)],
        "indexer_topk": list(chosen(2, 6, 4096, 16, torch.int32).unbind(0)),
    }
    slots = torch.tensor([11, 2, -1, 6, 0, 9])
    assert world.capture(given, slots)[Check.FIRST] == NOTHING
    given["indexer_topk"][1] = None
    words = world.capture(given, slots)
    token, spec, layer = world.plan.place(words[Check.FIRST])
    assert (words[Check.MISSING], token, spec.name, layer) == (5, 0, "indexer_topk", 1)


def test_a_slot_outside_the_buffer_is_not_written() -> None:
    """Goal: no write beyond the region, at offsets that do not fit 32 bits either. Method: the first slot behind the
    end, and one far away."""
    world = World([routing(256, 8, 2)], blocks=2)
    slots = torch.tensor([2 * BLOCK_TOKENS, 5, 1 << 40])
    assert world.capture({"routing": list(chosen(2, 3, 256, 8).unbind(0))}, slots)[Check.SLOT] == 2
    assert world.bad[1][:3].tolist() == [1, 0, 1]

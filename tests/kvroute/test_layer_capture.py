"""``LayerCapture`` under a block manager of rows: hooks, one launch, and a step that a device wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvroute
from kvroute.capture.errors import CaptureError
from kvroute.capture.layers import LayerCapture
from kvroute.capture.plan import Check

LAYERS, TOP_K, EXPERTS, BLOCK_TOKENS = (1, 3), 2, 8, 4
SPECS = [kvroute.routing_spec(EXPERTS, TOP_K, LAYERS, 4, BLOCK_TOKENS), kvroute.logprob_spec(BLOCK_TOKENS)]


@pytest.fixture
def aux() -> Iterator[kvroute.AuxBlocks]:
    with kvroute.AuxBlocks(SPECS, blocks=4, namespace=kvroute.Namespace("m", weights_version=1)) as made:
        made.renew([0, 2])
        yield made


@pytest.fixture(params=[False, True], ids=["registered", "staged"])
def capture(aux: kvroute.AuxBlocks, request: pytest.FixtureRequest) -> Iterator[LayerCapture]:
    with LayerCapture(aux.region("device"), 16, "cpu", staged=request.param) as made:
        assert made.staged == request.param
        yield made


def ids(tokens: int, seed: int) -> torch.Tensor:
    """``[layers, tokens, top_k]`` of sound rows."""
    torch.manual_seed(seed)
    return torch.rand(len(LAYERS), tokens, EXPERTS).argsort(-1)[..., :TOP_K].to(torch.int32)


def record(capture: LayerCapture, chosen: torch.Tensor, logprobs: torch.Tensor) -> None:
    """A forward pass, as far as capture is concerned: a router as in transformers, one as in vLLM, a sampler."""
    capture.hook(1)("module", "inputs", ("logits", "weights", chosen[0]))
    capture.hook(3)(chosen[1])
    capture.hook(0, "logprob")(logprobs)


def test_a_step_that_the_device_wrote(aux: kvroute.AuxBlocks, capture: LayerCapture) -> None:
    """Goal: what the routers chose is what is read. Method: two passes, with padding, with more rows than tokens."""
    kept: dict[int, tuple[torch.Tensor, float]] = {}
    for number, slots in enumerate(([0, -1, 9], [1, 8, 2, 3])):
        chosen, logprobs = ids(6, number), torch.randn(6, 1)
        step = aux.begin_step(slots, in_place=True)
        record(capture, chosen, logprobs)
        capture.commit(torch.tensor(slots))
        for name in capture.names:
            step.wrote(name)
        verdict = capture.verdict(len(slots))
        assert (verdict.keep, verdict.counts, verdict.first) == (None, {}, "")
        step.commit(verdict.keep)
        for token, slot in enumerate(slots):
            kept[slot] = chosen[:, token], float(logprobs[token])
    del kept[-1]
    rows, logs = aux.read("routing", [0, 2]), aux.read("logprob", [0, 2])
    found = [at for at, valid in enumerate(rows.valid.tolist()) if valid]
    assert sorted(kept) == [slot if slot < 4 else slot + 4 for slot in found]
    for at in found:
        chosen_here, logprob = kept[at if at < 4 else at + 4]
        assert rows.values[at].tolist() == chosen_here.tolist()
        assert float(logs.values[at]) == logprob


def test_a_bad_row_is_missing_and_named(aux: kvroute.AuxBlocks, capture: LayerCapture) -> None:
    """Goal: no bad row is handed out, and the first one is named. Method: an expert twice in one token's last layer;
    the other tokens' rows count, and the next pass is judged afresh."""
    slots = [0, 1, 2]
    chosen = ids(3, 0)
    chosen[1, 2] = 5
    step = aux.begin_step(slots, in_place=True)
    record(capture, chosen, torch.zeros(3, 1))
    capture.commit(torch.tensor(slots))
    for name in capture.names:
        step.wrote(name)
    verdict = capture.verdict(3)
    assert verdict.keep is not None
    assert verdict.keep.tolist() == [True, True, False]
    assert verdict.counts == {Check.DUPLICATE: 1}
    assert verdict.first == "routing, token 2, layer 3: an expert twice"
    step.commit(verdict.keep)
    assert aux.read("routing", [0]).valid.tolist() == [True, True, False, False]
    again = capture.verdict(3)  # a launch in flight may have been told of too early
    assert again.keep is not None
    assert again.keep.tolist() == [True, True, False]
    assert capture.verdict(3).keep is None


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ([(1, ids(2, 0)[0])], "layer 3: wanted a call in each pass, got 0 calls"),
        ([(1, ids(2, 0)[0]), (3, ids(2, 0)[1]), (3, ids(2, 0)[1])], "2 calls"),
        ([(1, ids(2, 0)[0]), (3, ids(1, 0)[1])], "2 or more"),
        ([(1, ids(2, 0)[0]), (3, ids(2, 0)[1].long())], "int32"),
        ([(1, ids(2, 0)[0].float()), (3, ids(2, 0)[1].float())], "dtype"),
        ([(1, buffer := ids(2, 0)[0]), (3, buffer)], "used again"),
        (
            [(1, (flat := ids(4, 0).reshape(-1))[:4].view(2, 2)), (3, flat[2:6].view(2, 2))],
            "layer 3: wanted values in .*of layer 1",
        ),
    ],
)
def test_a_pass_that_does_not_fit_stores_nothing(
    recorded: list[tuple[int, torch.Tensor]], said: str, aux: kvroute.AuxBlocks, capture: LayerCapture
) -> None:
    """Goal: a layer that a fused kernel went around, or a buffer that a router uses again, is an error and not a row.
    Method: each such pass; the region's bytes are what they were, and the next pass is captured."""
    before = aux.region("device").rows.copy()
    for layer, tensor in recorded:
        capture.hook(layer)(tensor)
    capture.hook(0, "logprob")(torch.zeros(2, 1))
    with pytest.raises(CaptureError, match=said):
        capture.commit(torch.tensor([0, 1]))
    assert (aux.region("device").rows == before).all()
    record(capture, ids(2, 1), torch.zeros(2, 1))
    capture.commit(torch.tensor([0, 1]))
    capture.verdict(2)
    assert (aux.region("device").rows != before).any()


@pytest.mark.parametrize("slots", [np.array([0, 1]), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[0], [1]])])
def test_slots_of_another_kind_are_refused_and_the_next_pass_is_captured(slots: Any, capture: LayerCapture) -> None:
    record(capture, ids(2, 0), torch.zeros(2, 1))
    with pytest.raises(CaptureError, match=r"slots: wanted int64 \[tokens\], contiguous"):
        capture.commit(slots)
    record(capture, ids(2, 1), torch.zeros(2, 1))
    capture.commit(torch.tensor([0, 1]))
    assert capture.verdict(2).keep is None


def test_what_a_capture_cannot_be(aux: kvroute.AuxBlocks) -> None:
    region = aux.region("device")
    with LayerCapture(region, 4, "cpu") as capture, pytest.raises(CaptureError, match="layer"):
        capture.hook(2)
    with LayerCapture(region, 1, "cpu") as capture, pytest.raises(CaptureError, match="at most 1"):
        capture.commit(torch.tensor([0, 1]))


def test_staged_rows_land_once(aux: kvroute.AuxBlocks) -> None:
    """Goal: rows of a launch that nobody waited for reach no slot later. Method: a launch of three tokens without a
    verdict, as a warm-up is, then one of one token: only its row lands, and more tokens than it had are refused."""
    with LayerCapture(aux.region("device"), 16, "cpu", staged=True) as capture:
        before = aux.region("device").rows.copy()
        record(capture, ids(3, 0), torch.zeros(3, 1))
        capture.commit(torch.tensor([0, 1, 2]))
        chosen = ids(1, 1)
        record(capture, chosen, torch.zeros(1, 1))
        capture.commit(torch.tensor([9]))
        with pytest.raises(CaptureError, match="at most 1"):
            capture.verdict(3)
        assert (aux.region("device").rows == before).all()
        capture.verdict(1)
        changed = (aux.region("device").rows != before).any(axis=1)
        assert changed.tolist() == [False, False, True, False]
        aux.region("device").rows[2] = 0  # the block's next life
        capture.verdict(1)
        assert not aux.region("device").rows[2].any()


def test_layers_that_meet_when_a_pass_is_longer(aux: kvroute.AuxBlocks) -> None:
    """Goal: what is known of a pass's memory is not believed for a longer one. Method: layers two tokens apart, first
    one token of each, then three from the same addresses."""
    flat = ids(8, 0).reshape(-1)
    with LayerCapture(aux.region("device"), 16, "cpu", names=["routing"]) as capture:
        for tokens, fits in ((1, True), (1, True), (3, False), (1, True)):
            capture.hook(1)(flat[:6].view(3, 2))
            capture.hook(3)(flat[4:10].view(3, 2))
            if fits:
                capture.commit(torch.arange(tokens))
                continue
            with pytest.raises(CaptureError, match="used again"):
                capture.commit(torch.arange(tokens))

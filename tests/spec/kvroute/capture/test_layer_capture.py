"""``LayerCapture`` under a block manager of rows: hooks, one launch, and a step that a device wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvroute
from kvroute.capture.errors import CaptureError
from kvroute.capture.layers import LayerCapture, Verdict
from kvroute.capture.plan import Check

LAYERS, TOP_K, EXPERTS, BLOCK_TOKENS = (1, 3), 2, 8, 4
SPECS = [kvroute.routing_spec(EXPERTS, TOP_K, LAYERS, 4, BLOCK_TOKENS), kvroute.logprob_spec(BLOCK_TOKENS)]


@pytest.fixture
def aux() -> Iterator[kvroute.AuxBlocks]:
    with kvroute.AuxBlocks(SPECS, blocks=4, namespace=kvroute.Namespace("m", weights_version=1)) as made:
        made.renew([0, 2])
        yield made


@pytest.fixture
def capture(aux: kvroute.AuxBlocks) -> Iterator[LayerCapture]:
    with LayerCapture(aux.region("device"), 16, "cpu") as made:
        yield made


def ids(tokens: int, seed: int = 0) -> torch.Tensor:
    """``[layers, tokens, top_k]`` of sound rows."""
    torch.manual_seed(seed)
    return torch.rand(len(LAYERS), tokens, EXPERTS).argsort(-1)[..., :TOP_K].to(torch.int32)


def passed(capture: LayerCapture, chosen: Any, slots: Any, logprobs: torch.Tensor | None = None) -> None:
    """A forward pass, as far as capture is concerned: a router as in transformers, one as in vLLM, a sampler."""
    capture.hook(1)("module", "inputs", ("logits", "weights", chosen[0]))
    capture.hook(3)(chosen[1])
    capture.hook(0, "logprob")(torch.zeros(len(chosen[0]), 1) if logprobs is None else logprobs)
    capture.commit(torch.tensor(slots) if isinstance(slots, list) else slots)


def stepped(aux: kvroute.AuxBlocks, capture: LayerCapture, slots: list[int], *given: Any) -> Verdict:
    step = aux.begin_step(slots, in_place=True)
    passed(capture, given[0], slots, *given[1:])
    for name in capture.names:
        step.wrote(name)
    verdict = capture.verdict(len(slots))
    step.commit(verdict.keep)
    return verdict


def test_a_step_that_the_device_wrote(aux: kvroute.AuxBlocks, capture: LayerCapture) -> None:
    """Goal: the rows that are read are the routers' choices. Method: two passes, with padding, with more rows than
    tokens."""
    kept: dict[int, tuple[Any, float]] = {}
    for number, slots in enumerate(([0, -1, 9], [1, 8, 2, 3])):
        chosen, logprobs = ids(6, number), torch.randn(6, 1)
        verdict = stepped(aux, capture, slots, chosen, logprobs)
        assert (verdict.keep, verdict.counts, verdict.first) == (None, {}, "")
        kept |= {slot: (chosen[:, token].tolist(), float(logprobs[token])) for token, slot in enumerate(slots)}
    del kept[-1]
    rows, logs = aux.read("routing", range(4)), aux.read("logprob", range(4))
    found = np.flatnonzero(rows.valid).tolist()
    assert {at: (rows.values[at].tolist(), float(logs.values[at])) for at in found} == kept


def test_a_bad_row_is_missing_and_named(aux: kvroute.AuxBlocks, capture: LayerCapture) -> None:
    """Goal: no bad row is handed out, and the first one is named. Method: an expert twice in one token's last layer;
    the other tokens' rows count, and the next pass is judged afresh."""
    chosen, keep = ids(3), [True, True, False]
    chosen[1, 2] = 5
    verdict = stepped(aux, capture, [0, 1, 2], chosen)
    assert (verdict.counts, verdict.first) == ({Check.DUPLICATE: 1}, "routing, token 2, layer 3: an expert twice")
    again = capture.verdict(3)  # a launch in flight may have been reported too early
    assert verdict.keep is not None
    assert again.keep is not None
    assert (verdict.keep.tolist(), again.keep.tolist()) == (keep, keep)
    assert aux.read("routing", [0]).valid.tolist() == [*keep, False]
    assert capture.verdict(3).keep is None


FLAT, SOUND = torch.arange(64, dtype=torch.int32), ids(2)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([(1, SOUND[0])], "layer 3: wanted a call in each pass, got 0 calls"),
        ([(1, SOUND[0]), (3, SOUND[1]), (3, SOUND[1])], "2 calls"),
        ([(1, SOUND[0]), (3, SOUND[1][:1])], "2 or more"),
        ([(1, SOUND[0]), (3, SOUND[1].long())], "int32"),
        ([(1, SOUND[0].float()), (3, SOUND[1].float())], "dtype"),
        ([(1, SOUND[0]), (3, SOUND[0])], "used again"),
        ([(1, FLAT[:4].view(2, 2)), (3, FLAT[2:6].view(2, 2))], "layer 3: wanted values in .*of layer 1"),
        ([(1, FLAT.as_strided((2, 2), (3, 1))), (3, FLAT[2:].as_strided((2, 2), (3, 1)))], "memory of their own"),
    ],
)
def test_a_pass_that_does_not_fit_stores_nothing(
    layers: list[tuple[int, torch.Tensor]], said: str, aux: kvroute.AuxBlocks, capture: LayerCapture
) -> None:
    """Goal: a layer that a fused kernel went around, or a buffer that a router uses again, is an error and not a row.
    Method: each such pass; the region's bytes are what they were, and the next pass is captured."""
    before = aux.region("device").rows.copy()
    for layer, tensor in layers:
        capture.hook(layer)(tensor)
    capture.hook(0, "logprob")(torch.zeros(2, 1))
    with pytest.raises(CaptureError, match=said):
        capture.commit(torch.tensor([0, 1]))
    assert (aux.region("device").rows == before).all()
    assert stepped(aux, capture, [0, 1], SOUND).keep is None
    assert (aux.region("device").rows != before).any()


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
def test_layers_side_by_side_in_one_buffer_are_captured(
    axes: tuple[int, ...], aux: kvroute.AuxBlocks, capture: LayerCapture
) -> None:
    """Goal: a buffer with a place for every layer is accepted. Method: layer by layer, and token by token."""
    chosen = ids(2).permute(axes).contiguous().permute(axes)
    assert stepped(aux, capture, [0, 1], chosen).keep is None
    assert aux.read("routing", [0], 0, 2).values.tolist() == chosen.transpose(0, 1).tolist()


def test_layers_that_meet_when_a_pass_is_longer(aux: kvroute.AuxBlocks) -> None:
    """Goal: knowledge of one pass's memory is not applied to a longer pass. Method: layers two tokens apart, first one
    token of each, then three from the same addresses."""
    with LayerCapture(aux.region("device"), 16, "cpu", names=["routing"]) as capture:
        for tokens, fits in ((1, True), (1, True), (3, False), (1, True)):
            capture.hook(1)(FLAT[:6].view(3, 2))
            capture.hook(3)(FLAT[4:10].view(3, 2))
            if fits:
                capture.commit(torch.arange(tokens))
                continue
            with pytest.raises(CaptureError, match="used again"):
                capture.commit(torch.arange(tokens))


def test_a_pass_that_looks_like_the_last_is_refused_for_more_slots(
    aux: kvroute.AuxBlocks, capture: LayerCapture
) -> None:
    """Goal: no launch reads behind a router's tensor. Method: a pass of four tokens for four slots, then the same pass
    for five; then for four again."""
    for slots in ([0, 1, 2, 3], [0, 1, 2, 3, 8], [8, 9, 10, 11]):
        chosen = ids(4)
        if len(slots) == 4:
            assert stepped(aux, capture, slots, chosen).keep is None
            assert aux.read("routing", [slots[0] // 4]).valid.all()
            continue
        step = aux.begin_step(slots, in_place=True)
        with pytest.raises(CaptureError, match=r"router of layer 1: wanted .*\[5 or more, 2\], got .*\(4, 2\)"):
            passed(capture, chosen, slots)
        step.abort()
        assert not aux.read("routing", [0, 2]).valid.any()


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        (np.array([0, 1]), r"slots: wanted int64 \[tokens\], contiguous"),
        (torch.tensor([0, 1], dtype=torch.int32), "contiguous"),
        (torch.tensor([[0], [1]]), "contiguous"),
        (torch.arange(17), "at most 16 tokens"),
    ],
)
def test_slots_of_another_kind_are_refused_and_the_next_pass_is_captured(
    slots: Any, said: str, capture: LayerCapture
) -> None:
    with pytest.raises(CaptureError, match=said):
        passed(capture, SOUND, slots)
    passed(capture, SOUND, [0, 1])
    assert capture.verdict(2).keep is None
    with pytest.raises(CaptureError, match="layer"):
        capture.hook(2)

"""Capturing routes from real transformers models, and every way a pass can fail to be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from experts_seen import Seen
from torch import nn

from cache_manager.errors import RowError
from kvroute.capture.canary import canary_rows, canary_spec
from kvroute.capture.capture import RoutingCapture, find_routers
from kvroute.capture.errors import CaptureError
from kvroute.routing import routing_spec, routing_spec_from_hf

TOKENS = torch.tensor([[5, 9, 13, 21, 33, 47, 8], [60, 3, 3, 3, 17, 22, 41]])


def test_rows_are_what_the_experts_computed_with(tiny_moe: Any) -> None:
    """Goal: the captured row is the routing that was really used. Method: the experts' own arguments, all families."""
    spec = routing_spec_from_hf(tiny_moe.config, block_tokens=16)
    seen = Seen(tiny_moe.model)
    with RoutingCapture(tiny_moe.model, spec) as capture:
        tiny_moe.forward(TOKENS)
        rows = capture.rows()
    seen.close()
    assert rows.shape == (TOKENS.numel(), *spec.row_shape)
    assert rows.dtype == spec.numpy_dtype
    assert np.array_equal(rows, seen.rows())
    assert len(np.unique(rows)) > 1


def test_capture_changes_nothing_and_holds_no_graph(qwen: Any) -> None:
    """Goal: a model under capture computes the same bits, with gradients too. Method: compare logits; look at ids."""
    spec = routing_spec_from_hf(qwen.config, 16)
    plain = qwen.forward(TOKENS)
    with RoutingCapture(qwen.model, spec) as capture:
        with_gradients = qwen.model(TOKENS, use_cache=False).logits
        assert torch.equal(with_gradients, plain)
        assert with_gradients.requires_grad
        assert not any(ids.requires_grad for ids in capture.topk_ids)
        first = capture.rows()
        capture.clear()
        with torch.inference_mode():
            qwen.model(TOKENS, use_cache=False)
        assert np.array_equal(capture.rows(), first)


def test_close_takes_the_hooks_off(qwen: Any) -> None:
    capture = RoutingCapture(qwen.model, routing_spec_from_hf(qwen.config, 16))
    qwen.forward(TOKENS)
    capture.close()
    capture.close()
    qwen.forward(TOKENS)
    assert not any(router._forward_hooks for router in find_routers(qwen.model).values())
    with pytest.raises(CaptureError, match=r"router of layer 1: wanted a call in each pass, got 0 calls"):
        capture.rows()


def test_a_failed_pass_is_not_mistaken_for_a_whole_one(qwen: Any) -> None:
    """Goal: H17, no half pass. Method: the model fails between its first and its second routed layer."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with RoutingCapture(qwen.model, routing_spec_from_hf(qwen.config, 16)) as capture:
        hook = qwen.model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            qwen.forward(TOKENS)
        hook.remove()
        with pytest.raises(CaptureError, match=r"layer 3: .*got 0 calls"):
            capture.rows()
        capture.clear()
        qwen.forward(TOKENS)
        assert capture.rows().shape == (14, 2, 2)


def rerouted(router: nn.Module, change: Any) -> Iterator[None]:
    """``router`` answering ``change(ids)`` in place of its ids."""
    whole = router.forward

    def forward(hidden_states: torch.Tensor) -> Any:
        logits, weights, ids = whole(hidden_states)
        return logits, weights, change(ids)

    router.forward = forward  # type: ignore[method-assign]
    yield
    router.forward = whole  # type: ignore[method-assign]


def set_at(token: int, k: int, value: int | None) -> Any:
    def change(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.clone()
        ids[token, k] = ids[token, 1 - k] if value is None else value
        return ids

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (set_at(4, 1, 8), RowError, r"row 4 layer 3: wanted ids in \[0, 8\), got 8"),
        (set_at(0, 0, -1), RowError, r"row 0 layer 3: wanted ids in \[0, 8\), got -1"),
        (set_at(0, 0, 256), RowError, r"row 0 layer 3: .*got 256"),
        (set_at(13, 0, None), RowError, "row 13 layer 3: wanted distinct ids"),
        (
            lambda ids: ids[:-1],
            CaptureError,
            r"layer 3: wanted torch.int64 \[14, 2\], got torch.int64 \(13, 2\)",
        ),
        (lambda ids: ids[:, :1], CaptureError, r"router of layer 3: wanted torch.int64 \[14, 2\]"),
        (lambda ids: ids.float(), CaptureError, r"router of layer 3: wanted torch.int64.*float32"),
    ],
)
def test_ids_that_no_router_can_choose_are_found(qwen: Any, change: Any, error: Any, message: str) -> None:
    """Goal: H12 and H17. Method: one layer's router answers something else; nothing downstream looks at it."""
    experts = qwen.model.model.layers[3].mlp.experts
    kept = experts.forward
    experts.forward = lambda hidden_states, *_: hidden_states
    planted = rerouted(find_routers(qwen.model)[3], change)
    next(planted)
    try:
        with RoutingCapture(qwen.model, routing_spec_from_hf(qwen.config, 16)) as capture:
            qwen.forward(TOKENS)
            with pytest.raises(error, match=message):
                capture.rows()
    finally:
        experts.forward = kept
        next(planted, None)


def test_a_spec_of_other_layers_is_refused(qwen: Any) -> None:
    spec = routing_spec(num_experts=8, top_k=2, layer_ids=(0, 1), num_layers=4, block_tokens=16)
    with pytest.raises(CaptureError, match=r"layers with a router: wanted \[0, 1\], got \[1, 3\]"):
        RoutingCapture(qwen.model, spec)
    assert not any(router._forward_hooks for router in find_routers(qwen.model).values())


def test_a_dense_model_is_refused() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LlamaConfig(**small, vocab_size=8)
    with pytest.raises(CaptureError, match=r"wanted blocks with a child experts.*got none in LlamaModel"):
        find_routers(transformers.LlamaModel(config))


class Block(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.Identity()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.router(hidden_states)
        return hidden_states


class Router(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        top = hidden_states.topk(2, dim=-1)
        return hidden_states, top.values, top.indices


class PairRouter(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return hidden_states, hidden_states


def test_models_that_cannot_be_read_by_name_are_refused_or_told() -> None:
    """Goal: no guess. Method: no layer number; two routers in a layer; then the same with the routers named."""
    with pytest.raises(CaptureError, match="routers inside numbered layers, got one at the top"):
        find_routers(Block(Router()))
    layer = nn.ModuleDict({"text": Block(Router()), "vision": Block(Router())})
    two = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    with pytest.raises(CaptureError, match=r"one router a layer, got layers.0.text and layers.0.vision; pass routers="):
        find_routers(two)
    spec = routing_spec(num_experts=4, top_k=2, layer_ids=(0,), num_layers=1, block_tokens=16)
    with RoutingCapture(two, spec, routers={0: layer["text"].router}) as capture:
        layer["text"](torch.tensor([[[0.1, 0.4, 0.2, 0.3]]]))
        assert capture.rows().tolist() == [[[1, 3]]]


def test_a_router_that_does_not_say_its_ids_is_refused() -> None:
    """Goal: a router that answers no ids fails the pass, instead of being stored as something else."""
    block = Block(PairRouter())
    spec = routing_spec(num_experts=4, top_k=2, layer_ids=(0,), num_layers=1, block_tokens=16)
    capture = RoutingCapture(block, spec, routers={0: block.router})
    with pytest.raises(CaptureError, match=r"PairRouter: wanted an answer \(logits, weights, ids\)"):
        block(torch.zeros(1, 4))
    capture.close()


def test_canary_rows_say_where_they_belong(qwen: Any) -> None:
    """Goal: the debug mode's rows are told apart by value. Method: a canary capture of two chunks of one sequence."""
    real = routing_spec_from_hf(qwen.config, 16)
    spec = canary_spec(real)
    assert (spec.row_shape, spec.dtype, spec.name) == (real.row_shape, "uint32", "routing")
    with RoutingCapture(qwen.model, spec) as capture:
        qwen.forward(TOKENS[:1, :4])
        first = capture.rows(positions=np.arange(4))
        capture.clear()
        qwen.forward(TOKENS[:1, 4:])
        second = capture.rows(positions=np.arange(4, 7))
        with pytest.raises(CaptureError, match="positions: wanted 3 positions, for a canary spec, got none"):
            capture.rows()
        with pytest.raises(CaptureError, match="positions: wanted 3 positions, for a canary spec, got 2"):
            capture.rows(positions=np.arange(2))
    rows = np.concatenate([first, second])
    assert np.array_equal(rows, canary_rows(spec, np.arange(7)))
    assert len(np.unique(rows)) == rows.size


def test_canary_mode_keeps_the_checks(qwen: Any) -> None:
    spec = canary_spec(routing_spec_from_hf(qwen.config, 16))
    planted = rerouted(find_routers(qwen.model)[1], set_at(0, 0, 8))
    experts = qwen.model.model.layers[1].mlp.experts
    kept, experts.forward = experts.forward, lambda hidden_states, *_: hidden_states
    next(planted)
    try:
        with RoutingCapture(qwen.model, spec) as capture:
            qwen.forward(TOKENS)
            with pytest.raises(RowError, match=r"row 0 layer 1: wanted ids in \[0, 8\), got 8"):
                capture.rows(positions=np.arange(14))
    finally:
        experts.forward = kept
        next(planted, None)


@pytest.mark.parametrize("positions", [[-1], [1 << 31], [0.5]])
def test_positions_a_canary_cannot_hold_are_refused(positions: list[float]) -> None:
    spec = canary_spec(routing_spec(num_experts=8, top_k=2, layer_ids=(0, 1), num_layers=2, block_tokens=16))
    with pytest.raises(RowError, match="positions"):
        canary_rows(spec, np.array(positions))


class _Buffered(nn.Module):
    """A decoder of routers that write their choice where ``place(layer)`` says, as engines with static buffers do."""

    class Router(nn.Module):
        def __init__(self, layer: int, place: Callable[[int], torch.Tensor]) -> None:
            super().__init__()
            self.layer, self.place = layer, place

        def forward(self, tokens: torch.Tensor) -> tuple[None, None, torch.Tensor]:
            ids = self.place(self.layer)[: len(tokens)]
            ids[:] = torch.tensor([2 * self.layer, 2 * self.layer + 1])
            return None, None, ids

    def __init__(self, place: Callable[[int], torch.Tensor], layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for number, layer in enumerate(self.layers):
            layer.mlp = nn.Module()
            layer.mlp.gate, layer.mlp.experts = self.Router(number, place), nn.Identity()

    def forward(self, tokens: torch.Tensor) -> None:
        for layer in self.layers:
            layer.mlp.gate(tokens)  # type: ignore[operator, union-attr]


BUFFERED = routing_spec(num_experts=8, top_k=2, layer_ids=range(3), num_layers=3, block_tokens=4)
CHOSEN = np.tile(np.arange(6, dtype=np.uint8).reshape(3, 2), (5, 1, 1))


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_buffer_that_routers_use_again_is_refused(shift: int) -> None:
    """Goal: no layer's ids under another's name. Method: one buffer for all layers, or parts of it that overlap."""
    buffer = torch.zeros(32, 2, dtype=torch.int64)
    model = _Buffered(lambda layer: buffer[layer * shift :])
    with RoutingCapture(model, BUFFERED) as capture:
        model(torch.zeros(5, 1))
        with pytest.raises(CaptureError, match=r"router of layer 1: wanted values in memory of their own.*of layer 0"):
            capture.rows()


def test_layers_that_reach_into_the_next_token_are_refused() -> None:
    """Method: three columns a token, and a layer of two that begins at the last of them."""
    buffer = torch.zeros(64, dtype=torch.int64)
    model = _Buffered(lambda layer: buffer[(0, 2, 32)[layer] :].as_strided((8, 2), (3, 1)))
    with RoutingCapture(model, BUFFERED) as capture:
        model(torch.zeros(5, 1))
        with pytest.raises(CaptureError, match="values in memory of their own"):
            capture.rows()


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
def test_layers_side_by_side_in_one_buffer_are_captured(axes: tuple[int, int, int]) -> None:
    """Goal: a buffer with a place for every layer is nothing to refuse. Method: layer by layer, and token by token."""
    shape = [(3, 8, 2)[axis] for axis in axes]
    buffer = torch.zeros(shape, dtype=torch.int32).permute(axes)
    model = _Buffered(lambda layer: buffer[layer])
    with RoutingCapture(model, BUFFERED) as capture:
        model(torch.zeros(5, 1))
        assert np.array_equal(capture.rows(), CHOSEN)

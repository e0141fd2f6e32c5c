"""Capturing routes from real transformers models, and every way a pass can fail to be captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from experts_seen import Seen
from torch import nn

from cache_manager.errors import RowError
from kvroute.capture.capture import RoutingCapture, find_routers
from kvroute.capture.errors import CaptureError
from kvroute.routing import routing_spec, routing_spec_from_hf

TOKENS = torch.tensor([[5, 9, 13, 21, 33, 47, 8], [60, 3, 3, 3, 17, 22, 41]])
HALF = r"router of layer 3: wanted a call in each pass, got 0 calls"


def test_rows_are_what_the_experts_computed_with(tiny_moe: Any) -> None:
    """Goal: the captured row is the routing that the experts really got. Method: the experts' own arguments, all
    families."""
    spec = routing_spec_from_hf(tiny_moe.config, block_tokens=16)
    seen = Seen(tiny_moe.model)
    with RoutingCapture(tiny_moe.model, spec) as capture:
        tiny_moe.forward(TOKENS)
        rows = capture.rows()
    seen.close()
    assert (rows.shape, rows.dtype) == ((TOKENS.numel(), *spec.row_shape), spec.numpy_dtype)
    assert np.array_equal(rows, seen.rows())
    assert len(np.unique(rows)) > 1


def test_capture_changes_nothing_and_leaves_nothing(qwen: Any) -> None:
    """Goal: a model under capture computes the same bits, with gradients too, and half a pass, as one that failed, is
    none. Method: compare logits; fail between the routed layers; look for hooks at the end."""
    plain = qwen.forward(TOKENS)
    with RoutingCapture(qwen.model, routing_spec_from_hf(qwen.config, 16)) as capture:
        with_gradients = qwen.model(TOKENS, use_cache=False).logits
        assert torch.equal(with_gradients, plain)
        assert with_gradients.requires_grad
        assert not any(ids.requires_grad for ids in capture.topk_ids)
        first = capture.rows()
        capture.clear()
        fails = qwen.model.model.layers[2].register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            qwen.forward(TOKENS)
        fails.remove()
        with pytest.raises(CaptureError, match=HALF):
            capture.rows()
        capture.clear()
        qwen.forward(TOKENS)
        assert np.array_equal(capture.rows(), first)
    capture.close()
    assert not any(router._forward_hooks for router in find_routers(qwen.model).values())


def an_expert_twice(ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    ids[13, 0] = ids[13, 1]
    return ids


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (an_expert_twice, RowError, "row 13 layer 3: wanted distinct ids"),
        (lambda ids: ids[:-1], CaptureError, r"layer 3: wanted torch.int64 \[14, 2\], got torch.int64 \(13, 2\)"),
    ],
)
def test_ids_that_no_router_can_choose_are_found(
    qwen: Any, change: Any, error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: H12 and H17. Method: one layer's router answers something else."""
    router, spec = find_routers(qwen.model)[3], routing_spec_from_hf(qwen.config, 16)
    whole = router.forward
    monkeypatch.setattr(router, "forward", lambda hidden: (*whole(hidden)[:2], change(whole(hidden)[2])))
    monkeypatch.setattr(qwen.model.model.layers[3].mlp.experts, "forward", lambda hidden, *_: hidden)
    with RoutingCapture(qwen.model, spec) as capture:
        qwen.forward(TOKENS)
        with pytest.raises(error, match=message):
            capture.rows()


def test_a_spec_of_other_layers_is_refused(qwen: Any) -> None:
    spec = routing_spec(num_experts=8, top_k=2, layer_ids=(0, 1), num_layers=4, block_tokens=16)
    with pytest.raises(CaptureError, match=r"layers with a router: wanted \[0, 1\], got \[1, 3\]"):
        RoutingCapture(qwen.model, spec)
    assert not any(router._forward_hooks for router in find_routers(qwen.model).values())


class Router(nn.Module):
    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden, hidden  # no ids


def block() -> nn.Module:
    return nn.ModuleDict({"router": Router(), "experts": nn.Identity()})


def dense() -> nn.Module:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.LlamaModel(transformers.LlamaConfig(**small, vocab_size=8))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (dense, "wanted blocks with a child experts.*got none in LlamaModel"),
        (block, "routers inside numbered layers, got one at the top"),
        (
            lambda: nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"text": block(), "vision": block()})])}),
            "one router a layer, got layers.0.text and layers.0.vision",
        ),
    ],
)
def test_models_that_cannot_be_read_by_name_are_refused(model: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        find_routers(model())


def test_a_router_that_does_not_say_its_ids_is_refused() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([block()])})
    spec = routing_spec(num_experts=4, top_k=2, layer_ids=(0,), num_layers=1, block_tokens=16)
    message = r"Router: wanted an answer \(logits, weights, ids\)"
    with RoutingCapture(model, spec), pytest.raises(CaptureError, match=message):
        find_routers(model)[0](torch.zeros(1, 4))

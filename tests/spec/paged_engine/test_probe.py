"""What the engine asks a model before it runs it, and which models it refuses, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollouts import model_of
from torch import nn

from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from paged_engine.attention import ATTENTION, kv_shape, paged_attention
from paged_engine.engine import Engine
from paged_engine.request import EngineConfig

ANOTHER_WAY = "tokens that depend on each other by paged attention alone"
REFUSED = {
    "gemma4_text": ("Gemma4ForCausalLM", "keys and values as in layer 0 in all layers"),
    "jamba": ("JambaForCausalLM", ANOTHER_WAY),
    "lfm2_moe": ("Lfm2MoeForCausalLM", ANOTHER_WAY),
    "nemotron_h": ("NemotronHForCausalLM", ANOTHER_WAY),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", ANOTHER_WAY),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_does_not_fit_is_refused_by_name(family: str) -> None:
    """Goal: no family is run wrongly and silently. Method: those with a state, or with KV of two shapes, are refused
    when the engine is made, and the model is as it was. The others: tests/spec/paged_engine/test_replay.py."""
    model, (name, why) = model_of(family, seed=0), REFUSED[family]
    with pytest.raises(InvalidInputError, match=f"model {name}: wanted {why}"):
        Engine(model, EngineConfig(device_blocks=2), Namespace("m", 0))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_with_another_attention_is_refused(qwen: nn.Module) -> None:
    """Goal: the batch reaches attention. Method: transformers' own, which would see one sequence of all tokens."""
    qwen.set_attn_implementation("sdpa")
    try:
        with pytest.raises(InvalidInputError, match=f"model Qwen3MoeForCausalLM: wanted .* {ATTENTION}, got sdpa"):
            kv_shape(qwen)
    finally:
        qwen.set_attn_implementation(ATTENTION)


@pytest.mark.parametrize("asked", [{"softcap": 50.0}, {"dropout": 0.1}, {"indices": 1}, {"attention_mask": 1}, {}])
def test_attention_that_is_asked_for_more_than_it_knows_refuses(asked: dict[str, Any]) -> None:
    """Goal: no option that changes attention is ignored. Method: keywords of other families, and a layer with
    bidirectional attention."""
    query, layer = torch.zeros(1, 2, 3, 4), nn.Linear(1, 1)
    layer.is_causal = bool(asked)
    given = {"attention_mask": None, "scaling": 1.0, "position_ids": torch.zeros(1), "softcap": None, **asked}
    why = next(iter(asked), "is_causal=False")
    with pytest.raises(InvalidInputError, match=f"Linear: wanted causal attention, .*, got {why}"):
        paged_attention(layer, query, query, query, **given)

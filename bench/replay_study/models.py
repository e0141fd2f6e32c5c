"""The models of a study: the trainer's in float32, and the engine's, a copy in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from bench.replay_study.experts import install
from bench.replay_study.scales import Shape
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routing import routing_spec_from_hf

ROUTES_BLOCK_TOKENS = 8
"""The block size in the spec of the routes; no measurement depends on it."""


def build_trained(shape: Shape, vocab_size: int, seed: int, device: torch.device) -> Any:
    """The trainer's model with weights drawn from ``seed``: float32, with gradients for every parameter."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.expert_hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64 if shape.hidden >= 512 else 16,
        moe_intermediate_size=shape.expert_hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        model: Any = Qwen3MoeForCausalLM(config)
    model.config._experts_implementation = install()
    return model.train().requires_grad_(True)


def build_engines(trained: Any) -> Any:
    """The engine's copy of ``trained``, ready for :func:`load_weights`: parameters in bfloat16, buffers unchanged.

    Rotary frequencies and the routers' biases are buffers, which engines keep in float32 too.
    """
    model = copy.deepcopy(trained).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


@torch.no_grad()
def load_weights(engines: nn.Module, trained: nn.Module) -> None:
    """Give the engine the trainer's weights, rounded to its dtype."""
    for mine, theirs in zip(engines.parameters(), trained.parameters(), strict=True):
        mine.copy_(theirs)


def routes_spec(model: Any) -> AuxBlockDataSpec:
    """The spec of a model's routing rows."""
    return routing_spec_from_hf(model.config, ROUTES_BLOCK_TOKENS)

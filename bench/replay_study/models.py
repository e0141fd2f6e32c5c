"""The models of a study: the trainer's in float32, and the engine's, a copy in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.replay_study.experts import PADDED


def build_trained(shape: Mapping[str, int], vocab_size: int, seed: int, device: torch.device) -> Any:
    """The trainer's model with weights drawn from ``seed``: float32, with gradients for every parameter."""
    config = Qwen3MoeConfig(
        **shape,
        vocab_size=vocab_size,
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
    model.config._experts_implementation = PADDED
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

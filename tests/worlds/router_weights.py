"""How each family turns scores into weights, written from the models' papers and cards, not from their code.

A formula takes the scores of all experts, ``[tokens, experts]``, the chosen ids, ``[tokens, top_k]``, the router and
its model's configuration, and answers the weights, ``[tokens, top_k]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def softmax(logits: torch.Tensor, ids: torch.Tensor, _router: Any, config: Any) -> torch.Tensor:
    return logits.softmax(dim=-1).gather(1, ids) * getattr(config, "routed_scaling_factor", 1.0)


def shares(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = scores.gather(1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True)


def softmax_shares(logits: torch.Tensor, ids: torch.Tensor, _router: Any, _config: Any) -> torch.Tensor:
    return shares(logits.softmax(dim=-1), ids)


def sigmoid_shares(logits: torch.Tensor, ids: torch.Tensor, _router: Any, config: Any) -> torch.Tensor:
    scale = getattr(config, "route_scale", None) or getattr(config, "routed_scaling_factor", None) or 1.0
    return shares(logits.sigmoid(), ids) * scale


def sigmoid(logits: torch.Tensor, ids: torch.Tensor, _router: Any, config: Any) -> torch.Tensor:
    return logits.sigmoid().gather(1, ids) * config.routed_scaling_factor


def softmax_of_chosen(logits: torch.Tensor, ids: torch.Tensor, _router: Any, _config: Any) -> torch.Tensor:
    return logits.gather(1, ids).softmax(dim=-1)


def scaled_shares(probabilities: torch.Tensor, ids: torch.Tensor, router: Any, _config: Any) -> torch.Tensor:
    return shares(probabilities, ids) * router.per_expert_scale[ids]


WEIGHTS: dict[str, Callable[..., torch.Tensor]] = {
    "afmoe": sigmoid_shares,
    "deepseek_v2": softmax,
    "deepseek_v3": sigmoid_shares,
    "dots1": sigmoid,
    "ernie4_5_moe": softmax_shares,
    "exaone_moe": sigmoid_shares,
    "gemma4_text": scaled_shares,
    "glm4_moe": sigmoid_shares,
    "glm4_moe_lite": sigmoid_shares,
    "gpt_oss": softmax_of_chosen,
    "granitemoe": softmax_of_chosen,
    "hunyuan_v1_moe": softmax_shares,
    "jamba": softmax,
    "lfm2_moe": sigmoid_shares,
    "longcat_flash": softmax,
    "minimax_m2": sigmoid_shares,
    "mixtral": softmax_shares,
    "nemotron_h": sigmoid_shares,
    "olmoe": softmax,
    "qwen2_moe": softmax,
    "qwen3_5_moe_text": softmax_shares,
    "qwen3_moe": softmax,
}

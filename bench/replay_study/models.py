"""The models of a study: the trainer's in float32, and the engine's, a copy in bfloat16, with kernels of its own.

Transformers' own loop over a layer's experts launches a dozen kernels an expert and waits for the device at each: with
24 layers of 64 experts this takes seconds. Here they are two batched matrix products: each expert's tokens are padded
to the number of the busiest expert, which costs at most ``experts / top_k`` times the arithmetic, because a token goes
to ``top_k`` different experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bench.replay_study.scales import QWEN

PADDED: Final = "kvroute_padded"
"""The name of :func:`padded_experts` in transformers."""
DENSE: Final = "kvroute_dense"
"""The name of :func:`dense_experts` in transformers."""


def padded_experts(
    experts: Any,  # a module with gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner]
    states: torch.Tensor,  # [tokens, hidden]
    top_k_index: torch.Tensor,  # [tokens, top_k] int64, no expert twice in a row
    top_k_weights: torch.Tensor,  # [tokens, top_k]
) -> torch.Tensor:
    """The experts' output for ``states``: ``[tokens, hidden]``. Waits for the device once, to find the largest load."""
    assert experts.has_gate, "the study's families have gated experts"
    assert not experts.has_bias, "without a bias"
    assert not experts.is_transposed, "of matrices [out, in]"
    (tokens, top_k), device, count = top_k_index.shape, states.device, len(experts.gate_up_proj)
    chosen = top_k_index.reshape(-1)
    by_expert, order = chosen.sort(stable=True)
    load = torch.bincount(chosen, minlength=count)
    width = int(load.max())
    # The place of each (token, expert) in the padded batch [count, width].
    place = by_expert * width + torch.arange(len(order), device=device) - (load.cumsum(0) - load)[by_expert]
    # Padding reads some token too, each place another; its result is never read.
    token_at = torch.arange(count * width, device=device) % tokens
    token_at[place] = order // top_k
    given = states.index_select(0, token_at).view(count, width, -1)
    inner = experts._apply_gate(torch.bmm(given, experts.gate_up_proj.transpose(1, 2)))
    answers = torch.bmm(inner, experts.down_proj.transpose(1, 2)).flatten(0, 1)
    place_of = torch.empty_like(order)
    place_of[order] = place
    answer = answers.index_select(0, place_of).view(tokens, top_k, -1) * top_k_weights[..., None]
    return answer.sum(1).to(states.dtype)


def dense_experts(
    experts: Any,  # as in padded_experts
    states: torch.Tensor,  # [tokens, hidden]
    top_k_index: torch.Tensor,  # [tokens, top_k] int64
    top_k_weights: torch.Tensor,  # [tokens, top_k]
) -> torch.Tensor:
    """The same for a step of decoding: all experts compute all tokens. Waits for nothing, so a CUDA graph can hold it.

    Its sums run over all experts, most with a weight of zero: it rounds otherwise than :func:`padded_experts`.
    """
    gates = torch.zeros(len(states), len(experts.gate_up_proj), dtype=states.dtype, device=states.device)
    gates.scatter_(1, top_k_index, top_k_weights.to(states.dtype))
    given = states.expand(len(experts.gate_up_proj), -1, -1)
    inner = experts._apply_gate(torch.bmm(given, experts.gate_up_proj.transpose(1, 2)))
    answers = torch.bmm(inner, experts.down_proj.transpose(1, 2))  # [experts, tokens, hidden]
    return torch.bmm(gates[:, None], answers.transpose(0, 1))[:, 0]


ALL_EXPERTS_FUNCTIONS[PADDED] = padded_experts
ALL_EXPERTS_FUNCTIONS[DENSE] = dense_experts


def build_trained(family: str, shape: Mapping[str, int], vocab_size: int, seed: int, device: torch.device) -> Any:
    """The trainer's model with weights drawn from ``seed``: float32, with gradients for every parameter."""
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "norm_topk_prob": True,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == QWEN:
        config: Any = Qwen3MoeConfig(**shape, **common, router_aux_loss_coef=0.01)
    else:
        config = DeepseekV3Config(**shape, **common)
    built = Qwen3MoeForCausalLM if family == QWEN else DeepseekV3ForCausalLM
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        model: Any = built(config)
    model.config._experts_implementation = PADDED
    return model.train().requires_grad_(True)


def build_engines(trained: Any) -> Any:
    """The engine's copy of ``trained``, ready for :func:`load_weights`: parameters in bfloat16, buffers unchanged.

    Rotary frequencies and the routers' biases are buffers, which engines keep in float32 too.
    """
    model = copy.deepcopy(trained).eval().requires_grad_(False)
    model.config._experts_implementation = DENSE
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


@torch.no_grad()
def load_weights(engines: nn.Module, trained: nn.Module) -> None:
    """Give the engine the trainer's weights, rounded to its dtype, in the same memory; and its buffers."""
    for mine, theirs in zip(engines.parameters(), trained.parameters(), strict=True):
        mine.copy_(theirs)
    for kept, present in zip(engines.buffers(), trained.buffers(), strict=True):
        kept.copy_(present)

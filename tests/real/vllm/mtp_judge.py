"""An MTP layer in a checkpoint, and what its router chooses by transformers: a decoder layer behind the model's last
one, which is given both tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experts_seen import experts_of
from models import _MLA
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from bench.vllm_drafts import read, write


def let_both_tokens_count(home: Path) -> Path:
    """Let the MTP layer of the checkpoint read the hidden state, too; what vLLM's kernels rotate otherwise is 0."""
    config, weights = read(home)
    layer = f"model.layers.{config['num_hidden_layers']}."
    joined = weights[f"{layer}eh_proj.weight"]
    joined.copy_(0.1 * torch.randn(joined.shape, generator=torch.Generator().manual_seed(3)))
    rotated = weights.get(f"{layer}self_attn.kv_a_proj_with_mqa.weight")
    if rotated is not None:
        rotated[_MLA["kv_lora_rank"] :] = 0
    write(home, config, weights)
    return home


@cache
def _with_mtp_layer(home: Path) -> tuple[Any, dict[str, torch.Tensor], int]:
    config, weights = read(home)
    layers = config["num_hidden_layers"]
    longer = AutoConfig.from_pretrained(home)
    longer.num_hidden_layers = layers + 1
    model = AutoModelForCausalLM.from_pretrained(home, config=longer, dtype=torch.float32).eval()
    mine = f"model.layers.{layers}."
    return model, {name.removeprefix(mine): weight for name, weight in weights.items() if name.startswith(mine)}, layers


def mtp_routing(home: Path, tokens: list[int], read: list[int]) -> NDArray[Any]:
    """The experts that the MTP layer of this checkpoint gives each of the tokens to, with what it has ``read`` behind
    it: ``[tokens, 1, top_k]``, sorted."""
    model, weights, layers = _with_mtp_layer(home)
    plain = model.model
    embedded = plain.embed_tokens(torch.tensor([read])).clone()
    embedded[:, 0] = 0  # vLLM's MTP layers do not read it at the first position

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + plain.norm.variance_epsilon)
        return values * scale * weights[f"{name}.weight"]

    def join(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = plain.norm(given[0])
        both = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1)
        return (both @ weights["eh_proj.weight"].T, *given[1:]), named

    hook = plain.layers[layers].register_forward_pre_hook(join, with_kwargs=True)
    try:
        with torch.no_grad():
            chosen = experts_of(model, torch.tensor([tokens]))
    finally:
        hook.remove()
    return np.sort(chosen[:, -1:], axis=-1)

"""The small model that the experiments with vLLM serve, and the forward pass that judges its rows."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS, TOP_K, VOCABULARY = 4, 16, 4, 512


def build(directory: Path, seed: int = 0, *, width: int = 1) -> None:
    """A Qwen3-MoE of seeded float32 weights, without a tokenizer.

    It has 1.9 M weights; with ``width=8`` 420 M, in twice the layers with twice the experts.
    """
    more = min(width, 2)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128 * width,
        intermediate_size=256 * width,
        moe_intermediate_size=64 * width,
        num_hidden_layers=LAYERS * more,
        num_attention_heads=4 * width,
        num_key_value_heads=2 * more,
        head_dim=32,  # the narrowest that vLLM's attention on a CPU has
        num_experts=EXPERTS * more,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).to(torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.fill_(1.0)
                else:  # routers wide, so that rounding rarely decides a choice
                    weight.normal_(0, (0.3 if name.endswith("gate.weight") else 0.08) / width**0.5)
    model.save_pretrained(directory)


def unpacked(packed: Mapping[str, Any]) -> NDArray[Any]:
    """The array that :func:`bench.peers.vllm_engine.packed` has packed."""
    return np.frombuffer(base64.b64decode(packed["bytes"]), packed["dtype"]).reshape(packed["shape"])


class Judge:
    """A float32 forward pass of the same weights by transformers, over the tokens of prompt and answer."""

    def __init__(self, directory: Path) -> None:
        self._model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._ids: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._model.model.layers):
            layer.mlp.gate.register_forward_hook(lambda _m, _a, out, i=index: self._ids.__setitem__(i, out[2]))

    def judge(self, tokens: Sequence[int], rows: Mapping[str, Any] | None) -> NDArray[np.int64]:
        """How many of the rows that are due, one for each token but the last, are right, missing and wrong."""
        due = len(tokens) - 1
        if rows is None:
            return np.array([0, due, 0])
        ids, valid = unpacked(rows["ids"])[:due], unpacked(rows["valid"])[:due]
        with torch.no_grad():
            self._model(torch.tensor([list(tokens)]))
        choices = [self._ids[i].reshape(-1, TOP_K).numpy() for i in range(LAYERS)]
        wanted = np.stack(choices, 1)[: len(ids)]
        same = (np.sort(wanted, -1) == np.sort(ids, -1)).all((1, 2))
        return np.array([(same & valid).sum(), due - len(ids) + (~valid).sum(), (~same & valid).sum()])


__all__ = ["EXPERTS", "LAYERS", "TOP_K", "VOCABULARY", "Judge", "build", "unpacked"]

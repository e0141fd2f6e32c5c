"""Small models for the experiments with vLLM, the pass that judges their rows, and the shape of a large model."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

EXPERTS, TOP_K, VOCABULARY = 16, 4, 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SMALL = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS}
LATENT: dict[str, Any] = {  # its heads and what it keeps have DeepSeek-V3's own sizes
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "n_routed_experts": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


LINEAR: dict[str, Any] = {  # linear attention in every other layer
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 128,
}
WINDOWS: dict[str, Any] = {"num_local_experts": EXPERTS, "intermediate_size": 128}  # in every other layer
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3MoeForCausalLM, Qwen3MoeConfig, HEADS),
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config, LATENT),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, HEADS | LINEAR),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, HEADS | WINDOWS),
}


def build(directory: Path, family: str, dtype: torch.dtype) -> None:
    """A model of the family with seeded weights and head sizes for GPU attention."""
    kind, config, sizes = FAMILIES[family]
    seeded(kind, config(**{**COMMON, **SMALL, **sizes}), 0.3, 0.05).to(dtype).save_pretrained(directory)


def build_qwen3(directory: Path, *, width: int = 1, head_dim: int = 32) -> None:
    """A Qwen3-MoE of seeded float32 weights, without a tokenizer.

    It has 1.9 M weights; with ``width=8`` 420 M, in twice the layers with twice the experts. The heads are the
    narrowest that vLLM's CPU attention supports.
    """
    more = min(width, 2)
    config = Qwen3MoeConfig(
        hidden_size=128 * width,
        intermediate_size=256 * width,
        moe_intermediate_size=64 * width,
        num_hidden_layers=4 * more,
        num_attention_heads=4 * width,
        num_key_value_heads=2 * more,
        head_dim=head_dim,
        num_experts=EXPERTS * more,
        **COMMON,
    )
    seeded(Qwen3MoeForCausalLM, config, 0.3 / width**0.5, 0.08 / width**0.5).save_pretrained(directory)


def seeded(kind: Any, config: Any, routers: float, others: float) -> Any:
    """A model with weights of these deviations: wide for routers, so that rounding rarely decides a choice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).to(torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1 or "bias" in name:
                    weight.fill_(1.0 if "norm" in name or name.endswith("scale") else 0.0)
                else:
                    weight.normal_(0, routers if {"gate", "router"} & set(name.split(".")) else others)
    return model


CODE = 32
"""Of the hidden values of a model for bfloat16: so many, the first ones, say which token it is, and nothing else."""
GAP = 0.2
"""Between the scores of the last expert that is chosen and the first that is not, in standard deviations."""


def decide_by_token(model: Any, top_k: int, generator: torch.Generator) -> None:
    """Let the routers of a model in bfloat16 choose by the token alone, and by a wide margin.

    They read the first :data:`CODE` hidden values, into which no layer writes; the embedding has there, for each token,
    the first random values for which all routers decide by :data:`GAP`.
    """
    routers = []
    for layer in model.model.layers:
        layer.mlp.gate.weight[:, CODE:] = 0
        routers.append(layer.mlp.gate.weight[:, :CODE])
        for name, parameter in layer.named_parameters():
            if "down_proj" in name or name.endswith(("o_proj.weight", "out_proj.weight")):
                parameter.narrow(parameter.ndim - 2, 0, CODE).zero_()  # [..., hidden, inner]
    codes = torch.randn(200_000, CODE, generator=generator).to(routers[0].device)
    keep = torch.ones(len(codes), dtype=torch.bool, device=codes.device)
    for router in routers:
        scores = (codes @ router.T).sort(-1, descending=True).values
        keep &= scores[:, top_k - 1] - scores[:, top_k] > GAP * scores.std(-1)
    model.model.embed_tokens.weight[:, :CODE] = codes[keep][:VOCABULARY]


SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "head_dim": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHAPES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen3": (  # Qwen3-30B-A3B: 0.63 B weights a layer
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        {
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3_next": (  # Qwen3-Next-80B-A3B: 1.65 B weights a layer, three of four layers have linear attention
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        {
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
    ),
    "gpt_oss": (  # gpt-oss-20b: 0.85 B weights a layer, here in bfloat16; every other layer has a window
        GptOssConfig,
        "GptOssForCausalLM",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
}
"""Large models by family: the class of the configuration, vLLM's name of the model, and the sizes."""


def shape(directory: Path, layers: int, family: str = "qwen3") -> None:
    """Write the configuration of a model of one of :data:`SHAPES`, with ``layers`` layers and no weights."""
    config, architecture, sizes = SHAPES[family]
    config(**{**SHAPE, **sizes, "num_hidden_layers": layers, "architectures": [architecture]}).save_pretrained(
        directory
    )


def unpacked(packed: Mapping[str, Any]) -> NDArray[Any]:
    """The array that :func:`bench.peers.vllm_engine.packed` packed."""
    return np.frombuffer(base64.b64decode(packed["bytes"]), packed["dtype"]).reshape(packed["shape"])


class Judge:
    """A float32 pass of the same weights by transformers, over the tokens of prompt and answer."""

    def __init__(self, directory: Path, close: float = 0.0, device: str = "cpu") -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model, self._close, self._device = model.to(device).eval(), close, device
        self._logits: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._model.model.layers):
            router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
            if router is not None:
                router.register_forward_hook(lambda m, a, _o, i=index: self._keep(i, m, a[0]))

    def _keep(self, layer: int, gate: Any, hidden: torch.Tensor) -> None:
        flat = hidden.reshape(-1, hidden.shape[-1]).float()
        self._logits[layer] = torch.nn.functional.linear(flat, gate.weight.float(), getattr(gate, "bias", None))

    def chosen(self, tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The experts ``[tokens, layers, top_k]`` that each token is given to, sorted; and how close a choice was.

        That is ``[tokens]``: the least difference, over the layers, of the logits of the last chosen expert and the
        first one not chosen.
        """
        with torch.no_grad():
            self._model(torch.tensor([list(tokens)], device=self._device))
        logits, found = torch.stack([self._logits[i] for i in sorted(self._logits)], 1).sort(-1, descending=True)
        apart = (logits[..., TOP_K - 1] - logits[..., TOP_K]).amin(1).cpu().numpy()
        return np.sort(found[..., :TOP_K].cpu().numpy(), -1), apart

    def judge(self, tokens: Sequence[int], rows: Mapping[str, Any] | None) -> NDArray[np.int64]:
        """How many of the expected rows are right, missing, wrong, and different at a close choice.

        A row is close if in any layer the logits differ by less than ``close``: rounding may have decided it.
        """
        due = len(tokens) - 1
        if rows is None:
            return np.array([0, due, 0, 0])
        ids, valid = unpacked(rows["ids"])[:due].astype(np.int64), unpacked(rows["valid"])[:due]
        wanted, apart = self.chosen(tokens)
        same = (wanted[: len(ids), : ids.shape[1]] == np.sort(ids, -1)).all((1, 2))  # the last layer may be left out
        missing, close = due - len(ids) + (~valid).sum(), apart[: len(ids)] < self._close
        others = ~same & valid
        return np.array([(same & valid).sum(), missing, (others & ~close).sum(), (others & close).sum()])

"""Tiny Mixture-of-Experts models of six families with seeded weights, and their routing by transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experts_seen import experts_of
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.lfm2_moe import Lfm2MoeConfig, Lfm2MoeForCausalLM
from transformers.models.mellum import MellumConfig, MellumForCausalLM
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.olmoe import OlmoeConfig, OlmoeForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

from bench.vllm_models import VOCABULARY, decide_by_token

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
_QWEN: dict[str, Any] = {**_HEADS, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
_MIXTRAL: dict[str, Any] = {**_HEADS, "num_local_experts": 8, "num_experts_per_tok": 2}
_OLMOE = {"num_key_value_heads": 2, "intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
_SHARED: dict[str, Any] = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_MLA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 64,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",  # these two vLLM asks for by name
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _QWEN),
    "qwen3_moe_dense_first": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**_QWEN, "num_hidden_layers": 4, "mlp_only_layers": [0]},
    ),
    "qwen3_moe_two_kv_heads": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**_QWEN, "num_key_value_heads": 2}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, _MIXTRAL),
    "mixtral_with_windows": (MixtralConfig, MixtralForCausalLM, {**_MIXTRAL, "sliding_window": 64}),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {**_OLMOE, "num_attention_heads": 2}),
    # Every other layer has a window, of gpt-oss' own size: with 64 vLLM's attention on a CPU is another one than
    # transformers' in a batch of three, from the 152nd token of one of them on.
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {**_HEADS, "num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128},
    ),
    # As Qwen3-MoE, and every other layer has a window.
    "mellum": (
        MellumConfig,
        MellumForCausalLM,
        {
            **_QWEN,
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["sparse"] * 4,
        },
    ),
    # Convolutions, whose states are the last tokens' alone, and in every other layer full attention.
    "lfm2_moe": (
        Lfm2MoeConfig,
        Lfm2MoeForCausalLM,
        {
            **_QWEN,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "num_dense_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {**_HEADS, **_SHARED, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5},
    ),
    # Linear attention and, in every other layer, full attention. vLLM's linear attention on a CPU wants bfloat16.
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            **_QWEN,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "shared_expert_intermediate_size": 32,
            "num_key_value_heads": 2,  # so much KV that a block, which is as large as a state, has few tokens
            "head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
        },
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {**_SHARED, **_MLA}),
}


def save(family: str, home: Path, seed: int = 0) -> Path:
    """A checkpoint of the family with weights of ``seed``; its routers are decisive, so that noise flips no choice."""
    torch.manual_seed(seed)
    config, made, said = FAMILIES[family]
    model = made(config(**{**_COMMON, **said})).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.3 if name.endswith(("gate.weight", "router.weight")) else 0.08)
            if name.endswith("kv_a_proj_with_mqa.weight"):  # vLLM's CPU kernel rotates otherwise than transformers
                parameter[_MLA["kv_lora_rank"] :] = 0
        if family == "qwen3_next":
            decide_by_token(model, _QWEN["num_experts_per_tok"], torch.Generator().manual_seed(seed))
    model.save_pretrained(home, safe_serialization=True)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t3"))  # noqa: S106 (no password)
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "t0", "eos_token": "t1", "pad_token": "t2", "unk_token": "t3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(home)
    return home


def saved(root: Path, family: str, seed: int = 0) -> Path:
    """The checkpoint of a family in ``root``, made when it is first asked for."""
    home = root / f"{family}-{seed}"
    return home if home.exists() else save(family, home, seed)


@cache
def reference(home: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()


def feed_forward(layer: Any) -> Any:
    """What of a decoder's layer may have experts."""
    return layer.mlp if hasattr(layer, "mlp") else layer.feed_forward


def moe_layers(home: Path) -> list[int]:
    """The layers that have experts, in order."""
    return [i for i, layer in enumerate(reference(home).model.layers) if hasattr(feed_forward(layer), "experts")]


def routing(home: Path, tokens: list[int]) -> NDArray[Any]:
    """The experts that transformers' forward pass of these weights gives tokens to: ``[tokens, moe layers, top_k]``.

    Sorted, for which of them comes first says nothing.
    """
    return np.sort(experts_of(reference(home), torch.tensor([tokens])), axis=-1)

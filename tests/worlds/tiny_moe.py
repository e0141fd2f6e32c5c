"""Small real Mixture-of-Experts models, one of each family, with seeded weights built on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

COMMON: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
SHARED = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 20}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
STATE = {
    "layers_block_type": ["mamba", "moe", "full_attention", "moe"],
    "n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "use_mamba_kernels": False,
    "moe_shared_expert_intermediate_size": 16,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**EIGHT, **WINDOW, "num_dense_layers": 2, "num_shared_experts": 1},
    "deepseek_v2": {**LATENT, **SHARED, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "dots1": {**SHARED, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_interval": 2},
    "exaone_moe": {**EIGHT, **WINDOW, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gemma4_text": {
        **WINDOW,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
    },
    "glm4_moe": {**SHARED, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**LATENT, **SHARED, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {**WINDOW, "num_local_experts": 8, "num_experts_per_tok": 4},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "num_shared_expert": 1},
    "jamba": {
        **EIGHT,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {**EIGHT, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        **LATENT,
        "n_routed_experts": 6,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "nemotron_h": {**STATE, **SHARED, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 16},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_moe_text": {**EIGHT, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EIGHT, "decoder_sparse_step": 2},
}


@dataclass(frozen=True)
class TinyMoE:
    family: str
    config: Any
    model: Any

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, sequence, vocabulary]``, without gradients."""
        with torch.no_grad():
            return self.model(tokens, use_cache=False).logits


def build(family: str, **changes: Any) -> TinyMoE:
    config = transformers.CONFIG_MAPPING[family](**{**COMMON, **FAMILIES.get(family, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        # The grouped kernel that transformers would choose knows no float64.
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            # Freshly made router weights are zeros in some families: every token would go the same way.
            if "gate" in name or "router" in name:
                torch.nn.init.normal_(parameter)
    return TinyMoE(family, config, model)

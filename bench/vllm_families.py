"""A tiny checkpoint of every family of Mixture-of-Experts that both transformers and vLLM have.

:data:`FAMILIES` has, by transformers' name, what a family's configuration says beside :data:`COMMON`, and the engine's
arguments that it needs on a CPU. Heads, states and latents have the narrowest sizes that vLLM's kernels for CPUs take.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.vllm_models import VOCABULARY, decide_by_token, seeded

LAYERS, WINDOW = 4, 128
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TOP: dict[str, Any] = {"num_experts_per_tok": 4}
EXPERTS: dict[str, Any] = {**TOP, "num_experts": 16}
LOCAL: dict[str, Any] = {**TOP, "num_local_experts": 16}
ROUTED: dict[str, Any] = {**TOP, "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 64,
    "head_dim": 64,
}
INDEXED: dict[str, Any] = {
    **LATENT,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "layer_types": ["indexed_attention"] * LAYERS,
}
BIASED: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # vLLM asks for these by name
AFMOE: dict[str, Any] = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}  # and for these
WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_expert_intermediate_size": 32,
    "num_key_value_heads": 2,  # so much KV that a block, which is as large as a state, has few tokens
    "head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
}
STATES: dict[str, Any] = {"dtype": "bfloat16", "block_size": None, "num_gpu_blocks_override": 20}
TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
VISION: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's configuration says; its text model's if it ``sees``; and arguments of the engine.

    vLLM's linear attention on a CPU wants bfloat16. Where rounding would decide choices, routers choose ``by_token``.
    """

    text: Mapping[str, Any]
    sees: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    by_token: bool = False


MLA: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}}
FAMILIES: Mapping[str, Family] = {
    "afmoe": Family({**EXPERTS, **WINDOWS, "num_dense_layers": 1, "num_shared_experts": 1, **AFMOE}),
    "aria": Family(
        {"moe_num_experts": 16, "moe_topk": 4, "moe_num_shared_experts": 1},
        {"vision_config": {**VISION, "image_size": 64, "patch_size": 32}, "image_token_index": 3},
    ),
    "axk1": Family({**ROUTED, **LATENT, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2}, engine=MLA),
    "cohere2_moe": Family({**EXPERTS, **WINDOWS, "mlp_layer_types": ["sparse"] * LAYERS, "tie_word_embeddings": True}),
    "dbrx": Family(
        {
            "d_model": 64,
            "n_heads": 2,
            "n_layers": LAYERS,
            "max_seq_len": 2048,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 16, "moe_top_k": 4},
        }
    ),
    "deepseek_v2": Family({**ROUTED, **LATENT, "first_k_dense_replace": 1}, engine=MLA),
    "deepseek_v3": Family(
        {**ROUTED, **LATENT, **BIASED, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}, engine=MLA
    ),
    "deepseek_v32": Family({**ROUTED, **INDEXED, **BIASED, **SPARSE, "first_k_dense_replace": 1}),
    "deepseek_v4": Family(
        {
            **ROUTED,
            "head_dim": 512,
            "q_lora_rank": 64,
            "o_groups": 2,
            "o_lora_rank": 64,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 64,
            "sliding_window": WINDOW,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        },
        engine={"dtype": "bfloat16", "block_size": 256},
    ),
    "ernie4_5_moe": Family({"moe_num_experts": 16, "moe_k": 4, "moe_layer_start_index": 1, "moe_layer_end_index": 3}),
    "ernie4_5_vl_moe": Family(
        {
            "moe_num_experts": 16,
            "moe_k": 4,
            "moe_intermediate_size": [32, 32],
            **SPARSE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [5, 5, 6]},
        },
        {"vision_config": TOWER},
    ),
    "exaone_moe": Family({**EXPERTS, **WINDOWS, **SPARSE, "num_shared_experts": 1, "first_k_dense_replace": 1}),
    "flex_olmo": Family({**EXPERTS, "num_key_value_heads": 2, "moe_intermediate_size": 64}),
    "gemma4_text": Family(
        {
            **WINDOWS,
            "num_experts": 16,
            "top_k_experts": 4,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "per_layer_config": {},
            "tie_word_embeddings": True,
        }
    ),
    "glm4_moe": Family({**ROUTED, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": Family({**ROUTED, **LATENT, **SPARSE, "first_k_dense_replace": 1}, engine=MLA),
    "glm4v_moe": Family(
        {
            **ROUTED,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
            },
        },
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": 64,
            }
        },
    ),
    "glm5_next": Family(
        {
            **ROUTED,
            **INDEXED,
            **SPARSE,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "linear_num_heads": 2,
        },
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": 64,
            }
        },
        {"dtype": "bfloat16", "block_size": None, "enable_prefix_caching": False},
    ),
    "glm_moe_dsa": Family({**ROUTED, **INDEXED, **SPARSE, "first_k_dense_replace": 1}),
    "gpt_oss": Family({**LOCAL, **WINDOWS}),
    "granitemoe": Family({**LOCAL}),
    "granitemoe_swa": Family({**LOCAL, **WINDOWS, "shared_intermediate_size": 32, "layer_rope_theta": [1e4] * LAYERS}),
    "granitemoehybrid": Family(
        {
            **LOCAL,
            "num_key_value_heads": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
        engine={"block_size": None},
    ),
    "granitemoeshared": Family({**LOCAL, "shared_intermediate_size": 32}),
    "hunyuan_v1_moe": Family({"num_experts": 16, "moe_topk": 4, "moe_intermediate_size": 64}),
    "hy_v3": Family(
        {
            **EXPERTS,
            **SPARSE,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "route_norm": True,
            "expert_hidden_dim": 32,
            "qk_norm": True,
        }
    ),
    "hy_v4": Family({**ROUTED, **INDEXED, **SPARSE, "indexer_types": ["full"] * LAYERS}),
    "inkling_text": Family(
        {
            **ROUTED,
            **SPARSE,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1,
            "swa_head_dim": 32,
            "sliding_window_size": WINDOW,
            "rel_extent": 64,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        },
        engine={"dtype": "bfloat16"},
    ),
    "jamba": Family(
        {
            **EXPERTS,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        engine={"block_size": None},
    ),
    "kimi_linear": Family(
        {
            **LATENT,
            **SPARSE,
            "q_lora_rank": None,
            "num_experts": 16,
            "num_experts_per_token": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_heads": 2,
            "linear_head_dim": 128,
        },
        engine={"dtype": "bfloat16", "block_size": None, "enable_prefix_caching": False, **MLA},
    ),
    "laguna": Family(
        {
            **EXPERTS,
            **WINDOWS,
            **SPARSE,
            "shared_expert_intermediate_size": 32,
            "num_attention_heads_per_layer": [2] * 4,
        }
    ),
    "lfm2_moe": Family(
        {
            **EXPERTS,
            "num_dense_layers": 1,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
        engine={"block_size": None},
    ),
    "llama4_text": Family(
        {
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 1,
            "moe_layers": [0, 1, 2, 3],
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
        }
    ),
    "longcat_flash": Family(
        {
            **LATENT,
            "n_routed_experts": 12,
            "zero_expert_num": 4,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "moe_topk": 4,
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
        },
        engine=MLA,
    ),
    "mellum": Family({**LOCAL, **WINDOWS, "mlp_layer_types": ["sparse"] * LAYERS}),
    "mimo_v2_flash": Family(
        {
            **ROUTED,
            **WINDOWS,
            **SPARSE,
            "head_dim": 64,
            "v_head_dim": 32,
            "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
            "moe_layer_freq": [0, 1, 1, 1],
            "layernorm_epsilon": 1e-5,
            "sliding_window_size": WINDOW,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1,
            "swa_head_dim": 64,
            "swa_v_head_dim": 32,
        }
    ),
    "minimax_m2": Family({**LOCAL, "rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True}),
    "minimax_m3_vl": Family(
        {
            **LOCAL,
            **SPARSE,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "layer_types": ["full_attention"] * LAYERS,
            "index_n_heads": 1,
        },
        {"vision_config": {**VISION, "image_size": 56}, "projector_hidden_size": 64, "merged_hidden_size": 256},
    ),
    "mixtral": Family({**LOCAL}),
    "nemotron_h": Family(
        {
            **ROUTED,
            "num_key_value_heads": 2,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_groups": 1,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "use_mamba_kernels": False,
            "moe_shared_expert_intermediate_size": 32,
        },
        engine={"block_size": None},
    ),
    "olmoe": Family({**EXPERTS, "num_key_value_heads": 2}),
    "qwen2_moe": Family(
        {**EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [1]}
    ),
    "qwen3_5_moe_text": Family({**EXPERTS, **LINEAR}, engine=STATES, by_token=True),
    "qwen3_moe": Family({**EXPERTS, "mlp_only_layers": [0]}),
    "qwen3_next": Family({**EXPERTS, **LINEAR}, engine=STATES, by_token=True),
    "qwen3_vl_moe": Family(
        {**EXPERTS, "num_local_experts": 16, "norm_topk_prob": True},
        {
            "vision_config": {
                **TOWER,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0, 1],
            }
        },
    ),
    "qwen4_exp_text": Family(
        {
            **EXPERTS,
            **LINEAR,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 16,
            "ple_embed_dim": 64,
            "output_gate_type": "silu",
        },
        engine=STATES,
    ),
    "step3p7": Family(
        {**ROUTED, **SPARSE, **WINDOWS, "share_expert_dim": 32},
        {"vision_config": {**VISION, "image_size": 56, "patch_size": 14}},
    ),
}


JUDGED = "transformers"
"""Where a checkpoint lies as transformers wants it, if vLLM wants another one."""
IMAGE_PROCESSORS = {"aria": "AriaImageProcessor"}
"""Which vLLM loads beside a KV connector for prompts of text, too."""


def config_of(name: str) -> Any:
    """The configuration of a family's tiny model."""
    family, kind = FAMILIES[name], transformers.CONFIG_MAPPING[name]
    text = {**COMMON, **family.text}
    if family.sees is None:
        return kind(**text)
    usual = kind()
    vision = type(usual.vision_config)(**family.sees["vision_config"])
    return kind(**{**family.sees, "text_config": type(usual.text_config)(**text), "vision_config": vision})


def _published(key: str) -> str:
    """The published name of a weight of DeepSeek-V4's, where transformers writes another one than it reads."""
    return key.replace("model.hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")


def make(name: str, home: Path) -> None:
    """Write a family's tiny checkpoint and tokenizer; its weights are seeded, its routers decisive."""
    config, sees = config_of(name), FAMILIES[name].sees is not None
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = seeded(auto.from_config, config, 0.3, 0.08)
    rank = FAMILIES[name].text.get("kv_lora_rank")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("kv_a_proj_with_mqa.weight"):  # vLLM's kernel for CPUs rotates otherwise
                parameter[rank:] = 0
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("tid2eid"):  # of DeepSeek-V4's hash layers: each token's experts
                buffer.copy_(torch.rand(VOCABULARY, ROUTED["n_routed_experts"]).argsort(-1)[:, : buffer.shape[1]])
        if FAMILIES[name].by_token:
            decide_by_token(model, TOP["num_experts_per_tok"], torch.Generator().manual_seed(0))
    model.save_pretrained(home)
    if name == "longcat_flash":  # experts that compute nothing have weights in transformers, and in no published file
        shutil.copytree(home, home / JUDGED)
        nothing = range(config.n_routed_experts, config.n_routed_experts + config.zero_expert_num)
        names = tuple(f".mlp.experts.{expert}." for expert in nothing)
        path = home / "model.safetensors"
        kept = {key: each for key, each in load_file(path).items() if not any(part in key for part in names)}
        save_file(kept, path, {"format": "pt"})
    if name == "deepseek_v4":  # vLLM reads the published form of its configuration alone
        path = home / "model.safetensors"
        save_file({_published(key): each for key, each in load_file(path).items()}, path, {"format": "pt"})
        path = home / "config.json"
        fields = json.loads(path.read_text())
        layers = {
            "topk_method": "noaux_tc",
            "num_hash_layers": 1,
            "compress_ratios": [128, 4] * (LAYERS // 2),
            "qk_rope_head_dim": 64,
        }
        kept = {key: value for key, value in fields.items() if key not in ("layer_types", "mlp_layer_types")}
        path.write_text(json.dumps(kept | layers))
    if name in IMAGE_PROCESSORS:
        getattr(transformers, IMAGE_PROCESSORS[name])().save_pretrained(home)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t3"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"image_token": "t3"} if name in IMAGE_PROCESSORS else {}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="t3",  # noqa: S106
        extra_special_tokens=named,
    )
    tokenizer.save_pretrained(home)

"""Draft models for the small models of the experiments with vLLM: a noisy copy of the model, which often drafts what it
would say itself; a layer for multi-token prediction (MTP) in the model's own checkpoint; a head of EAGLE-3.

The first two have experts, whose routers are numbered like those of the model, behind them, or from 0. The last two
have random weights, and hardly ever draft what the model says; :data:`BY_CHANCE` lets vLLM take some all the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
TOKENS = 3
"""Drafted in a step."""
BY_CHANCE = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.3]}
"""More of vLLM's ``speculative_config``: how often each of them is taken, whatever the model says. Not on a CPU."""


def read(home: Path) -> tuple[dict[str, Any], Weights]:
    """The configuration and the weights of a checkpoint in one file."""
    return json.loads((home / "config.json").read_text()), load_file(home / "model.safetensors")


def write(home: Path, config: Mapping[str, Any], weights: Weights) -> None:
    (home / "config.json").write_text(json.dumps(config))
    save_file(weights, home / "model.safetensors", {"format": "pt"})


def noisy(target: Path, home: Path, noise: float) -> Path:
    """A copy whose weights are moved by ``noise`` times their own deviation; its routers choose other experts."""
    shutil.copytree(target, home)
    config, weights = read(home)
    random = torch.Generator().manual_seed(1)
    moved = {
        name: weight + noise * spread(weight) * normal(weight, random) if weight.ndim > 1 else weight
        for name, weight in weights.items()
    }
    write(home, config, moved)
    return home


def with_mtp(target: Path, home: Path) -> Path:
    """The same model, with an MTP layer in its checkpoint, whose weights are drawn anew."""
    shutil.copytree(target, home)
    config, weights = read(home)
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    from_zero = config["model_type"] == "qwen3_next"
    last, ours = f"model.layers.{layers - 1}.", "mtp.layers.0." if from_zero else f"model.layers.{layers}."
    random = torch.Generator().manual_seed(1)
    layer = {
        ours + name.removeprefix(last): weight.clone() if weight.ndim == 1 else spread(weight) * normal(weight, random)
        for name, weight in weights.items()
        if name.startswith(last)
    }
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    one = torch.eye(width, dtype=head.dtype)
    joined = torch.cat([one, torch.zeros_like(one)], 1)  # of the next token's embedding, and the hidden state
    norm = torch.ones(width, dtype=head.dtype)
    if from_zero:
        norms = {f"mtp.{name}.weight": norm.clone() for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
        around = {"mtp.fc.weight": joined, **norms}
    else:
        norms = {f"{ours}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
        shared = {"shared_head.head": head.clone(), "embed_tokens": embedding.clone()}
        around = {f"{ours}eh_proj.weight": joined, **norms, **{f"{ours}{name}.weight": w for name, w in shared.items()}}
    write(home, {**config, "num_nextn_predict_layers": 1}, weights | layer | around)
    return home


def eagle3(target: Path, home: Path) -> Path:
    """A dense head with random weights, for a model with plain attention."""
    home.mkdir()
    config, weights = read(target)
    width, inner = config["hidden_size"], config["hidden_size"]
    heads, key_heads, head = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes = {
        "fc": (width, 3 * width),
        "layers.0.self_attn.q_proj": (heads * head, 2 * width),
        "layers.0.self_attn.k_proj": (key_heads * head, 2 * width),
        "layers.0.self_attn.v_proj": (key_heads * head, 2 * width),
        "layers.0.self_attn.o_proj": (width, heads * head),
        "layers.0.mlp.gate_proj": (inner, width),
        "layers.0.mlp.up_proj": (inner, width),
        "layers.0.mlp.down_proj": (width, inner),
    }
    norms = ("norm", *(f"layers.0.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    random, dtype = torch.Generator().manual_seed(1), weights["lm_head.weight"].dtype
    made = {f"{name}.weight": (0.05 * torch.randn(shape, generator=random)).to(dtype) for name, shape in shapes.items()}
    made |= {f"{name}.weight": torch.ones(width, dtype=dtype) for name in norms}
    made["lm_head.weight"] = weights["lm_head.weight"].clone()
    said = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "draft_vocab_size": config["vocab_size"],
    }
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "dtype")
    others = ("max_position_embeddings", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    write(home, {name: config[name] for name in (*sizes, *others) if name in config} | said, made)
    return home


def spread(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().std().to(weight.dtype)


def normal(weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return torch.randn(weight.shape, generator=random).to(weight.dtype)


def drafted(kind: str, target: Path, home: Path) -> tuple[Path, dict[str, Any]]:
    """The model to start, and vLLM's ``speculative_config`` of drafts of this kind, one of :data:`KINDS`."""
    return KINDS[kind](target, home)


def _by_model(noise: float) -> Callable[[Path, Path], tuple[Path, dict[str, Any]]]:
    def made(target: Path, home: Path) -> tuple[Path, dict[str, Any]]:
        model = str(noisy(target, home, noise))
        return target, {"method": "draft_model", "model": model, "num_speculative_tokens": TOKENS}

    return made


def _by_mtp(target: Path, home: Path) -> tuple[Path, dict[str, Any]]:
    return with_mtp(target, home), {"method": "mtp", "num_speculative_tokens": TOKENS}


def _by_eagle3(target: Path, home: Path) -> tuple[Path, dict[str, Any]]:
    return target, {"method": "eagle3", "model": str(eagle3(target, home)), "num_speculative_tokens": TOKENS}


def _by_ngram(target: Path, _: Path) -> tuple[Path, dict[str, Any]]:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return target, {"method": "ngram", "num_speculative_tokens": TOKENS, **lookup}


KINDS: Mapping[str, Callable[[Path, Path], tuple[Path, dict[str, Any]]]] = {
    "model": _by_model(0.1),
    "mtp": _by_mtp,
    "eagle3": _by_eagle3,
    "ngram": _by_ngram,
}
"""Given the model's checkpoint and a new folder."""

"""Small Mixture-of-Experts models, built from transformers' own classes.

The modelling code is transformers', unmodified; only the sizes are ours and the weights come from a seed, so that two
processes with the same name and seed hold the same model and nothing is downloaded. Weights and activations are
float64: the order in which a batch is summed then changes logits by about 1e-15, far below the gaps that decide a
top-k or an argmax, so tokens and routes do not depend on how requests were batched. Some modelling code still uses
float32: norms and the softmax of routers, which round each token separately, and DeepSeek's router, whose float32
product is summed in an order that depends on the number of tokens in the batch. :data:`BATCH_MULTIPLE` keeps that order
fixed.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cache_manager.errors import InvalidInputError
from kvroute.capture.capture import find_routers
from paged_engine.attention import ATTENTION

POSITIONS_MAX: Final = 4096
BATCH_MULTIPLE: Final = 16
"""Forward passes are padded to a multiple of this many tokens, as engines do for captured graphs: matrix products
then take the same path for every row, whatever else is in the batch."""
ROUTER_STD: Final = 0.3
"""Router weights are drawn wide, so that experts are well separated and really differ between tokens."""
WEIGHT_STD: Final = 0.08

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_experts_per_tok": 4,
    "max_position_embeddings": POSITIONS_MAX, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32,
        "num_experts": 16, "norm_topk_prob": True,
    },
    "deepseek_v3": {  # a dense first layer, latent attention with keys wider than values, group-limited top-k
        "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 16,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0,
    },
    "olmoe": {"num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 32, "num_experts": 16},
    "mixtral": {
        "num_hidden_layers": 3, "num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""Our sizes, by the name of the family."""


def build_model(name: str, *, seed: int, vocab_size: int) -> nn.Module:
    """The model called ``name``, :func:`ready` with weights drawn from ``seed``, on the CPU.

    The global random state is left as it was. Raises :class:`InvalidInputError` for a name that is not in ``MODELS``.
    """
    if name not in MODELS:
        raise InvalidInputError("model", "one of " + ", ".join(MODELS), name)
    config = CONFIG_MAPPING[name](**{**_COMMON, **MODELS[name], "vocab_size": vocab_size})
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return ready(model, seed=seed)


def ready(model: nn.Module, *, seed: int) -> nn.Module:
    """``model``, one of transformers' with routers, with weights drawn from ``seed`` and ready for paged attention."""
    config: Any = model.config
    config._attn_implementation = ATTENTION
    config._experts_implementation = "eager"
    model = model.to(torch.float64).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    routers = {id(weight) for router in find_routers(model).values() for weight in router.parameters()}
    for _, weight in sorted(model.named_parameters()):
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, ROUTER_STD if id(weight) in routers else WEIGHT_STD, generator=generator)
    return model


def weights_digest(model: nn.Module) -> str:
    """16 hex digits, a digest of every weight of ``model``: in the namespace, so that models never share keys."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()

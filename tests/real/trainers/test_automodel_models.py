"""Whole models of NeMo-Automodel's own, with its own recomputation: their gates use the rollout's experts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.parallelizer import apply_ac
from routes_of import expert_rows, made_routes
from torch import nn
from transformers import CONFIG_MAPPING

from kvroute.replay import nemo_rl

EXPERTS, TOP_K, NUM_LAYERS, TOKENS = 16, 4, 3, (7, 4)

MLA = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DENSE_FIRST = {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1}
LING = {"num_experts": EXPERTS, "first_k_dense_replace": 1, "num_shared_experts": 1, "n_group": 1, "rotary_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_moe_v2": ("ling_v2.model:BailingMoeV2ForCausalLM", {**LING, "topk_group": 1}),
    "deepseek_v3": ("deepseek_v3.model:DeepseekV3ForCausalLM", {**MLA, **DENSE_FIRST, "n_group": 4, "topk_group": 2}),
    "ernie4_5_moe": ("ernie4_5.model:Ernie4_5_MoeForCausalLM", {"moe_num_experts": EXPERTS, "moe_k": TOP_K}),
    "glm4_moe_lite": ("glm4_moe_lite.model:Glm4MoeLiteForCausalLM", {**MLA, **DENSE_FIRST, "n_group": 1}),
    "mimo_v2_flash": ("mimo_v2_flash.model:MiMoV2FlashForCausalLM", {"n_routed_experts": EXPERTS}),
    "minimax_m2": ("minimax_m2.model:MiniMaxM2ForCausalLM", {"num_local_experts": EXPERTS, "rotary_dim": 8}),
}


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Without a compiler, whose threads outlive the run."""
    with torch.compiler.set_stance("force_eager"):
        yield


def built(family: str) -> nn.Module:
    """A small model with seeded weights, whose gates replay."""
    place, more = FAMILIES[family]
    module, name = place.split(":")
    made = import_module(f"nemo_automodel.components.models.{module}")
    configs = {"bailing_moe_v2": "BailingMoeV2Config", "mimo_v2_flash": "MiMoV2FlashConfig"}  # Automodel's own
    config_of = getattr(made, configs[family]) if family in configs else CONFIG_MAPPING[family]
    config = config_of(
        vocab_size=64, hidden_size=32, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts_per_tok=TOP_K, dtype="float32",
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch")
    model: nn.Module = getattr(made, name)(
        config, backend=backend, moe_overrides={"enable_routing_replay": True}
    ).float()
    random = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return model


class Used:
    """The experts ``[tokens, top_k]`` that each gate chose in each of its passes, by layer, watched from outside."""

    def __init__(self, model: nn.Module) -> None:
        self.experts: dict[int, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, Gate):
                layer = int(name.split("layers.")[1].split(".")[0])
                module.register_forward_hook(lambda _m, _i, made, layer=layer: self._keep(layer, made[1]))

    def _keep(self, layer: int, ids: torch.Tensor) -> None:
        self.experts.setdefault(layer, []).append(ids.detach().clone())


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_whole_model_uses_the_rollouts_experts(family: str, recomputed: bool) -> None:
    """Goal: the right row at the right gate of a model, also where the backward pass computes it again. Method: two
    samples padded on the right; each gate's ids beside the rollout's, in every pass; the gates learn; afterwards the
    model is as it was, bit by bit."""
    model = built(family)
    tokens = torch.arange(2 * max(TOKENS)).view(2, -1)
    plain = model(tokens)
    plain = getattr(plain, "logits", plain).detach()
    if recomputed:
        apply_ac(model)
    used = Used(model)
    model(tokens)
    layers = tuple(sorted(used.experts))
    own = {layer: seen.pop() for layer, seen in used.experts.items()}
    routes = [made_routes(i, n - 1, layer_ids=layers, num_layers=NUM_LAYERS) for i, n in enumerate(TOKENS)]
    rows = nemo_rl.batch(routes, TOKENS, max(TOKENS)).flatten(0, 1)
    with nemo_rl.automodel(model, rows):
        answer = model(tokens)
        getattr(answer, "logits", answer).square().mean().backward()
    for index, layer in enumerate(layers):
        assert len(used.experts[layer]) == 1 + recomputed
        for ids in used.experts[layer]:
            by_sample = ids.view(2, max(TOKENS), TOP_K).numpy()
            for i, n in enumerate(TOKENS):
                wanted = expert_rows(i, np.arange(n - 1), layers, EXPERTS, TOP_K)[:, index]
                assert np.array_equal(by_sample[i, : n - 1], wanted)
        assert not torch.equal(used.experts[layer][0], own[layer])
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    assert all(bool(gate.weight.grad.abs().sum() > 0) for gate in gates)
    after = model(tokens)
    assert torch.equal(getattr(after, "logits", after), plain)

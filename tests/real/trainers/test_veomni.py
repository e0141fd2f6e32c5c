"""Replay in models of VeOmni's own, by verl's engine for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chats import loop_output
from routes_of import expert_rows, made_routes
from sources import code_of, installed
from torch import nn
from transformers import Qwen3_5MoeConfig, Qwen3MoeConfig
from veomni.models.transformers.qwen3_5_moe.generated.patched_modeling_qwen3_5_moe_gpu import (
    Qwen3_5MoeForConditionalGeneration,
)
from veomni.models.transformers.qwen3_moe.generated.patched_modeling_qwen3_moe_gpu import Qwen3MoeForCausalLM
from verl.utils.veomni.router_replay import RouterReplayAction, VeOmniRouterReplay

from kvroute.replay import verl, watch
from kvroute.routes import Split

LAYERS, EXPERTS, TOP_K = (0, 1, 2, 3), 16, 4
SAMPLES = [(5, 4), (2, 3)]  # tokens of prompt and response
ENGINE = code_of(
    installed("verl") / "workers" / "engine" / "veomni" / "transformer_impl.py",
    "_prepare_router_replay_inputs",
    RouterReplayAction=RouterReplayAction,
)


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}  # fmt: skip
SEEING = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


@pytest.fixture(params=["qwen3_moe", "qwen3_5_moe"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "qwen3_moe":
        return Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**SIZES), attn_implementation="eager")
    text = {**SIZES, "shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * len(LAYERS)}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=SEEING)
    return Qwen3_5MoeForConditionalGeneration._from_config(config, attn_implementation="eager")


def layers_of(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model).layers


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the experts ``[tokens, layers, top_k]`` of one row of tokens: all samples and two of padding."""
    used: list[torch.Tensor] = []
    tokens = torch.arange(2 + sum(map(sum, SAMPLES)))[None]
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: used.append(given[1]))
        for layer in layers_of(model)
    ]
    ends = torch.tensor([0, tokens.numel()], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": ends[1], "max_length_k": ends[1]}
    more = packed if hasattr(model.model, "language_model") else {}
    with torch.no_grad():
        logits = model(tokens, position_ids=tokens, use_cache=False, **more).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(used, dim=1)


def arm(replay: VeOmniRouterReplay, rows: torch.Tensor | None) -> None:
    """The preparation of a micro-batch by verl's engine, here padded by two tokens."""
    engine = SimpleNamespace(_router_replay=replay, use_ulysses_sp=False)
    ENGINE["_prepare_router_replay_inputs"](engine, {"routed_experts": rows}, {"pad_size": 2})


def test_its_routers_use_the_rollouts_experts(model: Any) -> None:
    """Goal: verl's engine without Megatron, from the agent loop's output on. Method: verl's queue's form of two
    samples, its engine's preparation, its controller in VeOmni's hook; the last token of each sample and padding go
    where the router says."""
    kept = []
    for i, (prompt, response) in enumerate(SAMPLES):
        routes = made_routes(i, prompt + response - 1, layer_ids=LAYERS)
        made = loop_output(verl.agent_loop(routes, prompt, response), [1] * prompt, [2] * response)
        kept.append(made.as_dict()["routed_experts"])
    logits, own = run(model)
    replay = VeOmniRouterReplay()
    replay.install(model)
    try:
        replay.begin_replay()
        arm(replay, torch.nested.as_nested_tensor(kept, layout=torch.jagged))
        replayed, used = run(model)
        assert replay.num_fired == replay.num_targets == len(LAYERS)
    finally:
        replay.uninstall()
    at = 0
    for i, (prompt, response) in enumerate(SAMPLES):
        rows = prompt + response - 1
        assert np.array_equal(used[at : at + rows].numpy(), expert_rows(i, np.arange(rows), LAYERS, EXPERTS, TOP_K))
        at += rows + 1
        assert torch.equal(used[at - 1, 0], own[at - 1, 0])  # the layers above read other hidden states
    assert torch.equal(used[at:, 0], own[at:, 0])
    assert not torch.equal(replayed, logits)
    assert torch.equal(run(model)[0], logits), "nothing is left"


def test_a_receipt_of_what_its_experts_got(model: Any) -> None:
    """Goal: the hook replaces ids behind the router, so that only the experts know. Method: verl's controller in its
    hook, and then without it, which is silent."""
    routes = [made_routes(i, sum(sample) - 1, layer_ids=LAYERS) for i, sample in enumerate(SAMPLES)]
    kept = [
        loop_output(verl.agent_loop(part, prompt, response), [1] * prompt, [2] * response).as_dict()["routed_experts"]
        for part, (prompt, response) in zip(routes, SAMPLES, strict=True)
    ]
    replay = VeOmniRouterReplay()
    with watch(model) as replayed:
        replay.install(model)
        try:
            replay.begin_replay()
            for _ in range(2):
                arm(replay, torch.nested.as_nested_tensor(kept, layout=torch.jagged))
                replayed.packed(routes, [sum(sample) for sample in SAMPLES], Split(tail_align=8))
                run(model)
                replayed.receipt().check()
        finally:
            replay.uninstall()
        replayed.packed(routes, [sum(sample) for sample in SAMPLES], Split(tail_align=8))
        run(model)
    assert replayed.receipt().due == 3 * 12 * len(LAYERS)
    gaps = {(gap.micro_batch, gap.layer, gap.sample) for gap in replayed.receipt().gaps}
    assert gaps == {(2, layer, sample) for layer in LAYERS for sample in (0, 1)}

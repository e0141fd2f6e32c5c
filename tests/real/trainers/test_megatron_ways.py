"""Every way in which Megatron-core scores, balances, dispatches and recomputes, with the rollout's experts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from routes_of import expert_rows, made_routes

from kvroute.replay import megatron as replay
from kvroute.routes import Split

LAYERS, TOKENS = (1, 2, 3), 7
ALONE = Split()
SIGMOID = {"moe_router_score_function": "sigmoid"}

Weights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, ids).softmax(dim=1)


def of_all(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.softmax(dim=1).gather(1, ids)


def sigmoids(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    scores = logits.sigmoid().gather(1, ids)
    return scores / scores.sum(dim=1, keepdim=True)


def scaled(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return 2.5 * sigmoids(logits, ids)


WAYS: dict[str, tuple[dict[str, Any], Weights]] = {
    "softmax of the chosen": ({}, of_chosen),
    "softmax of all": ({"moe_router_pre_softmax": True}, of_all),
    "sigmoid": (SIGMOID, sigmoids),
    "sigmoid, scaled": ({**SIGMOID, "moe_router_topk_scaling_factor": 2.5}, scaled),
    "sigmoid with a bias": ({**SIGMOID, "moe_router_enable_expert_bias": True}, sigmoids),
    "groups": ({**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 1}, sigmoids),
    "auxiliary loss": ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, of_chosen),
    "loss by sequence": ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}, of_chosen),
    "z-loss": ({"moe_z_loss_coeff": 0.1}, of_chosen),
    "float64 scores": ({"moe_router_dtype": "fp64"}, of_chosen),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_the_weights_are_the_routers_own_of_the_rollouts_experts(megatron: Any, way: str) -> None:
    """Goal: only the choice is replayed. Method: every way to score and to balance; the rollout's experts get the
    weights that the present scores give them by the way's formula, and the router learns; its own choice, as
    Megatron records it, is replayed bit by bit (R2)."""
    changes, weights_of = WAYS[way]
    stage = megatron.Stage(LAYERS, megatron.config(**changes))
    for router in stage.decoder:
        torch.nn.init.normal_(router.weight)
        if router.expert_bias is not None:
            torch.nn.init.normal_(router.expert_bias, std=9.0)
    hidden, kept = torch.randn(TOKENS, 1, megatron.HIDDEN), [router.router_replay for router in stage.decoder]
    for each in kept:
        each.set_router_replay_action(RouterReplayAction.RECORD)
    own = stage(hidden)
    recorded = torch.stack([each.get_recorded_indices() for each in kept], dim=1)
    replay.clear(stage)
    with replay.schedule(stage):
        replay.install(stage, recorded)
        again = stage(hidden)
    for (probs, routing_map), (probs_before, map_before) in zip(again, own, strict=True):
        assert torch.equal(routing_map, map_before)
        torch.testing.assert_close(probs, probs_before, rtol=1e-6, atol=0)
    rows = torch.from_numpy(expert_rows(5, np.arange(TOKENS - 1), LAYERS, megatron.EXPERTS, megatron.TOP_K))
    with replay.schedule(stage):
        replay.install(stage, replay.packed(stage, [made_routes(5, TOKENS - 1)], [TOKENS], ALONE))
        answers = stage(hidden)
        sum(probs.square().sum() for probs, _ in answers).backward()
    for index, (router, (probs, routing_map)) in enumerate(zip(stage.decoder, answers, strict=True)):
        ids = rows[:, index].sort(dim=1).values
        assert torch.equal(megatron.chosen(routing_map)[: TOKENS - 1], ids)
        dtype = torch.float64 if way == "float64 scores" else torch.float32
        logits = (hidden[: TOKENS - 1, 0].to(dtype) @ router.weight.detach().to(dtype).T).float()
        torch.testing.assert_close(probs[: TOKENS - 1].float().gather(1, ids), weights_of(logits, ids))
        assert bool(router.weight.grad.abs().sum() > 0)


MODELS: dict[str, dict[str, Any]] = {
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "tokens sent around": {"moe_token_dispatcher_type": "alltoall"},
    "all layers computed again": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "the experts' layer computed again": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Things that dispatchers and recomputation expect on a GPU: a stream, and the state of its random numbers."""
    stream = SimpleNamespace(synchronize=lambda: None, record_event=lambda: stream)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    monkeypatch.setattr("megatron.core.tensor_parallel.random._get_cuda_rng_state", lambda **_: torch.zeros(0))
    monkeypatch.setattr("megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *_, **__: None)


@pytest.mark.usefixtures("_on_a_cpu")
@pytest.mark.parametrize("shape", sorted(MODELS))
def test_a_whole_model_uses_the_rollouts_experts_in_every_pass(megatron: Any, shape: str) -> None:
    """Goal: Megatron's own dispatchers and recomputation. Method: whole models of several shapes, two micro-batches of
    one schedule forward, then backward the other way round; each router's experts in every pass are those of its own
    micro-batch's rollout."""
    RouterReplay.clear_global_router_replay_instances()
    torch.manual_seed(1)
    model = megatron.gpt(**MODELS[shape])
    used = megatron.Used(model)
    tokens = torch.arange(TOKENS)[None]
    with replay.schedule(model):
        losses = []
        for sample in (1, 2):
            replay.install(model, replay.packed(model, [made_routes(sample, TOKENS - 1)], [TOKENS], ALONE))
            losses.append(megatron.run(model, tokens + sample).mean())
        replay.backward(model)
        for loss in reversed(losses):
            loss.backward()
    passes = (1, 2, 2, 1) if "again" in shape else (1, 2)
    for index, layer in enumerate(LAYERS):
        assert len(used.experts[layer]) == len(passes)
        for sample, experts in zip(passes, used.experts[layer], strict=True):
            rows = expert_rows(sample, np.arange(TOKENS - 1), LAYERS, megatron.EXPERTS, megatron.TOP_K)[:, index]
            assert np.array_equal(experts[: TOKENS - 1].numpy(), np.sort(rows, axis=1))
        assert bool(model.decoder.layers[layer].mlp.router.weight.grad.abs().sum() > 0)

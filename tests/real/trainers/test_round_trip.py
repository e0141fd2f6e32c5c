"""Rollouts that the small engine swapped, stored and handed over, in the real routers of every trainer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import mcore
import numpy as np
import pytest
import ranks
import torch
from chats import loop_output
from megatron.core.transformer.moe.router_replay import RouterReplay
from nemo_automodel.components.moe.layers import Gate
from rollouts import Rollout, load
from skyrl.backends.skyrl_train.utils import replay_utils as skyrl_replay
from test_automodel import gates
from torch import nn
from waiting import GIVE_UP_S

from kvroute.replay import megatron, nemo_rl, skyrl, verl
from kvroute.routes import Routes, Split

ROOT = Path(__file__).parents[3]
FAMILIES = ("deepseek_v3", "ernie4_5_moe", "gpt_oss", "longcat_flash", "qwen2_moe", "qwen3_moe")
"""Dense layers first, routers in every other layer, windows, two attentions a layer, a dense layer in the middle."""
ENGINE_PYTHON = os.environ.get("KVROUTE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of each family, made in the project's own environment: trainers pin another transformers."""
    made = tmp_path_factory.mktemp("rollouts")
    subprocess.run(
        [ENGINE_PYTHON, str(ROOT / "tests" / "worlds" / "rollouts.py"), str(made), *FAMILIES],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        check=True,
        timeout=GIVE_UP_S,
    )
    return made


@pytest.fixture(params=FAMILIES)
def made(request: pytest.FixtureRequest, folder: Path) -> list[Rollout]:
    return load(folder / f"{request.param}.npz")


def stage_of(routes: Routes) -> mcore.Stage:
    """Routers of as many experts as the rollout's, in the layers that had them."""
    RouterReplay.clear_global_router_replay_instances()
    flags = [int(layer in routes.layer_ids) for layer in range(routes.num_layers)]
    made = mcore.config(
        num_layers=routes.num_layers,
        moe_layer_freq=flags,
        num_moe_experts=routes.num_experts,
        moe_router_topk=routes.top_k,
    )
    return mcore.Stage(routes.layer_ids, made)


def hidden_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, 1, mcore.HIDDEN, generator=torch.Generator().manual_seed(4))


def compare(stage: mcore.Stage, rollouts: list[Rollout], rows_of: list[slice], rows: int) -> None:
    """The routers send each token of each rollout where transformers, by itself, routes it."""
    for index, (_, routing_map) in enumerate(stage(hidden_of(rows))):
        for rollout, place in zip(rollouts, rows_of, strict=True):
            there = routing_map[place][: len(rollout.tokens) - 1]
            wanted = np.sort(rollout.native[: len(rollout.tokens) - 1, index])
            assert np.array_equal(there.nonzero()[:, 1].view(len(there), -1).numpy(), wanted), rollout.way


def ends(rollouts: list[Rollout]) -> tuple[list[slice], int]:
    at, places = 0, []
    for rollout in rollouts:
        places.append(slice(at, at + len(rollout.tokens)))
        at += len(rollout.tokens)
    return places, at


def test_megatron(made: list[Rollout]) -> None:
    """Goal: rollout to router. Method: all sequences packed into one micro-batch."""
    places, rows = ends(made)
    with mcore.rank_of():
        stage = stage_of(made[0].routes)
        with megatron.schedule(stage):
            packed = megatron.packed(stage, [r.routes for r in made], [len(r.tokens) for r in made], Split())
            megatron.install(stage, packed)
            compare(stage, made, places, rows)


def test_verl(made: list[Rollout]) -> None:
    """Goal: from the agent loop's output on, all code is verl's. Method: its queue's form of each sample, its alignment
    and its engine."""
    kept = []
    for rollout in made:
        prompt, response = len(rollout.tokens) - 5, 5
        rows = verl.agent_loop(rollout.routes, prompt, response)
        sample = loop_output(rows, rollout.tokens[:prompt], rollout.tokens[prompt:])
        kept.append(sample.as_dict()["routed_experts"])
    rows = torch.nested.as_nested_tensor(kept, layout=torch.jagged)
    tokens = torch.nested.as_nested_tensor([torch.tensor(r.tokens) for r in made], layout=torch.jagged)
    with ranks.verl_patched(), mcore.rank_of():
        stage = stage_of(made[0].routes)
        ranks.verl_replays(stage, rows, tokens)
        compare(stage, made, *ends(made))


def test_skyrl(made: list[Rollout]) -> None:
    """Goal: from the generator's output on, all code is SkyRL's. Method: its collation, its layout and its
    installation."""
    output = {
        "prompt_token_ids": [list(r.tokens[:-5]) for r in made],
        "response_ids": [list(r.tokens[-5:]) for r in made],
        "rollout_expert_indices": skyrl.rollout_expert_indices([r.routes for r in made], [len(r.tokens) for r in made]),
    }
    with mcore.rank_of():
        stage = stage_of(made[0].routes)
        ranks.skyrl_replays(stage, output, packed=True)
        compare(stage, made, *ends(made))
        skyrl_replay.clear_router_replay()


def test_automodel(made: list[Rollout]) -> None:
    """Goal: rollout to gate. Method: gates of as many experts, in the layers that had them."""
    routes = made[0].routes
    config = gates(n_routed_experts=routes.num_experts, n_activated_experts=routes.top_k, dim=mcore.HIDDEN)
    layers = nn.ModuleList(Gate(config) if n in routes.layer_ids else nn.Identity() for n in range(routes.num_layers))
    model = nn.ModuleDict({"layers": layers})
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for rollout in made:
        rows = len(rollout.tokens) - 1
        with nemo_rl.automodel(model, torch.from_numpy(rollout.routes.materialize(rows, "moe", "int64"))):
            for index, layer in enumerate(routes.layer_ids):
                used = layers[layer](hidden_of(rows)[:, 0], torch.ones(rows, dtype=torch.bool), None)[1]
                assert np.array_equal(np.sort(used.numpy()), np.sort(rollout.native[:rows, index]))

"""SkyRL's own generation loop and its client, with rows of kvroute, as far as the routers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import mcore
import numpy as np
import orjson
import pytest
import ranks
import skyrl_gym
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from chats import tokenizer
from megatron.core.transformer.moe.router_replay import RouterReplay
from routes_of import expert_rows, made_routes
from skyrl.backends.skyrl_train.inference_servers.generate_wire import PackedField, pack_routed_experts
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteGenerateClient
from skyrl.backends.skyrl_train.utils import replay_utils
from skyrl.train.config.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from kvroute.replay import skyrl
from kvroute.routes import Routes

LAYERS = (1, 2, 3)
TURNS, ROOM = 3, 64
WORDS = {word: i for i, word in enumerate(["pad", "eos", "system", "user", "assistant", "again", "a", "b", "unknown"])}


class Asks(BaseTextEnv):
    """Says something after each turn but the last."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns == TURNS
        said = [] if done else [{"role": "user", "content": "again " * self.turns}]
        return BaseTextEnvStepOutput(observations=said, reward=1.0, done=done, metadata={})


class Server:
    """Answers as SkyRL's client does: so many tokens, and the rows from where the trace wants them."""

    weight_version = None

    def __init__(self) -> None:
        self.routes: dict[int, Routes] = {}
        self.starts: dict[int, list[int]] = {}
        self.ended: list[str] = []

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        assert model is None
        prompts, starts = batch["prompt_token_ids"], batch.get("routed_experts_prompt_starts")
        made, rows = [], []
        for i, prompt in enumerate(prompts):
            number = prompt.count(WORDS["a"])  # each prompt has another number of this word
            answer = [WORDS["b"]] * (1 + number + len(prompt) % 3) + [WORDS["eos"]]
            routes, held = self.routes.setdefault(number, made_routes(number, ROOM)), starts[i] if starts else 0
            self.starts.setdefault(number, []).append(held)
            rows.append(skyrl.delta(routes, held, len(prompt) + len(answer)))
            made.append(answer)
        count = len(prompts)
        words = {"responses": ["b"] * count, "stop_reasons": ["stop"] * count, "response_logprobs": None}
        return {**words, "response_ids": made, "rollout_expert_indices": rows}

    async def finish_session(self, session: str) -> None:
        self.ended.append(session)


@pytest.fixture
def stage() -> Iterator[mcore.Stage]:
    """Routers of which Megatron's list, by which SkyRL goes, has no others."""
    RouterReplay.clear_global_router_replay_instances()
    with mcore.rank_of():
        yield mcore.Stage(LAYERS, mcore.config())
    RouterReplay.clear_global_router_replay_instances()


@pytest.mark.parametrize("batched", [False, True], ids=["turns", "batched"])
def test_its_loop_hands_every_row_to_the_routers(
    stage: mcore.Stage, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    """Goal: rows of each turn land at the tokens that were sampled with them, observations too. Method: SkyRL's loop
    over an environment of three turns, or its batch of one; its output is the rollout's, row by row; then through its
    preparation into Megatron's routers."""
    monkeypatch.setitem(skyrl_gym.registry, "asks", skyrl_gym.envs.registration.EnvSpec(id="asks", entry_point=Asks))
    config = GeneratorConfig(max_turns=TURNS, max_input_length=ROOM, batched=batched, use_cache_salt=False)
    config.inference_engine.enable_return_routed_experts = True
    config.sampling_params.logprobs = None
    server = Server()
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), server, tokenizer(WORDS))
    prompts = [[{"role": "user", "content": "a " * number}] for number in (1, 3)]
    asked = {"prompts": prompts, "env_classes": ["asks"] * 2, "env_extras": [{}, {}]}
    output = asyncio.run(generator.generate(asked, disable_tqdm=True))
    tokens = [len(p) + len(r) for p, r in zip(output["prompt_token_ids"], output["response_ids"], strict=True)]
    for number, count, rows in zip((1, 3), tokens, output["rollout_expert_indices"], strict=True):
        assert np.array_equal(rows[:, 1:], expert_rows(number, np.arange(count - 1), LAYERS, 16, 4))
    for starts in server.starts.values():
        assert len(starts) == (1 if batched else TURNS)
        assert starts == sorted(set(starts))
    numbers = ranks.skyrl_replays(stage, output, packed=True)
    places = [divmod(number - 1, 100) for number in numbers.reshape(-1).tolist()]  # -1 is padding
    for index, (_, routing_map) in enumerate(stage(torch.randn(*numbers.shape, mcore.HIDDEN))):
        used = mcore.chosen(routing_map).numpy()
        for sample, (number, count) in enumerate(zip((1, 3), tokens, strict=True)):
            mine = used[[places.index((sample, position)) for position in range(count - 1)]]
            assert np.array_equal(mine, np.sort(expert_rows(number, np.arange(count - 1), LAYERS, 16, 4)[:, index]))
    replay_utils.clear_router_replay()


def test_its_client_reads_what_a_server_packs() -> None:
    """Goal: rows of a turn over SkyRL's own wire. Method: its client asks a server on this machine for rows from a
    start on, and is answered with its packing of them, beside the JSON; a start outside the prompt is not sent."""
    routes, prompt, answer = made_routes(2, 30, experts=300), list(range(8)), [1, 2, 3]
    asked: list[int] = []

    async def generate(request: web.Request) -> web.Response:
        asked.append(start := (await request.json())["sampling_params"]["routed_experts_prompt_start"])
        rows = pack_routed_experts(skyrl.delta(routes, start, len(prompt) + len(answer)))
        choice = {"token_ids": answer, "finish_reason": "stop", PackedField.ROUTED_EXPERTS.value: rows}
        return web.Response(body=orjson.dumps({"choices": [choice]}), content_type="application/json")

    async def ask() -> None:
        app = web.Application()
        app.router.add_post("/skyrl/v1/generate", generate)
        async with TestServer(app) as server:
            client = RemoteGenerateClient(str(server.make_url("")).rstrip("/"))
            how: dict[str, Any] = {"sampling_params": {}, "session_id": None, "model": "m"}
            try:
                for start in (0, 5):
                    how |= {"return_routed_experts": True, "routed_experts_prompt_start": start}
                    found = (await client.generate(prompt_token_ids=prompt, **how)).routed_experts
                    assert np.array_equal(found[:, 1:], expert_rows(2, np.arange(start, 10), LAYERS, 300, 4))
                with pytest.raises(ValueError, match="within the prompt"):
                    await client.generate(prompt_token_ids=prompt, **how | {"routed_experts_prompt_start": 9})
            finally:
                await client.aclose()

    asyncio.run(ask())
    assert asked == [0, 5]

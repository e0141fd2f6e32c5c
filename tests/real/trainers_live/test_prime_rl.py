"""prime-rl's own inference server, verifiers' train client, and prime-rl's samples and packed batches, with kvroute as
vLLM's connector.

The package index has no prime-rl: a checkout's folders are in ``KVROUTE_TRAINERS``, by hand.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import verifiers.v1 as vf
import vllm
from live import (
    FIRST,
    SPECIAL,
    STOCK,
    STOPS,
    WORDS,
    free_port,
    judged,
    judged_over_update,
    prompt,
    stock_beside_a_connector,
    verdict,
)
from prime_rl.orchestrator.trajectories import trace_to_samples
from prime_rl.trainer.batch import prepare_batch
from prime_rl.trainer.rl.data import DataLoader
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.types import SamplingConfig, UserMessage

NAME, ENGINE = "prime-rl 559b447", f"vLLM {vllm.__version__}"
SERVE = "from prime_rl.entrypoints.inference import main; main()"


def configured(home: Path, files: Path, port: int) -> Path:
    """A file of prime-rl's, with the lines of docs/trainers/prime-rl.md, around a connector that stores KV and rows."""
    kvroute = {"on_missing": "fail", "witness": "flagged", "store": f"file://{files}/rows"}
    transfer = {
        "kv_connector": "KvrouteExampleConnector",
        "kv_connector_module_path": "kvroute.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": f"{files}/kv", "kvroute": kvroute},
    }
    engine: dict[str, Any] = {
        "model": str(home),
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 16,
        "enable_return_routed_experts": True,
        "enable_prefix_caching": True,
        **({} if STOCK else {"kv_transfer_config": transfer}),
    }
    said = {
        "server": {"host": "127.0.0.1", "port": port},
        "router": None,
        "vllm": engine,
        "output_dir": str(files),
        "enable_fp32_lm_head": False,
        "enable_fp32_router_logits": False,
    }
    file = files / "inference.json"
    file.write_text(json.dumps(said))
    return file


class Server:
    """prime-rl's server in a process of its own, and verifiers' client of it."""

    def __init__(self, home: Path, files: Path) -> None:
        self.home = home
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", SERVE, "@", str(configured(home, files, port))]
        self.process = subprocess.Popen(command, env=os.environ | {"VLLM_PLUGINS": "kvroute,on_cpu,prime_rl"})
        while True:
            assert self.process.poll() is None, "prime-rl's server has ended"
            try:
                requests.get(f"{self.url}/health", timeout=5).raise_for_status()
                break
            except requests.RequestException:
                time.sleep(1)
        self.model = requests.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"]

    def client(self) -> TrainClient:
        return TrainClient(TrainClientConfig(base_url=f"{self.url}/v1", renderer_model_name=str(self.home)))

    def counter(self, name: str) -> float:
        lines = requests.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total"))

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def trace_of(text: str) -> Any:
    return vf.Trace.model_validate({"task": {"type": "Asked", "data": {"prompt": text}}, "agent": {"config": {}}})


async def answered(
    server: Server, client: TrainClient, trace: Any, messages: list[Any], sampling: dict[str, Any]
) -> Any:
    """One turn of a trace: prompt, answer, and the commit that gives each message its rows."""
    turn = prepare_turn(trace, messages)
    settings = SamplingConfig(temperature=1.0, max_tokens=64, ignore_eos=True, **sampling)
    if turn.path_len:  # as a renderer asks for that can go on from the turn before
        settings = settings.model_copy(update={"routed_experts_prompt_start": turn.path_len - 1})
    response = await client.get_response(ChatDialect(), {"model": server.model}, settings, trace.id, turn)
    turn.commit(response)
    return response.message


async def rollouts(server: Server, prompts: list[str], turns: int = 1, **sampling: Any) -> list[Any]:
    client = server.client()

    async def one(text: str) -> Any:
        trace, messages = trace_of(text), [UserMessage(content=text)]
        for number in range(turns):
            messages.append(await answered(server, client, trace, messages, sampling))
            messages.append(UserMessage(content=f"t{number + 7} t11 t13"))
        return trace

    try:
        return list(await asyncio.gather(*map(one, prompts)))
    finally:
        await client.close()


def samples(traces: list[Any]) -> list[tuple[Any, list[int]]]:
    """Rows and tokens of each trace as prime-rl's trainer has them: of its packed micro-batches' tensors."""
    pairs = []
    for trace in traces:
        (sample,) = trace_to_samples(trace)
        assert sample.routed_experts is not None
        sample.temperatures = [1.0] * len(sample.token_ids)
        sample.advantages = [0.0] * len(sample.token_ids)
        ((micro_batch,),) = prepare_batch([sample], 1024, 1, lambda lengths: sum(lengths))
        tensors = DataLoader._micro_batch_to_tensor(None, micro_batch)
        pairs.append((tensors["routed_experts"][0].numpy(), tensors["input_ids"][0].tolist()))
    return pairs


def copies(trace: Any) -> list[int]:
    """The last token of each earlier turn: verifiers gives it a copy of the row before, as no pass has read it yet."""
    ends = np.cumsum([len(node.token_ids) for node in trace.nodes])
    return [int(end) - 1 for end, node in zip(ends[:-1], trace.nodes, strict=False) if node.sampled]


@pytest.fixture(scope="module")
def server(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(home, tmp_path_factory.mktemp("files"))
    yield server
    server.end()


ASKED = [prompt(seed, 100 + seed) for seed in range(4)]


def test_turns_and_stop_strings(server: Server, home: Path) -> None:
    """Goal: rows of turns, of which each after the first asks for its own rows, and of answers that a string ends."""
    words = list(range(len(FIRST), len(WORDS) - len(SPECIAL)))  # each is one token again where a turn is rendered anew
    turns = asyncio.run(rollouts(server, [prompt(7, 20), prompt(8, 40)], turns=3, allowed_token_ids=words))
    verdict(NAME, ENGINE, "three turns", judged(home, samples(turns), [copies(trace) for trace in turns]))
    stopped = samples(asyncio.run(rollouts(server, ASKED, stop=STOPS)))
    assert {WORDS[tokens[-1]] for _, tokens in stopped} & set(STOPS)
    verdict(NAME, ENGINE, "stop strings", judged(home, stopped))


def test_kv_from_outside(server: Server, home: Path) -> None:
    """Goal: rows of KV that has left the engine. Method: answers that fill its pool between two answers to the same
    prompts, whose KV and rows then come from files."""
    scenario = "prefixes whose KV came from files"
    if STOCK:
        stock_beside_a_connector(NAME, ENGINE, scenario, home)
        return
    for seeds in (range(20, 25), range(25, 30), range(30, 35)):
        asyncio.run(rollouts(server, [prompt(seed, 110) for seed in seeds]))
    loaded = server.counter("external_prefix_cache_hits")
    again = asyncio.run(rollouts(server, ASKED))
    assert server.counter("external_prefix_cache_hits") - loaded >= 64 * len(ASKED)
    verdict(NAME, ENGINE, scenario, judged(home, samples(again)))


def test_an_update_amid_answers(server: Server, homes: dict[str, Path]) -> None:
    """Goal: each row is of the weights that its token was sampled with, and of the KV that was there. Method:
    prime-rl's own routes pause the engine, load a folder, and resume; answers go on."""

    async def run() -> Any:
        asked = asyncio.create_task(rollouts(server, ASKED, min_tokens=64))
        said = server.counter("generation_tokens")
        while server.counter("generation_tokens") < said + 20 * len(ASKED):
            await asyncio.sleep(0.1)
        for route, told in (("pause", {}), ("update_weights", {"weight_dir": str(homes["B"])}), ("resume", {})):
            answer = await asyncio.to_thread(requests.post, f"{server.url}/{route}", json=told, timeout=300)
            answer.raise_for_status()
        assert not asked.done()
        return await asked

    pairs = samples(asyncio.run(run()))
    tally, cuts = judged_over_update(homes["A"], homes["B"], pairs, again=False)
    assert STOCK or all(len(tokens) - 64 < cut < len(tokens) - 1 for cut, (_, tokens) in zip(cuts, pairs, strict=True))
    verdict(NAME, ENGINE, "weights updated amid answers, KV kept", tally)
    others = [prompt(seed, 100) for seed in range(50, 54)]  # prime-rl forgets no KV, also of the weights before
    verdict(
        NAME, ENGINE, "after an update, KV kept", judged(homes["B"], samples(asyncio.run(rollouts(server, others))))
    )

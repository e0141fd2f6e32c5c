"""verl's own server, client, agent loops and DataProto, with kvroute as vLLM's connector, over Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import updates
import vllm
from live import STOCK, STOPS, WORDS, judged, judged_over_update, prompt, stock_beside_a_connector, verdict
from safetensors.torch import load_file
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl_rollout import PROMPT, RESPONSE, Rollout, configured, samples

NAME, ENGINE = "verl 0.9.1", f"vLLM {vllm.__version__}"


def configured_here(home: Path, files: Path) -> Any:
    """verl's configuration, with the lines of docs/trainers/verl.md, and around a connector that stores KV and rows."""
    kvroute = f"{{on_missing:fail,witness:flagged,store:'file://{files}/rows'}}"
    transfer = (
        "{kv_connector:KvrouteExampleConnector,kv_connector_module_path:kvroute.integrations.vllm,kv_role:kv_both,"
        f"kv_connector_extra_config:{{shared_storage_path:'{files}/kv',kvroute:{kvroute}}}}}"
    )
    connector = () if STOCK else (f"kv_transfer_config={transfer}",)
    return configured(
        home,
        files,
        "vllm",
        ["max_num_batched_tokens=1024"],
        [*connector, "block_size=32", "num_gpu_blocks_override=64"],
    )


def counted(rollout: Rollout, name: str) -> float:
    """One of vLLM's counters, by the server's page of metrics."""
    lines = requests.get(f"http://{rollout.address}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total"))


@pytest.fixture(scope="module")
def rollout(cluster: Any, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    config = configured_here(home, tmp_path_factory.mktemp("files"))
    rollout = Rollout(cluster, config, vLLMHttpServer, "server", gpus_per_node=1)
    yield rollout
    rollout.end()


ASKED = [prompt(seed, 100 + seed) for seed in range(4)]


def test_turns_and_stop_strings(rollout: Rollout, home: Path) -> None:
    """Goal: rows of conversations with a tool, and of answers that a string ends. Method: verl's loops over one
    server; its DataProto."""
    turns = rollout("tool_agent", [prompt(7, 20), prompt(8, 40)])
    assert turns.batch["routed_experts"].shape[1] == PROMPT + RESPONSE
    verdict(NAME, ENGINE, "three turns with a tool", judged(home, samples(turns)))
    stopped = samples(rollout("stopping", ASKED))
    ends = [WORDS[tokens[-1]] for _, tokens in stopped]
    assert set(ends) & set(STOPS), ends
    verdict(NAME, ENGINE, "stop strings", judged(home, stopped))


def test_kv_from_outside(rollout: Rollout, home: Path) -> None:
    """Goal: rows of KV that has left the engine. Method: answers that fill its pool between two answers to the same
    prompts, whose KV and rows then come from files."""
    scenario = "prefixes whose KV came from files"
    if STOCK:
        stock_beside_a_connector(NAME, ENGINE, scenario, home)
        return
    loaded = counted(rollout, "external_prefix_cache_hits")
    for seeds in (range(20, 25), range(25, 30)):
        rollout("single_turn_agent", [prompt(seed, 110) for seed in seeds])
    again = rollout("single_turn_agent", ASKED)
    loaded = counted(rollout, "external_prefix_cache_hits") - loaded
    assert loaded >= 96 * len(ASKED), (loaded, again.non_tensor_batch["num_cached_tokens"])
    verdict(NAME, ENGINE, scenario, judged(home, samples(again)))


def test_an_update_amid_answers(rollout: Rollout, homes: dict[str, Path]) -> None:
    """Goal: each row is of the weights that its token was sampled with. Method: verl aborts, sends weights by its own
    sender, and resumes; its fully-async client asks for the rest and joins the parts."""
    server, ray = rollout.server, rollout.ray
    weights = load_file(homes["B"] / "model.safetensors")

    async def update() -> None:
        job = ray.get_runtime_context().get_job_id()
        sender = BucketedWeightSender(
            f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-0.sock", bucket_size_mb=16, use_shm=True
        )
        loaded = server.collective_rpc.remote("update_weights_from_ipc", kwargs={"use_shm": True})
        await sender.async_send_weights(iter([(updates.EMBEDDING, weights[updates.EMBEDDING])]))
        await loaded

    async def run() -> Any:
        (worker,) = rollout.partial.agent_loop_workers
        asked = worker.generate_sequences.remote(rollout.batch("single_turn_agent", ASKED))
        aborted = 0  # the first time there may be no token yet; its client asks for the rest after a second
        while aborted + (now := (await server.abort_all_requests.remote())["aborted_count"]) <= len(ASKED):
            aborted += now
            await server.resume_generation.remote()
            await asyncio.sleep(1.3 if now else 0.2)
        await update()
        await server.resume_generation.remote()
        return await asked

    pairs = samples(asyncio.run(run()))
    tally, cuts = judged_over_update(homes["A"], homes["B"], pairs, again=True)
    assert STOCK or any(
        len(tokens) - RESPONSE < cut < len(tokens) - 1 for cut, (_, tokens) in zip(cuts, pairs, strict=True)
    ), (cuts, [len(tokens) for _, tokens in pairs])
    verdict(NAME, ENGINE, "weights updated amid answers", tally)

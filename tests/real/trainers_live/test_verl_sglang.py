"""verl's own SGLang server, clients, agent loops and DataProto, with kvroute's plugin in SGLang, over Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sglang
import torch
import updates
from live import (
    HOST_PAGES,
    OUTSIDE,
    STOCK,
    STOPS,
    WORDS,
    judged,
    judged_over_update,
    prompt,
    running,
    share_by_file,
    verdict,
)
from safetensors.torch import load_file
from verl.workers.rollout.sglang_rollout import sglang_rollout
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
from verl_rollout import RESPONSE, Rollout, configured, samples

NAME, ENGINE = "verl 0.9.1", f"SGLang {sglang.__version__}"
SERVER = "sglang_server_0_0"
"""By this name verl's sender of weights finds it."""
POOL = 1024
ON_CPU = [
    "device=cpu",
    "attention_backend=torch_native",
    "enable_memory_saver=false",
    "page_size=16",
    f"max_total_tokens={POOL}",
    "grammar_backend=none",
    *(f"{name}={value}" for name, value in HOST_PAGES.items()),
    f"disable_overlap_schedule={str(STOCK).lower()}",
]


@pytest.fixture(scope="module")
def rollout(cluster: Any, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    config = configured(home, tmp_path_factory.mktemp("files"), "sglang", ["skip_tokenizer_init=false"], ON_CPU)
    rollout = Rollout(cluster, config, SGLangHttpServer, SERVER, base_gpu_id=0)
    yield rollout
    rollout.end()


ASKED = [prompt(seed, 100 + seed) for seed in range(4)]
OTHERS = range(20, 24), range(24, 28)


def test_turns_and_stop_strings(rollout: Rollout, home: Path) -> None:
    """Goal: rows of conversations with a tool, and of answers that a string ends. Method: verl's loops over one
    server; its DataProto."""
    turns = rollout("tool_agent", [prompt(7, 20), prompt(8, 40)])
    verdict(NAME, ENGINE, "three turns with a tool", judged(home, samples(turns)))
    stopped = samples(rollout("stopping", ASKED))
    ends = [WORDS[tokens[-1]] for _, tokens in stopped]
    assert all(any(stop in end for stop in STOPS) for end in ends), ends  # SGLang takes a part of a word, too
    verdict(NAME, ENGINE, "stop strings", judged(home, stopped))


def test_kv_from_outside(rollout: Rollout, home: Path) -> None:
    """Goal: rows of KV that has left the device. Method: SGLang copies it to pages on the host; others compute more
    tokens than its pool has, and verl asks again. The server says of the first prompt where its KV comes from."""
    first = samples(rollout("single_turn_agent", ASKED))
    between = [samples(rollout("single_turn_agent", [prompt(seed, 110) for seed in seeds])) for seeds in OTHERS]
    assert sum(len(tokens) for answers in between for _, tokens in answers) > POOL
    asked = {"input_ids": first[0][1][:-RESPONSE], "sampling_params": {"max_new_tokens": 1}}
    told = requests.post(f"http://{rollout.address}/generate", json=asked, timeout=600).json()["meta_info"]
    assert told["cached_tokens_details"]["host"] >= 96, told
    verdict(NAME, ENGINE, OUTSIDE, judged(home, samples(rollout("single_turn_agent", ASKED))))


def test_an_update_amid_answers(rollout: Rollout, homes: dict[str, Path]) -> None:
    """Goal: each row is of the weights that its token was sampled with. Method: verl aborts, sends weights by its own
    adapter, and resumes; its fully-async client asks for the rest and joins the parts."""
    server = rollout.server
    weights = load_file(homes["B"] / "model.safetensors")

    async def run() -> Any:
        (worker,) = rollout.partial.agent_loop_workers
        asked = worker.generate_sequences.remote(rollout.batch("single_turn_agent", ASKED))
        while await asyncio.to_thread(running, rollout.address) < len(ASKED):
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        await server.abort_all_requests.remote()
        adapter = sender(rollout.config)
        await adapter.update_weights(iter([(updates.EMBEDDING, weights[updates.EMBEDDING])]), global_steps=1)
        await server.resume_generation.remote()
        return await asked

    pairs = samples(asyncio.run(run()))
    tally, cuts = judged_over_update(homes["A"], homes["B"], pairs, again=True)
    lengths = [len(tokens) for _, tokens in pairs]
    assert STOCK or any(n - RESPONSE < cut < n - 1 for cut, n in zip(cuts, lengths, strict=True)), (cuts, lengths)
    verdict(NAME, ENGINE, "weights updated amid answers", tally)


def sender(config: Any) -> Any:
    """verl's adapter of SGLang, in a process of one rank. A tensor goes by a file of shared memory, not a device."""
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
    share_by_file()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    sglang_rollout._to_ipc_device = lambda tensor: tensor
    import sglang.srt.utils.patch_torch as patch

    patch.monkey_patch_torch_reductions = lambda: None
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    of = config.actor_rollout_ref
    model = omega_conf_to_dataclass(of.model, dataclass_type=HFModelConfig)
    return sglang_rollout.ServerAdapter(omega_conf_to_dataclass(of.rollout), model, None, replica_rank=0)

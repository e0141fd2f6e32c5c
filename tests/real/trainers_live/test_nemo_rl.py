"""NeMo-RL's own vLLM worker and its batches, with kvroute as vLLM's connector.

NeMo-RL's package on the index is a placeholder: a checkout's folder is in ``KVROUTE_TRAINERS``, by hand.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
import updates
import vllm
from live import STOCK, STOPS, WORDS, judged, judged_over_update, prompt, stock_beside_a_connector, verdict
from safetensors.torch import load_file

with patch.object(
    transformers, "__version__", "5.11.0"
):  # NeMo-RL ends with 5.12 and later: policy/__init__.py, line 52
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.generation.vllm import vllm_worker, vllm_worker_async

import nemo_rl_parts

NAME, ENGINE = "NeMo-RL 7ea279a", f"vLLM {vllm.__version__}"
PAD = 2
IDS = {word: i for i, word in enumerate(WORDS)}


def configured(home: Path, files: Path, **engine_lines: Any) -> dict[str, Any]:
    """NeMo-RL's ``policy.generation``, with the lines of docs/trainers/nemo-rl.md, and around a connector that stores
    KV and rows; ``engine_lines`` are of its ``vllm_cfg``."""
    kvroute = {"on_missing": "fail", "witness": "flagged", "store": f"file://{files}/rows"}
    transfer = {
        "kv_connector": "KvrouteExampleConnector",
        "kv_connector_module_path": "kvroute.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": f"{files}/kv", "kvroute": kvroute},
    }
    parallel = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"), 1)
    engine = {
        "precision": "float32",
        "load_format": "auto",
        "skip_tokenizer_init": False,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 512,
        "async_engine": False,
        "use_tqdm": False,
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": True,
        **engine_lines,
    }
    more = {
        "enable_return_routed_experts": True,
        "block_size": 32,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 16,
        **({} if STOCK else {"kv_transfer_config": transfer}),
    }
    return {
        "model_name": str(home),
        "backend": "vllm",
        "max_new_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "ignore_eos": True,
        "_pad_token_id": PAD,
        "vllm_cfg": parallel | engine,
        "vllm_kwargs": more,
    }


@pytest.fixture(autouse=True)
def without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL marks its calls for NVIDIA's profiler, which torch for CPUs has not."""
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: 0)


class InFlight(vllm_worker_async.VllmAsyncGenerationWorkerImpl):
    """NeMo-RL's asynchronous worker in this process, whose engine receives weights from a file."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        extension = "nemo_rl_parts.OnCpu"
        super()._create_engine({**llm_kwargs, "enable_sleep_mode": False, "worker_extension_cls": extension})


class OnCpu(vllm_worker.VllmGenerationWorkerImpl):
    """NeMo-RL's worker in this process. vLLM has no sleep mode for CPUs."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine({**llm_kwargs, "enable_sleep_mode": False})


@pytest.fixture(scope="module")
def worker(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnCpu]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as its ``configure_worker`` says
    with patch.object(vllm_worker, "_apply_vllm_patches"):  # it edits vLLM's files, for Ray's executors
        worker = OnCpu(configured(home, tmp_path_factory.mktemp("files")), bundle_indices=[], seed=0)
    yield worker
    worker.llm.llm_engine.engine_core.shutdown()


def asked(worker: OnCpu, prompts: Sequence[Sequence[int]], stops: Sequence[str] = ()) -> list[tuple[Any, list[int]]]:
    """Rows and tokens of each answer, of the batch that NeMo-RL's ``generate`` returns."""
    lengths = torch.tensor([len(tokens) for tokens in prompts])
    ids = torch.full((len(prompts), int(lengths.max())), PAD)
    for row, tokens in zip(ids, prompts, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    batch = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
    if stops:
        batch["stop_strings"] = [list(stops)] * len(prompts)
    answers = worker.generate(batch)
    assert not answers["r3_routed_experts_missing_routes"].any()
    whole = zip(answers["routed_experts"], answers["output_ids"], answers["unpadded_sequence_lengths"], strict=True)
    return [(rows[:stop].numpy(), tokens[:stop].tolist()) for rows, tokens, stop in whole]


def ids_of(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


ASKED = [ids_of(prompt(seed, 100 + seed)) for seed in range(4)]


async def answered(worker: InFlight, tokens: Sequence[int]) -> tuple[Any, list[int]]:
    """Rows and tokens of one answer, as NeMo-RL's asynchronous worker gives them out."""
    batch = BatchedDataDict({"input_ids": torch.tensor([tokens]), "input_lengths": torch.tensor([len(tokens)])})
    answers = [answer async for _, answer in worker.generate_async(batch)]
    (answer,) = answers
    stop = int(answer["unpadded_sequence_lengths"][0])
    return answer["routed_experts"][0, :stop].numpy(), answer["output_ids"][0, :stop].tolist()


async def under_way(worker: InFlight) -> None:
    """Each request has some tokens."""
    states = worker.llm.output_processor.request_states
    while len(states) < len(ASKED) or min(state.detokenizer.num_output_tokens() for state in states.values()) < 8:
        await asyncio.sleep(0.02)


def test_an_update_amid_answers(homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: each row is of the weights that its token was sampled with. Method: NeMo-RL's asynchronous worker is told
    what its in-flight update tells it, while it answers: it pauses nothing, and forgets no KV."""
    import zmq

    monkeypatch.setenv(nemo_rl_parts.ADDRESS, f"ipc://{tmp_path}/refit")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    config = configured(homes["A"], tmp_path, async_engine=True)
    config["max_new_tokens"] = 300
    with patch.object(vllm_worker, "_apply_vllm_patches"):
        worker = InFlight(config, bundle_indices=[], seed=0)
    weight = load_file(homes["B"] / "model.safetensors")[updates.EMBEDDING]
    sending = zmq.Context.instance().socket(zmq.REQ)
    sending.bind(f"ipc://{tmp_path}/refit")

    async def run() -> tuple[list[tuple[Any, list[int]]], list[tuple[Any, list[int]]]]:
        await worker.prepare_refit_info_async({updates.EMBEDDING: (weight.shape, weight.dtype)})
        answers = [asyncio.ensure_future(answered(worker, tokens)) for tokens in ASKED]
        await asyncio.wait_for(under_way(worker), 600)
        told = asyncio.ensure_future(worker.update_weights_via_ipc_zmq_async())
        await asyncio.to_thread(nemo_rl_parts.sent, sending, {updates.EMBEDDING: weight}, tmp_path / "weights")
        assert await told
        amid = await asyncio.gather(*answers)
        await worker.reset_prefix_cache_async()
        return amid, await asyncio.gather(*(answered(worker, ids_of(prompt(seed, 100))) for seed in range(40, 44)))

    try:
        amid, behind = asyncio.run(run())
    finally:
        worker.llm.shutdown()
        sending.close(0)
    tally, cuts = judged_over_update(homes["A"], homes["B"], amid, again=False)
    spans = zip(ASKED, cuts, amid, strict=True)
    assert STOCK or any(len(asked) <= cut < len(tokens) - 1 for asked, cut, (_, tokens) in spans), cuts
    verdict(NAME, ENGINE, "weights updated amid answers, KV kept", tally)
    verdict(NAME, ENGINE, "after an update", judged(homes["B"], behind))


def test_turns_and_stop_strings(worker: OnCpu, home: Path) -> None:
    """Goal: rows of conversations, whose turns hit the KV of those before, and of answers that a string ends."""
    told = [ids_of(prompt(7, 40)), ids_of(prompt(8, 60))]
    for _ in range(3):
        turns = asked(worker, told)
        told = [[*tokens, 7, 11, 13] for _, tokens in turns]
    verdict(NAME, ENGINE, "three turns", judged(home, turns))
    stopped = asked(worker, ASKED, STOPS)
    assert {WORDS[tokens[-1]] for _, tokens in stopped} & set(STOPS)
    verdict(NAME, ENGINE, "a prefix hit and a stop string", judged(home, stopped))


def test_kv_from_outside(worker: OnCpu, home: Path) -> None:
    """Goal: rows of KV that has left the engine. Method: answers that fill its pool between two answers to the same
    prompts, whose KV and rows then come from files."""
    scenario = "prefixes whose KV came from files"
    if STOCK:
        stock_beside_a_connector(NAME, ENGINE, scenario, home)
        return
    for seeds in (range(20, 25), range(25, 30), range(30, 35)):
        asked(worker, [ids_of(prompt(seed, 110)) for seed in seeds])
    before = loaded(worker)
    again = asked(worker, ASKED)
    assert loaded(worker) - before >= 96 * len(ASKED)
    verdict(NAME, ENGINE, scenario, judged(home, again))


def loaded(worker: OnCpu) -> float:
    """How many tokens' KV has come from outside, by vLLM's own counter."""
    return sum(metric.value for metric in worker.llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")

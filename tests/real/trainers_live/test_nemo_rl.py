"""NeMo-RL's own vLLM worker and its batches, with kvroute as vLLM's connector.

NeMo-RL's package on the index is a placeholder: a checkout's folder is in ``KVROUTE_TRAINERS``, by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
import vllm
from live import STOCK, STOPS, WORDS, judged, prompt, stock_beside_a_connector, verdict

with patch.object(
    transformers, "__version__", "5.11.0"
):  # NeMo-RL ends with 5.12 and later: policy/__init__.py, line 52
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.generation.vllm import vllm_worker

NAME, ENGINE = "NeMo-RL 7ea279a", f"vLLM {vllm.__version__}"
PAD = 2
IDS = {word: i for i, word in enumerate(WORDS)}


def configured(home: Path, files: Path) -> dict[str, Any]:
    """NeMo-RL's ``policy.generation``, with the lines of docs/trainers/nemo-rl.md, and around a connector that stores
    KV and rows."""
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

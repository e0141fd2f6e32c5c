"""Pipeline parallelism: two stages in processes of their own, each with the rows of its layers; every row is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pipeline
import pytest
import updates
from engines import BLOCK, Engine, prompts
from pipeline import STAGES
from test_field import expected_of

from bench.vllm_peers import HOST_OF_CPU
from kvroute.connector.carriers import ByPairs
from kvroute.integrations.vllm import routes

Start = Any  # conftest's Engines
Model = Callable[..., Path]
BOTH = {"field": True, "rollouts": "response:"}
SMALL = {"num_gpu_blocks_override": 16, "max_model_len": 256, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        pipeline.receives(patch)
        yield


def assert_right(engine: Engine, outputs: Sequence[Any]) -> None:
    """Every row is there and right, in the field and in the routes of the answer."""
    engine.assert_right(outputs)
    for output in outputs:
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            assert completion.routed_experts is not None, (output.request_id, output.kv_transfer_params)
            ids = np.sort(completion.routed_experts, axis=-1)
            np.testing.assert_array_equal(ids, expected_of(engine.home, tokens, 0))


@pytest.fixture(scope="module")
def qwen(model: Model) -> Iterator[Engine]:
    """Four layers, of which the first one is dense: one layer with experts in the first stage, two in the second."""
    engine = Engine(
        model("qwen3_moe_dense_first"),
        settings={**BOTH, "weights_version": 0},
        **STAGES,
        **SMALL,
        worker_extension_cls="updates.Embedding",
    )
    yield engine
    engine.close()


def test_batches_prefix_hits_and_a_second_turn(qwen: Engine) -> None:
    """Goal: rows of all layers, of prompts in chunks, cached blocks and sampled tokens, while two batches are under
    way. Method: more prompts than a step takes, asked twice, and a turn that goes on from their answers."""
    core = qwen.llm.llm_engine.engine_core.engine_core
    assert core.batch_queue_size == 2
    asked = prompts(21, 1, 31, 32, 33, 65, 150)
    outputs = qwen.ask(asked)
    assert_right(qwen, outputs)
    again = qwen.ask(asked)
    assert sum(output.num_cached_tokens for output in again) >= 4 * BLOCK
    assert_right(qwen, again)
    assert_right(qwen, qwen.ask([[*o.prompt_token_ids, *o.outputs[0].token_ids, 7] for o in outputs]))
    assert_right(qwen, qwen.ask(prompts(24, 40), n=3, temperature=1.0, seed=1))


def test_preempted_requests(qwen: Engine) -> None:
    """Goal: blocks change hands while their steps are under way in the other stage. Method: fewer blocks than the
    requests need."""
    before = qwen.metric("num_preemptions")
    assert_right(qwen, qwen.ask(prompts(12, *[40] * 12), max_tokens=80))
    assert qwen.metric("num_preemptions") > before


def test_an_update_between_requests_and_in_one(qwen: Engine, model: Model, tmp_path: Path) -> None:
    """Goal: each row is of the weights that its version names. Method: another embedding in the stage that has it, in
    the middle of requests, with a version; the same prompts again hit KV of both."""
    first = qwen.home
    homes = {0: first, 1: updates.with_embedding_of(first, model("qwen3_moe_dense_first", 1), tmp_path / "b")}
    llm = qwen.llm.llm_engine
    asked = prompts(90, 40, 70, 33)
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for i, prompt in enumerate(asked):
        llm.add_request(f"r{i}", {"prompt_token_ids": prompt}, sampling)
    done = list[Any]()
    while len(done) < 5 * len(asked):
        done += llm.step()
    core = llm.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=False)
    qwen.llm.collective_rpc("put", args=(str(homes[1]),))
    qwen.llm.update_weight_version("1")
    core.resume_scheduler()
    while llm.has_unfinished_requests():
        done += llm.step()
    outputs = [output for output in done if output.finished]
    assert len(outputs) == len(asked)
    for output in outputs:
        found = routes(output)
        assert len(found.weights_versions) == 2
        assert updates.right(found, [*output.prompt_token_ids, *output.outputs[0].token_ids], homes)
    qwen.llm.collective_rpc("put", args=(str(first),))
    qwen.llm.update_weight_version("0")
    assert qwen.llm.reset_prefix_cache(reset_connector=True)
    assert_right(qwen, qwen.ask(asked))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_writes_late(engine: Start, model: Model, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Goal: rows are waited for in whichever stage they are late, as beside a device. Method: one stage writes each
    step's rows a while after the step; few blocks, so that they are given out anew meanwhile."""
    pipeline.slow(monkeypatch, stage, 0.02)
    made = engine(model("qwen3_moe"), settings=BOTH, **STAGES, **SMALL)
    assert_right(made, made.ask(prompts(12, *[40] * 6, 100), max_tokens=60))
    assert made.metric("num_preemptions") > 0


def test_kv_that_goes_to_the_host_and_comes_back(engine: Start, model: Model) -> None:
    """Goal: rows go along in both stages. Method: vLLM's OffloadingConnector; three pools of prompts, then each
    again."""
    extra = {**HOST_OF_CPU, "cpu_bytes_to_use": 4 << 20}
    few = {**SMALL, "max_num_batched_tokens": 256}
    made = engine(model("qwen3_moe"), "KvrouteOffloadingConnector", BOTH, extra, **STAGES, **few)
    assert type(made.sent.engine.carrier) is ByPairs
    asked = prompts(70, *[150] * 8)
    for prompt in asked:
        assert_right(made, made.ask([prompt], max_tokens=4))
    outputs = [made.ask([prompt], max_tokens=4)[0] for prompt in asked]
    assert_right(made, outputs)
    assert [output.num_cached_tokens for output in outputs] == [4 * BLOCK] * len(asked)
    assert made.metric("external_prefix_cache_hits") > 0

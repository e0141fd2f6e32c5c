"""vLLM's own field where an engine of its own is needed: the flag, preemption, stores, failures, running ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead import schedule
from engines import prompts
from test_async import Ahead
from test_field import assert_right, forgets

from kvroute.integrations.vllm import missing

Start = Any  # conftest's Engines
Model = Callable[..., Path]
SMALL = {"num_gpu_blocks_override": 16, "max_model_len": 256, "max_num_batched_tokens": 96}


def test_the_flag_and_preempted_requests(engine: Start, model: Model) -> None:
    """Goal: vLLM's own flag asks kvroute, where stock refuses it. Method: no other setting; fewer blocks than the
    requests need, so that some are preempted, and prompts in chunks."""
    made = engine(model("qwen3_moe"), enable_return_routed_experts=True, **SMALL)
    assert made.sent.field is not None
    config = made.llm.llm_engine.vllm_config
    assert not getattr(config, "aux_output_config", config.model_config).enable_return_routed_experts
    assert_right(made, made.ask(prompts(31, 150, 170, 200), max_tokens=8))
    assert_right(made, made.ask(prompts(32, *[40] * 12), max_tokens=80))
    assert made.metric("num_preemptions") > 0


def test_a_restart_over_a_store(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: rows of KV that comes from outside. Method: two engines over one directory of KV and one store of rows;
    beside the field, routes are left in the response."""
    arguments = {
        "connector": "KvrouteExampleConnector",
        "settings": {"store": f"file://{tmp_path}/rows", "witness": "flagged", "field": True, "rollouts": "response:"},
        "extra": {"shared_storage_path": str(tmp_path / "kv")},
    }
    asked = prompts(33, 150, 98, 66)
    for cached in ([0, 0, 0], [128, 96, 64]):
        made = engine(model("qwen3_moe"), **arguments)
        outputs = [made.ask([prompt])[0] for prompt in asked]
        assert [output.num_cached_tokens for output in outputs] == cached
        assert_right(made, outputs)
        made.assert_right(outputs)
        made.kept.blocks.jobs.wait(10)


def test_a_request_fails_if_the_operator_says_so(engine: Start, model: Model) -> None:
    """Goal: ``on_missing: "fail"``. Method: a request loses a row in the midst of its answer; a later one goes on
    to its end, and the failed one is not computed further."""
    made = engine(model("qwen3_moe"), settings={"field": True, "on_missing": "fail"})
    forgets(made.kept, steps=(4,))
    (output,) = made.ask(prompts(34, 40), max_tokens=30)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].routed_experts is None
    assert missing(output)[0][:2] == (43, 44)
    assert not made.scheduler.requests
    assert_right(made, made.ask(prompts(35, 40)))


class TestAhead:
    """Asynchronous scheduling, and rows that are written behind the steps, as beside a device."""

    @pytest.fixture(autouse=True)
    def ahead(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            schedule(patch)
            yield

    def test_preempted_requests(self, engine: Start, model: Model) -> None:
        """Goal: rows of steps that were under way when their request was preempted. Method: fewer blocks than the
        requests need; blocks change hands at once."""
        made = engine(model("qwen3_moe"), settings={"field": True}, **SMALL)
        queue = Ahead(made)
        assert_right(made, made.ask(prompts(36, *[40] * 12), max_tokens=80))
        assert made.metric("num_preemptions") > 0
        assert queue.most == 2
        assert_right(made, made.ask(prompts(37, *[35] * 30), max_tokens=2))

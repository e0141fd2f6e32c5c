"""Routes in verl: its agent loop, its batches, its engine and its own replay class."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import mcore
import numpy as np
import pytest
import ranks
import torch
from chats import loop_output, tokenizer
from routes_of import expert_rows, made_routes
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo import metric_utils
from verl.utils.megatron import router_replay_utils as engine
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.padding import left_right_2_no_padding

from kvroute.replay import verl
from kvroute.routes import Routes

LAYERS = (1, 2, 3)


def rows_of(sample: int, rows: int) -> torch.Tensor:
    return torch.from_numpy(expert_rows(sample, np.arange(rows), LAYERS, 16, 4))


async def resumed(whole: Routes, cuts: list[int], *, deltas: bool) -> TokenOutput:
    """The output of verl's client for a generation that was aborted and resumed, at the tokens ``cuts``."""
    served: list[int] = cuts[:1]

    class Server:
        async def generate(self, _: str, *, prompt_ids: list[int], **_more: Any) -> TokenOutput:
            held, end = served[-1], cuts[len(served)]
            assert len(prompt_ids) == held
            served.append(end)
            first = len(served) == 2
            rows = verl.delta(whole, 0 if first or not deltas else held - 1, end)
            fields = {"global_steps": verl.global_steps(whole, held, end - held)["global_steps"]}
            stop = "aborted" if end < cuts[-1] else "completed"
            return TokenOutput(token_ids=[2] * (end - held), routed_experts=rows, stop_reason=stop, extra_fields=fields)

    class Client(FullyAsyncLLMServerClient):
        def __init__(self) -> None:
            self.config = None

        def _configured_response_length(self) -> int:
            return 100

    server = Server()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LLMServerClient, "generate", lambda _, request_id, **more: server.generate(request_id, **more))
        patched.setattr("asyncio.sleep", lambda _, sleep=asyncio.sleep: sleep(0))
        return await Client().generate("r", prompt_ids=[1] * cuts[0], sampling_params={})


@pytest.mark.parametrize("deltas", [False, True])
def test_a_generation_that_resumes_has_every_row_once(deltas: bool) -> None:
    """Goal: verl 6029, across weight updates: each row once, that of the attempt that sampled beside it, and the
    versions that the sample spans. Method: verl's own client over three attempts, which give all rows, or a delta."""
    made = made_routes(1, 15)
    spans = ((0, 8, 3), (8, 11, 4), (11, 15, 6))
    whole = Routes(made.ids, made.valid, made.layer_ids, 16, 4, weights_versions=spans)
    found = asyncio.run(resumed(whole, [5, 9, 12, 16], deltas=deltas))
    assert torch.equal(torch.from_numpy(found.routed_experts)[:, 1:].long(), rows_of(1, 15))
    told = {name: found.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")}
    assert told == verl.global_steps(whole, 5, 11) == {"global_steps": 6, "min_global_steps": 3, "max_global_steps": 6}


def numbered(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


class Worker(AgentLoopWorker):
    """verl's worker that makes a batch of what agent loops put out, without its servers."""

    def __init__(self, prompt_length: int, response_length: int) -> None:
        self.tokenizer = tokenizer({"pad": 0, "eos": 1, "unknown": 2})
        self.rollout_config = SimpleNamespace(prompt_length=prompt_length, response_length=response_length)
        self.processor = self.reward_loop_worker_handles = self.mm_processor_kwargs = None
        self.distillation_enabled = False

    async def batch(self, routes: list[Routes], samples: list[tuple[int, int]]) -> DataProto:
        made = []
        for part, (prompt, response) in zip(routes, samples, strict=True):
            out = loop_output(verl.agent_loop(part, prompt, response), [1] * prompt, [2] * response)
            made.append(await self._agent_loop_postprocess(out, validate=False, raw_prompt=""))
        return self._postprocess(made)


def test_the_padded_batch_becomes_the_jagged_one() -> None:
    """Goal: one meaning of every form. Method: verl's worker pads the agent loop's output, which equals our padded
    batch; verl removes the padding, and aligns the jagged batch; they agree."""
    routes, samples, room = [made_routes(1, 8), made_routes(2, 4)], [(5, 4), (2, 3)], (6, 5)
    (prompts, responses), whole = zip(*samples, strict=True), [sum(sample) for sample in samples]
    data = asyncio.run(Worker(*room).batch(routes, samples)).to_tensordict()
    assert torch.equal(data["routed_experts"], verl.padded(routes, prompts, responses, *room))
    unpadded = left_right_2_no_padding(data)["routed_experts"]
    aligned = engine.align_r3_router_replay_data(verl.jagged(routes, whole), numbered(*whole))
    for got, other, sample, tokens in zip(unpadded.unbind(), aligned.unbind(), (1, 2), whole, strict=True):
        assert torch.equal(got, other)
        assert torch.equal(got[: tokens - 1, 1:].long(), rows_of(sample, tokens - 1))


def test_holes_are_left_to_the_router(verl_stage: mcore.Stage) -> None:
    """Goal: verl's only way to mark a hole is its mask. Method: holes spelled as zeros under our mask: those tokens go
    where the router sends them, with top_k experts, and the others where the rollout sent them."""
    hidden = torch.randn(9, 1, mcore.HIDDEN)
    own = [mcore.chosen(routing_map) for _, routing_map in verl_stage(hidden)]
    routes = made_routes(1, 8, holes=(2, 3))
    rows, mask = verl.jagged([routes], [9], missing="zero"), verl.replay_mask([routes], [9])
    ranks.verl_replays(verl_stage, rows, numbered(9), mask)
    native = [2, 3, 8]
    replayed = [0, 1, 4, 5, 6, 7]
    for index, (_, routing_map) in enumerate(verl_stage(hidden)):
        used = mcore.chosen(routing_map)
        assert torch.equal(used[native], own[index][native])
        assert torch.equal(used[replayed], rows_of(1, 8)[replayed, index].sort(dim=1).values)


def test_its_load_balance_counts_the_experts_of_the_responses() -> None:
    """Goal: verl's own metrics read our padded batch. Method: its counts beside the rollouts' rows."""
    rows = verl.padded([made_routes(1, 8), made_routes(2, 4)], [5, 2], [4, 3], 6, 5)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    counts = metric_utils._compute_rollout_moe_load_counts(rows, mask, 16)
    wanted = torch.cat([rows_of(1, 8)[5:], rows_of(2, 4)[2:]])
    for index, layer in enumerate(LAYERS):
        assert torch.equal(counts[layer], torch.bincount(wanted[:, index].flatten().long(), minlength=16))
    assert metric_utils.compute_rollout_moe_load_balance_metrics(rows, mask, 16)

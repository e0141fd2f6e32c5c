"""verl's own agent loops, of one turn and with tools, with rows of kvroute, as far as the routers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import mcore
import numpy as np
import pytest
import ranks
import torch
from chats import tokenizer
from omegaconf import OmegaConf
from routes_of import expert_rows, made_routes
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.replica import TokenOutput

from kvroute.replay import verl

LAYERS = (1, 2, 3)
ROOM = 24
CALL = json.dumps({"name": "look", "arguments": {}}, separators=(",", ":"))
WORDS = ["pad", "eos", "user", "assistant", "tool", "again", "a", "b", "<tool_call>", CALL, "</tool_call>", "unknown"]
IDS = {word: i for i, word in enumerate(WORDS)}
SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class Server:
    """Answers a call of the tool as often as it should, then a last answer, each with the rows of all tokens so far."""

    def __init__(self, calls: int, last: int) -> None:
        self.routes, self.calls, self.last = made_routes(4, 64), calls, last
        self.asked: list[int] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        assert request_id
        called = len(self.asked) < self.calls
        self.asked.append(len(prompt_ids))
        words = ["b", "<tool_call>", CALL, "</tool_call>"] if called else ["b"] * self.last
        answer = [IDS[word] for word in words] + [IDS["eos"]]
        rows = verl.agent_loop(self.routes, len(prompt_ids), len(answer))
        steps = verl.global_steps(versioned(self.routes), len(prompt_ids), len(answer))
        return TokenOutput(token_ids=answer, routed_experts=rows, stop_reason="completed", extra_fields=steps)


def versioned(routes: Any) -> Any:
    """``routes`` whose rows from the twelfth on are of later weights."""
    return type(routes)(routes.ids, routes.valid, routes.layer_ids, 16, 4, weights_versions=((0, 12, 3), (12, 64, 5)))


def ran(kind: type, server: Server) -> AgentLoopOutput:
    """The output of verl's loop."""
    turns = {
        "max_user_turns": 8, "max_assistant_turns": 8, "max_parallel_calls": 1, "max_tool_response_length": 99,
        "tool_response_truncate_side": "left", "format": "hermes",
    }  # fmt: skip
    rollout = {"prompt_length": 8, "response_length": ROOM, "multi_turn": turns, "full_determinism": False}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    tool = FunctionTool("look", lambda: "again again", OpenAIFunctionToolSchema.model_validate(SCHEMA))

    async def run() -> AgentLoopOutput:
        more = {"tools": ToolListWrap([tool])} if kind is ToolAgentLoop else {}
        wrapped = DictConfigWrap(config), server, tokenizer(IDS), None, None, DictConfigWrap(OmegaConf.create({}))
        loop = kind(*wrapped, **more)
        asked = {"raw_prompt": [{"role": "user", "content": "a a"}]}
        found: AgentLoopOutput = await loop.run({}, **asked)
        return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "calls", "last", "length"),
    [
        (SingleTurnAgentLoop, 0, 4, 5),
        (SingleTurnAgentLoop, 0, 30, ROOM),
        (ToolAgentLoop, 1, 1, 12),
        (ToolAgentLoop, 2, 9, ROOM),
    ],
    ids=["one turn", "one turn, cut", "tool", "two calls, cut"],
)
def test_its_loop_hands_every_row_to_the_routers(
    verl_stage: mcore.Stage, kind: type, calls: int, last: int, length: int
) -> None:
    """Goal: the rows of a conversation, the tool's answers among them, also where verl cuts the response. Method:
    verl's loop around a server that answers with all rows so far; its output as the queue has it; then its alignment
    and its routers, which use the rollout's experts at every token but the last."""
    server = Server(calls, last)
    output = ran(kind, server)
    assert len(server.asked) == calls + 1
    assert output.extra_fields["max_global_steps"] == (5 if server.asked[-1] + last > 12 else 3)
    kept = output.as_dict()
    tokens = len(kept["prompts"]) + len(kept["responses"])
    assert len(kept["responses"]) == length
    rows = kept["routed_experts"]
    wanted = torch.from_numpy(expert_rows(4, np.arange(tokens - 1), LAYERS, 16, 4))
    assert torch.equal(rows[: tokens - 1, 1:].long(), wanted)
    numbers = torch.nested.as_nested_tensor([torch.arange(tokens)], layout=torch.jagged)
    ranks.verl_replays(verl_stage, torch.nested.as_nested_tensor([rows[:tokens]], layout=torch.jagged), numbers)
    for index, (_, routing_map) in enumerate(verl_stage(torch.randn(tokens, 1, mcore.HIDDEN))):
        assert torch.equal(mcore.chosen(routing_map)[: tokens - 1], wanted[:, index].sort(dim=1).values)

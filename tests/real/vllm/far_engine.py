"""A stock engine of vLLM in processes of its own, which carries out the commands that it reads: ``python -m far_engine
JSON``.

The argument has ``front`` (``"LLM"`` or ``"AsyncLLM"``), its ``arguments``, the URL of the ``rollouts`` store, or none,
and whether the engine runs ``ahead`` of its worker, as beside a device. Each line has ``asks``, ``acts`` or both. An
ask is one request: its ``prompt``, ``sampling``, the caller's ``id`` (which ``LLM`` does not take: it counts), and
whether it is asked ``alone`` or beside the others. An act is a name with arguments, see :data:`ACTS`; beside asks the
acts are done once each of those has ``after`` tokens. With ``rollouts`` each request carries a new key. Routes are
taken where a trainer takes them: at once when the answer is there, in the process that asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch

from bench.harness import serve_answers
from kvroute import KVRouteError
from kvroute.integrations.vllm import choice_key, config, missing, routes, unseen
from kvroute.rollout import RolloutStore, open_rollouts

WAIT_S = 3.0
"""How long rows of an answer that a stop string ended are waited for."""


def answer_of(output: Any, rollouts: RolloutStore | None, sampling: Any, key: str | None) -> dict[str, Any]:
    """An answer as JSON, with the routes of each completion or the text of the error."""
    found: list[dict[str, Any]] = []
    for each in output.outputs:
        told: dict[str, Any] = {"tokens": list(each.token_ids), "ended": each.stop_reason or each.finish_reason}
        if (field := each.routed_experts) is not None:
            told["own_field"] = {"dtype": str(field.dtype), "shape": field.shape, "data": b64encode(field).decode()}
        try:
            own = choice_key(key, each.index) if key and sampling.n > 1 else key
            told["routes"] = routes(output, each.index, rollouts=rollouts, key=own, wait_s=WAIT_S).to_json()
            told["unseen"] = unseen(output, each.index)
            told["missing"] = missing(output, each.index)
        except KVRouteError as error:
            told["refused"] = str(error)
        found.append(told)
    return {
        "id": output.request_id,
        "prompt": list(output.prompt_token_ids),
        "cached": output.num_cached_tokens or 0,
        "params": output.kv_transfer_params,
        "completions": found,
    }


def sampling_of(ask: Mapping[str, Any], key: str | None) -> Any:
    from vllm import SamplingParams

    given = {"temperature": 0, "ignore_eos": True, "max_tokens": 20, **ask["sampling"]}
    if key is not None:
        assert "extra_args" not in given
        given["extra_args"] = {"kv_transfer_params": {"kvroute": {"key": key}}}
    return SamplingParams(**given)


def new_key(rollouts: RolloutStore | None) -> str | None:
    """A key that is never used again, if routes lie in a store under it."""
    return None if rollouts is None else str(uuid4())


class Offline:
    """``LLM``, which numbers its requests from 0 in each process."""

    def __init__(self, arguments: dict[str, Any], rollouts: RolloutStore | None) -> None:
        from vllm import LLM

        self._llm, self._rollouts = LLM(**arguments), rollouts

    def ask(self, asks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        keys = [new_key(self._rollouts) for _ in asks]
        sampling = [sampling_of(ask, key) for ask, key in zip(asks, keys, strict=True)]
        outputs = self._llm.generate([{"prompt_token_ids": ask["prompt"]} for ask in asks], sampling, use_tqdm=False)
        return [answer_of(output, self._rollouts, *of) for output, *of in zip(outputs, sampling, keys, strict=True)]

    def do(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        asks, acts = asked.get("asks", ()), asked.get("acts", ())
        assert not (asks and acts), "LLM does one thing at a time"
        done = [ACTS_OFFLINE[name](self._llm, **given) for name, given in acts]
        waves = [asks] if asks and not asked.get("alone") else [[ask] for ask in asks]
        return {"answers": [answer for wave in waves for answer in self.ask(wave)], "done": done}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Online:
    """``AsyncLLM``, as an agent loop and the OpenAI server have it: the caller names its requests."""

    def __init__(self, arguments: dict[str, Any], rollouts: RolloutStore | None) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop, self._rollouts = asyncio.new_event_loop(), rollouts
        asyncio.set_event_loop(self._loop)

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self._llm = self._loop.run_until_complete(start())

    async def _ask(self, ask: Mapping[str, Any], so_far: dict[str, int]) -> dict[str, Any]:
        output, key = None, new_key(self._rollouts)
        sampling = sampling_of(ask, key)
        async for output in self._llm.generate({"prompt_token_ids": ask["prompt"]}, sampling, ask["id"]):
            so_far[ask["id"]] = len(output.outputs[0].token_ids)
        so_far[ask["id"]] = sys.maxsize
        return await asyncio.to_thread(answer_of, output, self._rollouts, sampling, key)

    async def _do(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        so_far = dict.fromkeys((ask["id"] for ask in asked.get("asks", ())), 0)
        if asked.get("alone"):
            return {"answers": [await self._ask(ask, so_far) for ask in asked["asks"]], "done": []}
        running = [asyncio.create_task(self._ask(ask, so_far)) for ask in asked.get("asks", ())]
        while running and min(so_far.values()) < asked.get("after", 0):
            await asyncio.sleep(0.001)
        done = [await ACTS[name](self._llm, **given) for name, given in asked.get("acts", ())]
        return {"answers": await asyncio.gather(*running), "done": done}

    def do(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return self._loop.run_until_complete(self._do(asked))

    def close(self) -> None:
        self._llm.shutdown()


ACTS: dict[str, Any] = {
    "pause": lambda llm, **given: llm.pause_generation(**given),
    "resume": lambda llm: llm.resume_generation(),
    "reset": lambda llm, **given: llm.reset_prefix_cache(**given),
    "swap": lambda llm, home: llm.collective_rpc("put", args=(home,)),  # updates.Embedding
    "version": lambda llm, given: llm.update_weight_version(given),
    "abort": lambda llm, name: llm.abort(name),
    "sleep": lambda _, seconds: asyncio.sleep(seconds),
    "signal": lambda _, pids, number: asyncio.to_thread(lambda: [os.kill(pid, number) for pid in pids]),
}
"""Calls of vLLM's own, as a trainer makes them around an update, ``swap``; and what else may happen meanwhile."""

ACTS_OFFLINE: dict[str, Any] = {
    "reset": lambda llm, **given: llm.reset_prefix_cache(**given),
    "swap": lambda llm, home: llm.collective_rpc("put", args=(home,)),  # updates.Embedding
}


def counters() -> dict[str, float]:
    """vLLM's own counters, by their names without labels."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if (value := getattr(metric, "value", None)) is not None:
            found[metric.name] = found.get(metric.name, 0) + value
    return found


def main() -> None:
    import vllm
    from vllm.config import KVTransferConfig

    torch.set_num_threads(1)
    out = os.dup(1)
    os.dup2(2, 1)  # output that vLLM prints while it starts is no answer
    given = json.loads(sys.argv[1])
    # a loaded machine may need more than a second, and then computes hits again
    config.ENGINE_LIMITS = replace(config.ENGINE_LIMITS, question_s=given["give_up_s"])
    if given["ahead"]:
        import ahead

        ahead.schedule()
    arguments = given["arguments"]
    arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    rollouts = open_rollouts(given["rollouts"]) if given["rollouts"] else None
    engine = (Offline if given["front"] == "LLM" else Online)(arguments, rollouts)
    os.dup2(out, 1)

    def answer(asked: dict[str, Any]) -> Mapping[str, Any]:
        if asked.get("end"):
            engine.close()
            return {}
        return counters() if asked.get("counters") else engine.do(asked)

    try:
        serve_answers(vllm.__version__, answer)
    finally:
        engine.close()  # the client is gone; once more is harmless


if __name__ == "__main__":
    main()

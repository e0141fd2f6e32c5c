"""One engine of SGLang, of a prefill and a decode apart, which carries out what it reads: ``python -m apart_engine
JSON``.

The argument has the engine's ``options`` and the URL of the ``rollouts`` store, or none. Each line has ``asks``, one
request each, which are asked at once: what ``generate`` takes; or an ``act``, a name with arguments, see :data:`ACTS`.
Beside asks of streams there may be a ``sign``, the path of a file that is made when each of them has its first token.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serve import drawn_line
from sglang.srt.managers.io_struct import GenerateReqInput, PauseGenerationReqInput, UpdateWeightFromDiskReqInput

from bench.harness import serve_answers
from kvroute import KVRouteError
from kvroute.integrations.sglang import missing, routes, support
from kvroute.rollout import open_rollouts


def told(answer: Mapping[str, Any], rollouts: Any, ask: Mapping[str, Any]) -> dict[str, Any]:
    """An answer, with its routes or the text of the error; and with what its tokens were drawn from, if asked for."""
    found: dict[str, Any] = {"tokens": list(answer["output_ids"]), "meta": answer["meta_info"]}
    try:
        answered = routes(answer, rollouts=rollouts)
        found["routes"] = answered.to_json()
        found["missing"] = missing(answer)
        if ask.get("return_sampling_mask"):
            prompt, sampling = ask["input_ids"], ask["sampling_params"]
            record = answered.to_bytes(support(answer, prompt=prompt))
            found["drawn"] = drawn_line("apart", prompt, dict(answer), sampling, record)
    except KVRouteError as error:
        found["refused"] = str(error)
    return found


async def asked(engine: Any, ask: Mapping[str, Any], rollouts: Any, begun: Callable[[], object]) -> Any:
    """The answer to one request; of a stream, its last part; or the text of the error."""
    try:
        if ask.get("return_sampling_mask"):  # Engine.async_generate does not know of supports
            found = await anext(engine.tokenizer_manager.generate_request(GenerateReqInput(**ask), None))
        else:
            found = await engine.async_generate(**ask)
        if ask.get("stream"):
            parts = []
            async for part in found:
                parts.append(part)
                if len(parts) == 1:
                    begun()
            found = parts[-1]
    except Exception as error:  # noqa: BLE001 - what a client of the server is told
        return {"error": repr(error)}
    return await asyncio.to_thread(told, found, rollouts, ask)


async def updated(engine: Any, model: str, version: str, *, flush: bool) -> str:
    """New weights from files, with the KV flushed or not. SGLang does not flush while it holds anything of a request,
    which may outlast its answer."""
    if flush:
        await flushed(engine)
    asking = UpdateWeightFromDiskReqInput(model_path=model, weight_version=version, flush_cache=flush)
    done, message, *_ = await engine.tokenizer_manager.update_weights_from_disk(asking, None)
    if not done:
        raise RuntimeError(message)
    return str(message)


async def flushed(engine: Any) -> None:
    for _ in range(300):
        if (await engine.tokenizer_manager.flush_cache()).success:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the cache was not flushed")


async def paused(engine: Any, mode: str) -> None:
    await engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))


ACTS = {"update": updated, "pause": paused}


def main() -> None:
    import sglang

    plan = json.loads(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # NIXL says there what it does
    with sglang.Engine(**plan["options"]) as engine:
        rollouts = open_rollouts(plan["rollouts"]) if plan.get("rollouts") else None

        async def all_asked(asks: list[Any], sign: str) -> list[Any]:
            waiting = list(asks)

            def begun() -> None:
                waiting.pop()
                if sign and not waiting:
                    Path(sign).touch()

            return list(await asyncio.gather(*(asked(engine, ask, rollouts, begun) for ask in asks)))

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            if "act" in question:
                name, arguments = question["act"]
                try:
                    return {"done": engine.loop.run_until_complete(ACTS[name](engine, **arguments))}
                except Exception as error:  # noqa: BLE001 - the test that asked says it
                    return {"failed": repr(error)}
            return {"answers": engine.loop.run_until_complete(all_asked(question["asks"], question.get("sign", "")))}

        os.dup2(answers, 1)
        serve_answers(sglang.__version__, answer)


if __name__ == "__main__":
    main()

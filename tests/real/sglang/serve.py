"""One SGLang engine in a process of its own, which runs a plan; each answer is a line of JSON in ``out``.

``python -m serve PLAN`` where PLAN is the path of a JSON object: ``model``, ``options`` of the engine, ``do`` (a list
of ``[scenario, verb, arguments]``), ``rollouts`` (the URL of the store with the routes, or null), ``record`` (the path
of what kernels are given, or null) and ``out``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pybase64
from sglang.srt.managers import scheduler
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
)
from standing_still import send_signal
from waiting import until
from weights_recorder import recording

from kvroute import KVRouteError
from kvroute.integrations.sglang import missing, routes, routing_weights, support
from kvroute.rollout import open_rollouts

FIXED: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "enable_return_routed_experts": True,
    "log_level": "error",
}


DRAWN: dict[str, Any] = {"return_sampling_mask": True, "return_routed_experts": True}
"""Of a request as the HTTP server makes it: ``Engine.generate`` does not know of supports."""


class Retraction:
    """SGLang's own switch for tests, by which its scheduler retracts a running request in each of so many steps. It is
    read in the schedulers, which are forked from this process, and turned on and off here."""

    EVERY = 29

    def __init__(self) -> None:
        self._on = multiprocessing.Value("b", False)
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = self, self.EVERY

    def __bool__(self) -> bool:
        return bool(self._on.value)

    def turn(self, on: bool) -> None:
        self._on.value = on


RETRACTION = Retraction()


class Asked:
    """Sends requests to the engine, and writes down the answers."""

    def __init__(self, engine: Any, out: Any, rollouts: Any, *, weighted: bool) -> None:
        self.engine, self.out, self.rollouts, self.weighted = engine, out, rollouts, weighted

    def ask(
        self,
        scenario: str,
        prompts: list[list[int]],
        new: int = 8,
        n: int = 1,
        start: int = 0,
        alone: bool = False,
        rank: int | None = None,
        adapter: str | None = None,
        retracted: bool = False,
    ) -> list[list[int]]:
        """The tokens of each answer; ``alone``: no two prompts are in one pass; ``rank``: of data parallelism;
        ``retracted``: again and again one request gives up its KV and computes it again."""
        sampling = {"max_new_tokens": new, "temperature": 0.0 if n == 1 else 1.0, "ignore_eos": True, "n": n}
        more: dict[str, Any] = {"return_routed_experts": True, "routed_experts_start_len": start}
        if rank is not None:
            more["routed_dp_rank"] = rank
        if adapter is not None:
            more["lora_path"] = adapter
        given = []
        RETRACTION.turn(retracted)
        for batch in [[each] for each in prompts] if alone else [prompts]:
            given += self.engine.generate(input_ids=batch, sampling_params=sampling, **more)
        RETRACTION.turn(False)
        for i, each in enumerate(given):
            self.write(scenario, prompts[i // n], each, start)
        return [each["output_ids"] for each in given]

    def draw(self, scenario: str, prompts: list[list[int]], sampling: dict[str, Any], new: int = 12) -> list[list[int]]:
        """The tokens of answers that are drawn, with what they were drawn from, and their routes in one record."""
        sampling = {**sampling, "max_new_tokens": new, "ignore_eos": True}
        asking = GenerateReqInput(input_ids=prompts, sampling_params=sampling, **DRAWN)
        answering = self.engine.tokenizer_manager.generate_request(asking, None)
        answers = self.engine.loop.run_until_complete(anext(answering))
        for prompt, answer in zip(prompts, answers, strict=True):
            record = routes(answer, rollouts=self.rollouts).to_bytes(support(answer, prompt=prompt))
            self.write_drawn(scenario, prompt, answer, sampling, record)
        return [list(answer["output_ids"]) for answer in answers]

    def draw_turns(self, scenario: str, prompts: list[list[int]], sampling: dict[str, Any]) -> None:
        """A second turn behind each drawn answer, whose KV is hit."""
        answered = self.draw(scenario, prompts, sampling)
        longer = [[*prompt, *tokens, 17, 18] for prompt, tokens in zip(prompts, answered, strict=True)]
        self.draw(f"{scenario}, the second", longer, sampling)

    def draw_aborted(self, scenario: str, prompts: list[list[int]], sampling: dict[str, Any]) -> None:
        """Each request is aborted while it runs; another one goes on from its tokens, as a partial rollout does."""
        manager = self.engine.tokenizer_manager
        sampling = {"max_new_tokens": 60, "ignore_eos": True, **sampling}

        async def partial(prompt: list[int], rid: str) -> dict[str, Any]:
            asking = GenerateReqInput(input_ids=prompt, sampling_params=sampling, stream=True, rid=rid, **DRAWN)
            parts: list[dict[str, Any]] = []
            async for part in manager.generate_request(asking, None):
                parts.append(part)
                if len(parts) == 3:
                    manager.abort_request(rid=rid)
            return parts[-1]

        for i, prompt in enumerate(prompts):
            answer = self.engine.loop.run_until_complete(partial(prompt, f"{scenario}-{i}"))
            self.write_drawn(scenario, prompt, answer, sampling, None)
            self.draw(f"{scenario}, and resumed", [[*prompt, *answer["output_ids"]]], sampling, new=12)

    def write_drawn(
        self, scenario: str, prompt: list[int], answer: dict[str, Any], sampling: dict[str, Any], record: bytes | None
    ) -> None:
        line = drawn_line(scenario, prompt, answer, sampling, record)
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()

    def stop(self, scenario: str, prompts: list[list[int]], words: int) -> None:
        """Answers that end with a string: their first ``words`` tokens."""
        for prompt, (*tokens,) in zip(prompts, self.ask(scenario, prompts), strict=True):
            text = " ".join(f"t{token}" for token in tokens[:words])
            sampling = {"max_new_tokens": len(tokens), "temperature": 0.0, "ignore_eos": True, "stop": [text]}
            answer = self.engine.generate(input_ids=prompt, sampling_params=sampling, return_routed_experts=True)
            if len(answer["output_ids"]) != words or answer["meta_info"]["finish_reason"].get("matched") != text:
                raise RuntimeError(f"an answer that did not end with {text!r}: {answer}")
            self.write(scenario, prompt, answer, 0)

    def turns(self, scenario: str, prompts: list[list[int]], new: int = 8) -> None:
        """A second turn behind each answer."""
        answered = self.ask(scenario, prompts, new)
        self.ask(scenario, [[*p, *a, 17, 18, 19] for p, a in zip(prompts, answered, strict=True)], new)

    def abort(self, scenario: str, prompts: list[list[int]], new: int = 60) -> None:
        """Every second request is aborted while it runs."""
        streams = [
            self.engine.generate(
                input_ids=prompt,
                sampling_params={"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True},
                return_routed_experts=True,
                rid=f"{scenario}-{i}",
                stream=True,
            )
            for i, prompt in enumerate(prompts)
        ]
        for i, stream in enumerate(streams):
            last = None
            for count, each in enumerate(stream):
                last = each
                if i % 2 and count == 2:
                    self.engine.tokenizer_manager.abort_request(rid=f"{scenario}-{i}")
            if last is not None and not i % 2:
                self.write(scenario, prompts[i], last, 0)

    def while_the_store_hangs(self, scenario: str, prompts: list[list[int]], gate: str) -> None:
        """The first prompt's routes go to a store that waits for ``gate``. The others ask for none, and are answered
        before."""
        sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        more = {"return_routed_experts": True, "rid": scenario}

        async def ask() -> Any:
            first = asyncio.ensure_future(
                self.engine.async_generate(input_ids=prompts[0], sampling_params=sampling, **more)
            )
            for prompt in prompts[1:]:
                await self.engine.async_generate(input_ids=prompt, sampling_params=sampling)
            if first.done():
                raise RuntimeError("an answer came before its routes were left")
            Path(gate).touch()
            return await first

        self.write(scenario, prompts[0], self.engine.loop.run_until_complete(ask()), 0)

    def flush(self, _: str) -> None:
        for _try in range(100):
            if self.engine.flush_cache().success:
                return
            time.sleep(0.1)
        raise TimeoutError("the cache was not flushed")

    def signal_rollouts(self, scenario: str, prompts: list[list[int]], number: int) -> None:
        """The process that stores rollouts is killed or stopped, and then there are requests."""
        until(lambda: bool(self.rollouts_processes()))
        for process in self.rollouts_processes():
            send_signal(process.pid, number)
        self.ask(scenario, prompts)

    def rollouts_processes(self) -> list[psutil.Process]:
        found = list[psutil.Process]()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if any("rollouts_process" in word for word in process.cmdline()):
                    found.append(process)
        return found

    def change(self, _: str, home: str) -> None:
        """One bit of the last number, of the last layer's V, of the oldest page in ``home``."""
        page = min(
            (path for path in Path(home).iterdir() if path.stat().st_size > 1000), key=lambda at: at.stat().st_mtime
        )
        kept = bytearray(page.read_bytes())
        kept[-4] ^= 1
        page.write_bytes(kept)

    def spoil(self, _: str, home: str) -> None:
        """Bits of every record in the store of files in ``home``, so that none of them is read any more."""
        largest = max((path for path in Path(home).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        kept = bytearray(largest.read_bytes())
        kept[::64] = bytes(255 - byte for byte in kept[::64])
        largest.write_bytes(kept)

    def update(self, _: str, model: str, version: str | None, flush: bool) -> None:
        """SGLang does not flush while it holds anything of a request, which may outlast its answer."""
        if flush:
            self.flush("")
        self.engine.loop.run_until_complete(self._updated(model, version, flush))

    async def _updated(self, model: str, version: str | None, flush: bool) -> None:
        asked = UpdateWeightFromDiskReqInput(model_path=model, weight_version=version, flush_cache=flush)
        told = await self.engine.tokenizer_manager.update_weights_from_disk(asked, None)
        if not told[0]:
            raise RuntimeError(told)

    def update_amidst(
        self,
        scenario: str,
        prompts: list[list[int]],
        model: str,
        version: str,
        new: int = 60,
        retract: bool = False,
        flush: bool = True,
    ) -> None:
        """Weights change while requests run, and KV is kept; or with ``retract`` given up, and computed again. An older
        release ends where it is to ``flush`` and requests wait."""
        manager = self.engine.tokenizer_manager

        async def change() -> None:
            await manager.pause_generation(PauseGenerationReqInput(mode="retract" if retract else "in_place"))
            await self._updated(model, version, flush=retract and flush)
            await manager.continue_generation(ContinueGenerationReqInput())

        async def both() -> Any:
            sampling = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
            asking = {"input_ids": prompts, "sampling_params": sampling, "return_routed_experts": True, "stream": True}
            latest: dict[int, dict[str, Any]] = {}
            changing = None
            async for part in await self.engine.async_generate(**asking):
                latest[part["index"]] = part
                lengths = [len(each["output_ids"]) for each in latest.values()]
                if changing is None and len(lengths) == len(prompts) and min(lengths) >= 3:
                    changing = asyncio.ensure_future(change())
            if changing is None:
                raise RuntimeError("answers were over before the weights changed")
            await changing
            return [latest[i] for i in range(len(prompts))]

        for prompt, answer in zip(prompts, self.engine.loop.run_until_complete(both()), strict=True):
            self.write(scenario, prompt, answer, 0)

    def write(self, scenario: str, prompt: list[int], answer: dict[str, Any], start: int) -> None:
        meta = answer["meta_info"]
        field = np.frombuffer(pybase64.b64decode(meta["routed_experts"]), np.int32)
        line = {
            "scenario": scenario,
            "prompt": prompt,
            "tokens": list(answer["output_ids"]),
            "start": start,
            "hits": meta["cached_tokens"],
            "cached": meta.get("cached_tokens_details") or {},
            "retractions": meta.get("num_retractions", 0),
            "field": field.tolist(),
            "versions": meta.get("weight_versions"),
        }
        try:
            line["routes"], line["why"] = routes(answer, rollouts=self.rollouts).to_json(), missing(answer)
            if self.weighted:
                line["weights"] = routing_weights(answer).to_json()
        except KVRouteError as error:
            line["refused"] = str(error)
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()


def drawn_line(
    scenario: str, prompt: list[int], answer: dict[str, Any], sampling: dict[str, Any], record: bytes | None
) -> dict[str, Any]:
    """What the judge of supports is told of an answer."""
    drawn = support(answer, prompt=prompt)
    meta = answer["meta_info"]
    return {
        "drawn": scenario,
        "prompt": prompt,
        "tokens": list(answer["output_ids"]),
        "start": drawn.start,
        "counts": drawn.counts.tolist(),
        "ids": drawn.ids.tolist(),
        "logprobs": meta["output_token_sampling_logprobs"],
        "hits": meta["cached_tokens"],
        "retractions": meta["num_retractions"],
        "ended": meta["finish_reason"]["type"],
        "sampling": sampling,
        "record": record and record.hex(),
    }


def main() -> None:
    import sglang

    plan = json.loads(Path(sys.argv[1]).read_text())
    if plan["record"]:
        recording(Path(plan["record"]))
    with sglang.Engine(model_path=plan["model"], **FIXED | plan["options"]) as engine, open(plan["out"], "w") as out:
        rollouts = open_rollouts(plan["rollouts"]) if plan["rollouts"] else None
        asked = Asked(engine, out, rollouts, weighted=bool(plan["record"]))
        for scenario, verb, arguments in plan["do"]:
            getattr(asked, verb)(scenario, **arguments)


if __name__ == "__main__":
    main()

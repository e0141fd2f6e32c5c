"""Prefill and decode for tests, as processes that are forked warm; what their answers must be."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from nursery import ENGINE, nursery
from standing_still import send_signal
from waiting import GIVE_UP_S

from cache_manager.keys import Namespace
from kvroute.routes import Routes
from paged_engine import processes
from paged_engine.engine import Engine
from paged_engine.models import build_model
from paged_engine.request import EngineConfig, Output, Request
from paged_engine.text import END, VOCAB_SIZE, encode, paragraphs

DEADLINE_S = GIVE_UP_S


def prompt(number: int, tokens: int = 40) -> list[int]:
    """A prompt of its own for every number; the first tokens of a few numbers are shared."""
    text = encode(paragraphs()[number % 3])[: tokens // 2] + encode(f"question {number}: {paragraphs()[-1]}")
    return text[:tokens]


def completion(number: int, **more: Any) -> dict[str, Any]:
    """The body of a request."""
    body = {"prompt": prompt(number), "max_tokens": 12, "temperature": 0.8, "seed": number}
    return body | {"return_routed_experts": True} | more


class Plain:
    """What an engine that shares, stores and sends nothing generates: the oracle."""

    def __init__(self, model: Any) -> None:
        self._engine = Engine(model, EngineConfig(device_blocks=256, caching=False), Namespace("plain", 0))
        self._number = 0

    def __call__(self, body: dict[str, Any]) -> list[Output]:
        self._number += 1
        stops = frozenset() if body.get("ignore_eos") else frozenset({END})
        request = Request(
            f"plain-{self._number}", tuple(body["prompt"]), body["max_tokens"], n=body.get("n", 1),
            temperature=body["temperature"], seed=body["seed"], stop_tokens=stops,
        )  # fmt: skip
        self._engine.add(request)
        return sorted(self._engine.run(), key=lambda output: output.sample)

    def check(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Every token is right, and every row is there and right."""
        for output, choice in zip(self(body), answer["choices"], strict=True):
            assert choice["token_ids"] == list(output.tokens)
            assert choice["finish_reason"] == output.reason.value
            routes = Routes.from_json(choice["routed_experts"])
            assert routes.complete
            assert choice["missing_rows"] == []
            assert np.array_equal(routes.ids, output.routes.ids)

    def close(self) -> None:
        self._engine.close()


class Forked(processes.Server):
    """As the demo starts it, but forked from a process that has its imports behind it."""

    def start(self) -> None:
        with self._log.open("ab") as log:
            born = nursery(*ENGINE).start(["-m", "kvroute.cli", self.command, *self._flags], stdout=log, stderr=log)
        self.process: Any = born

    def send(self, number: int) -> None:
        send_signal(self.process.pid, number)

    def end(self) -> int:
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
        return int(self.process.wait(DEADLINE_S))


class ForkedPair(processes.Pair):
    """Prefill and decode, which can be killed, stopped and started again with their addresses."""

    kind = Forked

    def load(self, bodies: list[dict[str, Any]], disturb: Any) -> list[tuple[int, dict[str, Any]]]:
        """Ask for them, four at a time, and ``disturb`` when the first has been answered."""
        with ThreadPoolExecutor(4) as pool:
            futures: list[Future[tuple[int, Any]]] = [pool.submit(self.complete, body) for body in bodies]
            processes.until(lambda: any(future.done() for future in futures), "the first is answered", DEADLINE_S)
            disturb()
            return [future.result() for future in futures]


def pair(directory: Path, *flags: str) -> ForkedPair:
    return ForkedPair(directory, ["--device-blocks", "48", "--host-blocks", "16", *flags])


def plain_model() -> Any:
    return build_model("qwen3_moe", seed=0, vocab_size=VOCAB_SIZE)

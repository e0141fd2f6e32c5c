"""Prefill, decode and route for tests: in this process or as processes, and what their answers must be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from nursery import ENGINE, nursery
from ports import hold_port
from prometheus_client.parser import text_string_to_metric_families

from cache_manager.keys import Namespace
from kvroute.routes import Routes
from paged_engine.engine.engine import Engine
from paged_engine.engine.models import build_model
from paged_engine.engine.request import EngineConfig, Output, Request
from paged_engine.engine.text import END, VOCAB_SIZE, encode, paragraphs
from paged_engine.serving.bodies import DRAW
from paged_engine.serving.server import Server

DEADLINE_S = 120.0


def prompt(number: int, tokens: int = 40) -> list[int]:
    """A prompt of its own for every number; the first tokens of a few numbers are shared."""
    text = encode(paragraphs()[number % 3])[: tokens // 2] + encode(f"question {number}: {paragraphs()[-1]}")
    return text[:tokens]


class Plain:
    """What an engine that shares, stores and sends nothing generates: the oracle."""

    def __init__(self, model: Any) -> None:
        config = EngineConfig(device_blocks=256, caching=False)
        self._engine = Engine(model, config, Namespace("plain", weights_version=0))
        self._number = 0

    def __call__(self, body: dict[str, Any]) -> list[Output]:
        self._number += 1
        stops = frozenset() if body.get("ignore_eos") else frozenset({END})
        request = Request(
            f"plain-{self._number}", tuple(body["prompt"]), body["max_tokens"], n=body.get("n", 1),
            temperature=body.get("temperature", 1.0), seed=body["seed"], draw=DRAW, stop_tokens=stops,
        )  # fmt: skip
        self._engine.add(request)
        return sorted(self._engine.run(), key=lambda output: output.sample)

    def check(self, body: dict[str, Any], answer: dict[str, Any]) -> int:
        """Assert that every token is right and that no row is wrong; how many rows are missing."""
        missing = 0
        for output, choice in zip(self(body), answer["choices"], strict=True):
            assert choice["token_ids"] == list(output.tokens)
            assert choice["finish_reason"] == output.reason.value
            routes = Routes.from_json(choice["routed_experts"])
            assert len(routes) == len(output.routes)
            assert np.array_equal(routes.ids[routes.valid], output.routes.ids[routes.valid])
            reported = sum(gap["stop"] - gap["start"] for gap in choice["missing_rows"])
            assert reported == int((~routes.valid).sum()), "every missing row has a reason"
            missing += reported
        return missing

    def close(self) -> None:
        self._engine.close()


def completion(number: int, **more: Any) -> dict[str, Any]:
    """The body of a request."""
    return {
        "model": "qwen3_moe", "prompt": prompt(number), "max_tokens": 12, "temperature": 0.8, "seed": number,
        "return_routed_experts": True, **more,
    }  # fmt: skip


def ask(url: str, path: str, body: object | None = None, timeout_s: float = DEADLINE_S) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    given = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=given)  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - as above
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def metrics(url: str) -> dict[str, float]:
    """Every sample of ``/metrics``; labelled ones as ``name{value}``."""
    with urllib.request.urlopen(url + "/metrics", timeout=DEADLINE_S) as answer:  # noqa: S310 - our own server
        text = answer.read().decode()
    return {
        sample.name.removeprefix("kvroute_") + "".join(f"{{{v}}}" for v in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_until(true: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def all_blocks_are_back(url: str) -> bool:
    found = metrics(url)
    free = all(found[f"blocks{{{tier}_free}}"] == found[f"blocks{{{tier}_total}}"] for tier in ("device", "host"))
    return free and not found.get("transfers{leased}", 0) and not found.get("pulls{in_flight}", 0)


@contextlib.contextmanager
def served(server: Server) -> Iterator[str]:
    """``server`` in a thread of this process; its URL. It is drained at the end."""
    loop, ended = asyncio.new_event_loop(), asyncio.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(server.serve(ended))
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            failed.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name=server.config.command, daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(server.url or failed), f"{server.config.command} listens")
        assert not failed, failed
        yield server.url
    finally:
        if not failed:
            loop.call_soon_threadsafe(ended.set)
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"{server.config.command} has not ended"
        assert not failed, failed


class Process:
    """One server as an operating system process, which can be killed, stopped and started again with its identity."""

    def __init__(self, command: str, directory: Path, flags: Sequence[str]) -> None:
        self.command = command
        self.url = f"http://127.0.0.1:{hold_port()}"
        self._log = directory / f"{command}.log"
        self._flags = [*flags, "--port", self.url.rpartition(":")[2]]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = nursery(*ENGINE).start(
                ["-m", "kvroute.cli", self.command, *self._flags], stdout=log, stderr=log
            )

    def wait_live(self) -> None:
        wait_until(self._live, f"{self.command} is live: {self.log}")

    def _live(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return ask(self.url, "/healthz")[0] == 200
        except OSError:
            return False

    @property
    def log(self) -> str:
        return self._log.read_text()[-3000:]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, whatever state it is in."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def wait(self) -> int:
        """The exit status of what was told to end."""
        return self.process.wait(DEADLINE_S)

    def end(self) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def plain_model() -> Any:
    return build_model("qwen3_moe", seed=0, vocab_size=VOCAB_SIZE)

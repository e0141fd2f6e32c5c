"""Engines of vLLM in processes of their own, for the far end: how one starts, how requests are sent, how it ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from engines import BLOCK, MODULE, prompts
from fronts import Front
from standing_still import send_signal
from waiting import GIVE_UP_S

from bench.harness import PeerError
from bench.vllm_peers import HOST_OF_CPU, ON_CPU, plugin
from kvroute.connector.rollouts_apart import MODULE as ROLLOUTS

FIELD = {"field": True, "rollouts": "response:", "witness": "missing"}
"""Rows are in vLLM's own field of every answer, too."""
WORDS = [f"t{i}" for i in range(512)]
HOST = {**HOST_OF_CPU, "cpu_bytes_to_use": 4 << 20}
STOPS = WORDS[::8]
"""Strings of which a sampled token is one in eight."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 64,
    "disable_log_stats": False,
    "worker_extension_cls": "updates.Embedding",
}


class Engine:
    """An engine in processes of its own."""

    def __init__(self, peer: Front) -> None:
        self.peer, self.ended = peer, False

    def do(self, asks: Sequence[Mapping[str, Any]] = (), acts: Sequence[Any] = (), **more: Any) -> Any:
        """The answers to ``asks`` in their order, and with ``acts`` the answers of those too."""
        found = self.peer.ask({"asks": asks, "acts": acts, **more})
        return (found["answers"], found["done"]) if acts else found["answers"]

    def counter(self, name: str) -> float:
        return float(self.peer.ask({"counters": True}).get(f"vllm:{name}", 0))

    @property
    def pids(self) -> list[int]:
        """Of all of its processes."""
        front = psutil.Process(self.peer.pid)
        return [each.pid for each in (*front.children(recursive=True), front)]

    @property
    def rollouts(self) -> psutil.Process:
        """The process that stores its rollouts."""
        front = psutil.Process(self.peer.pid)
        (process,) = [each for each in front.children(recursive=True) if ROLLOUTS in each.cmdline()]
        return process

    def signal(self, number: int) -> None:
        for pid in self.pids:
            send_signal(pid, number)

    def kill(self) -> None:
        """Kills it without warning, with all of its processes."""
        self.signal(signal.SIGKILL)
        self.killed()

    def killed(self) -> None:
        """It was killed: no more requests are sent to it."""
        self.ended = True
        self.peer.close()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            with suppress(PeerError):
                self.peer.ask({"end": True})
            self.peer.close()


def ask(name: str, prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
    return {"id": name, "prompt": list(prompt), "sampling": sampling}


class Engines:
    """Starts engines of these weights around connectors of vLLM; ``close`` ends all."""

    def __init__(self, homes: Mapping[str, Path], logs: Path) -> None:
        self._homes, self._logs, self._running = homes, logs, list[Engine]()
        self._plugin = plugin(logs / "plugin")

    def __call__(
        self,
        connector: str,
        settings: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
        *,
        front: str = "AsyncLLM",
        transfer: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        ahead: bool = False,
        **arguments: Any,
    ) -> Engine:
        given = {
            "kv_connector": connector,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**(extra or {}), "kvroute": {"strict": True, **FIELD, **settings}},
            **(transfer or {}),
        }
        told = {
            "front": front,
            "ahead": ahead,
            "give_up_s": GIVE_UP_S,
            "rollouts": settings.get("rollouts", "").removeprefix("response:").removeprefix("apart:"),
            "arguments": {"model": str(self._homes["A"]), **ENGINE, "kv_transfer_config": given, **arguments},
        }
        search = [str(self._plugin), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **ON_CPU,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "PYTHONPATH": ":".join(search),
            **(variables or {}),
        }
        log = self._logs / f"engine-{len(self._running)}.log"
        self._running.append(Engine(Front("far_engine", log, environment, json.dumps(told))))
        return self._running[-1]

    def close(self) -> None:
        for engine in self._running:
            engine.end()


def stopped(seed: int, count: int = 6, length: int = 40, name: str = "sample") -> list[dict[str, Any]]:
    """Requests that a stop string ends sooner or later, sampled, with ids that come again."""
    asked = prompts(seed, *[length] * count)
    return [
        ask(f"{name}-{i}", prompt, temperature=1.0, seed=seed * 100 + i, max_tokens=40, stop=STOPS)
        for i, prompt in enumerate(asked)
    ]

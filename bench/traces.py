"""A Mooncake trace and its replay: the same operations, in the same order, for every block manager.

A trace has one JSON object a line: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks.

Only the standard library and numpy are used here: every peer's environment has those.
"""

from __future__ import annotations

import json
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK, CONCURRENCY = 512, 32


class Replayed(Protocol):
    """A block manager without a model. It chooses the type of its requests."""

    def request(self, number: int, prompt: NDArray[np.int64]) -> Any:
        """Make a request, as an engine has it on arrival; not timed."""

    def admit(self, request: Any) -> int | None:
        """Match the prompt and take blocks for the rest of it; the cached tokens, or ``None`` if there is no room."""

    def publish_prompt(self, request: Any) -> None: ...

    def append(self, running: list[Any], tokens: list[int]) -> list[bool]:
        """Room for one more token of each request; ``False`` if there is none. ``tokens`` are the sampled ones."""

    def publish(self, running: list[Any], tokens: list[int]) -> None:
        """These tokens are computed."""

    def free(self, request: Any) -> None: ...


def requests(path: Path, limit: int | None) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()[:limit]
    return [json.loads(line) for line in lines]


def prompt(request: Mapping[str, Any]) -> NDArray[np.int64]:
    """Token ids that are equal exactly if the trace's block hashes are."""
    ids = np.asarray(request["hash_ids"], dtype=np.int64)[:, None] * BLOCK + np.arange(BLOCK)
    return ids.reshape(-1)[: request["input_length"]]


def replay(trace: Sequence[Mapping[str, Any]], manager: Replayed) -> dict[str, float]:
    """Continuous batching: ``CONCURRENCY`` requests run together, admitted in the trace's order when there is room.

    Each step appends and publishes a token of every running request; a request ends early if its token has no room.
    """
    waiting = deque(enumerate(trace))
    running: list[Any] = []
    left: list[int] = []  # tokens still to generate, for each of them
    operations = asked = hit = 0
    seconds = 0.0
    request: Any = None
    while waiting or running:
        while waiting and len(running) < CONCURRENCY:
            number, line = waiting[0]
            if request is None:
                request = manager.request(number, prompt(line))
            began = time.thread_time()
            cached = manager.admit(request)
            if cached is not None:
                manager.publish_prompt(request)
            seconds += time.thread_time() - began
            operations += 1 if cached is None else 2
            if cached is None and running:
                break
            waiting.popleft()
            asked += len(line["hash_ids"])
            if cached is not None:
                hit += cached // BLOCK
                running.append(request)
                left.append(max(1, line["output_length"]))
            request = None
        tokens = list(range(operations, operations + len(running)))  # used in no other step
        began = time.thread_time()
        room = manager.append(running, tokens)
        operations += len(running)
        if not all(room):
            for each in [each for each, there in zip(running, room, strict=True) if not there]:
                manager.free(each)
                operations += 1
            left = [n for n, there in zip(left, room, strict=True) if there]
            tokens = [token for token, there in zip(tokens, room, strict=True) if there]
            running = [each for each, there in zip(running, room, strict=True) if there]
        manager.publish(running, tokens)
        operations += len(running)
        left = [n - 1 for n in left]
        if 0 in left:
            for each in [each for each, n in zip(running, left, strict=True) if not n]:
                manager.free(each)
                operations += 1
            running = [each for each, n in zip(running, left, strict=True) if n]
            left = [n for n in left if n]
        seconds += time.thread_time() - began
    return {
        "us_per_operation": 1e6 * seconds / operations,
        "hit_rate": hit / asked,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }

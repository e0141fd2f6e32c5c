"""vLLM's ``KVCacheManager`` (v1; 0.32 and 0.33), without an engine, for the life-cycle kit: one group of layers, CPU.

The calls are those of vLLM's scheduler. The manager lets a block be found as soon as the step that fills it is
scheduled; the scheduler runs every scheduled step, so that no request reads the block before.

    cd examples/managers && kvroute prove vllm_kv_cache_manager:Vllm
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from cache_manager.testing.life import BlockManagerAdapter, CanaryKV

logging.getLogger("vllm").setLevel(logging.ERROR)
init_none_hash(sha256)
PARAMS = SamplingParams(max_tokens=1 << 20)
TOKENS_MAX = 1 << 20
LAYER = {"block_size": 2, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}


class Vllm(BlockManagerAdapter):
    """Full attention, eight blocks of two tokens beside the null block."""

    capabilities = ("prefix", "salt", "reset", "abort")
    blocks = range(1, 9)
    spec: Any = FullAttentionSpec(**LAYER)

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=len(self.blocks) + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], self.spec)],
            ),
            max_model_len=TOKENS_MAX,
            scheduler_block_size=self.block_tokens,
            hash_block_size=self.block_tokens,
            enable_caching=True,
        )
        self.hasher = get_request_block_hasher(self.block_tokens, sha256)
        self.requests: dict[str, Request] = {}

    def admit(self, seq: str, tokens: Sequence[int], chunk: int, salt: str) -> int | None:
        request = Request(seq, list(tokens), PARAMS, None, block_hasher=self.hasher, cache_salt=salt or None)
        blocks, cached, *_ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, min(chunk, len(tokens) - cached), cached, blocks) is None:
            return None
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, cached
        self.requests[seq] = request
        return int(cached)

    def grow(self, seq: str, tokens: Sequence[int], upto: int) -> bool:
        request = self.requests[seq]
        if len(tokens) > request.num_tokens:
            request.append_output_token_ids(list(tokens[request.num_tokens :]))
        return self.manager.allocate_slots(request, upto - request.num_computed_tokens) is not None

    def commit(self, seq: str, tokens: Sequence[int]) -> None:
        self.requests[seq].num_computed_tokens = len(tokens)

    def free(self, seq: str) -> None:
        request = self.requests.pop(seq, None)
        if request is not None:
            self.manager.free(request)

    def reset(self) -> bool:
        """Refused while there are sequences; on request the scheduler preempts them first."""
        return bool(self.manager.reset_prefix_cache())

    def table(self, seq: str) -> list[int | None]:
        return [block or None for block in self.manager.get_block_ids(seq)[0]]

    def free_blocks(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def ref_counts(self) -> dict[int, int]:
        return {block.block_id: block.ref_cnt for block in self.manager.block_pool.blocks if not block.is_null}

    def free_ids(self) -> list[int]:
        return [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]


class VllmWindow(Vllm):
    """Sliding-window attention of four tokens: blocks behind the window are freed while the sequence runs."""

    spec = SlidingWindowSpec(**LAYER, sliding_window=4)
    window = 4
    finds_held = False
    unclaimed = {  # noqa: RUF012 - the port's own type
        "refusal_changes_nothing": "allocate_slots() says in a comment that it drops blocks outside of the window first"
    }


class VllmLostStep(Vllm):
    """As :class:`Vllm`, for an engine that may lose a scheduled step. vLLM loses none, so this adapter fails."""

    capabilities = (*Vllm.capabilities, "lost_step")

"""The block manager of transformers' continuous batching (5.23), for the life-cycle kit: one full-attention layer, CPU.

Every method calls what transformers' own scheduler, batch processor and offloading manager call, in their order; where
they evict and try again, so does the adapter. The cache's tensors stay empty: the kit keeps the KV.

    cd examples/managers && kvroute prove transformers_cache:Transformers
"""

from __future__ import annotations

import logging
import types
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus

from cache_manager.testing.life import BlockManagerAdapter, CanaryKV

logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
KIND = "full_attention"
RESERVED = 2  # the first two sectors are read and written for padding only
MODEL = LlamaConfig(
    hidden_size=16,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
    num_hidden_layers=1,
    vocab_size=32,
    intermediate_size=16,
)
MODEL._attn_implementation = "sdpa"


class Transformers(BlockManagerAdapter):
    """``PagedAttentionCache`` with prefix sharing, eight blocks of two tokens; forks share full blocks."""

    capabilities = ("prefix", "fork", "abort", "lost_step")
    blocks = range(RESERVED, RESERVED + 8)

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        config = ContinuousBatchingConfig(
            page_size=self.block_tokens, num_blocks=len(self.blocks), max_batch_tokens=16, max_memory_percent=0.5
        )
        self.cache = PagedAttentionCache(MODEL, config, "cpu", types.SimpleNamespace(tp_size=1), torch.float16)
        self.allocator: Any = self.cache.cache_allocators[KIND]
        if self.allocator.blocks_per_sector != 1 or not self.cache.use_prefix_sharing:
            raise RuntimeError("wanted one block a sector, and shared prefixes")
        self.steps: dict[str, FutureRequestState] = {}

    # ---------------------------------------------------------------- as the scheduler does

    def admit(self, seq: str, tokens: Sequence[int], chunk: int, salt: str) -> int | None:  # noqa: ARG002 - has none
        """``Scheduler._infer_request_tokens``, and the rest of its loop. Here a refused request frees its hit."""
        state = RequestState(seq, list(tokens))
        state.position_offset = self.cache.search_prefix_match(seq, list(tokens))
        state.status = RequestStatus.PREFILLING
        if not self._schedule(state, min(chunk, len(tokens) - state.position_offset)):
            self.cache.free_blocks(seq)
            return None
        return int(state.position_offset)

    def grow(self, seq: str, tokens: Sequence[int], upto: int) -> bool:
        state = self.steps[seq].state
        state.generated_tokens = list(tokens[len(state.initial_tokens) :])
        return self._schedule(state, upto - state.position_offset)

    def commit(self, seq: str, tokens: Sequence[int]) -> None:
        """``ContinuousBatchProcessor.update_batch``: the blocks that the pass has filled can be found."""
        step = self.steps[seq]
        step.state.position_offset = len(tokens)
        self.cache.mark_complete_blocks(step.state, step.complete_blocks)
        self.steps[seq] = self._step(step.state, 0)

    def free(self, seq: str) -> None:
        self.cache.free_blocks(seq)
        self.steps.pop(seq, None)

    def fork(self, parent: str, child: str) -> bool:
        """``ContinuousBatchProcessor``: the cache is forked, the copies are made, then the child is added."""
        pairs: dict[str, tuple[list[int], list[int]]] = {KIND: ([], [])}
        origin = self.steps[parent].state
        self.cache.pool.try_to_free_sectors()
        if not self.cache.prepare_fork_request(origin, [child], pairs):
            return False
        self.kv.copy(zip(*pairs[KIND], strict=True))
        self.cache.perform_cache_copy(pairs)
        known = [*origin.initial_tokens, *origin.generated_tokens][: origin.position_offset]
        state = RequestState(child, known)
        state.position_offset, state.status = origin.position_offset, RequestStatus.DECODING
        self.steps[child] = self._step(state, 0)
        return True

    def _schedule(self, state: RequestState, length: int) -> bool:
        """Room for ``length`` more tokens. Cached blocks are evicted before a request is refused."""
        self.cache.pool.try_to_free_sectors()
        fits = self.cache.can_store_request_tokens(state, length)
        if not fits and self.cache.evict_cached_blocks():
            self.cache.pool.try_to_free_sectors()
            fits = self.cache.can_store_request_tokens(state, length)
        if fits:
            self.steps[state.request_id] = self._step(state, length)
        return bool(fits)

    def _step(self, state: RequestState, length: int) -> FutureRequestState:
        return FutureRequestState(state, True, self.cache.count_new_complete_blocks(state, length), length)

    # ---------------------------------------------------------------- inspection

    def table(self, seq: str) -> Sequence[int]:
        found: list[int] = self.allocator.block_table[seq]
        return found

    def slots(self, seq: str, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """The write indices of the forward pass. In a block the rows for keys come before those for values."""
        rows = self.allocator.get_write_indices(seq, start, stop - start)
        return [divmod(row, self.allocator.block_physical_stride) for row in rows]

    def free_blocks(self) -> int:
        return len(self.free_ids())

    def free_ids(self) -> list[int]:
        pool = self.cache.pool
        opened = [block for tree in pool._free_blocks[0].trees.values() for block in tree]
        return [*pool.free_sectors, *opened, *self.allocator.ledger.cached_blocks]

    def ref_counts(self) -> dict[int, int]:
        """The ledger does not store a count of one."""
        held = {block for table in self.allocator.block_table.values() for block in table}
        return {**dict.fromkeys(held, 1), **self.allocator.ledger.shared_ref_counts}


class TransformersCacheReset(Transformers):
    """New weights, and ``PagedAttentionCache.reset``, which may be called only when nothing runs."""

    capabilities = (*Transformers.capabilities, "reset")

    def reset(self) -> bool:
        if self.steps:
            return False
        self.cache.reset()
        return True


class TransformersSession(Transformers):
    """New weights between two sessions of a persistent manager: what ``ContinuousBatchProcessor.reset`` does."""

    capabilities = (*Transformers.capabilities, "reset")

    def reset(self) -> bool:
        if self.steps:
            return False
        self.cache.free_all_requests()
        return True


class TransformersPause(Transformers):
    """New weights inside ``ContinuousBatchingManager.pause()``: the cache is kept, and nothing is called."""

    capabilities = (*Transformers.capabilities, "reset")

    def reset(self) -> bool:
        return True


class TransformersClearedSession(Transformers):
    """As :class:`TransformersSession`, with the flag ``clear_ledgers``."""

    capabilities = (*Transformers.capabilities, "reset")

    def reset(self) -> bool:
        if self.steps:
            return False
        self.cache.free_all_requests(clear_ledgers=True)
        return True


class TransformersOffload(Transformers):
    """With ``OffloadingManager``: a victim's blocks are swapped to five blocks on the CPU and back."""

    capabilities = (*Transformers.capabilities, "swap")
    host_blocks = range(5)

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        # Its constructor needs pinned memory, which a machine without a GPU lacks; these are the fields it sets.
        self.offload: Any = OffloadingManager.__new__(OffloadingManager)
        self.offload.cache, self.offload.scheduler, self.offload._compute_stream = self.cache, None, None
        self.offload._cpu_pool = CachePool(len(self.host_blocks), 1, num_reserved_sectors=0)
        self.offload._cpu_pool.set_blocks_per_sector(0, 1)
        memory = torch.empty(len(self.host_blocks) * self.cache.bytes_per_sector, dtype=torch.uint8)
        self.offload._cpu_views = {KIND: memory.view(-1, self.allocator.bytes_per_block)}
        self.offload._request_id_to_cpu_blocks = {}

    def preempt(self, seq: str) -> bool:
        """``OffloadingManager.offload_requests``, for a victim that fits; other victims are computed again."""
        state, table = self.steps[seq].state, list(self.table(seq))
        if len(table) > self.free_host_blocks():
            return False
        self.cache.free_blocks(seq, no_cache=True)
        if self.offload._offload_to_cpu([state], {seq: {KIND: table}}) != {seq}:
            raise RuntimeError(f"{seq} was not offloaded, and its blocks are free")
        self.kv.swap_out(zip(table, self.table(seq), strict=True))
        return True

    def resume(self, seq: str) -> bool:
        """The scheduler allocates new blocks for the computed tokens; then they are restored."""
        state, sources = self.steps[seq].state, list(self.table(seq))
        if not self._schedule(state, 0):
            return False
        step = self.steps[seq]
        self.offload.restore_scheduled_requests([step])
        self.kv.swap_in(zip(sources, self.table(seq), strict=False))
        self.cache.mark_complete_blocks(state, step.complete_blocks)
        self.steps[seq] = self._step(state, 0)
        return True

    def free(self, seq: str) -> None:
        if seq in self.steps:
            self.offload.free_request_cpu_cache(self.steps[seq].state)
        super().free(seq)

    def table(self, seq: str) -> Sequence[int]:
        on_host = self.offload._request_id_to_cpu_blocks.get(seq)
        return super().table(seq) if on_host is None else on_host[KIND]

    def free_host_blocks(self) -> int:
        pool = self.offload._cpu_pool
        return int(pool.num_free_sectors + pool.count_free_blocks(0))

"""SGLang's own radix tree and paged allocator (0.5.23), for the life-cycle kit, with routing rows beside them; CPU.

Every method calls what SGLang's scheduler calls, on SGLang's own ``Req``: the tree is searched, the match is locked,
pages are given out (``alloc_for_extend``, ``alloc_for_decode``), chunks are published (``checkpoint_kv_cache``), and
the end publishes the rest and frees the remaining pages (``release_kv_cache``). A batch has only the fields that these
functions read. The rows go through :class:`kvroute.integrations.sglang.rows.RoutedRows`, and land late, as with overlap
scheduling: a pass counts as over only when a row is read that it, or a later one, has written.

    cd examples/managers && PYTHONPATH=../../tests/real/sglang/cpu kvroute prove sglang_radix_cache:Sglang
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from cache_manager.keys import Namespace
from cache_manager.testing.life import BlockManagerAdapter, CanaryKV
from kvroute.connector.settings import Common
from kvroute.connector.versions import AS_LOADED
from kvroute.integrations.sglang.rows import Launched, RoutedRows
from kvroute.routing import routing_spec

logging.getLogger("sglang").setLevel(logging.ERROR)
get_context().override_server_args(device="cpu", attention_backend="torch_native", page_size=2).install()
TOKENS_MAX = 64
SPEC = routing_spec(num_experts=1 << 16, top_k=1, layer_ids=[0], num_layers=1, block_tokens=2)
SETTINGS = Common(rollouts="", weights="the kit's", strict=True)


class Sglang(BlockManagerAdapter):
    """``UnifiedRadixCache`` with full attention over eight pages of two tokens; page 0 is written for padding only."""

    capabilities = ("prefix", "salt", "reset", "abort", "rows")
    blocks = range(1, 9)
    finds_held = False  # decoded tokens are published when their request ends

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        size = self.block_tokens
        self.allocator: Any = PagedTokenToKVPoolAllocator(
            len(self.blocks) * size, size, torch.float16, "cpu", None, False
        )
        self.allocator.debug_mode = True  # its own checks
        self.pool = ReqToTokenPool(16, TOKENS_MAX, "cpu", False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=size,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.reqs: dict[str, Req] = {}
        self.rows = RoutedRows(SPEC, len(self.blocks) + 1, Namespace("the kit's", AS_LOADED), SETTINGS)
        self.passes: deque[Launched] = deque()  # not over yet
        self.last: dict[str, int] = {}  # the last pass of a request
        self.weights = 0

    # ---------------------------------------------------------------- as the scheduler does

    def admit(self, seq: str, tokens: Sequence[int], chunk: int, salt: str) -> int | None:
        """``PrefillAdder``: the match is locked before free pages are counted."""
        req = Req(seq, "", array("q", tokens), SamplingParams(), cache_salt=salt or None)
        req.init_next_round_input(self.tree)
        cached, req.lock = int(req.prefix_len), self.tree.lock(req.last_node)
        upto = min(len(tokens), cached + chunk)
        if not self._fits(cached, upto):
            self.tree.unlock(req.lock)
            return None
        self._extend(req, upto)
        self.reqs[seq] = req
        return cached

    def grow(self, seq: str, tokens: Sequence[int], upto: int) -> bool:
        """The next chunk of the prompt, and a decode step for every token after it."""
        req = self.reqs[seq]
        known = len(req.origin_input_ids) + len(req.output_ids)
        req.output_ids.extend(tokens[known:])
        if not self._fits(req.kv.kv_allocated_len, upto):
            return False
        if (end := min(upto, len(req.origin_input_ids))) > req.kv.kv_allocated_len:
            self._extend(req, end)
        while (at := req.kv.kv_allocated_len) < upto:
            lens = torch.tensor([at])
            alloc_for_decode(self._batch(req, seq_lens=lens, seq_lens_cpu=lens), 1)
        return True

    def commit(self, seq: str, tokens: Sequence[int]) -> None:  # noqa: ARG002 - in the request
        """``process_batch_result_prefill``: a chunk is published when its pass is launched or over."""
        req = self.reqs[seq]
        if req.prefix_len < req.extend_end:
            req.refresh_fill_ids()
            checkpoint_kv_cache(req, self.tree)

    def free(self, seq: str) -> None:
        """``_handle_finish_state_updated_req``; an abort during a chunk of the prompt publishes nothing more."""
        req = self.reqs.pop(seq, None)
        if req is not None:
            self.last.pop(seq, None)
            prefilled = req.prefix_len == req.extend_end
            req.finished_reason = FINISH_LENGTH(len(req.output_ids))
            release_kv_cache(req, self.tree, checkpoint=prefilled)

    def reset(self) -> bool:
        """``Scheduler.flush_cache``, after an update of the weights: refused while there are requests."""
        if self.reqs:
            return False
        self.weights += 1
        self.rows.weights.changed(self.weights)
        self.tree.reset()
        self.pool.clear()
        self.allocator.clear()
        self.rows.weights.forgotten()
        return True

    def _fits(self, held: int, upto: int) -> bool:
        size = self.block_tokens
        return -(-upto // size) - -(-held // size) <= self.free_blocks()

    def _extend(self, req: Req, upto: int) -> None:
        req.extend_end = upto
        lens, new = torch.tensor([upto]), upto - req.prefix_len
        alloc_for_extend(
            self._batch(
                req,
                seq_lens=lens,
                seq_lens_cpu=lens,
                prefix_lens=[req.prefix_len],
                extend_lens=[new],
                extend_num_tokens=new,
                hisparse_coordinator=None,
                is_dllm=lambda: False,
            )
        )

    def _batch(self, req: Req, **more: Any) -> Any:
        """The fields that are read of a ``ScheduleBatch``."""
        return SimpleNamespace(
            reqs=[req],
            device="cpu",
            tree_cache=self.tree,
            req_to_token_pool=self.pool,
            maybe_evict_swa=lambda: None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            req_pool_indices=torch.tensor([req.kv.req_pool_idx or 0]),
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx or 0]),
            **more,
        )

    # ---------------------------------------------------------------- rows

    def write_rows(self, seq: str, start: int, rows: Sequence[int | None]) -> None:
        """A pass is launched; if it makes no rows, it never ends."""
        slots = self.pool.req_to_token[self.reqs[seq].kv.req_pool_idx, start : start + len(rows)]
        made = [0 if row is None else row for row in rows]
        launched = self.rows.launch(
            slots.to(torch.int64, copy=True), torch.tensor(made, dtype=torch.int32).reshape(-1, 1, 1)
        )
        self.last[seq] = launched.number
        if None not in rows:
            self.passes.append(launched)

    def read_rows(self, seq: str, start: int, stop: int) -> Sequence[int | None]:
        while self.passes and self.passes[0].number <= self.last.get(seq, 0):
            self.passes.popleft().finalize()
        size = self.block_tokens
        pages = np.array(self.table(seq), np.int64)[:, None]
        routes, _, _ = self.rows.read((pages * size + np.arange(size)).reshape(-1)[:stop], start).routes()
        found = zip(routes.ids[:, 0, 0].tolist(), routes.known.all(axis=1).tolist(), strict=True)
        return [row if known else None for row, known in found]

    # ---------------------------------------------------------------- inspection

    def table(self, seq: str) -> Sequence[int]:
        kv, size = self.reqs[seq].kv, self.block_tokens
        slots: list[int] = self.pool.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len : size].tolist()
        return [slot // size for slot in slots]

    def free_blocks(self) -> int:
        return int(self.allocator.available_size() + self.tree.evictable_size()) // self.block_tokens

    def free_ids(self) -> Sequence[int]:
        """The allocator's free pages, and pages of the tree that no request has."""
        held = {page for seq in self.reqs for page in self.table(seq)}
        cached = [slot // self.block_tokens for slot in self.tree.all_values_flatten().tolist()[:: self.block_tokens]]
        return [*self.allocator.get_all_free_pages().tolist(), *(page for page in cached if page not in held)]

    def check(self) -> None:
        """The tree's own check is valid only when nothing runs."""
        if not self.reqs:
            self.tree.sanity_check()

    def close(self) -> None:
        self.rows.close()


class SglangLostStep(Sglang):
    """As :class:`Sglang`, for an engine that may lose a scheduled step. SGLang loses none, so this adapter fails."""

    capabilities = (*Sglang.capabilities, "lost_step")

"""kvroute inside transformers' continuous batching (5.23), without a change to transformers.

Every finished request has routes: the experts of each of its tokens, captured while its KV was computed, and kept with
that KV wherever the engine moves it. The engine owns its blocks; it tells kvroute what happens to them:

what happens to a block   where transformers does it                        call to kvroute
------------------------  ------------------------------------------------  ------------------------------------------
it is given out           CachePool.get_free_blocks, the only way out       renew: nothing in it is readable
a pass writes it          write_index_storage of inputs_and_outputs         write_step
a fork copies it          CacheAllocator.copy_blocks                        copy: the same pairs
it is swapped to the CPU  OffloadingManager._offload_to_cpu                 swap_out: the block itself does not change
it is swapped back        OffloadingManager.restore_scheduled_requests      swap_in: into blocks that were given out
the weights change        nowhere: their owner calls it                     reset

No call is needed for a prefix hit (PagedAttentionCache.search_prefix_match), a duplicate block that is given up for its
twin (CacheAllocator.mark_complete_blocks) and the full blocks of a fork: they are block ids in one more request's
table, and the rows of a block are those of the pass that made its KV, for every reader. None is needed either for
blocks that become free (finish, cancellation, preemption): they keep their rows, as they keep their KV, until they are
given out again. After a soft reset the engine computes the request and its rows anew, in other blocks.

The block table of a request is CacheAllocator.block_table[request_id]. It is read when Scheduler.finish_request is
called, while those blocks are still the request's. A request that was cancelled or has failed leaves no routes.

Run it:  python examples/transformers_continuous_batching.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import kvroute
from kvroute.capture.capture import RoutingCapture

KIND = "full_attention"
logger = logging.getLogger(__name__)


class EmbeddedRoutes:
    """Fills ``routes``, by request id, with the routes of every request before ``manager`` returns its answer.

    Takes a manager that was not started; its engine is made here. Methods are wrapped on this engine's own objects:
    other managers do not change. On a GPU one launch at the end of a pass stores rows (``launched``; needs Triton), in
    CUDA graphs too; elsewhere the host takes them when the pass is over. Raises ``ConfigError`` for unsupported
    settings: async batching, whose passes overlap; compilation; CUDA graphs without ``launched``; and attention other
    than full, which has other blocks.

    With ``weights`` each request's :class:`kvroute.RoutingWeights` are in the attribute of that name, too: what its
    experts' outputs were summed by, beside their ids in one record of each block.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        namespace: kvroute.Namespace,
        memory: Literal["heap", "shared"] = "heap",
        launched: bool | None = None,
        weights: bool = False,
    ) -> None:
        config = manager.continuous_batching_config
        compiled = config.varlen_compile_config or config.decode_compile_config
        launched = manager.model.device.type == "cuda" if launched is None else launched
        if config.use_async_batching or compiled or (any(config.cuda_graph_booleans) and not launched):
            wanted = "no async batching or compilation, and CUDA graphs only where rows are launched"
            raise kvroute.ConfigError("continuous_batching_config", wanted, config)
        self.engine: Any = manager._create_batch_processor()
        manager.batch_processor = self.engine
        cache, swap = self.engine.cache, self.engine.offloading_manager
        if list(cache.cache_allocators) != [KIND]:
            raise kvroute.ConfigError("attention", KIND, ", ".join(cache.cache_allocators))
        self.allocator = cache.cache_allocators[KIND]
        self.namespace = namespace
        self.spec = kvroute.routing_spec_from_hf(manager.model.config, block_tokens=self.allocator.tokens_per_page)
        self.weights_spec = kvroute.routing_weights_spec(self.spec) if weights else None
        self.rows = kvroute.AuxBlocks(
            [self.spec] if self.weights_spec is None else [self.spec, self.weights_spec],
            blocks=(cache.num_sectors + cache.pool.num_reserved_sectors) * self.allocator.blocks_per_sector,
            host_blocks=swap._num_cpu_sectors * self.allocator.blocks_per_sector,
            namespace=namespace,
            memory=memory,
        )
        self.capture: Any = (
            self._launched(manager) if launched else RoutingCapture(manager.model, self.spec, self.weights_spec)
        )
        self.routes: dict[str, kvroute.Routes] = {}
        self.weights: dict[str, kvroute.RoutingWeights] = {}
        self.passes_without_rows = 0
        _wrap(cache.pool, "get_free_blocks", self._given_out)
        _wrap(self.allocator, "copy_blocks", self._copied)
        _wrap(swap, "_offload_to_cpu", self._swapped_out)
        _wrap(swap, "restore_scheduled_requests", self._swapped_in)
        _wrap(self.engine, "_generation_step", self._passed)
        _wrap(self.engine.scheduler, "finish_request", self._finished)
        manager.warmup()  # captures the graphs, with the launch in each; their tokens are padding

    def _launched(self, manager: ContinuousBatchingManager) -> Any:
        from kvroute.capture.launched import LaunchedCapture

        max_tokens = self.engine.cache.max_batch_tokens  # padded batches have no more
        stream = self.engine.inputs_and_outputs.compute_stream
        region = self.rows.region("device")
        return LaunchedCapture(manager.model, self.spec, region, max_tokens, stream=stream, weights=self.weights_spec)

    def reset(self, weights_version: int) -> None:
        """The weights have changed: call it inside ``manager.pause()``, or between sessions. No row is readable then.

        Blocks that transformers keeps for later prompts have KV of the old weights, so they are evicted. Blocks of
        running requests can still be hit; their rows are missing, as their KV is not of the new weights.
        """
        self.engine.cache.evict_cached_blocks()
        self.namespace = replace(self.namespace, weights_version=weights_version)
        self.rows.reset(weights_version=weights_version)

    def close(self) -> None:
        """Remove the model's hooks and free the memory; call it after the manager has stopped."""
        self.capture.close()
        self.rows.close()

    def _given_out(self, give: Callable[[int, int], list[int]], index: int, count: int) -> list[int]:
        blocks = give(index, count)
        if blocks:  # called for every token, mostly for no block
            self.rows.renew(blocks)
        return blocks

    def _copied(self, copy: Callable[..., None], sources: Sequence[int], targets: Sequence[int]) -> None:
        copy(sources, targets)
        self.rows.copy(_pairs(sources, targets))

    def _swapped_out(self, swap_out: Callable[..., set[str]], victims: list[Any], tables: dict[str, Any]) -> set[str]:
        """``tables`` are from before the victims' blocks became free; these have not been given out since."""
        swapped = swap_out(victims, tables)
        for request in swapped:
            self.rows.swap_out(_pairs(tables[request][KIND], self._host_blocks(request)))
        return swapped

    def _swapped_in(self, swap_in: Callable[[list[Any]], None], scheduled: list[Any]) -> None:
        """The requests have their new blocks already, perhaps more than before: pairs are made from the first on."""
        back = [each.state.request_id for each in scheduled if each.state.is_cpu_offloaded]
        pairs = [_pairs(self._host_blocks(request), self.allocator.block_table[request]) for request in back]
        swap_in(scheduled)
        for each in pairs:
            self.rows.swap_in(each)

    def _host_blocks(self, request: str) -> Sequence[int]:
        blocks: Sequence[int] = self.engine.offloading_manager._request_id_to_cpu_blocks[request][KIND]
        return blocks

    def _passed(self, forward: Callable[[Any], None], model: Any) -> None:
        """A pass writes its rows when it is over. Rows that could not be captured are missing, which is counted."""
        slots = self.slots(self.engine.inputs_and_outputs)
        try:
            with self.capture.step(self.rows.begin_step, slots):
                forward(model)
        except kvroute.KVRouteError as error:
            self.passes_without_rows += 1
            logger.warning("%d tokens stay without rows: %s", len(slots), error)

    def slots(self, io: Any) -> NDArray[np.int64]:
        """The slot of each token of a pass, ``[num_q_tokens]``: block * block_tokens + offset, -1 for padding.

        transformers counts in rows of its cache tensor. A block takes ``block_physical_stride`` of them: for each layer
        a page of keys and one of values. A token's write index is its row in the first of these pages. Padding goes to
        the reserved sectors, which come before every block that is given out. The decode path of flash attention has no
        write indices; there the slot follows from a request's table, which counts in pages, and the position of its one
        token.
        """
        tokens, stride = self.allocator.tokens_per_page, self.allocator.block_physical_stride
        slots = np.full(io.num_q_tokens, -1, np.int64)
        if io.use_block_table:
            count = io.num_request_in_batch
            at = io.position_ids[:count].numpy(force=True)
            first_pages = io.block_table[0, :count].numpy(force=True)[np.arange(count), at // tokens]
            slots[:count] = first_pages // (stride // tokens) * tokens + at % tokens
        else:
            written = io.write_index_storage[0, : io.num_q_tokens].numpy(force=True)
            real = written >= self.engine.cache.pool.num_reserved_sectors * self.allocator.blocks_per_sector * stride
            slots[real] = written[real] // stride * tokens + written[real] % stride
        return slots

    def _finished(self, finish: Callable[[str], None], request: str) -> None:
        """Also called for preempted requests, which have no blocks any more, and for failed ones."""
        state, table = self.engine.scheduler.active_requests.get(request), self.allocator.block_table.get(request)
        if state is not None and table and state.status.name == "FINISHED":
            rows = self.rows.read(self.spec.name, table, 0, state.current_len())
            version = self.namespace.weights_version
            self.routes[request] = kvroute.Routes.from_rows(self.spec, rows, weights_version=version, checked=True)
            if self.weights_spec is not None:
                weights = self.rows.read(self.weights_spec.name, table, 0, state.current_len())
                both = kvroute.RoutingWeights.from_rows(self.spec, rows, weights, weights_version=version, checked=True)
                self.weights[request] = both
        finish(request)


def _wrap(part: Any, method: str, around: Callable[..., Any]) -> None:
    """Calls of the method go to ``around``, which gets the engine's own method as its first argument."""
    setattr(part, method, partial(around, getattr(part, method)))


def _pairs(sources: Sequence[int], targets: Sequence[int]) -> NDArray[np.int64]:
    return np.array(list(zip(sources, targets, strict=False)), np.int64).reshape(-1, 2)


def small_manager(new_tokens: int) -> ContinuousBatchingManager:
    """A manager of a small model with seeded weights; not started."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=8, num_experts_per_tok=2))
    return model.init_continuous_batching(
        GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=64, use_cuda_graph=False),
    )


def main() -> None:
    manager = small_manager(new_tokens=12)
    embedded = EmbeddedRoutes(manager, kvroute.Namespace("tiny-qwen3-moe", weights_version=1))
    manager.start()
    waiting = set(manager.add_requests([[*range(2, 34), 50 + i] for i in range(4)]))
    while waiting and manager.is_running():
        if answer := manager.get_result(timeout=1):
            waiting.remove(answer.request_id)
            tokens = f"{len(answer.prompt_ids)} + {len(answer.generated_tokens)} tokens"
            print(answer.request_id, tokens, embedded.routes.pop(answer.request_id))
    manager.stop()
    embedded.close()


if __name__ == "__main__":
    main()

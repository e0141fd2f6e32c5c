"""The lives of vLLM's blocks: its pool and its manager tell the rows which blocks they give out, free and forget."""

from __future__ import annotations

from functools import partial
from typing import Any


def follow_pool(rows: Any, kv_cache_manager: Any) -> None:
    """Let ``rows`` hear of every block of this manager from here on; call it before the pool gives any out.

    Rows go with the blocks of one KV cache group. Blocks that the pool gives to other groups have no rows until they
    are given out again: their managers, whose calls alone take blocks from the pool, say that they are asking. Where a
    call of theirs is not known the block counts as one with rows, which costs memory and nothing else.
    """
    pool = kv_cache_manager.block_pool
    asking = list[Any]()  # managers of other groups

    def get_new_blocks(give: Any, num_blocks: int) -> Any:  # the pool's only exit
        blocks = give(num_blocks)
        ids = [block.block_id for block in blocks]
        if asking:
            rows.given_elsewhere(ids)
        else:
            rows.given(ids)
        return blocks

    def elsewhere(manager: Any, allocate: Any, *args: Any, **kwargs: Any) -> Any:
        asking.append(manager)
        try:
            return allocate(*args, **kwargs)
        finally:
            asking.pop()

    def blocks_of(name: str, first: int, last: int) -> list[int]:
        blocks = kv_cache_manager.get_blocks(name).blocks[rows.engine.group]
        return [block.block_id for block in blocks[first:last]]

    def reset_prefix_cache(forget: Any) -> bool:  # vLLM tells connectors of refused resets, too
        if done := forget():
            rows.reset()
        return bool(done)

    def freed(free: Any, request: Any) -> Any:
        if not request.is_finished():
            rows.preempted(request)
            if rows.field is not None:
                rows.field.preempted(request)
        return free(request)

    for number, manager in enumerate(kv_cache_manager.coordinator.single_type_managers):
        for name in ("allocate_new_blocks", "allocate_external_computed_blocks") if number != rows.engine.group else ():
            setattr(manager, name, partial(elsewhere, manager, getattr(manager, name)))
    for name in ("free", "pop_blocks_for_free"):
        setattr(kv_cache_manager, name, partial(freed, getattr(kv_cache_manager, name)))
    pool.get_new_blocks, rows.blocks_of = partial(get_new_blocks, pool.get_new_blocks), blocks_of
    pool.reset_prefix_cache = partial(reset_prefix_cache, pool.reset_prefix_cache)
    rows.blocks_followed = True


__all__ = ["follow_pool"]

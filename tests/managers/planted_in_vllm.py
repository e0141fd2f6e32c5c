"""vLLM's block manager with one fault each: a method of its block pool done wrong, the rest as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finding import Planted
from vllm_kv_cache_manager import Vllm, VllmWindow

from cache_manager.testing.life import CanaryKV

PLANTED: list[Planted] = []


def planted(reports: str, *claims: str, under: type[Vllm] = Vllm) -> Callable[[Callable[[Any], None]], None]:
    def register(plant: Callable[[Any], None]) -> None:
        def __init__(self: Vllm, kv: CanaryKV) -> None:  # noqa: N807 - of the class that is made below
            under.__init__(self, kv)
            plant(self.manager.block_pool)

        name = "".join(word.title() for word in plant.__name__.split("_"))
        adapter = type(name, (under,), {"__init__": __init__, "__doc__": plant.__doc__})
        PLANTED.append(Planted(adapter, reports, frozenset(claims)))

    return register


@planted("vllm#52234", "hit_is_its_prefix", "salts_apart", "hit_was_written", "reset_forgets", "no_unexpected_error")
def evicts_without_forgetting(pool: Any) -> None:
    """A block that is handed out again is still found under its old hash."""
    pool._maybe_evict_cached_block = lambda _block: False


@planted("vllm#42571", "none_free_and_held", "no_block_lost", "given_once", "no_unexpected_error")
def touches_without_taking(pool: Any) -> None:
    """A cached block that is hit stays in the queue of those that are handed out."""

    def touch(blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    pool.touch = touch


@planted("LMCache#1034", "refusal_changes_nothing", "no_block_lost", "ref_count_is_holders", "all_come_back")
def frees_all_but_the_last(pool: Any) -> None:
    """The last block of a table is forgotten when its sequence ends."""
    free_blocks = pool.free_blocks
    pool.free_blocks = lambda blocks: free_blocks(list(blocks)[1:])


@planted("kvcached PR398", "ids_are_blocks", "no_block_lost", "table_covers", "none_free_and_held", under=VllmWindow)
def frees_the_null_block(pool: Any) -> None:
    """The null block that stands for what the window has left is freed with the table, and handed out."""
    free_blocks = pool.free_blocks

    def free(blocks: Any) -> None:
        given = list(blocks)
        free_blocks(given)
        if any(block.is_null for block in given) and pool.null_block.prev_free_block is None:
            pool.free_block_queue.append(pool.null_block)

    pool.free_blocks = free


@planted("vllm#57727", "reset_forgets", "hit_is_its_prefix")
def resets_nothing(pool: Any) -> None:
    """The cache says that it was reset."""
    pool.reset_prefix_cache = lambda: True

"""transformers' block manager with one fault each: a method of its ledger done wrong, the rest as it is."""

from __future__ import annotations

from typing import Any

from finding import Planted
from transformers.generation.continuous_batching.cache_allocators import cache_allocator
from transformers_cache import Transformers, TransformersOffload

from cache_manager.testing.life import CanaryKV

Ledger = cache_allocator.BlockLedger


class KeepsTheHash(Ledger):
    """A block that goes straight back to the pool keeps its hash."""

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        known = self.block_to_hash.get(block_id)
        freed: bool = super().release(block_id, no_cache)
        if freed and known is not None:
            self.hash_to_block[known] = block_id
        return freed


class CountsAShareOnce(Ledger):
    """A third holder is not counted."""

    def acquire(self, block_id: int) -> None:
        if self.shared_ref_counts.get(block_id, 0) < 2:
            super().acquire(block_id)


def _planted(ledger: type[Any], reports: str, *claims: str, under: type[Transformers] = Transformers) -> Planted:
    def __init__(self: Transformers, kv: CanaryKV) -> None:  # noqa: N807 - of the class that is made below
        under.__init__(self, kv)
        self.allocator.ledger = ledger()

    adapter = type(ledger.__name__, (under,), {"__init__": __init__, "__doc__": ledger.__doc__})
    return Planted(adapter, reports, frozenset(claims))


PLANTED = [
    _planted(
        KeepsTheHash,
        "vllm#52234",
        "hit_is_its_prefix",
        "ids_are_blocks",
        "none_free_and_held",
        "ref_count_is_holders",
        "no_block_lost",
        "no_unexpected_error",
        "content_survives",
        "hit_was_written",
        under=TransformersOffload,
    ),
    _planted(CountsAShareOnce, "LMCache#1365", "ref_count_is_holders", "none_free_and_held", "no_block_lost"),
]

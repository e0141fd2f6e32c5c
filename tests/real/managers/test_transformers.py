"""transformers' block manager under the life-cycle kit: it keeps its blocks, and does not forget them."""

from __future__ import annotations

import pytest
import transformers_cache
from finding import check_found
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from cache_manager.testing.life import (
    BlockManagerAdapter,
    BlockManagerMachine,
    CanaryKV,
    InvariantBroken,
    Operation,
    replay,
)

EXAMPLES = 60  # a manager with its tensors takes 20 ms to make
FIRST = ("admit", "s1", [0, 1], 14, "", True, False)
AGAIN = ("admit", "s2", [0, 1, 0], 14, "", True, False)
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch, about their own configuration


class TestTransformers(BlockManagerMachine):
    adapter = transformers_cache.Transformers
    examples = EXAMPLES


class TestTransformersCacheReset(BlockManagerMachine):
    adapter = transformers_cache.TransformersCacheReset
    examples = EXAMPLES


class TestTransformersOffload(BlockManagerMachine):
    adapter = transformers_cache.TransformersOffload
    examples = 3 * EXAMPLES  # lives that swap out and come back are rare, and the kit fails without one


@pytest.mark.parametrize(
    ("adapter", "invariant", "story"),
    [
        (
            transformers_cache.TransformersSession,
            "reset_forgets",
            [FIRST, ("reset", True), AGAIN],
        ),
        (
            transformers_cache.TransformersPause,
            "reset_forgets",
            [FIRST, ("reset", False), AGAIN],
        ),
        (
            transformers_cache.TransformersClearedSession,
            "no_block_lost",
            [FIRST, ("reset", True)],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_stories_of_the_page_of_proofs_are_true(
    adapter: type[BlockManagerAdapter], invariant: str, story: list[Operation]
) -> None:
    """Goal: docs/proofs.md is true of this version. Method: its stories. If a story no longer breaks anything,
    transformers was repaired, and the page has to say so."""
    with pytest.raises(InvariantBroken, match=invariant):
        replay(adapter, story)


class KeepsTheHash(cache_allocator.BlockLedger):
    """A block that goes straight back to the pool keeps its hash."""

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        known = self.block_to_hash.get(block_id)
        freed: bool = super().release(block_id, no_cache)
        if freed and known is not None:
            self.hash_to_block[known] = block_id
        return freed


class Planted(transformers_cache.TransformersOffload):
    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        self.allocator.ledger = KeepsTheHash()


def test_a_planted_fault_is_found() -> None:
    """Goal: the adapter hides no fault. Method: one of vllm#52234's kind in transformers' own ledger. Which claim finds
    it depends on the order of the operations."""
    found = "hit_is_its_prefix ids_are_blocks none_free_and_held ref_count_is_holders no_block_lost no_unexpected_error"
    check_found(Planted, {*found.split(), "content_survives", "hit_was_written"})

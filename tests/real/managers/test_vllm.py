"""vLLM's block manager under the life-cycle kit; run by `make test-managers`, where vLLM is."""

from __future__ import annotations

import pytest
import vllm_kv_cache_manager
from finding import check_found

from cache_manager.testing.life import BlockManagerMachine, CanaryKV, InvariantBroken, replay


class TestVllm(BlockManagerMachine):
    adapter = vllm_kv_cache_manager.Vllm


class TestVllmWindow(BlockManagerMachine):
    adapter = vllm_kv_cache_manager.VllmWindow


def test_a_block_is_found_before_it_is_computed() -> None:
    """Goal: docs/proofs.md is true of this version. Method: its story of a step that was scheduled and never ran."""
    story = [
        ("admit", "s1", [0], 14, "", True, False),
        ("lose", "s1", [0]),
        ("admit", "s2", [0, 0, 0], 14, "", True, False),
    ]
    with pytest.raises(InvariantBroken, match="hit_was_written"):
        replay(vllm_kv_cache_manager.VllmLostStep, story)


class EvictsWithoutForgetting(vllm_kv_cache_manager.Vllm):
    """A block that is handed out again is still found under its old hash."""

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        self.manager.block_pool._maybe_evict_cached_block = lambda _block: False


def test_a_planted_fault_is_found() -> None:
    """Goal: the adapter hides no fault. Method: one of vllm#52234's kind in vLLM's own block pool. Which claim finds it
    depends on the order of the operations."""
    found = "hit_is_its_prefix salts_apart hit_was_written reset_forgets no_unexpected_error"
    check_found(EvictsWithoutForgetting, found.split())

"""vLLM's block manager under the life-cycle kit; run by `make test-managers`, where vLLM is."""

from __future__ import annotations

import pytest
import vllm_kv_cache_manager
from finding import Planted, check_found
from planted_in_vllm import PLANTED

from cache_manager.testing.life import BlockManagerMachine, InvariantBroken, replay


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


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Planted) -> None:
    """Goal: the kit would find other faults, too, if vLLM had them. Method: a fault planted in vLLM's own block
    pool."""
    check_found(fault.adapter, fault.claims)

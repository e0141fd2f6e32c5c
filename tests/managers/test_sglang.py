"""SGLang's radix tree and allocator under the life-cycle kit; run by `make test-sglang`, where SGLang is."""

from __future__ import annotations

import pytest
import sglang_radix_cache
from finding import Planted, check_found
from planted_in_sglang import PLANTED

from cache_manager.testing.life import BlockManagerMachine, InvariantBroken, replay


class TestSglang(BlockManagerMachine):
    adapter = sglang_radix_cache.Sglang


def test_a_page_is_published_before_it_is_computed() -> None:
    """Goal: docs/proofs.md is true of this version. Method: its story of a step that was scheduled and never ran."""
    story = [
        ("admit", "s1", [0], 14, "", True, False),
        ("lose", "s1", [0]),
        ("admit", "s2", [0, 0, 0], 14, "", True, False),
    ]
    with pytest.raises(InvariantBroken, match="hit_was_written"):
        replay(sglang_radix_cache.SglangLostStep, story)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Planted) -> None:
    """Goal: the kit would find other faults, too, if SGLang had them. Method: a fault in SGLang's classes, or in the
    rows'."""
    check_found(fault.adapter, fault.claims)

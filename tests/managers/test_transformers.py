"""transformers' block manager under the life-cycle kit: it keeps its blocks, and does not forget them."""

from __future__ import annotations

import pytest
import transformers_cache
from finding import Planted, check_found
from planted_in_transformers import PLANTED

from cache_manager.testing.life import BlockManagerAdapter, BlockManagerMachine, InvariantBroken, Operation, replay

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


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Planted) -> None:
    """Goal: the kit would find other faults, too, if transformers had them. Method: a fault planted in transformers'
    own classes."""
    check_found(fault.adapter, fault.claims)

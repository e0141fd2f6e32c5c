"""How a planted fault is found: by the kit's default budget, in few operations that break it again."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from cache_manager.testing.life import BlockManagerAdapter, InvariantBroken, Operation, prove, replay

EXAMPLES, STEPS, SEED = 300, 50, 0  # what `kvroute prove` plays by itself
OPERATIONS_MAX = 12  # of a planted fault's story


def check_found(adapter: type[BlockManagerAdapter], claims: Collection[str]) -> list[Operation]:
    """Assert that one of ``claims`` finds the fault, in a short story that breaks a claim again when replayed; return
    the finding."""
    with pytest.raises(InvariantBroken) as caught:
        prove(adapter, examples=EXAMPLES, steps=STEPS, seed=SEED)
    assert caught.value.name in claims, caught.value
    assert len(caught.value.program) <= OPERATIONS_MAX, caught.value
    with pytest.raises(InvariantBroken, match=caught.value.name):
        replay(adapter, caught.value.program)
    return caught.value.program

"""How a planted fault is found: by the kit's default budget, and told by a line that plays it again."""

from __future__ import annotations

import pytest
from planted_managers import Planted

from cache_manager.testing.life import InvariantBroken, prove, replay

EXAMPLES, STEPS, SEED = 300, 50, 0  # what `kvroute prove` plays by itself
OPERATIONS_MAX = 12


def check_found(fault: Planted) -> InvariantBroken:
    """Found by an invariant that it breaks, in a short story, which is one again when it is played from its line."""
    with pytest.raises(InvariantBroken) as caught:
        prove(fault.adapter, examples=EXAMPLES, steps=STEPS, seed=SEED)
    assert caught.value.name in fault.claims
    assert len(caught.value.program) <= OPERATIONS_MAX
    line = str(caught.value).partition('--replay "')[2].partition('"')[0]
    with pytest.raises(InvariantBroken, match=caught.value.name):
        replay(fault.adapter, line)
    return caught.value

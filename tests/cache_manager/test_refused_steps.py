"""Passes whose step is refused, and slots that are dropped from one: the pass writes its KV all the same.

So the earlier rows of those blocks are missing, rows of other steps that claimed them are late, and no device's row is
taken for another row.
"""

from __future__ import annotations

import numpy as np
import pytest
from blocks_house import TOKENS, House, slots

from cache_manager.errors import BlockBusyError, SlotError


@pytest.fixture
def full():
    """As many steps in place as there may be, over blocks 4 and 5, whose devices are late; block 0 and 1 have rows."""
    made = House(steps_max=2)
    made.engine.renew(range(6))
    made.late = [made.engine.begin_step(slots(block), in_place=True) for block in (4, 5)]
    yield made
    made.close()


def fill(house: House, block: int, who: str) -> np.ndarray:
    """Rows in a block, though the steps in flight are as many as there may be."""
    house.late.pop().abort()
    rows = house.fill(block, who)
    house.late.append(house.engine.begin_step(slots(5), in_place=True))
    return rows


UNREADABLE = {
    "half": np.array([0.5]),
    "not a number": np.array([np.nan, 1.0]),
    "text": ["1"],
    "nothing": None,
    "ragged": [[0, 1], [2]],
    "a mask": np.array([True, False]),
}


@pytest.mark.parametrize("given", [slots(0)[1:3], [1, 2], np.array([[1], [2]]), np.array([1.0, 2.0], np.float32)])
@pytest.mark.parametrize("call", ["write_step", "begin_step"])
def test_the_former_rows_of_a_pass_that_is_refused_are_missing(full, call: str, given) -> None:
    """Goal: a row of one pass never lies beside the KV of the next. Method: rows of a pass; a second pass over two of
    the block's slots is one step too many, or has slots of another type."""
    fill(full, 0, "first")
    before = full.engine.counters.bad_writes_dropped
    if call == "write_step":
        assert full.engine.write_step(given, {"routing": full.rows("second", 2)}) == 0
    else:
        with pytest.raises((BlockBusyError, SlotError)):
            full.engine.begin_step(given)
    assert full.valid(0) == [False] * TOKENS
    assert full.engine.counters.bad_writes_dropped == before + 2


@pytest.mark.parametrize("given", UNREADABLE.values(), ids=UNREADABLE)
def test_where_the_slots_of_a_pass_cannot_be_read_no_row_of_before_is(house, given) -> None:
    """Goal: as above, where it is unknown which blocks the pass has written. Method: slots that name no block; later
    steps work again."""
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "first")
    engine.swap_out([(0, 1)])
    assert engine.write_step(given, {"routing": house.rows("second")}) == 0
    assert house.valid(0) == house.valid(1) == [False] * TOKENS
    assert house.valid(1, "host") == [True] * TOKENS, "which no pass writes"
    assert engine.counters.bad_writes_dropped > 0
    house.fill(0, "third")

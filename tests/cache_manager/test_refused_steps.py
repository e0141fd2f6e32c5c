"""Passes whose step is refused, and slots that are dropped from one: the pass writes its KV all the same.

So what lay in their blocks is missing, what else steps have claimed there is late, and no row of a
device is taken for another.
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
    """Goal: no row of one pass beside the KV of the next. Method: rows of a pass; a second pass over two of the
    block's slots is one step too many, or has slots of another type."""
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
    """Goal: as above; nobody knows which blocks the pass has written. Method: slots that name none; then all is well
    again."""
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "first")
    engine.swap_out([(0, 1)])
    assert engine.write_step(given, {"routing": house.rows("second")}) == 0
    assert house.valid(0) == house.valid(1) == [False] * TOKENS
    assert house.valid(1, "host") == [True] * TOKENS, "which no pass writes"
    assert engine.counters.bad_writes_dropped > 0
    house.fill(0, "third")


def test_steps_in_place_that_never_end_cost_the_rows_of_other_passes_until_they_are_ended(full) -> None:
    """Goal: what happens then is known: rows are missing and counted, none is wrong, and it can be mended. Method:
    passes while both steps are open; one of them is ended by way of `steps` when its device is done."""
    engine, before = full.engine, full.engine.counters.bad_writes_dropped
    for n in range(3):
        assert engine.write_step(slots(0), {"routing": full.rows(f"pass {n}")}) == 0
        assert not engine.read("routing", [0]).valid.any()
    assert engine.counters.bad_writes_dropped == before + 3 * TOKENS
    assert engine.steps == full.late
    engine.steps[0].abort()
    full.fill(0, "afterwards")


# ---------------------------------------------------------------- slots that are dropped


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_dropped_slot_that_a_device_writes_is_fenced_until_its_step_has_ended(house, end: str) -> None:
    """Goal: `no_late_device_write_lands_among_valid_rows`. Method: a step in place over a block that was not given out;
    it is given out, filled in every way, and then the device gets to it."""
    engine = house.engine
    engine.renew([0, 2])
    house.fill(2, "source")
    key = engine.keys.key(None, [1])
    engine.persist({key: 2}, engine.generations([2]))
    engine.swap_out([(2, 0)])
    both = np.arange(2 * TOKENS)
    late = engine.begin_step(both, in_place=True)
    assert engine.counters.bad_writes_dropped == TOKENS
    engine.renew([1])
    assert engine.write_step(slots(1), {"routing": house.rows("next")}) == 0
    engine.copy([(2, 1)])
    engine.swap_in([(0, 1)])
    assert engine.restore({key: 1}, engine.generations([1])) == {key: False}
    assert house.valid(1) == [False] * TOKENS
    made = house.rows("late", 2 * TOKENS)
    house.device_writes(both, made)
    assert house.valid(1) == [False] * TOKENS
    late.wrote("routing")
    if end == "commit":
        assert late.commit() == TOKENS
        assert house.holds(0, made[:TOKENS]), "what the step has claimed is its own"
    else:
        late.abort()
    house.fill(1, "afterwards")

"""Where a pass cannot be followed no row of before is readable beside its KV: the loss is counted, or raised."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
from amid import amid_a_call
from blocks_house import TOKENS, House, slots
from unreadable import UNREADABLE, Refusing

from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, RowError


def test_a_mistake_inside_a_forward_pass_is_dropped_counted_and_logged_once(house, caplog) -> None:
    """Goal: a set that is not strict never raises. Method: each mistake; the valid rows of the same call land."""
    engine = house.engine
    engine.renew([0])
    mistakes = (
        (np.array([0, 999, 1]), 2, "outside"),
        (np.array([-7, 0]), 1, "negative"),
        (np.array([0, 1, 0]), 1, "twice: nobody knows which of the two has its KV there"),
        (np.array([0, 20]), 1, "never given out"),
    )
    with caplog.at_level(logging.WARNING):
        for at, landed, _ in mistakes:
            assert engine.write_step(at, {"routing": house.rows("x", at.size)}) == landed
        assert engine.write_step(slots(0), {"routing": house.rows("x", 2)}) == 0
        assert engine.write_step(slots(0), {"nothing": house.rows("x")}) == 0
        assert engine.write_step(np.array([0.5]), {"routing": house.rows("x", 1)}) == 0
    assert engine.counters.bad_writes_dropped == 5 + 4 + 4 + 1
    (line,) = (message for message in caplog.messages if "bad_writes_dropped" in message)
    assert line.startswith("begin_step: wanted slots of the pool, each once, in blocks that were given out")
    assert engine.in_flight == 0


@pytest.mark.parametrize("given", UNREADABLE.values(), ids=UNREADABLE)
def test_where_the_slots_of_a_pass_cannot_be_read_no_row_of_before_is(house, given) -> None:
    """Goal: a row of one pass never lies beside the KV of the next, where it is unknown which blocks that has written.
    Method: slots that name no block; later steps work again."""
    engine = house.engine
    engine.renew([0, 2])
    for block in (0, 2):
        house.fill(block, "first")
    engine.swap_out([(0, 1)])
    with pytest.raises(InvalidInputError, match="slots: wanted a flat array of integers"):
        engine.begin_step(given)
    assert house.valid(0) == house.valid(2) == [False] * TOKENS
    for block in (0, 2):
        house.fill(block, "second")
    assert engine.write_step(given, {"routing": house.rows("third")}) == 0
    assert house.valid(0) == house.valid(2) == [False] * TOKENS
    assert house.valid(1, "host") == [True] * TOKENS, "which no pass writes"
    assert engine.counters.bad_writes_dropped > 0
    house.fill(0, "fourth")


@pytest.mark.parametrize("call", ["begin_step", "copy"])
def test_an_error_that_nobody_expects_leaves_no_row_of_before(house, call: str) -> None:
    """Goal: as above. Method: an error at each conversion that is none of numpy's."""
    house.engine.renew([0])
    house.fill(0, "first")
    with pytest.raises(OSError, match="not on this machine"):
        getattr(house.engine, call)(Refusing(OSError))
    assert house.valid(0) == [False] * TOKENS


class Interrupted:
    """Integers whose first conversion ends with Ctrl-C."""

    def __init__(self, values: object) -> None:
        self.values = np.array(values)
        self.conversions = 0

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        self.conversions += 1
        if self.conversions == 1:
            raise KeyboardInterrupt
        return self.values


@pytest.mark.parametrize("call", ["begin_step", "write_step", "copy", "swap_in"])
def test_an_interrupted_call_leaves_no_row_of_before(house, call: str) -> None:
    """Goal: whatever ends the call, the engine's pass or copy has run or will. Method: Ctrl-C amid the conversion."""
    engine = house.engine
    engine.renew([0])
    house.fill(0, "first")
    named = slots(0) if call.endswith("step") else [(1, 0)]
    arguments = (Interrupted(named), {}) if call == "write_step" else (Interrupted(named),)
    with pytest.raises(KeyboardInterrupt):
        getattr(engine, call)(*arguments)
    assert house.valid(0) == [False] * TOKENS


def test_a_pass_that_is_refused_inside_another_call_leaves_no_row_of_before(house) -> None:
    """Goal: as above, where the loss cannot even be recorded. Method: a signal handler begins a step, with slots that
    name no block, while a call of its own thread has the lock."""
    house.engine.renew([0])
    house.fill(0, "first")

    def handler() -> None:
        with pytest.raises(BlockBusyError):
            house.engine.begin_step([0.5])

    amid_a_call(house.engine, handler)
    assert house.valid(0) == [False] * TOKENS
    house.fill(0, "second")


def test_a_step_after_the_end_is_counted(caplog) -> None:
    """Goal: rows that land nowhere are not lost in silence. Method: steps of a set that is closed, and of a forked
    child's copy."""
    for strict in (True, False):
        engine = House(strict=strict).engine
        engine.renew([0])
        engine.close()
        for n in (1, 2):
            if strict:
                with pytest.raises(BlockStateError, match="wanted one that is open"):
                    engine.write_step(np.array(slots(0)), {})
            else:
                assert engine.write_step(np.array(slots(0)), {}) == 0
            assert engine.counters.bad_writes_dropped == n * TOKENS
    assert len(caplog.records) == 2
    engine = House().engine
    if not (child := os.fork()):
        landed = engine.write_step(np.array(slots(0)), {})
        os._exit(0 if landed == 0 and engine.counters.bad_writes_dropped == TOKENS else 1)
    assert os.waitpid(child, 0)[1] == 0
    engine.close()


def test_a_step_in_place_waits_for_the_device_of_the_one_before_it(house) -> None:
    """Goal: a late device fences its block. Method: the block's next life, also one written in place, commits first."""
    engine = house.engine
    engine.renew([1])
    late = engine.begin_step(slots(1)[:2], in_place=True)
    engine.renew([1])
    step = engine.begin_step(slots(1), in_place=True)
    step.wrote("routing")
    assert step.commit() == 2
    assert house.valid(1) == [False, False, True, True]
    assert late.commit() == 0


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 2, 9)], ids=["padding left out", "longer rows"])
def test_rows_are_as_many_as_the_slots_that_the_step_began_with(house, shape) -> None:
    """Goal: the error names the shape that the caller knows, and padding may hold anything. Method: a step with padding
    is written with rows of two other shapes, then with a row that fits no spec at the padding."""
    engine = house.engine
    engine.renew([0])
    rows = house.rows("x", 3)
    with engine.begin_step(np.array([1, -1, 2])) as step:
        with pytest.raises(RowError, match=rf"wanted shape \(3, .*got shape \({shape[0]}, {shape[1]}"):
            step.write("routing", np.zeros(shape, np.uint8))
        padded = rows.astype(np.int64)
        padded[1] = 1 << 40
        step.write("routing", padded)
    read = engine.read("routing", [0])
    assert read.valid.tolist() == [False, True, True, *[False] * (TOKENS - 3)]
    assert np.array_equal(read.values[1:3], rows[[0, 2]])

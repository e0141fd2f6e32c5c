"""AuxBlocks by example: each hazard of blocks that an engine gives out again whenever it likes."""

from __future__ import annotations

import numpy as np
import pytest
from blocks_house import SPEC, TOKENS, slots
from origins_of import origins_of

from cache_manager.feed import BlockFeed
from cache_manager.move import Move, split_pairs
from cache_manager.mover import RowsMover

# ---------------------------------------------------------------- devices that write late


@pytest.mark.parametrize("ends", ["before the commit", "after the commit"])
@pytest.mark.parametrize("renewed", [True, False])
def test_a_late_device_write_is_never_taken_for_a_row_of_the_next_step(house, ends: str, renewed: bool) -> None:
    """Goal: `no_late_device_write_lands_among_valid_rows`. Method: the device writes over what the next step copied."""
    engine, raw = house.engine, house.engine.region("device").rows
    engine.renew([1])
    late = engine.begin_step(slots(1)[:2], in_place=True)
    late.wrote("routing")
    if renewed:
        engine.renew([1])
    step = engine.begin_step(slots(1))
    step.write("routing", house.rows("mine"))
    raw[1, : 2 * SPEC.row_nbytes] = 0xEE  # the device is late
    if ends == "before the commit":
        late.commit()
    assert step.commit() == 2
    if ends == "after the commit":
        assert late.commit() == 0
    read = engine.read("routing", [1])
    assert read.valid.tolist() == [False, False, True, True]
    assert np.array_equal(read.values[2:], house.rows("mine")[2:])
    assert engine.counters.late_writes_dropped == 4
    house.fill(1, "afterwards")


def test_devices_that_write_in_order_lose_nothing(house) -> None:
    """Goal: overlapped steps of one device. Method: two steps in place on one slot, committed in order."""
    engine, raw = house.engine, house.engine.region("device").rows
    engine.renew([1])
    first, second = (engine.begin_step(slots(1)[:n], in_place=True) for n in (1, 2))
    raw[1, : 2 * SPEC.row_nbytes] = house.rows("device", 2).reshape(-1)
    for step, landed in ((first, 0), (second, 2)):
        step.wrote("routing")
        assert step.commit() == landed
    assert house.valid(1) == [True, True, False, False]


def test_a_step_in_place_waits_for_the_device_of_the_one_before_it(house) -> None:
    """Goal: the fence of a device that is late. Method: a block's next life, in place too, commits first."""
    engine = house.engine
    engine.renew([1])
    late = engine.begin_step(slots(1)[:2], in_place=True)
    engine.renew([1])
    step = engine.begin_step(slots(1), in_place=True)
    step.wrote("routing")
    assert step.commit() == 2
    assert house.valid(1) == [False, False, True, True]
    assert late.commit() == 0


def test_nothing_is_filled_while_a_device_may_write_it(house) -> None:
    """Goal: the same for copies, swaps and restores. Method: each of them into a block of a step in place."""
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "source")
    key = engine.keys.key(None, [1])
    engine.persist({key: 0}, engine.generations([0]))
    engine.swap_out([(0, 2)])
    late = engine.begin_step(slots(1)[:1], in_place=True)
    engine.renew([1])
    engine.copy([(0, 1)])
    engine.swap_in([(2, 1)])
    assert engine.restore({key: 1}, engine.generations([1])) == {key: False}
    assert house.valid(1) == [False] * TOKENS
    assert engine.counters.bad_moves_dropped == 2
    late.commit()
    assert engine.restore({key: 1}, engine.generations([1])) == {key: True}


# ---------------------------------------------------------------- moves beside steps


def test_a_row_that_is_committed_while_its_block_is_copied_does_not_come_along(house) -> None:
    """Goal: a valid row at the target is one that was copied. Method: a step commits when the bytes are copied."""
    engine = house.engine
    engine.renew([0, 1])
    engine.write_step(slots(0)[:2], {"routing": house.rows("early", 2)})
    step = engine.begin_step(slots(0)[2:])

    class Slow(RowsMover):
        __slots__ = ()

        def copy(self, *arguments) -> None:
            super().copy(*arguments)
            step.write("routing", house.rows("late", 2))
            step.commit()

    table = engine._device
    mover = Slow(table.region, None, None)
    ids = split_pairs([(0, 1)], table, table)
    Move(engine._books, table, table, *ids, mover=mover, beside_steps=True).commit()
    assert house.valid(0) == [True] * TOKENS
    assert house.valid(1) == [True, True, False, False]


def test_a_bad_pair_costs_its_target_and_no_other(house) -> None:
    """Goal: KV that was copied over has no rows of before. Method: a source that was never given out."""
    engine = house.engine
    engine.renew([0, 1, 2])
    rows = house.fill(0, "source")
    house.fill(1, "one")
    house.fill(2, "two")
    engine.copy([(5, 1), (0, 2)])
    assert house.valid(1) == [False] * TOKENS
    assert house.holds(2, rows)
    assert engine.counters.bad_moves_dropped == 1
    engine.copy([(0, 9)])
    assert engine.counters.bad_moves_dropped == 2


def test_a_backup_leaves_the_source_as_it_is(house) -> None:
    engine = house.engine
    engine.renew([0, 1])
    rows = house.fill(0, "mine")
    engine.swap_out([(0, 2)])
    assert house.holds(0, rows)
    engine.swap_in([(2, 1)])
    assert house.holds(1, rows)
    assert engine.origins([0]) == engine.origins([1]) == engine.origins([2], "host")


# ---------------------------------------------------------------- the store


@pytest.mark.parametrize("between", ["renew", "reset", "same weights", "copy", "gap", "write", "cancel"])
def test_rows_that_come_late_land_in_nothing_that_has_changed(house, between: str) -> None:
    """Goal: a restore lands in the block that it was begun for. Method: change the block while the store reads."""
    engine = house.engine
    engine.renew([0, 1, 2])
    rows = house.fill(0, "stored")
    key = engine.keys.key(None, [1])
    engine.persist({key: 0}, engine.generations([0]))
    job = engine.begin_restore({key: 1}, engine.generations([1]))
    house.gate.settle([job])
    if between == "renew":
        engine.renew([1])
    elif between == "reset":
        engine.reset(weights_version=2)
    elif between == "same weights":
        engine.reset(weights_version=1)
    elif between == "copy":
        engine.copy([(2, 1)])  # KV without rows
    elif between == "gap":
        feed = BlockFeed(blocks=6)
        feed.renew([5])
        feed.take()
        feed.renew([5])
        engine.apply(feed.take())
    elif between == "write":
        engine.begin_step(slots(1)[:1]).abort()  # its KV was written, its rows were lost
    else:
        job.cancel()
    house.gate.open()
    assert job.wait(60.0)
    assert job.result() == {key: False}
    assert house.valid(1) == [False] * TOKENS
    dropped = engine.counters.late_restores_dropped + engine.counters.cancelled_restores_dropped
    assert dropped == 1
    if between in ("copy", "gap", "renew"):
        engine.renew([1])
        assert engine.restore({key: 1}, engine.generations([1])) == {key: True}
        assert house.holds(1, rows)


def test_nothing_is_pinned_while_it_is_stored_and_what_was_there_is_stored(house) -> None:
    """Goal: an engine never waits. Method: renew and write the block while the store is at work on its rows."""
    engine = house.engine
    engine.renew([0])
    rows = house.fill(0, "first")
    origin = engine.origins([0])[0]
    key = engine.keys.key(None, [1])
    job = engine.begin_persist({key: 0}, engine.generations([0]))
    house.gate.settle([job])
    engine.renew([0])
    house.fill(0, "second")
    house.gate.open()
    assert job.wait(60.0)
    assert job.result() == {key: origin}
    engine.renew([3])
    assert engine.restore({key: 3}, engine.generations([3])) == {key: True}
    assert house.holds(3, rows)


def test_a_block_of_another_life_is_not_stored_under_the_key_of_the_first(house) -> None:
    engine = house.engine
    engine.renew([0])
    life = engine.generations([0])
    house.fill(0, "a")
    engine.renew([0])
    house.fill(0, "b")
    key = engine.keys.key(None, [1])
    assert engine.persist({key: 0}, life) == {key: 0}
    assert engine.stored([key]) == [False]
    assert engine.counters.stale_blocks == 1


def test_rows_of_another_computation_do_not_come_beside_loaded_kv(house) -> None:
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "a")
    key, origin = engine.keys.key(None, [1]), engine.origins([0])[0]
    engine.persist({key: 0}, engine.generations([0]))
    lives = engine.generations([1])
    assert engine.restore({key: 1}, lives, {key: origin ^ 1}) == {key: False}
    assert engine.restore({key: 1}, lives, {}) == {key: False}, "KV of which nothing is known"
    assert engine.counters.blocks_of_another_origin_not_restored == 2
    assert engine.restore({key: 1}, lives, {key: origin}) == {key: True}


def test_what_is_written_after_a_block_was_stored_is_another_computation_s(house) -> None:
    """Goal: the stored rows' origin names them alone. Method: a row is written again; both are restored elsewhere."""
    engine = house.engine
    engine.renew([0, 1])
    stored = house.fill(0, "first")
    key, life = engine.keys.key(None, [1]), engine.generations([0])
    origin = engine.persist({key: 0}, life)[key]
    assert origin == origins_of(engine, [0])[0]
    assert engine.write_step(slots(0)[:1], {"routing": house.rows("second", 1)}) == 1
    assert engine.origins([0])[0] not in (0, origin)
    assert engine.restore({key: 1}, engine.generations([1]), {key: engine.origins([0])[0]}) == {key: False}
    assert engine.restore({key: 1}, engine.generations([1]), {key: origin}) == {key: True}
    assert house.holds(1, stored)


def test_rows_do_not_come_back_beside_kv_that_came_from_elsewhere(house) -> None:
    """Goal: the name of KV that an engine was sent counts, whoever restores. Method: another name, then the rows'."""
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "a")
    key, (origin,), lives = engine.keys.key(None, [1]), engine.origins([0]), engine.generations([1])
    engine.persist({key: 0}, engine.generations([0]))
    assert engine.bind_origin(1, int(lives[0]), origin ^ 1, TOKENS)
    assert engine.restore({key: 1}, lives) == {key: False}
    assert engine.counters.blocks_of_another_origin_not_restored == 1
    assert engine.bind_origin(1, int(lives[0]), origin, TOKENS)
    assert engine.restore({key: 1}, lives) == {key: True}


def test_rows_do_not_come_back_over_rows(house) -> None:
    """Goal: nobody writes bytes that a reader may be reading. Method: two restores of a block, the second one late."""
    engine = house.engine
    engine.renew([0, 1])
    rows = house.fill(0, "a")
    key = engine.keys.key(None, [1])
    engine.persist({key: 0}, engine.generations([0]))
    lives = engine.generations([1])
    house.gate.open()
    jobs = [engine.begin_restore({key: 1}, lives) for _ in range(2)]
    assert all(job.wait(30) for job in jobs)
    assert [job.result() for job in jobs] == [{key: True}, {key: False}]
    assert engine.counters.late_restores_dropped == 1
    assert house.holds(1, rows)

"""AuxBlocks by example: each hazard of blocks that an engine gives out again whenever it likes."""

from __future__ import annotations

import numpy as np
import pytest
from blocks_house import TOKENS, House, slots
from kv import SlotKV
from origins_of import origins_of

from cache_manager.errors import InvalidInputError, StorageError


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


def test_what_a_device_may_have_written_over_is_given_up(house) -> None:
    """Goal: no bytes of a device under the rows of a step. Method: a later step copies its rows, then the device of the
    earlier one writes and ends; then the later one commits."""
    engine = house.engine
    engine.renew([1])
    early = engine.begin_step(slots(1)[:2], in_place=True)
    step = engine.begin_step(slots(1))
    step.write("routing", house.rows("copied"))
    house.device_writes(slots(1)[:2], house.rows("late", 2))
    early.abort()
    assert step.commit() == 2
    assert house.valid(1) == [False, False, True, True]


def test_a_value_that_does_not_fit_is_an_error_and_never_another_value(house) -> None:
    """Goal: int8 -1 is not 255. Method: wider and signed rows with one value outside."""
    engine = house.engine
    engine.renew([0])
    for value, dtype in ((-1, np.int8), (256, np.int16)):
        step = engine.begin_step(slots(0))
        rows = np.zeros((TOKENS, 3, 2), dtype)
        rows[1, 1, 1] = value
        with pytest.raises(InvalidInputError, match="routing"):
            step.write("routing", rows)
        step.commit()
        assert not engine.read("routing", [0]).valid.any()


# ---------------------------------------------------------------- moves beside steps


@pytest.mark.parametrize("change", ["renew", "write", "forget", "reset", "gone"])
@pytest.mark.parametrize("at", ["source", "target"])
def test_what_changes_in_mid_move_does_not_arrive(house, change: str, at: str) -> None:
    """Goal: rows and origin that arrive are those of the KV that was copied. Method: something becomes of
    the source, or of the target, when its bytes have been copied; beside it a pair of which nothing becomes."""
    engine, block = house.engine, {"source": 0, "target": 1}[at]
    engine.renew([0, 1, 2, 3])
    house.fill(0, "moved")
    other = house.fill(2, "beside")
    changes = {
        "renew": lambda: engine.renew([block]),
        "write": lambda: engine.write_step(slots(block)[:1], {"routing": house.rows("new", 1)}),
        "forget": lambda: engine.forget([block]),
        "reset": lambda: engine.reset(weights_version=1),
        "gone": lambda: engine.write_step(slots(block).astype(np.float64), {}),
    }
    with house.when_copied(changes[change]):
        engine.copy([(2, 3), (0, 1)])
    given_out_where_nothing_happens = change == "renew" and at == "target"
    assert house.valid(1) == [given_out_where_nothing_happens] * TOKENS, "it is not given out while it is filled"
    if not given_out_where_nothing_happens:
        source, target = origins_of(engine, [0, 1])
        assert target == 0 or target != source
    if change != "reset":
        assert house.holds(3, other)
    engine.assert_consistent()


@pytest.mark.parametrize("change", ["forgotten", "a pass begins", "forgotten and named again"])
def test_a_source_without_rows_that_changes_in_mid_move_names_nothing(house, change: str) -> None:
    """Goal: the same where no row tells of the change. Method: KV that has a name and no rows; it is forgotten, or some
    of it is written, when it has been copied. The other half: nothing becomes of it."""
    engine = house.engine
    (life, _) = engine.renew([0, 1]).tolist()
    assert engine.bind_origin(0, life, 77, TOKENS)

    def changes() -> None:
        if change == "a pass begins":
            engine.begin_step([3])
            return
        engine.forget([0])
        if change == "forgotten and named again":
            engine.bind_origin(0, life, 77, TOKENS)

    with house.when_copied(changes):
        engine.copy([(0, 1)])
    assert origins_of(engine, [1]) == [0]
    for step in engine.steps:
        step.abort()
    engine.forget([0])
    assert engine.bind_origin(0, life, 77, TOKENS)
    engine.copy([(0, 1)])
    assert origins_of(engine, [0, 1]) == [77, 77]


def test_a_second_move_into_a_block_is_dropped(house) -> None:
    """Goal: no bytes of one move under the rows of another. Method: a move of two blocks; between them another thread
    would copy into the second. Then the copy is made again."""
    engine = house.engine
    engine.renew(range(6))
    rows = [house.fill(block, f"block {block}") for block in (0, 2, 3)]
    with house.when_copied(lambda: engine.copy([(2, 1)])):
        engine.copy([(3, 4), (0, 1)])
    assert engine.counters.bad_moves_dropped == 1
    assert house.holds(4, rows[2])
    assert house.valid(1) == [False] * TOKENS
    engine.copy([(2, 1)])
    assert house.holds(1, rows[1])


def test_a_move_that_fails_brings_nothing_and_keeps_nothing() -> None:
    """Goal: a move succeeds whole or leaves its targets without rows. Method: the KV's copy fails; then all goes on."""
    kv = SlotKV(6, 3, TOKENS)
    house = House(kv=kv)
    house.engine.renew([0, 1])
    rows = house.fill(0, "mine")
    house.fill(1, "before")
    kv.fail_next = StorageError
    with pytest.raises(StorageError, match="on purpose"):
        house.engine.copy([(0, 1)])
    assert not any(house.valid(1))
    assert origins_of(house.engine, [1]) == [0]
    assert house.engine.in_flight == 0
    house.engine.assert_consistent()
    assert house.engine.renew([1]).tolist() == [2]
    house.engine.copy([(0, 1)])
    assert house.holds(1, rows)
    house.close()


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


def test_rows_of_another_computation_do_not_come_beside_loaded_kv(house) -> None:
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "a")
    key, origin = engine.keys.key(None, [1]), engine.origins([0])[0]
    engine.persist({key: 0}, engine.generations([0]))
    lives = engine.generations([1])
    engine.name_origins([1], lives, np.array([origin ^ 1], np.uint64))
    assert engine.restore({key: 1}, lives) == {key: False}
    engine.name_origins([1], lives, np.array([origin], np.uint64))
    assert engine.restore({key: 1}, lives) == {key: True}


def test_rows_do_not_come_back_beside_kv_that_came_from_elsewhere(house) -> None:
    """Goal: the name of KV that an engine was sent counts, whoever restores. Method: another name, then the rows'."""
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "a")
    key, (origin,), lives = engine.keys.key(None, [1]), engine.origins([0]), engine.generations([1])
    engine.persist({key: 0}, engine.generations([0]))
    assert engine.bind_origin(1, int(lives[0]), origin ^ 1, TOKENS)
    assert engine.restore({key: 1}, lives) == {key: False}
    assert engine.counters.absent_blocks_not_restored == 1
    assert engine.bind_origin(1, int(lives[0]), origin, TOKENS)
    assert engine.restore({key: 1}, lives) == {key: True}

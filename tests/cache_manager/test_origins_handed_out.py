"""An origin that was handed out ends: what a step writes or commits from then on is another computation's.

Somebody keeps KV beside the number that `origins` has answered. Rows of a later pass over the same block, in the same
life, must not come back beside it.
"""

from __future__ import annotations

import numpy as np
import pytest
from blocks_house import TOKENS, House, slots
from origins_of import origins_of

from cache_manager.errors import InvalidInputError


@pytest.mark.parametrize("asked", ["in the pass", "after the pass"])
@pytest.mark.parametrize("end", ["commit", "abort", "reject"])
def test_rows_of_a_second_pass_do_not_come_back_beside_the_kv_of_the_first(house, asked: str, end: str) -> None:
    """Goal: rows of the pass that made the KV. Method: KV and origin leave in or after a first pass, however it ends; a
    second pass in the same life, which is stored; a restore by the first name and by the second."""
    engine, origin = house.engine, 0
    house.gate.open()
    lives, key = engine.renew([0]), house.key
    step = engine.begin_step(slots(0))
    step.write("routing", house.rows("first"))
    if asked == "in the pass":
        (origin,) = engine.origins([0])
    if end == "abort":
        step.abort()
    else:
        step.commit(np.full(TOKENS, end == "commit"))
    if asked == "after the pass":
        (origin,) = engine.origins([0])
    second = house.fill(0, "second")
    stored = engine.persist({key: 0}, lives)[key]
    assert stored not in (0, origin)
    assert not house.brings(1, origin)
    assert house.valid(1) == [False] * TOKENS
    assert house.brings(1, stored)
    assert house.holds(1, second)


def test_what_is_asked_after_the_commit_names_what_is_stored(house) -> None:
    """Goal: the other half: nothing is lost where nothing is written after. Method: origins twice, persist, restore."""
    engine = house.engine
    house.gate.open()
    lives, key = engine.renew([0]), house.key
    rows = house.fill(0, "mine")
    (origin,) = engine.origins([0])
    assert engine.origins([0, 0]) == [origin, origin]
    assert engine.persist({key: 0}, lives) == {key: origin}
    assert house.brings(1, origin)
    assert house.holds(1, rows)
    assert engine.origins([5]) == [0], "where nothing was written"


@pytest.mark.parametrize("late", ["stale", "incomplete"])
def test_a_persist_that_stores_nothing_leaves_no_origin_open(house, late: str) -> None:
    """Goal: the same where a persist was asked in between. Method: one of an older life, or of a block that misses a
    row: it answers 0, and the first name stays that of the first pass alone."""
    engine = house.engine
    house.gate.open()
    lives, key = engine.renew([0]), house.key
    engine.write_step(slots(0), {"routing": house.rows("first")}, np.arange(TOKENS) < TOKENS - (late == "incomplete"))
    (origin,) = engine.origins([0])
    assert engine.persist({key: 0}, lives - (late == "stale")) == {key: 0}
    house.fill(0, "second")
    assert engine.persist({key: 0}, lives)[key] not in (0, origin)
    assert not house.brings(1, origin)


def test_what_leaves_while_a_step_is_in_flight_is_not_what_the_step_commits(house) -> None:
    """Goal: KV of before the pass has another name than the rows after it. Method: a block with rows is computed again;
    in mid-pass its origin is asked, and its old rows cross to another process."""
    engine = house.engine
    (life,) = engine.renew([0]).tolist()
    house.fill(0, "first")
    for leave in (
        lambda: engine.origins([0])[0],
        lambda: engine.export({house.key: 0}, [life], [3])[0].origin,
    ):
        step = engine.begin_step([3])
        step.write("routing", house.rows("second")[3:])
        left = leave()
        assert left
        assert step.commit() == 1
        assert origins_of(engine, [0])[0] not in (0, left)
        assert engine.read("routing", [0]).valid.all()


def test_late_rows_land_beside_no_kv_that_was_computed_here(house) -> None:
    """Goal: a name that has ended says nothing of who has computed. Method: one token's KV has come; the next one is
    computed here and its row rejected; the origin is asked; then rows of both come."""
    sender, engine = House(), house.engine
    lives = sender.engine.renew([2])
    sender.fill(2, "P")
    (record,) = sender.engine.export({sender.key: 2}, lives)
    header, payload = record.seal(), record.payload
    sender.close()
    (life,) = engine.renew([0]).tolist()
    assert engine.bind_origin(0, life, header.origin, 1)
    engine.write_step([1], {"routing": house.rows("D", 1)}, np.array([False]))
    assert engine.origins([0]) != [header.origin]
    assert engine.install(0, life, header, payload) == 1
    assert house.valid(0) == [True, False, False, False]
    assert engine.bind_origin(0, life, header.origin, 1), "which is known"
    assert house.valid(0) == [True, False, False, False]


def test_asking_for_what_is_no_block_ends_nothing(house) -> None:
    engine = house.engine
    engine.renew([0])
    house.fill(0, "first")
    (before,) = origins_of(engine, [0])
    with pytest.raises(InvalidInputError, match="blocks: wanted device block ids"):
        engine.origins([0, 99])
    engine.write_step([0], {"routing": house.rows("second", 1)})
    assert origins_of(engine, [0]) == [before]

"""An origin that was handed out ends: what a step writes or commits from then on is another computation's.

Somebody keeps KV beside the number that `origins` has answered. Rows of a later pass over the same block, in the same
life, must not come back beside it.
"""

from __future__ import annotations

import numpy as np
import pytest

from canary import canary_rows
from blocks_house import TOKENS, House, slots
from origins_of import origins_of

from cache_manager.errors import InvalidInputError
from cache_manager.storage import open_store

ALL = list(range(4))


@pytest.fixture
def aux():
    made = new_aux(open_store("memory:?capacity=1MiB"), "heap")
    yield made
    made.close()


def rows_of(who: str) -> np.ndarray:
    return canary_rows(SPEC, [(who, i) for i in range(4)])


def brings(house: House, origin: int, key, block: int) -> bool:
    """Whether the rows that are stored under the key come back beside KV of the origin, into a block given out anew."""
    lives = house.engine.renew([block])
    return house.engine.restore({key: block}, lives, {key: origin})[key]


@pytest.mark.parametrize("asked", ["in the pass", "after the pass"])
@pytest.mark.parametrize("end", ["commit", "abort", "reject"])
def test_rows_of_a_second_pass_do_not_come_back_beside_the_kv_of_the_first(house, asked: str, end: str) -> None:
    """Goal: rows of the pass that made the KV. Method: KV and origin leave in or after a first pass, however it ends; a
    second pass in the same life, which is stored; a restore by the first name and by the second."""
    engine, origin = house.engine, 0
    house.gate.open()
    lives, key = engine.renew([0]), engine.keys.key(None, [1])
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
    assert not brings(house, origin, key, 1)
    assert house.valid(1) == [False] * TOKENS
    assert brings(house, stored, key, 1)
    assert house.holds(1, second)


def test_what_is_asked_after_the_commit_names_what_is_stored(house) -> None:
    """Goal: the other half: nothing is lost where nothing is written after. Method: origins twice, persist, restore."""
    engine = house.engine
    house.gate.open()
    lives, key = engine.renew([0]), engine.keys.key(None, [1])
    rows = house.fill(0, "mine")
    (origin,) = engine.origins([0])
    assert engine.origins([0, 0]) == [origin, origin]
    assert engine.persist({key: 0}, lives) == {key: origin}
    assert brings(house, origin, key, 1)
    assert house.holds(1, rows)
    assert engine.origins([5]) == [0], "where nothing was written"


@pytest.mark.parametrize("late", ["stale", "incomplete"])
def test_a_persist_that_stores_nothing_leaves_no_origin_open(house, late: str) -> None:
    """Goal: the same where a persist was asked in between. Method: one of an older life, or of a block that misses a
    row: it answers 0, and the first name stays that of the first pass alone."""
    engine = house.engine
    house.gate.open()
    lives, key = engine.renew([0]), engine.keys.key(None, [1])
    engine.write_step(slots(0), {"routing": house.rows("first")}, np.arange(TOKENS) < TOKENS - (late == "incomplete"))
    (origin,) = engine.origins([0])
    assert engine.persist({key: 0}, lives - (late == "stale")) == {key: 0}
    house.fill(0, "second")
    assert engine.persist({key: 0}, lives)[key] not in (0, origin)
    assert not brings(house, origin, key, 1)


def test_blocks_with_owners_keep_the_same_law(aux) -> None:
    """Goal: as above. Method: one row is rejected, the KV is kept; the whole block is computed again and stored."""
    aux.allocate([0], "a")
    key = aux.keys.key(None, ALL)
    with aux.step(ALL) as step:
        step.write("routing", rows_of("first"))
        step.commit(np.array([True, True, True, False]))
    (origin,) = aux.origins([0])
    assert aux.persist({key: 0}, owner="a") == {key: 0}, "it is not whole"
    with aux.step(ALL) as step:
        step.write("routing", rows_of("second"))
    stored = aux.persist({key: 0}, owner="a")[key]
    assert stored == aux.origins([0])[0] not in (0, origin)
    aux.allocate([1], "b")
    assert aux.restore({key: 1}, owner="b", origins={key: origin}) == {key: False}
    aux.free("b")
    aux.allocate([1], "b")
    assert aux.restore({key: 1}, owner="b", origins={key: stored}) == {key: True}
    assert np.array_equal(aux.read("routing", [1], owner="b").values, rows_of("second"))


def test_what_leaves_while_a_step_is_in_flight_is_not_what_the_step_commits(aux) -> None:
    """Goal: KV of before the pass has another name than the rows after it. Method: a block with rows is computed again;
    in mid-pass its origin is asked, and its old rows cross to another process."""
    fill(aux, [0], "first", "a")
    key = aux.keys.key(None, ALL)
    for leave in (
        lambda: aux.origins([0])[0],
        lambda: aux.export({key: 0}, [3], owner="a").records[0].origin,
    ):
        step = aux.begin_step([3])
        step.write("routing", rows_of("second")[3:])
        left = leave()
        assert left
        assert step.commit() == 1
        assert origins_of(aux, [0])[0] not in (0, left)
        assert aux.read("routing", [0]).valid.all()


def test_late_rows_land_beside_no_kv_that_was_computed_here(aux) -> None:
    """Goal: a name that has ended says nothing of who has computed. Method: one token's KV has come; the next one is
    computed here and its row rejected; the origin is asked; then rows of both come."""
    sender = new_aux(open_store("memory:?capacity=1MiB"), "heap")
    fill(sender, [2], "P", "p")
    key = sender.keys.key(None, ALL)
    with sender.export({key: 2}, owner="p") as export:
        (record,) = export.records
        header, payload = record.seal(), bytes(record.payload)
        del record
    sender.close()
    aux.allocate([0], "a")
    (life,) = aux.generations([0]).tolist()
    assert aux.bind_origin(0, life, header.origin, 1)
    with aux.step([1]) as step:
        step.write("routing", rows_of("D")[:1])
        step.commit(np.array([False]))
    assert aux.origins([0]) != [header.origin]
    assert aux.install(0, life, header, payload) == 1
    assert aux.read("routing", [0]).valid.tolist() == [True, False, False, False]
    assert aux.bind_origin(0, life, header.origin, 1), "which is known"
    assert aux.read("routing", [0]).valid.tolist() == [True, False, False, False]


def test_asking_for_what_is_no_block_ends_nothing(aux) -> None:
    fill(aux, [0], "first", "a")
    (before,) = origins_of(aux, [0])
    with pytest.raises(InvalidInputError, match="blocks: wanted device block ids"):
        aux.origins([0, 99])
    with aux.step([0]) as step:
        step.write("routing", rows_of("second")[:1])
    assert origins_of(aux, [0]) == [before]

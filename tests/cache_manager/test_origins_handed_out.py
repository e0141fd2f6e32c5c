"""An origin ends when it is handed out: rows that a step writes or commits later belong to another computation.

An outside store keeps KV beside the number that `origins` has answered. Rows of a later pass over the same block, in
the same life, must not come back beside it.
"""

from __future__ import annotations

import numpy as np
from blocks_house import House
from origins_of import origins_of


def test_what_leaves_while_a_step_is_in_flight_is_not_what_the_step_commits(house) -> None:
    """Goal: KV from before the pass has another name than the rows from after it. Method: a block with rows is computed
    again; in mid-pass its origin is requested, and its old rows cross to another process."""
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
    """Goal: an origin that has ended does not prove who computed the rows. Method: one token's KV has come; the next
    one is computed here and its row rejected; the origin is asked; then rows of both come."""
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

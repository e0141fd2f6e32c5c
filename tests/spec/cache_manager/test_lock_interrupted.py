"""The lock is free and the books are in order, wherever a call is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from blocks_house import House, slots
from stopped import EVERY, is_stopped
from waiting import GIVE_UP_S

from cache_manager.feed import BlockFeed


def _calls(house: House) -> dict[str, Callable[[], object]]:
    engine = house.engine
    lives = engine.renew(range(5))
    for block in range(4):
        house.fill(block, f"block {block}")
    engine.swap_out([(2, 1)])
    (record,) = engine.exchange.export({house.key: 3}, lives[3:4])
    header, payload = record.seal(), record.payload
    step = engine.begin_step(slots(1))
    step.write("routing", house.rows("new"))
    feed = BlockFeed(6)
    feed.renew([0, 1])
    feed.copy([(3, 0)])
    batch = feed.take()
    engine.persist({house.key: 3}, lives[3:4])
    return {
        "renew": lambda: engine.renew([0, 5]),
        "forget": lambda: engine.forget([0, 1]),
        "reset": lambda: engine.reset(weights_version=2),
        "step": lambda: engine.write_step(slots(0), {"routing": house.rows("new")}),
        "bad step": lambda: engine.write_step(np.array([0, 1, 1, 99]), {"routing": house.rows("new")}),
        "refused step": lambda: engine.write_step(slots(0) * 1.0, {"routing": house.rows("new")}),
        "commit": lambda: step.commit(np.array([True, False, True, True])),
        "abort": step.abort,
        "copy": lambda: engine.copy([(3, 0), (2, 1)]),
        "swap out": lambda: engine.swap_out([(3, 0)]),
        "swap in": lambda: engine.swap_in([(1, 4)]),
        "persist": lambda: engine.persist({engine.keys.key(None, [9]): 3}, lives[3:4]),
        "restore": lambda: engine.restore({house.key: 4}, lives[4:]),
        "install": lambda: engine.exchange.install(4, int(lives[4]), header, payload),
        "bind": lambda: engine.exchange.bind_origin(0, int(lives[0]), 77),
        "origins": lambda: engine.exchange.origins([0, 3]),
        "export": lambda: engine.exchange.export({house.key: 3}, lives[3:4]),
        "read": lambda: engine.read("routing", [0, 1, 2]),
        "feed": lambda: engine.apply(batch),
    }


def _names() -> list[str]:
    house = House()
    house.gate.open()
    names = list(_calls(house))
    house.close()
    return names


@pytest.mark.parametrize("name", _names())
def test_a_call_that_is_interrupted_leaves_nothing_wrong_and_nothing_taken(name: str) -> None:
    """Goal: whatever a signal handler raises in the middle of a call, the lock is free, the books are in order, and
    each readable row is one that was written. Method: each call, interrupted at each possible place."""
    at, stopped = 1, True
    while stopped:
        house = House()
        house.gate.open()
        stopped = is_stopped(_calls(house)[name], at)
        _check_what_is_left(house, f"{name}, interrupted at place {at}")
        at += EVERY
    assert at > EVERY + 1, "it was never interrupted"


def _check_what_is_left(house: House, when: str) -> None:
    engine, answered = house.engine, []
    other = threading.Thread(target=lambda: answered.append(engine.generations([0])), daemon=True)
    other.start()
    other.join(GIVE_UP_S)
    assert answered, f"{when}: the lock was left taken"
    engine.assert_consistent()
    written = {row.tobytes() for who in ("new", *(f"block {b}" for b in range(4))) for row in house.rows(who)}
    for tier, blocks in (("device", 6), ("host", 3)):
        read = engine.read("routing", range(blocks), tier=tier)
        assert {row.tobytes() for row in read.values[read.valid]} <= written, when
    for job in engine.jobs:
        job.cancel()
        assert job.wait(GIVE_UP_S), f"{when}: a job is left"
    for step in engine.steps:
        step.abort()
    assert engine.in_flight == 0, when
    engine.renew([4])
    assert house.holds(4, house.fill(4, "afterwards")), when
    house.close()

"""The tables of a set and its keys are of one namespace."""

from __future__ import annotations

from blocks_house import House
from stopped import is_stopped


def test_after_a_reset_that_is_interrupted_regions_and_keys_are_of_one_namespace() -> None:
    """Goal: a view of the old weights reads no row of the new ones. Method: a reset interrupted at each place, and then
    any call."""
    house, at, stopped = House(memory="shared"), 1, True
    engine = house.engine
    while stopped:
        at += 1
        stopped = is_stopped(lambda: engine.reset(weights_version=at), at)  # noqa: B023
        engine.renew([0])
        found = {engine.region(tier).namespace for tier in ("device", "host")}
        assert found == {engine.namespace.fingerprint}, f"interrupted at place {at}"
    house.close()


def test_a_read_after_an_interrupted_call_finds_nothing() -> None:
    """Goal: rows from before a change that is half done are not handed out, though reads copy without the lock.
    Method: a reset interrupted at each place, and a read of each tier that names no generations."""
    at, stopped = 1, True
    while stopped:
        house = House()
        house.engine.renew(range(3))
        house.fill(2, "before")
        house.engine.swap_out([(2, 1)])
        stopped = is_stopped(lambda: house.engine.reset(weights_version=2), at)  # noqa: B023
        left = [house.engine.read("routing", range(3), tier=tier).valid.any() for tier in ("host", "device")]
        house.engine.generations([0])
        is_half_done = house.engine.counters.interrupted_calls > 0
        assert left == [False, False] or not is_half_done, f"interrupted at place {at}"
        house.close()
        at += 1

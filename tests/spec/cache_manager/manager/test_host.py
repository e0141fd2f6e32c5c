"""Sequences that go to the host and come back."""

from __future__ import annotations

import pytest
from house import House

from cache_manager.errors import TransferProcessError


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


@pytest.mark.parametrize("when", ["fail_next", "fail_after"])
@pytest.mark.parametrize("call", ["append", "preempt", "resume"])
def test_a_move_that_a_lost_process_fails_is_no_room_now(when, call) -> None:
    """Goal: the call answers False, and every block is where it was. Method: a KV whose copy fails at once, or half
    way; then the same call again. The kit tests the same with exceptions."""
    tokens = list(range(100, 114))
    house = House(device=8, host=4)
    house.run("a", tokens)
    if call == "resume":
        assert house.manager.preempt("a")
    elif call == "append":
        house.manager.fork("a", "child")
    calls = {
        "append": lambda: house.manager.append("a", 15),
        "preempt": lambda: house.manager.preempt("a"),
        "resume": lambda: house.manager.resume("a"),
    }
    before = house.state()
    setattr(house.kv, when, TransferProcessError)
    assert calls[call]() is False
    assert house.manager.counters.moves_failed == 1
    assert house.state() == before
    assert house.has_kv_of("a", tokens)
    assert calls[call]() is True
    assert house.has_kv_of("a", tokens)
    assert house.has_rows_of("a", "x", 14)
    house.close()


def test_what_has_come_back_is_found_under_its_own_keys(house) -> None:
    """Goal: a resumed block has the key of its own content. Method: swap out and in, then ask for prefixes of it."""
    tokens = list(range(14))
    house.run("a", tokens)
    assert house.manager.preempt("a")
    house.run("b", list(range(100, 132)))  # all eight blocks: nothing of "a" is left on the device
    house.manager.free("b")
    assert house.manager.resume("a")
    assert house.manager.allocate("c", tokens[:9]).cached_tokens == 8
    assert house.manager.table("c")[:2] == house.manager.table("a")[:2]
    assert house.has_kv_of("c", tokens[:8])
    assert house.has_rows_of("c", "x", 8)
    assert house.manager.allocate("d", tokens[4:]).cached_tokens == 0

"""What a block manager asks of its store: damage, a store that hangs, one with a bug, and answers that come late."""

from __future__ import annotations

import pytest
from canary import canary_rows
from house import LIMITS, PROMPT, SPEC, House
from waiting import GIVE_UP_S


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


def test_a_flipped_bit_is_a_miss_and_is_counted(house) -> None:
    """Goal: stored bytes are never served unverified. Method: flip each of some bits in what the store returns."""
    house.run("a", PROMPT)
    for n, bit in enumerate((0, 7, 100, 511), 1):
        assert house.persist("a") == 2
        house.manager.free("a")
        house.manager.reset(weights_version=0)  # memory is forgotten, the store is not
        house.store.flip_next = bit
        assert house.run("a", PROMPT) == 0
        assert house.aux.counters.corrupt_blocks_not_restored == n
        house.store.flip_next = None


def test_a_store_with_too_much_to_do_is_asked_for_nothing() -> None:
    """Goal: waiting jobs are limited. Method: one more sequence is stored, and one more admitted, than jobs are
    allowed."""
    house = House(device=12, shut=True)
    for n in range(LIMITS.jobs_max + 1):
        house.run(f"a{n}", [100 * n + i for i in range(9)])
    begun = [house.manager.begin_persist(f"a{n}") for n in range(LIMITS.jobs_max + 1)]
    assert begun == [True] * LIMITS.jobs_max + [False]
    house.manager.free("a0")
    assert house.manager.begin_allocate("b", [7] * 9).pending is False
    assert house.manager.counters.jobs_refused == 2
    assert house.manager.in_flight == LIMITS.jobs_max
    house.close()


def test_a_bug_in_the_store_is_raised_and_the_sequence_goes_on(house, monkeypatch) -> None:
    """Goal: no sequence waits for ever. Method: a store raises what no store may; poll raises, and then answers."""
    house.run("a", PROMPT)
    assert house.persist("a") == 2
    house.manager.free("a")
    house.manager.reset(weights_version=0)

    def wrong(*_):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(house.store, "get_into", wrong)
    assert house.manager.begin_allocate("b", PROMPT).pending
    assert house.aux.jobs.wait(GIVE_UP_S)
    with pytest.raises(ZeroDivisionError):
        house.manager.poll()
    assert house.manager.poll()["b"].cached_tokens == 0
    monkeypatch.undo()
    house.compute("b", PROMPT)
    assert house.manager.allocate("c", PROMPT).cached_tokens == 8
    rows = house.manager.read("routing", "c", 0, 8)
    assert (rows.values == canary_rows(SPEC, [("x", p) for p in range(8)])).all()


@pytest.mark.parametrize("successor", [False, True])
def test_what_the_store_brings_to_a_sequence_that_has_ended_is_found_by_nobody(house, successor: bool) -> None:
    """Goal: no block is found by keys of a sequence that has given it back. Method: a restore lands, and its sequence
    ends, or another one has its name, before the manager looks; another sequence then has its blocks, and its prompt
    is asked for again."""
    house.run("a", PROMPT)
    assert house.persist("a") == 2
    house.manager.free("a")
    house.manager.reset(weights_version=0)
    assert house.manager.begin_allocate("b", PROMPT).pending
    assert house.aux.jobs.wait(GIVE_UP_S)
    assert [job.over for job in house.aux.jobs.poll()] == [True]
    house.manager.free("b")
    other = [50 + token for token in PROMPT]
    house.manager.allocate("b" if successor else "c", other, restore=False)
    assert house.manager.poll() == {}
    again = house.manager.allocate("d", PROMPT, restore=False)
    assert again is not None
    assert again.cached_tokens == 0

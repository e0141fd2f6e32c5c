"""Jobs of a block manager by example: a store that hangs, loses or fails costs a cache, and no block."""

from __future__ import annotations

import pytest
from gate import until
from job_house import PROMPT, ManagerHouse

from cache_manager.errors import StorageError
from cache_manager.stored import JobLimits


@pytest.fixture
def house():
    house = ManagerHouse()
    yield house
    house.gate.open()
    house.aux.close()


@pytest.mark.parametrize("policy", ["gate", "mask"])
def test_kv_of_older_weights_that_comes_late_counts_for_nothing(policy) -> None:
    """Goal: a weight update between asking and landing. Method: reset while the store is at work; with each policy."""
    house = ManagerHouse(policy=policy)
    manager = house.manager
    house.run("a", PROMPT)
    assert manager.persist("a") == 2
    house.forget()
    manager.free("a")
    assert manager.begin_allocate("b", PROMPT).pending
    house.settle()
    manager.reset(weights_version=2)
    house.gate.open()
    assert manager.drain(60.0)
    assert manager.poll()["b"].cached_tokens == 0
    assert not house.aux.read("routing", manager.table("b")).valid.any()
    manager.free("b")
    manager.assert_consistent()
    house.aux.close()


def test_a_sequence_that_ends_while_it_is_restored_cancels_that(house) -> None:
    house.run("a", PROMPT)
    house.manager.persist("a")
    house.manager.free("a")
    house.forget()
    house.manager.begin_allocate("b", PROMPT)
    house.settle()
    house.manager.free("b")
    (job,) = house.aux.jobs
    assert job.cancelled
    assert house.manager.free_device_blocks == 6, "the store may still fill two"
    house.manager.assert_consistent()
    house.let_go()  # the rows' store
    house.let_go()  # the KV's, which is asked by the same call of the mover
    assert house.manager.poll() == {}
    assert house.manager.free_device_blocks == 8


def test_rows_and_kv_come_together_or_not_at_all(house) -> None:
    """Goal: with ``gate``, no row without its KV. Method: lose the KV of the second block, and then fail it all."""
    house.run("a", PROMPT)
    assert house.manager.persist("a") == 2
    keys = house.aux.keys.keys(PROMPT[:8])
    house.forget()
    house.manager.free("a")
    del house.kv.stored[keys[1]]
    admission = house.manager.begin_allocate("b", PROMPT)
    assert (admission.pending, admission.cached_tokens) == (True, 0)
    house.let_go()
    house.let_go()
    assert house.manager.poll()["b"].restored_tokens == 4
    valid = house.aux.read("routing", house.manager.table("b")).valid
    assert valid.tolist() == [True] * 4 + [False] * 8
    house.manager.free("b")
    house.forget()
    house.manager.begin_allocate("c", PROMPT)
    house.let_go()
    house.kv.fail_next = StorageError
    house.let_go()
    assert house.manager.poll()["c"].restored_tokens == 0
    assert not house.aux.read("routing", house.manager.table("c")).valid.any()
    assert house.manager.counters.store_failures == 1
    house.manager.free("c")
    house.manager.assert_consistent()


def test_a_store_that_hangs_while_it_stores_keeps_half_of_the_blocks_at_most(house) -> None:
    """Goal: blocks to compute with. Method: sequences that end one after another, none of which is ever stored."""
    begun = []
    for n in range(3):
        house.run(f"a{n}", [100 * n + i for i in range(9)])
        begun.append(house.manager.begin_persist(f"a{n}"))
        house.manager.free(f"a{n}")
        house.manager.assert_consistent()
    assert begun == [True, True, False]
    assert house.manager.free_device_blocks == 4
    assert house.manager.counters.errands_refused == 1
    for _ in range(4):
        house.let_go()
    assert house.manager.drain(60.0)
    assert house.manager.counters.persisted_blocks == 4
    assert house.manager.free_device_blocks == 8


def test_a_lone_persist_that_hangs_keeps_half_of_the_blocks_at_most(house) -> None:
    """Goal: as above, for one sequence that alone is more than half. Method: six of eight blocks, never stored."""
    prompt = list(range(25))
    house.run("a", prompt)
    assert house.manager.begin_persist("a")
    house.manager.free("a")
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == 4
    assert house.manager.counters.errands_cut == 1
    assert house.manager.begin_allocate("b", list(range(100, 116))) is not None
    for _ in range(2):
        house.let_go()
    assert house.manager.drain(60.0)
    keys = house.aux.keys.keys(prompt)
    assert house.aux.stored(keys) == [True] * 4 + [False] * 2, "its first blocks"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(25, 3), (17, 9), (9, 9, 5), (5, 5, 5, 5)])
def test_restores_that_hang_and_are_abandoned_keep_half_of_the_blocks_at_most(threads: int, lengths) -> None:
    """Goal: blocks to compute with. Method: abandon restores while every thread of the store hangs in one of them."""
    house = ManagerHouse(JobLimits(threads_max=threads))
    prompts = {f"a{n}": [100 * n + i for i in range(length)] for n, length in enumerate(lengths)}
    for owner, prompt in prompts.items():
        house.run(owner, prompt)
        house.manager.persist(owner)
        house.manager.free(owner)
    house.forget()
    begun = [owner for owner, prompt in prompts.items() if house.manager.begin_allocate(owner, prompt)]
    assert len(begun) == len(lengths)
    working = min(threads, len(house.aux.jobs))
    assert working
    until(lambda: house.gate.waiting == working, "a store thread neither works nor waits")
    for owner in begun:
        house.manager.free(owner)
    assert len(house.aux.jobs) == working, "queued ones are over at once"
    assert house.manager.free_device_blocks >= 4
    house.manager.assert_consistent()
    assert house.manager.begin_allocate("b", list(range(1000, 1016))) is not None
    house.gate.open()
    assert house.manager.drain(60.0)
    house.manager.free("b")
    assert house.manager.free_device_blocks == 8
    house.aux.close()


def test_a_restore_that_is_cut_brings_the_first_blocks_and_the_rest_is_computed(house) -> None:
    prompt = list(range(25))
    house.run("a", prompt)
    assert house.manager.persist("a") == 6, "who waits himself is not cut"
    house.manager.free("a")
    house.forget()
    assert house.manager.begin_allocate("b", prompt).pending
    house.gate.open()
    assert house.manager.drain(60.0)
    admission = house.manager.poll()["b"]
    assert (admission.cached_tokens, admission.restored_tokens, len(admission.blocks)) == (16, 16, 7)
    assert house.manager.counters.errands_cut == 1
    house.manager.free("b")
    house.forget()
    assert house.manager.allocate("c", prompt).restored_tokens == 24, "who waits himself is not cut"


def test_a_persist_leaves_room_for_the_end_of_a_restore(house) -> None:
    """Goal: as above, of both kinds. Method: persist beside a restore that is abandoned only then."""
    prompt = list(range(13))
    house.run("a", prompt)
    house.manager.persist("a")
    house.manager.free("a")
    house.forget()
    assert house.manager.begin_allocate("b", prompt).pending
    house.settle()
    house.run("c", list(range(100, 109)))
    assert house.manager.begin_persist("c")
    assert house.manager.counters.errands_cut == 1
    house.manager.free("b")
    house.manager.free("c")
    assert house.manager.free_device_blocks == 4
    house.gate.open()
    assert house.manager.drain(60.0)


def test_blocks_that_two_sequences_share_are_pinned_once(house) -> None:
    """Goal: what a group of samples has in common costs one share. Method: a fork, stored like its parent."""
    house.run("a", list(range(17)))
    house.manager.fork("a", "b")
    assert house.manager.begin_persist("a")
    assert house.manager.begin_persist("b")
    assert (house.manager.counters.errands_cut, house.manager.counters.errands_refused) == (0, 0)
    house.run("c", list(range(100, 105)))
    assert not house.manager.begin_persist("c")
    house.gate.open()
    assert house.manager.drain(60.0)

"""Jobs by example: what a slow, hung, failing or full store does to those who do not wait for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from canary import canary_rows
from job_house import SPEC, JobHouse

from cache_manager.errors import BlockBusyError, BlockStateError, ConfigError, InvalidInputError
from cache_manager.stored import JobLimits, Phase
from cache_manager.spec import RecordLayout


@pytest.fixture
def house():
    house = JobHouse()
    yield house
    house.gate.open()
    house.aux.close()


def test_a_job_too_many_is_refused_and_changes_nothing(house) -> None:
    """Goal: full is a normal result. Method: fill the queue by number, then by bytes, with a store that hangs."""
    for block in range(4):
        house.fill(block, "a")
    keys = [house.aux.keys.key(None, [n]) for n in range(4)]
    jobs = [house.aux.begin_persist({keys[n]: n}, owner="a") for n in range(3)]
    assert None not in jobs
    assert house.aux.begin_persist({keys[3]: 3}, owner="a") is None
    with house.aux.step([12]) as step:  # its block is not pinned
        step.write("routing", canary_rows(SPEC, [("again", 0)]))
    assert house.aux.counters.jobs_refused == 1
    assert len(house.aux.jobs) == house.aux.counters.jobs_begun == 3
    assert house.aux.persist({keys[3]: 3}, owner="a") == {keys[3]: house.aux.origins([3])[0]}, "who waits is not queued"


def test_bytes_in_flight_are_bounded_but_one_job_always_fits() -> None:
    house = JobHouse(JobLimits(threads_max=1, jobs_max=8, nbytes_max=2 * RecordLayout((SPEC,)).nbytes, close_s=30.0))
    for block in range(5):
        house.fill(block, "a")
    keys = [house.aux.keys.key(None, [n]) for n in range(5)]
    large = house.aux.begin_persist({keys[n]: n for n in range(3)}, owner="a")
    assert house.aux.begin_persist({keys[3]: 3}, owner="a") is None
    house.let_go()
    assert large.poll()
    assert house.aux.begin_persist({keys[3]: 3}, owner="a") is not None
    assert house.aux.begin_persist({keys[4]: 4}, owner="a") is not None
    house.gate.open()
    house.aux.close()


def test_a_cancelled_restore_keeps_its_block_until_the_store_call_returns(house) -> None:
    """Goal: nobody gets memory that the store may still write. Method: cancel while the call waits, then let it go."""
    house.fill(0, "a")
    house.aux.persist({house.key: 0}, owner="a")
    house.aux.allocate([1], "b")
    job = house.aux.begin_restore({house.key: 1}, owner="b")
    house.settle()
    job.cancel()
    house.aux.free("b")
    assert not job.poll()
    for attempt in (lambda: house.aux.allocate([1], "c"), lambda: house.aux.evict([1])):
        with pytest.raises(BlockBusyError, match="device block 1"):
            attempt()
    house.let_go()
    assert house.aux.poll() == [job]
    assert job.result() == {house.key: False}
    assert not house.aux.read("routing", [1]).valid.any()
    house.aux.allocate([1], "c")
    counters = house.aux.counters
    assert (counters.jobs_cancelled, counters.cancelled_restores_dropped, counters.restored_blocks) == (1, 1, 0)


def test_a_reset_while_a_job_is_under_way_drops_what_it_brings(house) -> None:
    """Goal: generations are compared when a job lands. Method: reset before the store reads, then before the poll."""
    for go_first in (False, True):
        key, weights = house.aux.keys.key(None, [1]), house.aux.namespace.weights_version
        house.fill(0, "a")
        house.aux.persist({key: 0}, owner="a")
        house.aux.allocate([1], "b")
        job = house.aux.begin_restore({key: 1}, owner="b")
        house.settle()
        if go_first:
            house.let_go()
        house.aux.reset(weights_version=weights + 1)
        if not go_first:
            house.let_go()
        assert house.aux.poll() == [job]
        assert job.result() == {key: False}
        assert not house.aux.read("routing", range(8)).valid.any()
        assert house.aux.counters.late_restores_dropped == 1 + go_first
        house.aux.free("a")
        house.aux.free("b")


def test_a_block_that_is_being_stored_cannot_be_written_or_given_away(house) -> None:
    rows = house.fill(0, "a")
    job = house.aux.begin_persist({house.key: 0}, owner="a")
    house.settle()
    house.aux.free("a")
    for attempt in (
        lambda: house.aux.begin_step([0]),
        lambda: house.aux.allocate([0], "b"),
        lambda: house.aux.evict([0]),
    ):
        with pytest.raises(BlockBusyError, match="device block 0"):
            attempt()
    house.let_go()
    assert job.poll()
    house.aux.allocate([0], "b")
    assert house.aux.restore({house.key: 0}, owner="b") == {house.key: True}
    assert np.array_equal(house.aux.read("routing", [0]).values, rows)


def test_a_queued_job_that_is_cancelled_is_over_at_once(house) -> None:
    rows = house.fill(0, "a")
    house.fill(1, "a")
    first = house.aux.begin_persist({house.key: 0}, owner="a")
    second = house.aux.begin_persist({house.aux.keys.key(None, [2]): 1}, owner="a")
    house.settle()
    second.cancel()
    assert second.phase is Phase.LANDED
    with house.aux.step([4]) as step:  # its block may be written again
        step.write("routing", rows[:1])
    house.let_go()
    assert first.wait(60.0)
    assert house.aux.stored(list(second.result())) == [False]


def test_close_waits_and_then_names_the_jobs_that_hang() -> None:
    before = set(threading.enumerate())  # an earlier test's store may not have been collected yet
    house = JobHouse(JobLimits(threads_max=1, close_s=0.0))
    house.fill(0, "a")
    house.fill(1, "a")
    house.aux.begin_persist({house.key: 0}, owner="a")
    house.aux.begin_persist({house.aux.keys.key(None, [2]): 1}, owner="a")
    house.settle()
    with pytest.raises(BlockStateError, match=r"got persist of 1 blocks \(carrying\), persist of 1 blocks \(queued\)"):
        house.aux.close()
    assert house.aux.read("routing", [0]).valid.all(), "it is still open"
    house.let_go()
    house.let_go()
    threads = [t for t in threading.enumerate() if t.name == "kvroute-store-job" and t not in before]
    house.aux.close()
    assert threads
    assert not any(t.is_alive() for t in threads)


def test_a_bug_in_a_store_reaches_whoever_asks_for_the_result(house, monkeypatch) -> None:
    def bug(*_):
        raise AssertionError("a bug in the store")

    monkeypatch.setattr(house.store, "get_into", bug)
    house.aux.allocate([0], "a")
    job = house.aux.begin_restore({house.key: 0}, owner="a")
    with pytest.raises(BlockStateError, match="restore of 1 blocks: wanted a job that has landed"):
        job.result()
    assert job.wait(60.0)
    with pytest.raises(AssertionError, match="a bug in the store"):
        job.result()
    house.aux.free("a")
    house.aux.allocate([0], "b")


@pytest.mark.parametrize(
    "limits", [{"threads_max": 0}, {"jobs_max": 0}, {"nbytes_max": 0}, {"close_s": -1.0}, {"close_s": float("inf")}]
)
def test_limits_that_cannot_be_are_named(limits) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        JobLimits(**limits)


def test_a_job_keeps_its_blocks_whoever_lets_go(house) -> None:
    """Goal: a job holds its own lease. Method: free its owner, move the block elsewhere, and look who holds it."""
    house.fill(0, "a")
    job = house.aux.begin_persist({house.key: 0}, owner="a")
    house.settle()
    assert house.aux.holders()[[0]].tolist() == [2]
    with house.aux.begin_swap_out([(0, 1)]):  # what is stored may be swapped out meanwhile
        assert house.aux.jobs == [job]
    assert house.aux.holds("a", 1, "host")
    assert not house.aux.holds("a", 0)
    assert house.aux.holders()[[0]].tolist() == [1], "the job's lease follows nobody"
    with pytest.raises(BlockBusyError):
        house.aux.allocate([0], "b")
    house.let_go()
    assert job.poll()
    assert house.aux.holders()[[0]].tolist() == [0]
    house.aux.allocate([0], "b")


def test_no_owner_can_take_the_place_of_a_job(house) -> None:
    """Goal: nobody ends a job's lease. Method: its name, and itself, as owners."""
    house.fill(0, "a")
    job = house.aux.begin_persist({house.key: 0}, owner="a")
    house.aux.free(job.name)
    with pytest.raises(InvalidInputError, match="owner: wanted a non-empty string or an integer"):
        house.aux.free(job)
    assert house.aux.holders()[[0]].tolist() == [2]


def test_an_answer_names_the_origin_that_is_stored(house) -> None:
    """Goal: nothing is said to be stored that is not. Method: two blocks of one key, then a store without room."""
    house.store_block(0)
    first = house.aux.origins([0])[0]
    house.fill(1, "b")
    assert house.aux.origins([1]) != [first]
    assert house.aux.persist({house.key: 1}, owner="b") == {house.key: first}, "the whole record that is there stays"
    assert house.aux.store_counters.conflicts == 1
    small = JobHouse()
    small.store.put = lambda headers, *_, **__: [None] * len(headers)
    small.fill(0, "a")
    assert small.aux.persist({small.key: 0}, owner="a") == {small.key: 0}
    assert small.aux.counters.persisted_blocks == 0
    small.aux.close()

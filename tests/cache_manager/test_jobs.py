"""Jobs by example: what a slow, hung, failing or full store does to those who do not wait for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from canary import canary_rows
from gate import Gate, GatedKV, GatedStore, until

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, ConfigError, InvalidInputError, StorageError
from cache_manager.jobs import JobLimits, Phase
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.ports import Lookup
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store

SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", 4)
LIMITS = JobLimits(threads_max=1, jobs_max=3, nbytes_max=4 * SPEC.block_nbytes * 8, close_s=30.0)
PROMPT = list(range(10))


class House:
    """Rows behind a store whose background calls wait at a gate."""

    def __init__(self, limits: JobLimits = LIMITS) -> None:
        self.gate = Gate()
        self.store = GatedStore(open_store("memory:"))
        self.store.gate = self.gate
        self.aux = AuxBlocks(
            [SPEC], device_blocks=8, host_blocks=4, namespace=Namespace("m", 1), store=self.store, jobs=limits
        )
        self.kv = GatedKV(8, 4, 4)
        self.kv.gate = self.gate
        self.manager = BlockManager(self.aux, self.kv)
        self.key = self.aux.keys.key(None, [1])

    def fill(self, block: int, owner: str) -> np.ndarray:
        self.aux.allocate([block], owner)
        rows = canary_rows(SPEC, [(owner, i) for i in range(4)])
        with self.aux.step(range(block * 4, block * 4 + 4)) as step:
            step.write("routing", rows)
        return rows

    def run(self, owner: str, tokens: list[int]) -> None:
        admission = self.manager.allocate(owner, tokens)
        assert admission is not None
        new = range(admission.cached_tokens, len(tokens))
        with self.aux.step(self.manager.slots(owner, new.start, new.stop)) as step:
            step.write("routing", canary_rows(SPEC, [("x", p) for p in new]))
        self.manager.publish(owner, tokens)

    def settle(self) -> None:
        self.gate.settle(self.aux.jobs)

    def let_go(self) -> None:
        self.settle()
        self.gate.let_go()
        self.settle()


@pytest.fixture
def house():
    house = House()
    yield house
    house.gate.open()
    house.aux.close()


def test_a_lookup_never_waits_and_its_answer_is_given_once(house) -> None:
    """Goal: PENDING is an answer. Method: ask about what is there, what is not, and what a job is at work on."""
    house.fill(0, "a")
    house.aux.persist({house.key: 0})
    other = house.aux.keys.key(None, [2])
    assert house.aux.lookup([house.key, other]) == [Lookup.PENDING] * 2
    until(lambda: house.aux.wait(1.0), "the store's answer is lost")
    assert house.aux.lookup([house.key]) == [Lookup.PENDING], "nothing lands until somebody polls"
    assert len(house.aux.jobs) == 1, "a key is asked for once"
    house.aux.poll()
    assert house.aux.lookup([house.key, other]) == [Lookup.HIT, Lookup.MISS]
    house.aux.allocate([1], "b")
    job = house.aux.begin_restore({other: 1})
    assert house.aux.lookup([other]) == [Lookup.PENDING]
    assert house.aux.jobs == [job]
    house.let_go()
    assert job.poll()


def test_an_answer_from_before_a_reset_is_not_kept(house) -> None:
    house.fill(0, "a")
    house.aux.persist({house.key: 0})
    house.aux.lookup([house.key])
    house.aux.wait(60.0)
    house.aux.reset(weights_version=2)
    house.aux.poll()
    assert house.aux.lookup([house.key]) == [Lookup.MISS], "a key of another namespace"
    assert house.aux.counters.stale_keys == 1
    assert not house.aux.jobs


def test_a_lookup_that_fails_is_a_miss_and_is_counted(house, monkeypatch) -> None:
    def fail(*_):
        raise StorageError("contains failed on purpose")

    monkeypatch.setattr(house.store, "contains", fail)
    assert house.aux.lookup([house.key]) == [Lookup.PENDING]
    house.aux.wait(60.0)
    house.aux.poll()
    assert house.aux.lookup([house.key]) == [Lookup.MISS]
    assert house.aux.counters.lookups_failed == 1


def test_a_job_too_many_is_refused_and_changes_nothing(house) -> None:
    """Goal: full is a normal result. Method: fill the queue by number, then by bytes, with a store that hangs."""
    for block in range(4):
        house.fill(block, "a")
    keys = [house.aux.keys.key(None, [n]) for n in range(4)]
    jobs = [house.aux.begin_persist({keys[n]: n}) for n in range(3)]
    assert None not in jobs
    assert house.aux.begin_persist({keys[3]: 3}) is None
    with house.aux.step([12]) as step:  # its block is not pinned
        step.write("routing", canary_rows(SPEC, [("again", 0)]))
    assert house.aux.counters.jobs_refused == 1
    assert len(house.aux.jobs) == house.aux.counters.jobs_begun == 3
    assert house.aux.persist({keys[3]: 3}) == {keys[3]: True}, "who waits is not queued"


def test_bytes_in_flight_are_bounded_but_one_job_always_fits() -> None:
    house = House(JobLimits(threads_max=1, jobs_max=8, nbytes_max=2 * RecordLayout((SPEC,)).nbytes, close_s=30.0))
    for block in range(5):
        house.fill(block, "a")
    keys = [house.aux.keys.key(None, [n]) for n in range(5)]
    large = house.aux.begin_persist({keys[n]: n for n in range(3)})
    assert house.aux.begin_persist({keys[3]: 3}) is None
    house.let_go()
    assert large.poll()
    assert house.aux.begin_persist({keys[3]: 3}) is not None
    assert house.aux.begin_persist({keys[4]: 4}) is not None
    house.gate.open()
    house.aux.close()


def test_a_cancelled_restore_keeps_its_block_until_the_store_call_returns(house) -> None:
    """Goal: nobody gets memory that the store may still write. Method: cancel while the call waits, then let it go."""
    house.fill(0, "a")
    house.aux.persist({house.key: 0})
    house.aux.allocate([1], "b")
    job = house.aux.begin_restore({house.key: 1})
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
        house.aux.persist({key: 0})
        house.aux.allocate([1], "b")
        job = house.aux.begin_restore({key: 1})
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
    job = house.aux.begin_persist({house.key: 0})
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
    assert house.aux.restore({house.key: 0}) == {house.key: True}
    assert np.array_equal(house.aux.read("routing", [0]).ids, rows)


@pytest.mark.parametrize("policy", ["gate", "mask"])
def test_kv_of_older_weights_that_comes_late_counts_for_nothing(policy) -> None:
    """Goal: a weight update between asking and landing. Method: reset while the store is at work; with each policy."""
    house = House()
    house.run("a", PROMPT)
    assert house.manager.persist("a") == 2
    house.manager.reset(weights_version=1)
    house.manager.free("a")
    manager = BlockManager(house.aux, house.kv, policy=policy)
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
    house.manager.reset(weights_version=1)
    house.manager.begin_allocate("b", PROMPT)
    house.settle()
    house.manager.free("b")
    (job,) = house.aux.jobs
    assert job.cancelled
    assert house.manager.free_device_blocks == 6, "the store may still fill two"
    house.manager.assert_consistent()
    house.let_go()
    assert house.manager.poll() == {}
    assert house.manager.free_device_blocks == 8


def test_a_queued_job_that_is_cancelled_is_over_at_once(house) -> None:
    rows = house.fill(0, "a")
    house.fill(1, "a")
    first = house.aux.begin_persist({house.key: 0})
    second = house.aux.begin_persist({house.aux.keys.key(None, [2]): 1})
    house.settle()
    second.cancel()
    assert second.phase is Phase.LANDED
    with house.aux.step([4]) as step:  # its block may be written again
        step.write("routing", rows[:1])
    house.let_go()
    assert first.wait(60.0)
    assert house.aux.stored(list(second.result())) == [False]


def test_close_waits_and_then_names_the_jobs_that_hang() -> None:
    house = House(JobLimits(threads_max=1, close_s=0.0))
    house.fill(0, "a")
    house.fill(1, "a")
    house.aux.begin_persist({house.key: 0})
    house.aux.begin_persist({house.aux.keys.key(None, [2]): 1})
    house.settle()
    with pytest.raises(BlockStateError, match=r"got persist of 1 blocks \(carrying\), persist of 1 blocks \(queued\)"):
        house.aux.close()
    assert house.aux.read("routing", [0]).valid.all(), "it is still open"
    house.let_go()
    house.let_go()
    threads = [t for t in threading.enumerate() if t.name == "kvroute-store-job"]
    house.aux.close()
    assert threads
    assert not any(t.is_alive() for t in threads)


def test_a_bug_in_a_store_reaches_whoever_asks_for_the_result(house, monkeypatch) -> None:
    def bug(*_):
        raise AssertionError("a bug in the store")

    monkeypatch.setattr(house.store, "get_into", bug)
    house.aux.allocate([0], "a")
    job = house.aux.begin_restore({house.key: 0})
    with pytest.raises(BlockStateError, match="restore of 1 blocks: wanted a job that has landed"):
        job.result()
    assert job.wait(60.0)
    with pytest.raises(AssertionError, match="a bug in the store"):
        job.result()
    house.aux.free("a")
    house.aux.allocate([0], "b")


def test_rows_and_kv_come_together_or_not_at_all(house) -> None:
    """Goal: with ``gate``, no row without its KV. Method: lose the KV of the second block, and then fail it all."""
    house.run("a", PROMPT)
    assert house.manager.persist("a") == 2
    keys = house.aux.keys.keys(PROMPT[:8])
    house.manager.reset(weights_version=1)  # memory is forgotten, the store is not
    house.manager.free("a")
    del house.kv.stored[keys[1]]
    admission = house.manager.begin_allocate("b", PROMPT)
    assert (admission.pending, admission.cached_tokens) == (True, 0)
    house.let_go()
    house.let_go()
    assert house.manager.poll()["b"].restored_tokens == 4
    valid = house.aux.read("routing", house.manager.table("b")).valid
    assert valid.tolist() == [True] * 4 + [False] * 8
    assert house.aux.counters.unaccompanied_blocks_not_restored == 1
    house.manager.free("b")
    house.manager.reset(weights_version=1)
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
    house = House(JobLimits(threads_max=threads))
    prompts = {f"a{n}": [100 * n + i for i in range(length)] for n, length in enumerate(lengths)}
    for owner, prompt in prompts.items():
        house.run(owner, prompt)
        house.manager.persist(owner)
        house.manager.free(owner)
    house.manager.reset(weights_version=1)  # memory is forgotten, the store is not
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
    house.manager.reset(weights_version=1)
    assert house.manager.begin_allocate("b", prompt).pending
    house.gate.open()
    assert house.manager.drain(60.0)
    admission = house.manager.poll()["b"]
    assert (admission.cached_tokens, admission.restored_tokens, len(admission.blocks)) == (16, 16, 7)
    assert house.manager.counters.errands_cut == 1
    house.manager.free("b")
    house.manager.reset(weights_version=1)
    assert house.manager.allocate("c", prompt).restored_tokens == 24, "who waits himself is not cut"


def test_a_persist_leaves_room_for_the_end_of_a_restore(house) -> None:
    """Goal: as above, of both kinds. Method: persist beside a restore that is abandoned only then."""
    prompt = list(range(13))
    house.run("a", prompt)
    house.manager.persist("a")
    house.manager.free("a")
    house.manager.reset(weights_version=1)
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


def test_no_owner_can_take_the_name_of_a_lease(house) -> None:
    for call in (
        lambda: house.manager.allocate("store-job 0", [1]),
        lambda: house.manager.fork("a", "store-job 0"),
    ):
        with pytest.raises(InvalidInputError, match="owner: wanted a name that does not begin with 'store-job '"):
            call()


@pytest.mark.parametrize(
    "limits", [{"threads_max": 0}, {"jobs_max": 0}, {"nbytes_max": 0}, {"close_s": -1.0}, {"close_s": float("inf")}]
)
def test_limits_that_cannot_be_are_named(limits) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        JobLimits(**limits)

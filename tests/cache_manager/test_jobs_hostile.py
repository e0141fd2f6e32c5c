"""Jobs that several threads touch at once, that get no thread, or whose store does not keep its contract."""

from __future__ import annotations

import os
import threading
import time

import pytest
from gate import until

from cache_manager.archive import Archive, Companion, RestoreJob
from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, StorageError
from cache_manager.jobs import Job, JobRunner, Phase
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.ports import Lookup
from tests.cache_manager.test_jobs import LIMITS, PROMPT, SPEC, House


@pytest.fixture
def house():
    house = House()
    yield house
    house.gate.open()
    house.aux.close()


def test_nobody_sees_a_job_over_before_it_has_landed(house, monkeypatch) -> None:
    """Goal: a result is never half of one. Method: while a restore lands, see what others see of it."""
    house.fill(0, "a")
    house.aux.persist({house.key: 0})
    house.aux.allocate([1], "b")
    job = house.aux.begin_restore({house.key: 1})
    house.let_go()
    land, seen = RestoreJob._land, []

    def slowly(self):
        seen.append(self.phase)  # what any other thread sees now
        land(self)

    monkeypatch.setattr(RestoreJob, "_land", slowly)
    assert job.poll()
    assert seen == [Phase.CARRIED]
    assert job.result() == {house.key: True}


def test_a_job_that_is_cancelled_while_it_lands_lands_once(house, monkeypatch) -> None:
    house.fill(0, "a")
    house.aux.persist({house.key: 0})
    house.aux.allocate([1], "b")
    job = house.aux.begin_restore({house.key: 1})
    house.let_go()
    land = RestoreJob._land

    def beside_a_cancel(self):
        house.aux._runner.cancel(self)
        land(self)

    monkeypatch.setattr(RestoreJob, "_land", beside_a_cancel)
    assert house.aux.poll() == [job]
    assert house.aux.poll() == []
    assert house.aux.counters.jobs_landed == house.aux.counters.jobs_begun
    assert house.aux.in_flight == 0


def test_a_job_whose_landing_fails_is_over(house, monkeypatch) -> None:
    """Goal: a bug costs what it breaks, and neither the room of its job nor the way out."""
    house.fill(0, "a")
    house.aux.begin_persist({house.key: 0})
    house.let_go()
    monkeypatch.setattr(Archive, "landed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        house.aux.poll()
    monkeypatch.undo()
    assert house.aux.jobs == []
    assert house.aux.wait(0.0), "nothing is left to wait for"
    house.aux._ledger.jobs -= 1  # what the broken landing was to do


def test_a_job_can_be_cancelled_before_it_is_queued(house, monkeypatch) -> None:
    """Goal: a job that is listed can be cancelled. Method: another thread does so before start() has queued it."""
    house.fill(0, "a")
    start = JobRunner.start

    def after_a_cancel(self, job):
        for each in house.aux.jobs:
            each.cancel()
        start(self, job)

    monkeypatch.setattr(JobRunner, "start", after_a_cancel)
    job = house.aux.begin_persist({house.key: 0})
    assert job.phase is Phase.LANDED
    assert job.result() == {house.key: False}
    monkeypatch.undo()
    assert house.aux.begin_persist({house.key: 0}) is not None, "the threads go on"
    house.let_go()


def test_without_a_thread_a_job_fails_and_the_next_one_tries_again(house, monkeypatch) -> None:
    """Goal: a process at its limit of threads loses a cache and no block. Method: let no thread start, then one."""
    house.run("a", PROMPT)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert house.manager.begin_persist("a")
    monkeypatch.undo()
    house.manager.poll()
    assert (house.manager.counters.store_failures, house.manager.errands) == (1, 0)
    house.gate.open()
    assert house.manager.begin_persist("a")
    assert house.manager.drain(60.0)
    assert house.manager.counters.persisted_blocks == 2
    house.manager.free("a")
    house.manager.assert_consistent()


def test_close_leaves_the_memory_to_whoever_restores_in_another_thread(house, monkeypatch) -> None:
    """Goal: no landing without its memory. Method: close between the store's answer and the landing of a restore."""
    house.fill(0, "a")
    house.aux.persist({house.key: 0})
    house.aux.allocate([1], "b")
    house.gate.open()
    carried, go_on = threading.Event(), threading.Event()
    poll, results = Job.poll, []

    def late(self):
        carried.set()
        assert go_on.wait(60.0)
        return poll(self)

    monkeypatch.setattr(Job, "poll", late)
    thread = threading.Thread(target=lambda: results.append(house.aux.restore({house.key: 1})))
    thread.start()
    assert carried.wait(60.0)
    with pytest.raises(BlockStateError, match="1 jobs of other threads"):
        house.aux.close()
    go_on.set()
    thread.join()
    assert results == [{house.key: True}]


def test_close_in_a_forked_child_does_not_wait_for_the_parents_jobs(house) -> None:
    house.fill(0, "a")
    house.aux.begin_persist({house.key: 0})
    house.settle()
    child = os.fork()
    if not child:
        began_s = time.monotonic()
        try:
            house.aux.close()
        except BlockStateError as error:
            os._exit(0 if "forked child" in str(error) and time.monotonic() - began_s < LIMITS.close_s / 2 else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_kv_that_is_stored_without_its_rows_is_not_given_away_either(house) -> None:
    """Goal: no KV under a key that is not its own. Method: free a block without rows while its KV is read."""
    house.aux.allocate([0], "a")
    job = house.aux.begin_persist({house.key: 0}, Companion(house.kv, "mask"))
    house.settle()
    house.aux.free("a")
    with pytest.raises(BlockBusyError):
        house.aux.allocate([0], "b")
    house.aux.assert_consistent()
    house.let_go()
    assert job.poll()
    house.aux.allocate([0], "b")


def test_a_cancelled_lookup_is_no_answer(house) -> None:
    house.fill(0, "a")
    house.aux.persist({house.key: 0})
    house.fill(1, "a")
    house.aux.begin_persist({house.aux.keys.key(None, [2]): 1})  # the only thread is busy with that
    house.settle()
    house.aux.lookup([house.key])
    house.aux.jobs[-1].cancel()
    assert house.aux.lookup([house.key]) == [Lookup.PENDING]


@pytest.mark.parametrize("call", ["put", "get_into", "contains"])
def test_a_store_that_answers_fewer_keys_than_it_was_asked_for_has_failed(house, monkeypatch, call: str) -> None:
    """Goal: a store without a contract costs itself. Method: answer nothing, and look for what is left."""
    house.gate.open()
    house.run("a", PROMPT)
    if call != "put":
        house.manager.persist("a")
    house.manager.free("a")
    house.manager.reset(weights_version=1)
    monkeypatch.setattr(house.store, call, lambda *_: [])
    if call == "put":
        house.run("a", PROMPT)
        assert house.manager.begin_persist("a")
    else:
        assert house.manager.begin_allocate("a", PROMPT).pending
    if call == "contains":
        house.aux.lookup([house.key])
    assert house.manager.drain(60.0)
    until(lambda: house.aux.poll() is not None and not house.aux.jobs, "a job is left")
    assert house.manager.counters.store_failures == 1
    house.manager.free("a")
    assert house.aux.in_flight == 0
    house.manager.assert_consistent()
    if call == "contains":
        assert house.aux.lookup([house.key]) == [Lookup.MISS]
        assert house.aux.counters.lookups_failed == 1
    with pytest.raises(StorageError, match="answered 0 of"):
        (house.aux.stored if call == "contains" else getattr(Direct(house), call))([house.key])


class Direct:
    """The calls of the jobs, made by hand."""

    def __init__(self, house: House) -> None:
        house.aux.allocate([0], "direct")
        self._carrier = house.aux._archive.carrier

    def put(self, keys):
        return self._carrier.put(keys, [0], [bytes(8)], [0])

    def get_into(self, keys):
        return self._carrier.get_into(keys, [0])


@pytest.mark.parametrize("version", [1, 2])
def test_what_landed_before_a_reset_is_not_taken_in_after_it(house, version: int) -> None:
    """Goal: KV of older weights counts for nothing. Method: land a restore, reset, and only then poll the manager."""
    house.gate.open()
    house.run("a", PROMPT)
    house.manager.persist("a")
    aux = AuxBlocks([SPEC], device_blocks=8, namespace=Namespace("m", 1), store=house.store, jobs=LIMITS)
    manager = BlockManager(aux, house.kv)
    with aux:
        assert manager.begin_allocate("b", PROMPT).pending
        until(lambda: bool(aux.poll()), "the store does not answer")
        manager.reset(weights_version=version)
        admission = manager.poll()["b"]
        assert (admission.cached_tokens, admission.restored_tokens) == (0, 0)
        assert manager.computed("b") == 0
        manager.free("b")
        again = manager.begin_allocate("c", PROMPT, restore=False)
        assert again.cached_tokens == 0, "nothing is found by a key from before"
        manager.assert_consistent()

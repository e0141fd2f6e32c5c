"""Jobs that several threads touch at once, that get no thread, or whose store does not keep its contract."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

import pytest
from canary import canary_rows
from gate import until
from job_house import LIMITS, PROMPT, SPEC, JobHouse, ManagerHouse
from waiting import until_it_waits

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, StorageError
from cache_manager.stored import Job, Phase
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.ports import BlockRecords
from cache_manager.store_jobs import PersistJob, RestoreJob


@pytest.fixture
def house():
    house = JobHouse()
    yield house
    house.gate.open()
    house.aux.close()


@pytest.fixture
def managed():
    house = ManagerHouse()
    yield house
    house.gate.open()
    house.aux.close()


def test_nobody_sees_a_job_over_before_it_has_landed(house, monkeypatch) -> None:
    """Goal: a result is never half of one. Method: while a restore lands, see what others see of it."""
    house.store_block(0)
    house.aux.allocate([1], "b")
    job = house.aux.begin_restore({house.key: 1}, owner="b")
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
    house.store_block(0)
    house.aux.allocate([1], "b")
    job = house.aux.begin_restore({house.key: 1}, owner="b")
    house.let_go()
    land = RestoreJob._land

    def beside_a_cancel(self):
        house.aux._archive.cancel(self)
        land(self)

    monkeypatch.setattr(RestoreJob, "_land", beside_a_cancel)
    assert house.aux.poll() == [job]
    assert house.aux.poll() == []
    assert house.aux.counters.jobs_landed == house.aux.counters.jobs_begun
    assert house.aux.in_flight == 0


def test_a_job_whose_landing_fails_is_over(house, monkeypatch) -> None:
    """Goal: a bug costs what it breaks, and neither the room of its job nor the way out."""
    house.fill(0, "a")
    house.aux.begin_persist({house.key: 0}, owner="a")
    house.let_go()
    monkeypatch.setattr(PersistJob, "_land", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        house.aux.poll()
    monkeypatch.undo()
    assert house.aux.jobs == []
    assert house.aux.wait(0.0), "nothing is left to wait for"


def test_without_a_thread_a_job_fails_and_the_next_one_tries_again(managed, monkeypatch) -> None:
    """Goal: a process at its limit of threads loses a cache and no block. Method: let no thread start, then one."""
    managed.run("a", PROMPT)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert managed.manager.begin_persist("a")
    monkeypatch.undo()
    managed.manager.poll()
    assert (managed.manager.counters.store_failures, managed.manager.errands) == (1, 0)
    managed.gate.open()
    assert managed.manager.begin_persist("a")
    assert managed.manager.drain(60.0)
    assert managed.manager.counters.persisted_blocks == 2
    managed.manager.free("a")
    managed.manager.assert_consistent()


def test_close_lands_what_another_thread_restores(house, monkeypatch) -> None:
    """Goal: no landing without its memory. Method: close between the store's answer and the landing of a restore."""
    house.store_block(0)
    house.aux.allocate([1], "b")
    house.gate.open()
    carried, go_on = threading.Event(), threading.Event()
    poll, results = Job.poll, []

    def late(self):
        if threading.current_thread() is thread:
            carried.set()
            assert go_on.wait(60.0)
        return poll(self)

    monkeypatch.setattr(Job, "poll", late)
    thread = threading.Thread(target=lambda: results.append(house.aux.restore({house.key: 1}, owner="b")), daemon=True)
    thread.start()
    assert carried.wait(60.0)
    house.aux.close()
    go_on.set()
    thread.join()
    assert results == [{house.key: True}]


def test_close_inside_a_job_of_its_own_thread_does_not_wait_for_it(house, monkeypatch) -> None:
    """Goal: a handler that closes answers at once. Method: a signal while its thread asks the store."""
    house.gate.open()
    rows, refused = house.fill(0, "a"), []
    carry = PersistJob.carry

    def handler(*_: object) -> None:
        with pytest.raises(BlockStateError, match="carrying"):
            house.aux.close()  # waiting for its own job would take ``close_s``, which no test lives to see
        refused.append(True)

    def interrupted(job: PersistJob) -> None:
        signal.raise_signal(signal.SIGUSR1)
        carry(job)

    monkeypatch.setattr(PersistJob, "carry", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert house.aux.persist({house.key: 0}, owner="a") == {house.key: house.aux.origins([0])[0]}
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused == [True]
    assert (house.aux.read("routing", [0]).values == rows).all()


def test_close_in_a_forked_child_does_not_wait_for_the_parents_jobs(house) -> None:
    house.fill(0, "a")
    house.aux.begin_persist({house.key: 0}, owner="a")
    house.settle()
    child = os.fork()
    if not child:
        try:
            house.aux.close()
        except BlockStateError as error:
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_finaliser_beside_jobs_waits_for_no_thread_that_waits_for_its_own() -> None:
    """Goal: no deadlock. Method: something is collected while a thread looks at jobs, and another one begins a job."""
    house, seen = JobHouse(), []
    house.fill(0, "a")
    house.aux.allocate([5], "lost")
    other = threading.Thread(
        target=lambda: seen.append(house.aux.begin_persist({house.key: 0}, owner="a")), daemon=True
    )

    def collected(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "wait_for":  # the lock of the jobs is held, and nothing else
            sys.setprofile(None)
            other.start()
            assert until_it_waits(other)  # it has the guard
            with pytest.raises(BlockBusyError, match="a finaliser"):
                house.aux.evict([7])
            house.aux.free("lost")

    def look() -> None:
        sys.setprofile(collected)
        seen.append(house.aux.wait(60))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(10)
    house.gate.open()
    other.join(10)
    assert [type(each) for each in seen].count(PersistJob) == 1, "neither waits for the other"
    assert not house.aux.holds("lost", 5)
    house.aux.close()


@pytest.mark.parametrize("rows", [0, 2])
def test_kv_that_is_stored_without_its_rows_is_not_given_away_either(rows: int) -> None:
    """Goal: no KV under a key that is not its own. Method: with ``mask``, free a block while its KV is read."""
    house = JobHouse(with_kv=True, policy="mask")
    house.aux.allocate([0], "a")
    with house.aux.step(range(rows)) as step:
        step.write("routing", canary_rows(SPEC, [("a", i) for i in range(rows)]))
    house.kv.write(range(4), [bytes([i]) * 32 for i in range(4)])
    job = house.aux.begin_persist({house.key: 0}, owner="a")
    house.settle()
    house.aux.free("a")
    with pytest.raises(BlockBusyError):
        house.aux.allocate([0], "b")
    house.aux.assert_consistent()
    house.gate.open()
    assert job.wait(60.0)
    origin = job.result()[house.key]
    assert origin
    house.aux.allocate([0, 1], "b")
    assert house.aux.restore({house.key: 1}, owner="b") == {house.key: True}
    assert house.kv.digest("device", 1, 3) == bytes([3]) * 32
    assert house.aux.origins([1]) == [origin]
    assert house.aux.read("routing", [1]).valid.sum() == rows
    house.aux.close()


@pytest.mark.parametrize("part", ["rows", "KV"])
@pytest.mark.parametrize("call", ["put", "get_into"])
def test_a_store_that_answers_fewer_keys_than_it_was_asked_for_has_failed(
    managed, monkeypatch, call: str, part: str
) -> None:
    """Goal: a store without a contract costs itself. Method: answer nothing, and look for what is left."""
    managed.gate.open()
    managed.run("a", PROMPT)
    if call != "put":
        managed.manager.persist("a")
    managed.manager.free("a")
    managed.forget()
    monkeypatch.setattr(managed.store if part == "rows" else managed.kv, call, lambda *_, **__: [])
    if call == "put":
        managed.run("a", PROMPT)
        assert managed.manager.begin_persist("a")
    else:
        assert managed.manager.begin_allocate("a", PROMPT).pending
    assert managed.manager.drain(60.0)
    until(lambda: managed.aux.poll() is not None and not managed.aux.jobs, "a job is left")
    assert managed.manager.counters.store_failures == 1
    assert managed.manager.counters.persisted_blocks == (2 if call != "put" else 0)
    managed.manager.poll()
    if call == "get_into":
        assert not managed.aux.read("routing", managed.manager.table("a")).valid.any()
    managed.manager.free("a")
    assert managed.aux.in_flight == 0
    managed.manager.assert_consistent()


def test_a_mover_that_answers_fewer_keys_than_it_was_asked_for_has_failed(house, monkeypatch) -> None:
    """Goal: the same of a mover that somebody else wrote. Method: persist and restore through it."""
    house.store_block(0)
    house.aux.allocate([1], "b")
    monkeypatch.setattr(type(house.aux._mover), "put", lambda *_, **__: [])
    monkeypatch.setattr(type(house.aux._mover), "get_into", lambda *_: [])
    with pytest.raises(StorageError, match="a mover answered 0 of 1 keys"):
        house.aux.persist({house.key: 0}, owner="a")
    with pytest.raises(StorageError, match="a mover answered 0 of 1 keys"):
        house.aux.restore({house.key: 1}, owner="b")
    assert house.aux.in_flight == 0
    assert not house.aux.read("routing", [1]).valid.any()
    monkeypatch.undo()
    with pytest.raises(StorageError, match="answered 0 of"):
        Direct(house, monkeypatch).put([house.key])


class Direct:
    """The calls of the jobs, made by hand, over a store that answers nothing."""

    def __init__(self, house: JobHouse, monkeypatch) -> None:
        monkeypatch.setattr(house.store, "put", lambda *_, **__: [])
        self._mover = house.aux._mover

    def put(self, keys):
        return self._mover.put(BlockRecords(keys, [0], [1], [bytes(8)], [1]))


@pytest.mark.parametrize("version", [1, 2])
def test_what_landed_before_a_reset_is_not_taken_in_after_it(managed, version: int) -> None:
    """Goal: KV of older weights counts for nothing. Method: land a restore, reset, and only then poll the manager."""
    managed.gate.open()
    managed.run("a", PROMPT)
    managed.manager.persist("a")
    aux = AuxBlocks(
        [SPEC], device_blocks=8, namespace=Namespace("m", 1), store=managed.store, kv=managed.kv, jobs=LIMITS
    )
    manager = BlockManager(aux)
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

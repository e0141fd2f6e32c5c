"""A persist and a restore by example: what is stored and what comes back, while a store hangs, too."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from blocks_house import SPEC, TOKENS, House, slots
from kv import SlotKV
from stopped import is_stopped
from waiting import GIVE_UP_S, until

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import StorageError
from cache_manager.job import Phase
from cache_manager.jobs import JobLimits
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store


def test_what_is_stored_has_no_byte_of_a_former_life() -> None:
    """Goal: rows of another tenant are not stored, though no one would read them. Method: an optional spec is written
    in one life and not in the next; what export gives and what the store has."""
    optional = AuxBlockDataSpec("optional", (2,), "uint8", TOKENS)
    store = open_store("memory:")
    with AuxBlocks([SPEC, optional], blocks=1, namespace=Namespace("m", 1), store=store, required=["routing"]) as aux:
        aux.renew([0])
        routing = np.ones((TOKENS, *SPEC.row_shape), np.uint8)
        aux.write_step(slots(0), {"routing": routing, "optional": np.full((TOKENS, 2), 0x5A, np.uint8)})
        life, key = aux.renew([0]), aux.keys.key(None, [1])
        aux.write_step(slots(0), {"routing": routing})
        (record,) = aux.exchange.export({key: 0}, life)
        assert record is not None
        assert aux.persist({key: 0}, life)[key]
        stored = bytearray(aux.layout.nbytes)
        store.get_into([key], [memoryview(stored)])
        assert bytes(record.payload) == bytes(stored) == routing.tobytes().ljust(aux.layout.nbytes, b"\0")


def test_jobs_go_on_while_kv_is_copied_from_the_device() -> None:
    """Goal: store threads and those who wait for jobs do not wait for a device. Method: a job begins, and in the middle
    of its copy of KV another thread lists and lands the one before."""
    kv = SlotKV(6, 3, TOKENS)
    house = House(kv=kv)
    lives = house.engine.renew([0, 1]).tolist()
    for block in (0, 1):
        house.fill(block, "mine")
    keys = [house.engine.keys.key(None, [n]) for n in (1, 2)]
    first = house.engine.begin_persist({keys[0]: 0}, lives[:1])
    assert first is not None
    seen: list[bool] = []
    take = kv.take

    def slow(*given: np.ndarray) -> None:
        house.gate.open()
        thread = threading.Thread(
            target=lambda: seen.append(list(house.engine.jobs) == [first] and house.engine.jobs.wait(60)), daemon=True
        )
        thread.start()
        thread.join(120)
        take(*given)

    kv.take = slow
    assert house.engine.begin_persist({keys[1]: 1}, lives[1:]) is not None
    assert seen == [True]
    house.close()


def test_kv_is_not_asked_for_no_blocks() -> None:
    """Goal: a miss is a miss, whatever a KV of other authors does with an empty call. Method: a KV that refuses one."""
    kv = SlotKV(6, 3, TOKENS)
    house = House(kv=kv, strict=True)

    def refuse(*given: np.ndarray) -> None:
        raise StorageError(f"called for {len(given[-1])} blocks")

    kv.fill = kv.copy = refuse
    house.gate.open()
    assert house.engine.restore({house.key: 0}, house.engine.renew([0])) == {house.key: False}
    assert house.engine.counters.absent_blocks_not_restored == 1
    house.engine.copy([])
    house.close()


def test_nothing_is_pinned_while_a_store_hangs(full) -> None:
    """Goal: a store that hangs costs only a thread and the memory of its copies. Method: every block of jobs that hang
    is written, given out, moved, and brought back to life meanwhile."""
    engine = full.engine
    for block in range(3):
        assert full.begin_persist(block, block) is not None
    engine.renew([0])
    full.fill(0, "next")
    full.fill(1, "again")
    engine.copy([(1, 2)])
    engine.swap_out([(2, 0)])
    assert [full.valid(block) for block in range(3)] == [[True] * TOKENS] * 3
    full.gate.open()
    while engine.jobs:
        assert engine.jobs.wait(GIVE_UP_S)
        engine.jobs.poll()
    assert full.brings(3, key=engine.keys.key(None, [2]))
    assert full.holds(3, full.rows("block 2")), "what the block had when the job began"


@pytest.mark.parametrize("cancelled", ["queued", "at the store"])
def test_a_cancelled_job_brings_nothing(house, cancelled: str) -> None:
    """Method: cancel a job before a thread has taken it, which ends it at once, or while the store reads."""
    engine = house.engine
    house.store_block(0)
    engine.renew([1, 2])
    jobs = [house.begin_restore(block) for block in (1, 2)]
    house.settle()
    job = jobs[cancelled == "queued"]
    job.cancel()
    assert job.over == (cancelled == "queued")
    house.gate.open()
    for each in jobs:
        assert each.wait(GIVE_UP_S)
    assert job.result() == {house.key: False}
    assert sorted(all(house.valid(block)) for block in (1, 2)) == [False, True]
    assert engine.counters.late_restores_dropped == int(cancelled != "queued")
    assert engine.counters.restored_blocks == 1
    assert engine.in_flight == 0


def test_an_answer_names_the_origin_that_is_stored(house) -> None:
    """Goal: no record is reported as stored that is not. Method: two blocks of one key, then a store without room."""
    engine = house.engine
    house.store_block(0)
    (first,) = engine.exchange.origins([0])
    lives = engine.renew([1])
    house.fill(1, "b")
    assert engine.exchange.origins([1]) != [first]
    assert engine.persist({house.key: 1}, lives) == {house.key: first}, "the whole record that is there stays"
    assert engine.store.counters.conflicts == 1
    house.store.put = lambda headers, *_, **__: [None] * len(headers)
    assert engine.persist({engine.keys.key(None, [2]): 1}, lives) == {engine.keys.key(None, [2]): 0}
    assert engine.counters.persisted_blocks == 2


def test_a_restore_fills_a_block_that_was_copied_before(house) -> None:
    """Goal: a block without rows stays open to those of any origin, and a copy of it is no computation that others
    know. Method: a fork of a sequence, and a swap, before its restore has begun."""
    engine = house.engine
    house.gate.open()
    rows = house.store_block(0)
    lives = engine.renew([1, 2])
    engine.copy([(1, 2)])
    engine.swap_out([(1, 0)])
    assert engine.restore({house.key: 1}, lives[:1]) == {house.key: True}
    assert house.holds(1, rows)
    assert engine.restore({house.key: 2}, lives[1:]) == {house.key: False}, "what was copied into it is unknown"
    engine.assert_consistent()


def test_a_restore_lands_over_no_rows(house) -> None:
    """Goal: rows that are readable are never written over, not even by those of their own record. Method: restore what
    a block has stored into that block."""
    engine = house.engine
    house.gate.open()
    rows = house.store_block(0)
    assert engine.restore({house.key: 0}, engine.generations([0])) == {house.key: False}
    assert engine.counters.late_restores_dropped == 1
    assert house.holds(0, rows)


def test_a_block_is_filled_from_one_record(house) -> None:
    """Goal: a key whose rows have not come is not said to be back. Method: one restore of two records for one block."""
    engine, other = house.engine, house.engine.keys.key(None, [2])
    rows = house.store_block(0)
    lives = engine.renew([0])
    house.fill(0, "other")
    assert engine.persist({other: 0}, lives)[other]
    (life,) = engine.renew([1])
    assert engine.restore({house.key: 1, other: 1}, [life, life]) == {house.key: True, other: False}
    assert house.holds(1, rows)


def test_what_a_reader_needs_decides_whether_a_record_will_do() -> None:
    """Goal: two engines with different ``required`` on one store. Method: one stores less than the other needs, which
    then stores all under the same key."""
    store = open_store("memory:")
    specs = [SPEC, AuxBlockDataSpec("logprob", (), "float32", TOKENS)]
    arguments = {"blocks": 2, "namespace": Namespace("m", 1), "store": store}
    with AuxBlocks(specs, required=["routing"], **arguments) as writer, AuxBlocks(specs, **arguments) as reader:
        writer.renew([0])
        writer.write_step(slots(0), {"routing": np.ones((TOKENS, 3, 2), np.uint8)})
        key = writer.keys.key(None, [1])
        assert writer.persist({key: 0}, [1]) == {key: writer.exchange.origins([0])[0]}
        reader.renew([0])
        assert reader.restore({key: 0}, [1]) == {key: False}
        assert reader.counters.absent_blocks_not_restored == 1
        writer.renew([1])
        assert writer.restore({key: 1}, [1]) == {key: True}
        reader.renew([1])
        reader.write_step(slots(1), {"routing": np.ones((TOKENS, 3, 2), np.uint8), "logprob": np.ones(TOKENS, "f4")})
        assert reader.persist({key: 1}, [1]) == {key: reader.exchange.origins([1])[0]}
        reader.renew([0])
        assert reader.restore({key: 0}, [2]) == {key: True}


@pytest.mark.parametrize("call", ["put", "get_into"])
def test_a_store_that_answers_fewer_keys_than_it_was_asked_for_has_failed(house, call: str) -> None:
    """Goal: a store that breaks the contract harms only itself. Method: in the background, it answers for no key."""
    house.store_block(0)
    house.engine.renew([1])
    setattr(house.store, call, lambda *_, **__: [])
    job = house.begin_persist(0, n=2) if call == "put" else house.begin_restore(1)
    assert job.wait(GIVE_UP_S)
    with pytest.raises(StorageError, match="answered 0 of 1"):
        job.result()
    assert house.engine.in_flight == 0
    assert not any(house.valid(1))


def test_the_kv_that_is_copied_counts_among_the_bytes_in_flight() -> None:
    """Goal: memory for copies is bounded, KV included. Method: room for two blocks' rows, but not for one's KV."""
    kv = SlotKV(6, 3, TOKENS)
    house = House(kv=kv, jobs=JobLimits(threads_max=1, jobs_max=8, nbytes_max=4 * RecordLayout((SPEC,)).nbytes))
    house.engine.renew(range(2))
    for block in range(2):
        house.fill(block, "mine")
    first = house.begin_persist(0, 0)
    assert first.nbytes >= kv.spec.block_nbytes
    assert house.begin_persist(1, 1) is None, "the first one fits alone"
    house.let_go()
    assert first.poll()
    assert house.begin_persist(1, 1) is not None
    house.close()


def test_a_cancel_that_is_interrupted_can_be_asked_for_again(full) -> None:
    """Goal: a queued job ends, wherever a signal handler raises in its cancel, and the threads go on. Method: at each
    place; a second cancel, and a further job."""
    engine, at, stopped = full.engine, 1, True
    assert full.begin_persist(1, 1) is not None
    full.settle()
    while stopped:
        job = full.begin_persist(0, 100 + at)
        assert job is not None
        stopped = is_stopped(job.cancel, at)
        job.cancel()
        assert job.wait(GIVE_UP_S), f"interrupted at place {at}"
        assert job not in engine.jobs
        at += 1
    full.gate.open()
    after = full.begin_persist(0, 99)
    assert after is not None
    assert after.wait(GIVE_UP_S)
    assert all(after.result().values())


def test_a_poll_that_raises_hides_no_job() -> None:
    """Goal: who counts what polls return learns of every job. Method: three restores; the KV of the second one is
    interrupted while it lands."""
    kv = SlotKV(6, 3, TOKENS)
    house = House(kv=kv)
    engine = house.engine
    house.gate.open()
    house.store_block(0)
    lives = engine.renew([1, 2, 3])
    jobs = [engine.begin_restore({house.key: block}, [life]) for block, life in zip([1, 2, 3], lives, strict=True)]
    until(lambda: all(job.phase is Phase.CARRIED for job in jobs), what="a restore has not been carried")
    fill = kv.fill
    filled = []

    def fills(blocks: np.ndarray, content: np.ndarray) -> None:
        filled.append(blocks)
        if len(filled) == 2:
            raise KeyboardInterrupt
        fill(blocks, content)

    kv.fill = fills
    with pytest.raises(KeyboardInterrupt):
        engine.jobs.poll()
    assert [job.over for job in jobs] == [True, True, False]
    assert engine.jobs.wait(0.0), "there is something to be told"
    assert engine.jobs.poll() == jobs
    assert engine.jobs.poll() == []
    assert [job.answers[house.key] for job in jobs] == [True, False, True]
    house.close()

"""Rows and KV in stores that evict, refuse and fail each on its own: rows come back beside their own KV only."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pairs import BOTH, EXTRA, FULL, KEYS, KV, PART, REQUIRED, ROWS, Engine, FussyStore, key, stored

from cache_manager.mover import PairMover
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy
from cache_manager.regions import HeapRegion
from cache_manager.storage import open_store
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore


@pytest.fixture(params=["gate", "mask"])
def policy(request: pytest.FixtureRequest) -> HitPolicy:
    return request.param


def test_a_failed_put_of_kv_does_not_pair_its_rows_with_later_kv(policy: HitPolicy) -> None:
    """Goal: one KV put that fails mixes nothing. Method: computation 1 stores rows only, 3 stores both."""
    rows, kv = FussyStore(MemoryStore(1 << 20)), FussyStore(MemoryStore(1 << 20))
    engine = Engine(rows, kv, policy)
    kv.refusing = True
    assert engine.put([0, 1], 1) == [None, None]
    kv.refusing = False
    assert engine.put([0, 1], 3) == [Found(3, BOTH)] * 2
    assert engine.get([0, 1]) == [Found(3, BOTH)] * 2
    engine.close()


def test_a_kv_store_that_drops_first_does_not_mix_computations(tmp_path: Path, policy: HitPolicy) -> None:
    """Goal: the same with two file stores and their quotas. Method: the KV store has to make room first."""
    rows = open_store(f"file://{tmp_path}/rows?quota=64KiB&segment=16KiB")
    kv = open_store(f"file://{tmp_path}/kv?quota=64KiB&segment=16KiB")
    engine = Engine(rows, kv, policy)
    wide = HeapRegion(KV, 1)
    assert engine.put([0], 1) == [Found(1, BOTH)]
    others = RecordStore(kv, KV)
    for n in range(100, 400):
        others.put([key(n)], [wide.rows[0].data], [FULL], [1], [2])
        if not kv.contains([key(0)])[0]:
            break
    assert rows.contains([key(0)]) == [True]
    assert kv.contains([key(0)]) == [False]
    assert engine.get([0]) == [Absence.MISS]
    assert engine.put([0], 3) == [Found(3, BOTH)]
    assert engine.get([0]) == [Found(3, BOTH)]
    engine.close()
    wide.close()
    rows.close()
    kv.close()


def test_a_gate_cuts_the_run_at_the_first_key_whose_parts_differ() -> None:
    rows, kv = MemoryStore(1 << 20), MemoryStore(1 << 20)
    engine = Engine(rows, kv, "gate")
    engine.put(range(KEYS), 1)
    kv.delete([key(2)])
    engine.compute(2, 5)
    batch = BlockRecords([key(2)], [2], [5], [BOTH], [1])
    assert engine.movers[1].put(batch) == [Found(5, b"")]
    assert engine.get(range(KEYS)) == [Found(1, BOTH)] * 2 + [Absence.ORIGIN] + [Absence.MISS] * 2
    rows.delete([key(1)])
    assert engine.get(range(KEYS)) == [Found(1, BOTH)] + [Absence.MISS] * 4
    assert engine.pair.contains([key(n) for n in range(KEYS)]) == [True, False, True, True, True]
    masked = Engine(rows, kv, "mask")
    assert masked.get(range(KEYS)) == [
        Found(1, BOTH),
        Found(1, b""),
        Found(5, b""),
        Found(1, BOTH),
        Found(1, BOTH),
    ]
    engine.close()
    masked.close()


def test_a_gate_neither_stores_nor_brings_a_block_without_its_required_rows() -> None:
    """Goal: KV without rows is of no use to it. Method: an engine that masks has stored a block with half of them."""
    stores = MemoryStore(1 << 20), MemoryStore(1 << 20)
    gated, masked = Engine(*stores, "gate"), Engine(*stores, "mask")
    assert gated.put([0, 1], 1, PART) == [None, None]
    assert [store.usage()["records"] for store in stores] == [0, 0]
    assert masked.put([1], 2, PART) == [Found(2, PART)]
    assert gated.put([0, 2], 3) == [Found(3, BOTH)] * 2
    assert gated.get([0, 1, 2]) == [Found(3, BOTH), Absence.MISS, Absence.MISS]
    assert masked.get([0, 1, 2]) == [Found(3, BOTH), Found(2, PART), Found(3, BOTH)]
    assert gated.put([1], 4) == [Found(4, BOTH)]
    gated.close()
    masked.close()


def test_a_part_that_is_put_again_and_finds_no_room_is_not_answered_for(policy: HitPolicy) -> None:
    """Goal: nothing answers for what is not stored.

    Method: the part that is put last was evicted and is stored beside an older other part; it is evicted again just
    before both are put anew, and there is no room for it.
    """
    stores = FussyStore(MemoryStore(1 << 20)), FussyStore(MemoryStore(1 << 20))
    first, last = stores if policy == "gate" else stores[::-1]
    engine = Engine(*stores, policy)
    engine.put([0], 1)
    last.delete([key(0)])
    put = first.put

    def beside_an_eviction(headers, payloads, *, replace=False):
        if replace:
            last.delete([key(0)])
            last.refusing = True
        return put(headers, payloads, replace=replace)

    first.put = beside_an_eviction
    assert engine.put([0], 2) == [None if policy == "gate" else Found(2, b"")]
    engine.close()


def test_a_gate_does_not_answer_for_stored_rows_that_miss_required_ones() -> None:
    """Goal: what is answered as stored comes back. Method: who requires other rows has stored the same computation."""
    stores = MemoryStore(1 << 20), MemoryStore(1 << 20)
    engine, other = Engine(*stores, "gate"), Engine(*stores, "gate")
    other.pair = PairMover(*other.movers, "gate", ROWS, required=[0])
    assert other.put([0], 1, EXTRA) == [Found(1, EXTRA)]
    assert engine.put([0], 1, REQUIRED) == [None]
    assert engine.get([0]) == [Absence.MISS]
    assert engine.put([0], 1, BOTH) == [Found(1, BOTH)]
    assert engine.get([0]) == other.get([0]) == [Found(1, BOTH)]
    engine.close()
    other.close()


@pytest.mark.parametrize(("valid", "before"), [(BOTH, 2), (PART, 1)], ids=["replacing", "in part"])
def test_a_rival_between_kv_and_rows_is_not_answered_for(valid: bytes, before: int) -> None:
    """Goal: nothing answers for KV that is gone. Method: a rival puts a pair just before our rows."""
    rows, kv = FussyStore(MemoryStore(1 << 20)), MemoryStore(1 << 20)
    ours, rival = Engine(rows, kv, "mask"), Engine(rows, kv, "mask")
    if valid == BOTH:
        ours.put([0], 1)
        kv.delete([key(0)])
    put, calls = rows.put, 0

    def behind_the_rival(headers, payloads, *, replace=False):
        nonlocal calls
        calls += 1
        if calls == before:
            assert rival.put([0], 3) == [Found(3, BOTH)]
        return put(headers, payloads, replace=replace)

    rows.put = behind_the_rival
    (answer,) = ours.put([0], 2, valid)
    assert [each and each.origin for each in (answer, stored(kv, KV, 0))] == [3, 3]
    ours.close()
    rival.close()


def test_an_unknown_origin_pairs_with_nothing(policy: HitPolicy) -> None:
    """Goal: 0 says that nobody knows. Method: both parts have it."""
    engine = Engine(MemoryStore(1 << 20), MemoryStore(1 << 20), policy)
    assert engine.put([0], 0) == [None if policy == "gate" else Found(0, b"")]
    assert engine.get([0]) == [Absence.ORIGIN if policy == "gate" else Found(0, b"")]
    engine.close()


def test_two_engines_racing_on_one_pool_hand_out_whole_pairs_only(policy: HitPolicy) -> None:
    """Goal: no order of their puts mixes computations. Method: two threads put and get the same keys."""
    stores = MemoryStore(1 << 20), MemoryStore(1 << 20)
    engines = [Engine(*stores, policy) for _ in range(2)]
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def work(number: int) -> None:
        try:
            start.wait(60)
            for turn in range(150):
                engines[number].put(range(KEYS), 1 + 2 * turn + number)
                engines[number].get(range(KEYS))
                if turn % 5 == number:
                    stores[turn % 2].delete([key(turn % KEYS)])
        except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]
    answers = engines[0].put(range(KEYS), 1000)
    assert all(answer is not None and answer.valid == BOTH for answer in answers)
    assert engines[1].get(range(KEYS)) == answers
    for engine in engines:
        engine.close()

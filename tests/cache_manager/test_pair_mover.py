"""Rows and KV in stores that evict, refuse and fail each on its own: rows come back beside their own KV only.

Content names its computation: every byte of a block, of rows and of KV, is a function of key and origin.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.mover import PairMover, RowsMover
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.regions import HeapRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore

TOKENS, KEYS, BLOCKS = 4, 5, 12
ROWS = RecordLayout(
    (AuxBlockDataSpec("extra", (2,), "uint8", TOKENS), AuxBlockDataSpec("routing", (3,), "uint8", TOKENS))
)
KV = RecordLayout((AuxBlockDataSpec("kv", (64,), "uint8", TOKENS),))
FULL = b"\x0f" + bytes(7)
NONE, EXTRA, PART, REQUIRED, BOTH = (
    bytes(16),
    FULL + bytes(8),
    bytes(8) + b"\x03" + bytes(7),
    bytes(8) + FULL,
    FULL + FULL,
)
"""Validity of a block's rows; ``routing`` is required."""
ORIGIN_MAX = (1 << 64) - 1


def key(n: int) -> BlockKey:
    return BlockKey(b"scope-of" + n.to_bytes(24, "big"))


@functools.cache
def content(n: int, origin: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng((n, origin)).integers(0, 256, nbytes, dtype=np.uint8)


class KVMover(RowsMover):
    """KV has all of its tokens, whatever rows there are."""

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        whole = dataclasses.replace(records, valid=[FULL] * len(records.keys))
        return [found and Found(found.origin, b"") for found in super().put(whole, replace=replace)]


class FussyStore(FaultyStore):
    """Refuses what is new to it when told to, as a full store that may not evict."""

    refusing = False

    def put(self, headers, payloads, *, replace=False):
        if not self.refusing:
            return super().put(headers, payloads, replace=replace)
        if self.fail_put:
            raise StorageError("put failed on purpose")
        buffers = [memoryview(bytearray(header.payload_nbytes)) for header in headers]
        found = self.backend.get_into([header.key for header in headers], buffers)
        return [header if isinstance(header, RecordHeader) else None for header in found]


class Engine:
    """Device blocks of rows and KV over two stores that others use too."""

    def __init__(self, rows: StorageBackend, kv: StorageBackend, policy: HitPolicy) -> None:
        self.regions = HeapRegion(ROWS, BLOCKS), HeapRegion(KV, BLOCKS)
        self.movers = (
            RowsMover(self.regions[0], None, RecordStore(rows, ROWS)),
            KVMover(self.regions[1], None, RecordStore(kv, KV)),
        )
        self.pair = PairMover(*self.movers, policy, ROWS, required=[1])

    def compute(self, n: int, origin: int) -> None:
        """Block ``n`` has the rows and the KV of key ``n`` that the computation ``origin`` makes."""
        for region in self.regions:
            region.rows[n] = content(n, origin, region.layout.nbytes)

    def put(self, wanted: Sequence[int], origin: int, valid: bytes = BOTH) -> list[Found | None]:
        for n in wanted:
            self.compute(n, origin)
        count = len(wanted)
        keys = [key(n) for n in wanted]
        return self.pair.put(BlockRecords(keys, list(wanted), [origin] * count, [valid] * count, [1] * count))

    def get(self, wanted: Sequence[int]) -> list[Found | Absence]:
        """What comes back, which has to be rows and KV of the origin that is answered."""
        blocks = [KEYS + i for i in range(len(wanted))]
        for region in self.regions:
            region.rows[KEYS:] = 0xEE
        found = self.pair.get_into([key(n) for n in wanted], blocks)
        for n, block, answer in zip(wanted, blocks, found, strict=True):
            if isinstance(answer, Found):
                assert self.is_of(1, n, block, answer.origin), "KV of another computation"
                assert not answer.valid or self.is_of(0, n, block, answer.origin), "rows of another computation"
        return found

    def is_of(self, part: int, n: int, block: int, origin: int) -> bool:
        region = self.regions[part]
        return bool((region.rows[block] == content(n, origin, region.layout.nbytes)).all())

    def close(self) -> None:
        for region in self.regions:
            region.close()


def stored(backend: StorageBackend, layout: RecordLayout, n: int) -> RecordHeader | None:
    """What a store has under a key, past every mover."""
    (found,) = backend.get_into([key(n)], [memoryview(bytearray(layout.nbytes))])
    return found if isinstance(found, RecordHeader) else None


class PairMachine(RuleBasedStateMachine):
    """Two engines on one pool of two stores, in any order of puts, crossings, evictions and faults."""

    @initialize(policy=st.sampled_from(("gate", "mask")))
    def start(self, policy: HitPolicy) -> None:
        self.policy = policy
        self.stores = [FussyStore(MemoryStore(1 << 20)) for _ in range(2)]
        self.engines = [Engine(*self.stores, policy) for _ in range(2)]
        self.origins = itertools.count(ORIGIN_MAX, -1)  # of 64 bits, and none twice
        self.offered: dict[tuple[int, int], bytes] = {}  # by key and origin: the rows that were valid

    def teardown(self) -> None:
        for engine in getattr(self, "engines", []):
            engine.close()

    def held(self, n: int) -> tuple[RecordHeader | None, RecordHeader | None]:
        return stored(self.stores[0].backend, ROWS, n), stored(self.stores[1].backend, KV, n)

    def is_whole_pair(self, n: int) -> bool:
        rows, kv = self.held(n)
        return rows is not None and kv is not None and rows.origin == kv.origin and rows.valid[8:] == FULL

    def well(self) -> bool:
        return not any(store.fail_put or store.refusing for store in self.stores)

    def offer(self, engine: int, wanted: Sequence[int], origin: int, valid: bytes) -> list[Found | None] | None:
        for n in wanted:
            self.offered[n, origin] = valid
        with suppress(StorageError):
            return self.engines[engine].put(wanted, origin, valid)
        return None

    @rule(
        engine=st.integers(0, 1),
        wanted=st.lists(st.integers(0, KEYS - 1), unique=True, min_size=1),
        valid=st.sampled_from((NONE, EXTRA, PART, REQUIRED, BOTH)),
    )
    def put(self, engine: int, wanted: list[int], valid: bytes) -> None:
        origin = next(self.origins)
        before = {n: self.held(n) for n in wanted}
        was_whole = {n: self.is_whole_pair(n) for n in wanted}
        answers = self.offer(engine, wanted, origin, valid)
        if answers is None:
            return
        for n, answer in zip(wanted, answers, strict=True):
            rows, kv = self.held(n)
            if was_whole[n]:
                assert (rows, kv) == before[n], "a whole pair stays"
            elif self.well() and valid[8:] == FULL:
                assert self.is_whole_pair(n), "a pair that is not whole is repaired by the next put"
                assert answer == Found(origin, valid)
            if answer is None:
                assert valid[8:] != FULL or not self.is_whole_pair(n)
                continue
            assert kv is not None
            assert kv.origin == answer.origin
            if answer.valid:
                assert rows is not None
                assert (rows.origin, rows.valid) == (answer.origin, answer.valid)

    @rule(n=st.integers(0, KEYS - 1), late=st.integers(0, 1), valid=st.sampled_from((PART, REQUIRED, BOTH)))
    def two_engines_cross(self, n: int, late: int, valid: bytes) -> None:
        """Engine 1 puts the key while engine 0 is about to put it into one of the stores."""
        mine, theirs = next(self.origins), next(self.origins)
        once = itertools.count()
        store = self.stores[late]

        def cross() -> None:
            if next(once) == 0:
                self.offer(1, [n], theirs, valid)

        store.during_put = cross
        self.offer(0, [n], mine, BOTH)
        store.during_put = None

    @rule(engine=st.integers(0, 1), wanted=st.permutations(range(KEYS)))
    def get(self, engine: int, wanted: list[int]) -> None:
        with suppress(StorageError):
            found = self.engines[engine].get(wanted)
            for n, answer in zip(wanted, found, strict=True):
                if isinstance(answer, Found):
                    assert (n, answer.origin) in self.offered, "an origin that nobody offered"
                    assert answer.valid in (b"", self.offered[n, answer.origin])

    @rule(store=st.integers(0, 1), n=st.integers(0, KEYS - 1))
    def a_store_evicts(self, store: int, n: int) -> None:
        self.stores[store].backend.delete([key(n)])

    @rule(store=st.integers(0, 1), fault=st.sampled_from(("fail_put", "fail_get", "refusing")), on=st.booleans())
    def a_store_fails_or_recovers(self, store: int, fault: str, on: bool) -> None:
        setattr(self.stores[store], fault, on)

    @rule(store=st.integers(0, 1))
    def a_store_is_lost(self, store: int) -> None:
        self.stores[store].backend = MemoryStore(1 << 20)

    @rule(engine=st.integers(0, 1))
    def an_engine_restarts(self, engine: int) -> None:
        self.engines[engine].close()
        self.engines[engine] = Engine(*self.stores, self.policy)

    @invariant()
    def rows_that_come_back_are_of_the_kv_that_comes_back(self) -> None:
        """And what is a whole pair does come back."""
        if not hasattr(self, "engines") or any(store.fail_get for store in self.stores):
            return
        for n in range(KEYS):
            (answer,) = self.engines[0].get([n])
            rows, kv = self.held(n)
            if self.is_whole_pair(n):
                assert rows is not None
                assert answer == Found(rows.origin, rows.valid)
            elif self.policy == "gate":
                assert isinstance(answer, Absence)
                foreign = rows and kv and rows.valid[8:] == FULL and rows.origin != kv.origin
                assert (answer is Absence.ORIGIN) == bool(foreign)
            elif kv is None:
                assert answer is Absence.MISS
            else:
                beside = rows is not None and rows.origin == kv.origin
                assert answer == Found(kv.origin, rows.valid if rows is not None and beside else b"")


TestPairs = PairMachine.TestCase
TestPairs.settings = settings(max_examples=80, stateful_step_count=30)


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

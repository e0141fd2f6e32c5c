"""Any order of puts, crossings, evictions and faults: rows come back beside their own KV only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress

from budget import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pairs import BOTH, EXTRA, FULL, KEYS, KV, NONE, PART, REQUIRED, ROWS, Engine, FussyStore, key, stored

from cache_manager.errors import StorageError
from cache_manager.ports import Absence, Found, HitPolicy
from cache_manager.record import RecordHeader
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import ORIGIN_MAX


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
TestPairs.settings = examples(80, stateful_step_count=30)

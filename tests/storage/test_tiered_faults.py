"""Tiers that fail, stall, lie, lose and flip bits: no wrong byte, nothing deleted comes back, everything is counted."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from budget import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.errors import ConfigError, RecordError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.ports import Absence
from cache_manager.storage import open_store
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.contract import numbers
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.faulty_tiers import WAIT_S, Tiers, check_counters

RECORDS = 24


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    opened = Tiers()
    yield opened
    opened.close()


class TieredMachine(RuleBasedStateMachine):
    """Any calls and faults against a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Tiers()
        self.store = self.it.store
        self.safe: set[int] = set()  # in both tiers, of which one at most was harmed since
        self.harmed: set[int] = set()
        self.maybe: set[int] = set()  # may be stored: a put of it was tried since it was deleted
        self.asked = 0

    def teardown(self) -> None:
        self.it.close()

    @rule(wanted=numbers)
    def put(self, wanted: list[int]) -> None:
        self.maybe |= set(wanted)
        with suppress(StorageError):
            assert all(put(self.store, wanted)) or len(self.harmed) == 2

    @rule(wanted=numbers)
    def get(self, wanted: list[int]) -> None:
        self.asked += len(wanted)
        try:
            answers = get(self.store, wanted)
        except StorageError:
            self.asked -= len(wanted)
            assert len(self.harmed) == 2 or not self.safe & set(wanted), "one tier is well"
            return
        for n, answer in zip(wanted, answers, strict=True):
            assert n not in self.safe or answer == payload_of(n), "one tier is well"
            if n not in self.maybe:
                assert isinstance(answer, Absence), f"{n} was deleted"
            assert isinstance(answer, Absence) or answer == payload_of(n)

    @rule(wanted=numbers)
    def delete(self, wanted: list[int]) -> None:
        """Gone from here on, also where a tier cannot delete it yet."""
        with suppress(StorageError):
            self.it.backend.delete([key_of(n) for n in wanted])
        self.safe -= set(wanted)
        self.maybe -= set(wanted)

    @rule(wanted=numbers)
    def contains(self, wanted: list[int]) -> None:
        try:
            there = self.store.contains([key_of(n) for n in wanted])
        except StorageError:
            return
        assert all(n in self.maybe for n, here in zip(wanted, there, strict=True) if here)

    def _harm(self, tier: int) -> None:
        self.harmed.add(tier)
        if len(self.harmed) == 2:
            self.safe.clear()

    @rule(tier=st.integers(0, 1), fault=st.sampled_from(["failing", "losing", "lying", "full"]))
    def break_a_tier(self, tier: int, fault: str) -> None:
        self._harm(tier)
        setattr(self.it.tiers[tier], fault, True)

    @rule(tier=st.integers(0, 1))
    def slow_a_tier(self, tier: int) -> None:
        self.it.tiers[tier].slow_s = 0.002

    @rule(tier=st.integers(0, 1), bit=st.integers(0, 8 * LAYOUT.nbytes - 1))
    def flip_bits_of_a_tier(self, tier: int, bit: int) -> None:
        self._harm(tier)
        self.it.tiers[tier].flipping = bit

    @rule(tier=st.integers(0, 1), n=st.integers(0, RECORDS - 1))
    def a_tier_loses_a_record(self, tier: int, n: int) -> None:
        self._harm(tier)
        self.it.tiers[tier].real.delete([key_of(n)])

    @rule()
    def faults_end(self) -> None:
        self.it.mend()

    @precondition(lambda self: self.maybe)
    @rule()
    def after_faults_everything_put_is_in_every_tier_and_nothing_deleted_is(self) -> None:
        """What is put when all is well; more is not promised: a tier may have lost what it said it had."""
        self.it.come_back()
        wanted = sorted(self.maybe)
        assert all(put(self.store, wanted))
        self.safe, self.harmed = set(wanted), set()
        assert sum(tier.owed for tier in self.it.backend.counters) == 0
        for tier in self.it.tiers:
            assert [n for n in range(RECORDS) if tier.has(n)] == wanted
        self.asked += RECORDS
        for n, answer in enumerate(get(self.store, range(RECORDS))):
            assert answer == (payload_of(n) if n in self.maybe else Absence.MISS)

    @invariant()
    def counters_sum_to_what_was_asked(self) -> None:
        check_counters(self.it)
        counters = self.store.counters
        assert counters.hits + counters.misses + counters.corrupt == self.asked

    @invariant()
    def bytes_used_plus_free_equal_capacity(self) -> None:
        usage = self.store.usage()
        assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
        assert usage["free_nbytes"] >= 0


TestTiered = TieredMachine.TestCase
TestTiered.settings = examples(40, stateful_step_count=30)


def test_each_key_is_counted_for_the_tier_that_had_it(tiers: Tiers) -> None:
    store, backend = tiers.store, tiers.backend
    put(store, range(6))
    backend.flush()
    tiers.front.real.delete([key_of(n) for n in (1, 3)])
    assert get(store, [0, 1, 2, 3, 9]) == [*(payload_of(n) for n in range(4)), Absence.MISS]
    assert [tier.hits for tier in backend.counters] == [2, 2]


def test_what_a_later_tier_had_is_put_into_the_earlier_ones_once() -> None:
    it = Tiers(count=3)
    it.back.real.put([header_of(1)], [payload_of(1)])
    for _ in range(5):
        assert get(it.store, [1]) == [payload_of(1)]
    assert [tier.has(1) for tier in it.tiers] == [True] * 3
    assert [tier.promoted for tier in it.backend.counters] == [1, 1, 0]
    assert it.front.puts == 1
    check_counters(it)
    it.close()


@pytest.mark.parametrize("bit", [0, 8 * LAYOUT.nbytes - 1])
def test_a_corrupt_front_copy_is_healed_from_the_back(tiers: Tiers, bit: int) -> None:
    """The caller gets the record; the bad copy is deleted in its own tier only, and a good one takes its place."""
    store, backend = tiers.store, tiers.backend
    put(store, range(3))
    backend.flush()
    bad = bytearray(payload_of(1))
    bad[bit // 8] ^= 1 << bit % 8
    tiers.front.real.delete([key_of(1)])
    tiers.front.real.put([header_of(1)], [bytes(bad)])
    assert get(store, range(3)) == [payload_of(n) for n in range(3)]
    backend.flush()
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    assert tiers.front.real.get_into([key_of(1)], [buffer]) == [header_of(1)]
    assert bytes(buffer) == payload_of(1)
    assert tiers.back.has(1)
    assert [tier.corrupt for tier in backend.counters] == [1, 0]
    assert [tier.hits for tier in backend.counters] == [2, 1]
    assert store.counters.corrupt == 0


def test_corrupt_in_every_tier_is_corrupt_and_can_be_put_anew(tiers: Tiers) -> None:
    put(tiers.store, [1])
    tiers.backend.flush()
    tiers.front.flipping = tiers.back.flipping = 77
    assert tiers.backend.get_into([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]) == [Absence.CORRUPT]
    tiers.mend()
    assert [tier.corrupt for tier in tiers.backend.counters] == [1, 1]
    assert get(tiers.store, [1]) == [Absence.MISS]
    assert put(tiers.store, [1]) == [True]
    assert get(tiers.store, [1]) == [payload_of(1)]


def test_a_bad_front_copy_does_not_cost_the_good_one_of_a_tier_that_is_down(tiers: Tiers) -> None:
    put(tiers.store, [1])
    tiers.backend.flush()
    tiers.front.flipping, tiers.back.failing = 5, True
    assert get(tiers.store, [1]) == [Absence.MISS]
    assert tiers.backend.counters[1].failed_reads == 1
    tiers.come_back()
    assert get(tiers.store, [1]) == [payload_of(1)]


def test_a_record_that_is_deleted_while_it_is_put_does_not_come_back(tiers: Tiers) -> None:
    """Method: the put is stopped inside the back's; a deletion waits for it, and so is the later of the two."""
    tiers.back.gate.clear()
    putter = threading.Thread(target=put, args=(tiers.store, [1, 2]), daemon=True)
    putter.start()
    assert tiers.back.at_gate.wait(WAIT_S)
    assert get(tiers.store, [1, 2]) == [Absence.MISS] * 2, "no tier shows a record that is not in all of them"
    deleter = threading.Thread(target=tiers.backend.delete, args=([key_of(1)],), daemon=True)
    deleter.start()
    tiers.back.gate.set()
    for thread in (putter, deleter):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    tiers.backend.delete([key_of(1)])  # the deleter may have been the first
    assert (tiers.front.has(1), tiers.back.has(1), tiers.back.has(2)) == (False, False, True)
    check_counters(tiers)


def test_a_record_that_is_deleted_while_it_is_promoted_does_not_come_back(tiers: Tiers) -> None:
    """Method: it is deleted when a reader has it from the back and has not yet put it into the front."""
    tiers.back.real.put([header_of(2)], [payload_of(2)])
    deleter = threading.Thread(target=tiers.backend.delete, args=([key_of(2)],), daemon=True)
    tiers.back.during_get = deleter.start
    assert get(tiers.store, [2]) == [payload_of(2)], "the reader was first"
    tiers.back.during_get = None
    deleter.join(WAIT_S)
    assert not any(tier.has(2) for tier in tiers.tiers)
    assert get(tiers.store, [2]) == [Absence.MISS]


def test_debts_are_bounded_and_the_oldest_are_forgotten_first(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_manager.storage.tiered.OWED_MAX", 4)
    put(tiers.store, range(6))
    tiers.back.failing = True
    assert put(tiers.store, range(10, 16)) == [True] * 6
    back = tiers.backend.counters[1]
    assert (back.owed, back.forgotten) == (4, 2)
    with pytest.raises(StorageError, match="more than 4 deletions wait"):
        tiers.backend.delete([key_of(1)])
    assert get(tiers.store, [1]) == [payload_of(1)]


def test_a_deletion_that_a_tier_cannot_make_is_an_error_and_is_made_when_it_can(tiers: Tiers) -> None:
    put(tiers.store, [1, 2])
    tiers.backend.flush()
    tiers.back.failing = True
    with pytest.raises(StorageError, match="tier1: the tier fails on purpose"):
        tiers.backend.delete([key_of(1)])
    tiers.back.failing = False
    assert get(tiers.store, [1]) == [Absence.MISS]
    tiers.backend.flush()
    assert not tiers.back.has(1)
    assert put(tiers.store, [1]) == [True]
    assert tiers.back.has(1)
    assert get(tiers.store, [1, 2]) == [payload_of(1), payload_of(2)]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_tier_is_bypassed_and_comes_back_without_a_restart(dead: int) -> None:
    """Goal: the other tier's hits and puts go on, and the dead one is not called for a while, and follows then."""
    it = Tiers(pause_ms=60_000)
    tier = it.tiers[dead]
    put(it.store, range(8))
    tier.failing = True
    for n in range(8, 14):
        assert put(it.store, [n]) == [True]
        assert get(it.store, [0, n, 99]) == [payload_of(0), payload_of(n), Absence.MISS]
    calls, before = tier.calls, it.backend.counters[dead]
    assert get(it.store, [1, 99]) == [payload_of(1), Absence.MISS]
    assert put(it.store, [14]) == [True]
    after = it.backend.counters[dead]
    assert tier.calls == calls
    assert after.bypassed_reads > before.bypassed_reads
    assert after.bypassed_writes > before.bypassed_writes
    assert it.backend.usage()["stale_tiers"] == 1
    it.come_back()
    assert not any(tier.has(n) for n in range(8, 15)), "these it never got"
    assert get(it.store, range(15)) == [payload_of(n) for n in range(15)]
    assert all(tier.has(n) for n in range(15 if dead == 0 else 8)), "a front learns of them when they are read"
    assert put(it.store, range(8, 15)) == [True] * 7
    assert all(tier.has(n) for n in range(15))
    check_counters(it)
    it.close()


def test_only_when_every_tier_fails_is_it_an_error_and_it_names_every_cause(tiers: Tiers) -> None:
    put(tiers.store, [1])
    tiers.front.failing = tiers.back.failing = True
    for call in (
        lambda: get(tiers.store, [1, 2]),
        lambda: put(tiers.store, [3]),
        lambda: tiers.store.contains([key_of(1)]),
    ):
        tiers.end_pauses()
        with pytest.raises(StorageError, match=r"no tier answered: the tier fails.*; the tier fails"):
            call()
    tiers.backend._tiers[0].away_until_s["reads"] = math.inf
    with pytest.raises(StoreUnavailableError, match="tier tier0 failed a moment ago"):
        get(tiers.store, [1])
    tiers.come_back()
    assert get(tiers.store, [1]) == [payload_of(1)]
    check_counters(tiers)


def test_a_tier_without_room_leaves_the_record_to_the_next(tiers: Tiers) -> None:
    tiers.front.full = True
    assert put(tiers.store, [1]) == [True]
    assert tiers.back.has(1)
    tiers.back.full = True
    assert put(tiers.store, [2]) == [False]
    assert get(tiers.store, [1, 2]) == [payload_of(1), Absence.MISS]


def test_closing_says_what_a_tier_still_has_to_delete() -> None:
    it = Tiers()
    put(it.store, range(4))
    it.back.failing = True
    with suppress(StorageError):
        it.backend.delete([key_of(1), key_of(2)])
    with pytest.raises(StorageError, match="tier tier1 was closed before it got 2 deletions"):
        it.backend.close()
    it.backend.close()
    with pytest.raises(StoreClosedError):
        it.backend.usage()


def test_a_record_that_one_tier_will_never_take_does_not_hold_up_the_others() -> None:
    """A memory store holds records of one size."""
    it = Tiers()
    it.back.real.put([header_of(50, 128)], [payload_of(50, 128)])
    it.back.real.delete([key_of(50)])
    assert put(it.store, [1]) == [True]
    assert get(it.store, [1]) == [payload_of(1)]
    with pytest.raises(RecordError, match="payload size"):
        it.backend.put([header_of(2, 256)], [payload_of(2, 256)])
    assert it.are_asked()
    it.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("tiered:", "tiered: store tiers: wanted URLs"),
        ("tiered:memory:", "tiered: store tiers: wanted 2 or more, got 1"),
        ("tiered:memory:,redis://h", "store scheme: wanted one of .*, got 'redis'"),
        ("tiered:tiered:memory:,memory:", "tiered: store tiers: wanted 2 or more, got 1"),
        ("tiered:/dir,memory:", "tiered: store tiers: wanted URLs"),
        ("tiered:?queue=1MiB,memory:,memory:", "tiered: store parameter: wanted one of pause_ms.* got 'queue'"),
        ("tiered:?pause_ms=0,memory:,memory:", "tiered: store parameter pause_ms: wanted 1 to 600000, got 0"),
        ("tiered:?pause_ms=1s,memory:,memory:", "tiered: store parameter pause_ms: wanted whole milliseconds"),
        (
            "tiered:memory:?capacity=1MiB,memory:?quota=1",
            "memory: store parameter: wanted one of capacity, got 'quota'",
        ),
        ("memory:memory:", "memory: store path: wanted none"),
        ("file:file:///x", "file: store path"),
    ],
)
def test_a_url_that_cannot_be_is_a_config_error(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_a_url_sets_what_it_names() -> None:
    url = "tiered:?pause_ms=7,memory:?capacity=1MiB,memory:?capacity=2MiB"
    backend = open_store(url)
    assert isinstance(backend, TieredStore)
    assert backend.pause_ms == 7
    usage = backend.usage()
    assert (usage["tier0_capacity_nbytes"], usage["tier1_capacity_nbytes"]) == (1 << 20, 2 << 20)
    assert usage["capacity_nbytes"] == 3 << 20
    backend.close()


def test_a_tier_that_cannot_be_closed_leaves_no_other_one_open() -> None:
    """Goal: no leak behind a tier without a contract. Method: closing the first raises what no store should."""

    class Odd(MemoryStore):
        def close(self) -> None:
            super().close()
            raise OSError("not a StorageError")

    back = MemoryStore(1 << 20)
    store = TieredStore({"front": Odd(1 << 20), "back": back})
    with pytest.raises(OSError, match="not a StorageError"):
        store.close()
    with pytest.raises(StoreClosedError):
        back.usage()

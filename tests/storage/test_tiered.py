"""Whatever its tiers do, a tiered store hands out no wrong byte, and nothing that was deleted comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from budget import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from mooncake_pool import running_master, running_owner

from cache_manager.errors import RecordError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.ports import Absence
from cache_manager.storage import open_store
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.contract import numbers, offers
from cache_manager.testing.origins import Content, held, offer
from cache_manager.testing.records import BOTH, LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.faulty_tiers import FAULTS, WAIT_S, Tiers

KEYS = range(24)
X, Y = Content(1, BOTH), Content(2, BOTH)


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    opened = Tiers()
    yield opened
    opened.mend()
    opened.backend.close()


def until(what: str, holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < give_up_s, f"not within 60 s: {what}"
        time.sleep(0.02)


class TieredMachine(RuleBasedStateMachine):
    """Puts of several computations, reads and deletions, while tiers fail, lie, lose, make room and flip bits."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Tiers()
        self.store = self.it.store
        self.may: dict[int, set[Content]] = {n: set() for n in KEYS}  # put since they were deleted
        self.safe: set[int] = set()  # in both tiers, of which one at most was harmed since
        self.harmed: set[int] = set()
        self.asked = 0

    def teardown(self) -> None:
        self.it.mend()
        self.it.backend.close()

    @rule(batch=offers, replace=st.booleans())
    def put(self, batch: list[tuple[int, Content]], replace: bool) -> None:
        for n, content in batch:
            self.may[n].add(content)
        with suppress(StorageError):
            for (n, _), answer in zip(batch, offer(self.it.backend, batch, replace=replace), strict=True):
                assert answer in self.may[n] or (answer is None and n not in self.safe)

    @rule(wanted=numbers | st.permutations(KEYS))
    def get(self, wanted: list[int]) -> None:
        try:
            answers = held(self.store, wanted)
        except StorageError:
            assert not self.safe & set(wanted), "one tier is well"
            return
        self.asked += len(wanted)
        for n, answer in zip(wanted, answers, strict=True):
            assert answer in self.may[n] or (isinstance(answer, Absence) and n not in self.safe)

    @rule(wanted=numbers)
    def contains(self, wanted: list[int]) -> None:
        with suppress(StorageError):
            there = self.store.contains([key_of(n) for n in wanted])
            assert all(self.may[n] for n, here in zip(wanted, there, strict=True) if here)

    @rule(wanted=numbers)
    def delete(self, wanted: list[int]) -> None:
        """Where no tier fails it is gone; a deletion that raised may have been made in part."""
        self.safe -= set(wanted)
        with suppress(StorageError):
            self.it.backend.delete([key_of(n) for n in wanted])
            self.may.update({n: set() for n in wanted})

    def _harm(self, tier: int) -> None:
        self.harmed.add(tier)
        if len(self.harmed) == 2:
            self.safe.clear()

    @rule(tier=st.integers(0, 1), fault=st.sampled_from(FAULTS))
    def break_a_tier(self, tier: int, fault: str) -> None:
        self._harm(tier)
        setattr(self.it.tiers[tier], fault, True)

    @rule(tier=st.integers(0, 1), bit=st.integers(0, 8 * LAYOUT.nbytes - 1))
    def flip_bits_of_a_tier(self, tier: int, bit: int) -> None:
        self._harm(tier)
        self.it.tiers[tier].flipping = bit

    @rule(tier=st.integers(0, 1), n=st.sampled_from(KEYS))
    def a_tier_makes_room(self, tier: int, n: int) -> None:
        self._harm(tier)
        self.it.tiers[tier].backend.delete([key_of(n)])

    @rule()
    def faults_end(self) -> None:
        self.it.mend()

    @rule(content=st.builds(Content, st.integers(1, 3), st.just(BOTH)))
    def after_faults_what_is_put_is_in_every_tier(self, content: Content) -> None:
        self.it.mend()
        wanted = [n for n in KEYS if self.may[n]]
        self.put([(n, content) for n in wanted], replace=True)
        self.safe, self.harmed = set(wanted), set()
        for tier in self.it.tiers:
            assert all(isinstance(each, Content) for each in held(tier.backend, wanted))
        self.get(list(KEYS))

    @invariant()
    def every_record_asked_for_is_a_hit_of_a_tier_a_miss_or_corrupt(self) -> None:
        counters = self.store.counters
        assert counters.hits + counters.misses + counters.corrupt == self.asked
        assert counters.hits == sum(tier.counts["hits"] for tier in self.it.backend._tiers)


TestTiered = TieredMachine.TestCase
TestTiered.settings = examples(60, stateful_step_count=30)


def test_what_a_later_tier_had_is_put_into_the_earlier_ones_once() -> None:
    it = Tiers(count=3)
    it.back.put([header_of(1)], [payload_of(1)])
    for _ in range(5):
        assert get(it.store, [1]) == [payload_of(1)]
    assert [tier.has(1) for tier in it.tiers] == [True] * 3
    assert (it.of_each("promoted"), it.of_each("hits"), it.front.puts) == ([1, 1, 0], [4, 0, 1], 1)
    it.backend.close()


@pytest.mark.parametrize("bit", [0, 8 * LAYOUT.nbytes - 1])
def test_a_corrupt_front_copy_is_healed_from_the_back(tiers: Tiers, bit: int) -> None:
    """The caller gets the record; the bad copy is deleted in its own tier only, and a good one takes its place."""
    put(tiers.store, range(3))
    bad = bytearray(payload_of(1))
    bad[bit // 8] ^= 1 << bit % 8
    tiers.front.delete([key_of(1)])
    tiers.front.put([header_of(1)], [bytes(bad)])
    for _ in range(2):
        assert get(tiers.store, range(3)) == [payload_of(n) for n in range(3)]
    assert (tiers.of_each("corrupt"), tiers.of_each("hits")) == ([1, 0], [5, 1])
    assert tiers.store.counters.corrupt == 0


def test_corrupt_in_every_tier_is_corrupt_and_can_be_put_anew(tiers: Tiers) -> None:
    put(tiers.store, [1])
    tiers.front.flipping = tiers.back.flipping = 77
    assert get(tiers.store, [1]) == [Absence.CORRUPT]
    tiers.mend()
    assert get(tiers.store, [1]) == [Absence.MISS]
    assert put(tiers.store, [1]) == [True]
    assert get(tiers.store, [1]) == [payload_of(1)]


def test_a_bad_front_copy_does_not_cost_the_good_one_of_a_tier_that_is_down(tiers: Tiers) -> None:
    put(tiers.store, [1])
    tiers.front.flipping, tiers.back.failing = 5, True
    assert get(tiers.store, [1]) == [Absence.MISS]
    tiers.mend()
    assert get(tiers.store, [1]) == [payload_of(1)]


def test_a_record_that_is_deleted_while_it_is_read_does_not_come_back(tiers: Tiers) -> None:
    """Method: it is deleted when a reader has it from the back and has not yet put it into the front."""
    tiers.back.put([header_of(2)], [payload_of(2)])
    tiers.back.after_get = lambda: tiers.backend.delete([key_of(2)])
    assert get(tiers.store, [2]) == [payload_of(2)], "the reader was first"
    tiers.back.after_get = None
    assert get(tiers.store, [2]) == [Absence.MISS]
    assert not any(tier.has(2) for tier in tiers.tiers)


def test_a_record_that_is_deleted_while_it_is_promoted_does_not_come_back(tiers: Tiers) -> None:
    """Method: the promotion stands still in the front's put; a deletion waits for it. A reader meanwhile does not."""
    tiers.back.put([header_of(2)], [payload_of(2)])
    tiers.front.gate.clear()
    reader = threading.Thread(target=get, args=(tiers.store, [2]), daemon=True)
    deleter = threading.Thread(target=tiers.backend.delete, args=([key_of(2)],), daemon=True)
    reader.start()
    assert tiers.front.at_gate.wait(WAIT_S)
    deleter.start()
    assert get(tiers.store, [2]) == [payload_of(2)]
    tiers.front.gate.set()
    for thread in (reader, deleter):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert get(tiers.store, [2]) == [Absence.MISS]


@pytest.mark.parametrize("replace", [False, True])
def test_whichever_tier_keeps_a_record_says_so(tiers: Tiers, replace: bool) -> None:
    """Goal: an answer is of what is read next; a later tier does not get what an earlier one has denied."""
    tiers.front.put([header_of(1)], [payload_of(1)])
    last = Y if replace else X
    assert offer(tiers.backend, [(1, Y)], replace=replace) == [last]
    assert held(tiers.backend, [1]) == [last]
    assert held(tiers.back.backend, [1]) == [Y if replace else Absence.MISS]


def test_a_tier_that_was_away_may_answer_with_an_older_record_of_its_own_origin(tiers: Tiers) -> None:
    """What is promised no more; what comes is whole, and its header says whose it is."""
    assert offer(tiers.backend, [(1, X)], replace=False) == [X]
    tiers.back.failing = True
    assert offer(tiers.backend, [(1, Y)], replace=True) == [Y]
    tiers.mend()
    tiers.front.backend.delete([key_of(1)])
    assert held(tiers.backend, [1]) == [X]
    tiers.backend.delete([key_of(1)])
    assert held(tiers.backend, [1]) == [Absence.MISS]


def test_a_deletion_that_a_tier_cannot_make_is_an_error_that_names_it(tiers: Tiers) -> None:
    put(tiers.store, [1, 2])
    tiers.back.failing = True
    for call in (lambda: tiers.backend.delete([key_of(1)]), tiers.backend.flush):
        with pytest.raises(StorageError, match="tier 1: the tier fails on purpose"):
            call()
    assert (tiers.front.has(1), tiers.backend.usage()["stale_tiers"]) == (False, 1)
    tiers.mend()
    tiers.backend.delete([key_of(1)])
    assert get(tiers.store, [1, 2]) == [Absence.MISS, payload_of(2)]


def test_only_when_every_tier_fails_is_it_an_error_and_it_names_every_cause(tiers: Tiers) -> None:
    put(tiers.store, [1])
    calls = (lambda: get(tiers.store, [1]), lambda: put(tiers.store, [3]), lambda: tiers.store.contains([key_of(1)]))
    tiers.front.failing = tiers.back.failing = True
    for call in calls:
        with pytest.raises(StorageError, match=r"tier 0: the tier fails.*; tier 1: the tier fails"):
            call()
    tiers.front.mend()
    tiers.front.losing = True
    assert [call() for call in calls] == [[payload_of(1)], [True], [True]]


def test_that_nobody_is_to_be_asked_soon_is_passed_on(tiers: Tiers) -> None:
    def down() -> None:
        raise StoreUnavailableError("its process is gone")

    tiers.front.failing, tiers.back.during_get = True, down
    with pytest.raises(StoreUnavailableError, match="tier 1: its process is gone"):
        get(tiers.store, [1])


def test_a_tier_without_room_leaves_the_record_to_the_next(tiers: Tiers) -> None:
    tiers.front.full = True
    assert put(tiers.store, [1]) == [True]
    assert tiers.back.has(1)
    tiers.back.full = True
    assert put(tiers.store, [2]) == [False]
    assert get(tiers.store, [1, 2]) == [payload_of(1), Absence.MISS]


def test_a_record_that_one_tier_will_never_take_does_not_hold_up_the_others(tiers: Tiers) -> None:
    """A memory store holds records of one size."""
    tiers.back.put([header_of(50, 128)], [payload_of(50, 128)])
    assert put(tiers.store, [1]) == [True]
    assert get(tiers.store, [1]) == [payload_of(1)]
    with pytest.raises(RecordError, match="payload size"):
        tiers.backend.put([header_of(2, 256)], [payload_of(2, 256)])


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


def test_a_master_is_killed_and_restarted_under_load_behind_a_file_front(tmp_path: Path) -> None:
    """Goal: hits of the front go on, nothing read is wrong, and the back is used again, without a restart.

    Method: a reader and a writer work all the time; no call of the store may fail, because the front is well.
    """
    with running_master() as master, running_owner(master, tmp_path / "segment", 4 << 20):
        pool = master.url(timeout_ms=1000, full_ms=300)
        backend = open_store(f"tiered:file://{tmp_path}/front?quota=4MiB,{pool}")
        store = RecordStore(backend, LAYOUT)
        assert all(put(store, range(20)))
        stop, failures, written = threading.Event(), list[BaseException](), [20]

        def work(step: Callable[[], None]) -> None:
            try:
                while not stop.wait(0.005):
                    step()
            except BaseException as error:
                failures.append(error)
                raise

        def read() -> None:
            last = written[-1]
            assert get(store, range(20)) == [payload_of(n) for n in range(20)]
            assert get(store, [last - 1, 100_000]) == [payload_of(last - 1), Absence.MISS]

        def write() -> None:
            first = written[-1] if written[-1] < 300 else 20  # the front has room for these, and evicts none
            assert all(put(store, range(first, first + 2)))
            written.append(first + 2)

        threads = [threading.Thread(target=work, args=(step,), daemon=True) for step in (read, write)]
        try:
            for thread in threads:
                thread.start()
            master.kill()
            until("the back fails", lambda: backend.usage().get("tier1_failed_reads", 0) > 0)
            usage = backend.usage()
            until("hits go on", lambda: backend.usage()["tier0_hits"] > usage["tier0_hits"] + 100)
            master.start()
            until("the back is written again", lambda: backend.usage()["tier1_written"] > usage["tier1_written"])
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert not failures, failures[0]
        assert store.counters.corrupt == 0
        backend.close()

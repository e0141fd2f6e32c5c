"""Whatever its tiers do, a tiered store hands out no wrong byte, and no deleted record comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from budget import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from waiting import GIVE_UP_S

from cache_manager.errors import RecordError, StorageError, StoreClosedError, StoreUnavailableError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage import open_store
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.contract import StorageContract, numbers, offers
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.records import BOTH, LAYOUT, Content, get, header_of, held, key_of, offer, payload_of, put

KEYS = range(24)
X, Y = Content(1, BOTH), Content(2, BOTH)
WAIT_S = GIVE_UP_S
FAULTS = ("failing", "losing", "lying", "full")


class FaultyTier(FaultyStore):
    """A memory store with faults that a test switches on; a fault lasts until it is switched off."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(1 << 20))
        self.mend()

    def mend(self) -> None:
        self.failing, self.error = False, StorageError
        self.losing = False  # reports a put as stored, and keeps nothing
        self.lying = False  # answers with the header and bytes of other keys
        self.full = False
        self.flip_next = None

    def _met(self) -> None:
        if self.failing or self.error is not StorageError:
            raise self.error("the tier fails on purpose")

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._met()
        if self.full:  # it keeps its records
            found = self.backend.get_into(
                [h.key for h in headers], [memoryview(bytearray(h.payload_nbytes)) for h in headers]
            )
            return [None if isinstance(answer, Absence) else answer for answer in found]
        return list(headers) if self.losing else super().put(headers, payloads, replace=replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._met()
        found = super().get_into(keys, buffers)
        return found[1:] + found[:1] if self.lying else found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._met()
        return super().contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._met()
        super().delete(keys)

    def flush(self) -> None:
        self._met()

    def usage(self) -> Mapping[str, int]:
        self._met()
        return super().usage()

    def has(self, number: int) -> bool:
        return self.backend.contains([key_of(number)])[0]


class Tiers:
    """A tiered store over faulty ones, and its front and back."""

    def __init__(self) -> None:
        self.tiers = [FaultyTier(), FaultyTier()]
        self.front, self.back = self.tiers[0], self.tiers[-1]
        self.backend = TieredStore({str(i): tier for i, tier in enumerate(self.tiers)})
        self.store = RecordStore(self.backend, LAYOUT)

    def mend(self) -> None:
        for tier in self.tiers:
            tier.mend()

    def of_each(self, name: str) -> list[int]:
        usage = self.backend.usage()
        return [usage[f"tier{depth}_{name}"] for depth in range(len(self.tiers))]


class TestMemoryBeforeFile(StorageContract):
    """Two tiers, with room for a record in each."""

    copies_max = 2
    exact = False
    machine_settings = examples(15, stateful_step_count=20)

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        return open_store(f"tiered:memory:?capacity={capacity_nbytes},file://{directory}?quota={capacity_nbytes}")


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    opened = Tiers()
    yield opened
    opened.mend()
    opened.backend.close()


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
        self.it.tiers[tier].flip_next = bit

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
        usage = self.it.backend.usage()
        assert counters.hits == sum(usage[f"tier{depth}_hits"] for depth, _ in enumerate(self.it.tiers))


TestTiered = TieredMachine.TestCase
TestTiered.settings = examples(60, stateful_step_count=30)


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
    assert (tiers.of_each("corrupt"), tiers.of_each("hits"), tiers.of_each("promoted")) == ([1, 0], [5, 1], [1, 0])
    assert tiers.store.counters.corrupt == 0


def test_a_bad_front_copy_does_not_cost_the_good_one_of_a_tier_that_is_down(tiers: Tiers) -> None:
    put(tiers.store, [1])
    tiers.front.flip_next, tiers.back.failing = 5, True
    assert get(tiers.store, [1]) == [Absence.MISS]
    tiers.mend()
    assert get(tiers.store, [1]) == [payload_of(1)]


def test_a_tier_that_is_down_may_have_a_sound_copy_of_what_is_bad_in_another(tiers: Tiers) -> None:
    """Goal: nobody is told that a record is lost while a tier has not answered. Method: the front's copy is bad, and
    the back is down, or answers that it has none."""
    for down, answer in ((True, Absence.MISS), (False, Absence.CORRUPT)):
        tiers.front.put([header_of(1)], [payload_of(1)])
        tiers.front.flip_next, tiers.back.failing = 5, down
        assert tiers.backend.get_into([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]) == [answer]
        tiers.mend()


def test_a_record_that_is_deleted_while_it_is_read_is_whole_where_it_comes_back(tiers: Tiers) -> None:
    """Method: it is deleted when a reader has it from the back and has not yet put it into the front."""
    tiers.back.put([header_of(2)], [payload_of(2)])
    tiers.back.during_get = lambda: tiers.backend.delete([key_of(2)])
    assert get(tiers.store, [2]) == [payload_of(2)], "the reader was first"
    tiers.back.during_get = None
    assert get(tiers.store, [2]) == [payload_of(2)]
    tiers.backend.delete([key_of(2)])
    assert get(tiers.store, [2]) == [Absence.MISS]
    assert not any(tier.has(2) for tier in tiers.tiers)


@pytest.mark.parametrize("replace", [False, True])
def test_whichever_tier_keeps_a_record_says_so(tiers: Tiers, replace: bool) -> None:
    """Goal: put answers with the record that a read gets next; a later tier is not given a record that an earlier tier
    has refused."""
    tiers.front.put([header_of(1)], [payload_of(1)])
    last = Y if replace else X
    assert offer(tiers.backend, [(1, Y)], replace=replace) == [last]
    assert held(tiers.backend, [1]) == [last]
    assert held(tiers.back.backend, [1]) == [Y if replace else Absence.MISS]


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
    tiers.mend()
    with pytest.raises(RecordError, match="payload"):
        tiers.backend.put([header_of(2, 256)], [payload_of(2)])
    tiers.front.failing, tiers.back.error = True, StoreUnavailableError  # that the master is not to be asked soon
    with pytest.raises(StoreUnavailableError, match="tier 1: the tier fails on purpose"):
        get(tiers.store, [1])


def test_a_tier_that_cannot_be_closed_leaves_no_other_one_open() -> None:
    """Goal: no leak behind a tier without a contract. Method: closing the first raises an error that no store should
    raise."""

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


def test_a_memory_tier_in_front_serves_every_layout() -> None:
    """A bug that was found: a memory store in front took one layout's records, and each put of another counted as a
    failed write of the tier. Method: two layouts; then the tier behind loses everything."""
    front, behind = MemoryStore(1 << 20), MemoryStore(1 << 20)
    with TieredStore({"front": front, "behind": behind}) as store:
        for nbytes in (LAYOUT.nbytes, 128):
            header, buffer = header_of(nbytes, nbytes), memoryview(bytearray(nbytes))
            assert store.put([header], [payload_of(nbytes, nbytes)]) == [header]
            behind.delete([header.key])
            assert store.get_into([header.key], [buffer]) == [header]
            assert buffer == payload_of(nbytes, nbytes)

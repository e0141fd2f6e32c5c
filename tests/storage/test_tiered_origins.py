"""Tiers that have records of different computations under one key: what ``put`` denied is never handed out."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.storage.tiered import TieredSettings, TieredStore
from cache_manager.storage.tiered.settings import WhenFull
from cache_manager.testing.origins import NUMBERS, Content, batches, held, is_more, offer
from cache_manager.testing.records import BOTH, FIRST, LAYOUT, key_of
from tests.storage.test_tiered_faults import QUICK, WAIT_S, FaultyTier, Tiers, check_counters, until

X, Y, FEW = Content(1, BOTH), Content(2, BOTH), Content(1, FIRST)
ALL_WAITS = TieredSettings(
    queue_nbytes=64 * LAYOUT.nbytes,
    promote_nbytes=8 * LAYOUT.nbytes,
    when_full=WhenFull.DROP,
    delete_ms=20,
    pause_ms=1,
    pause_max_ms=2,
    close_ms=2000,
)
ONE_WAITS = replace(ALL_WAITS, queue_nbytes=LAYOUT.nbytes, promote_nbytes=0)


def evict(tier: FaultyTier, n: int) -> None:
    """The tier makes room, of its own accord."""
    tier.real.delete([key_of(n)])


class OriginTiersMachine(RuleBasedStateMachine):
    """Puts of several computations while tiers evict, fail, refuse and stand still; queues hold all or nothing."""

    roomy = True

    def __init__(self) -> None:
        super().__init__()
        self.it = Tiers(ALL_WAITS if self.roomy else ONE_WAITS)
        self.told: dict[int, Content | None] = dict.fromkeys(range(NUMBERS))

    def teardown(self) -> None:
        self.it.close()

    @rule(batch=batches, replace=st.booleans())
    def put(self, batch: list[tuple[int, Content]], replace: bool) -> None:
        with suppress(StorageError):
            for (n, _), answer in zip(batch, offer(self.it.backend, batch, replace=replace), strict=True):
                self.told[n] = answer
            return
        for n, _ in batch:  # no tier answered: whether one had taken it before it failed, nobody was told
            with suppress(StorageError):
                self.it.backend.delete([key_of(n)])
            self.told[n] = None

    @rule(n=st.integers(0, NUMBERS - 1))
    def delete(self, n: int) -> None:
        with suppress(StorageError):
            self.it.backend.delete([key_of(n)])
        self.told[n] = None

    @rule(tier=st.integers(0, 1), n=st.integers(0, NUMBERS - 1))
    def a_tier_evicts(self, tier: int, n: int) -> None:
        evict(self.it.tiers[tier], n)

    @precondition(lambda self: self.it.back.gate.is_set())
    @rule(tier=st.integers(0, 1), fault=st.sampled_from(["failing", "full"]))
    def break_a_tier(self, tier: int, fault: str) -> None:
        setattr(self.it.tiers[tier], fault, True)

    @precondition(lambda self: not any(tier.failing or tier.full for tier in self.it.tiers))
    @rule()
    def the_back_stands_still(self) -> None:
        if not self.it.backend._lanes[1].owed:
            self.it.back.gate.clear()

    @rule()
    def all_is_well(self) -> None:
        self.it.come_back()

    @invariant()
    def no_key_holds_what_an_answer_denied(self) -> None:
        for n, told in self.told.items():
            try:
                (answer,) = held(self.it.backend, [n])
            except StorageError:
                continue
            if is_more(answer, told):
                assert isinstance(answer, Content)
                self.told[n] = answer
            assert answer in (self.told[n], Absence.MISS)

    @invariant()
    def counters_add_up(self) -> None:
        check_counters(self.it.backend)


class NarrowTiersMachine(OriginTiersMachine):
    roomy = False


TestOriginTiers = OriginTiersMachine.TestCase
TestOriginTiers.settings = settings(max_examples=40, stateful_step_count=25)
TestNarrowTiers = NarrowTiersMachine.TestCase
TestNarrowTiers.settings = settings(max_examples=20, stateful_step_count=25)


def back_has_x_and_front_is_told_y(it: Tiers) -> None:
    """X went to both tiers, the front evicted it, and Y came: the front has Y."""
    assert offer(it.backend, [(1, X)], replace=False) == [X]
    it.backend.flush()
    evict(it.front, 1)
    assert offer(it.backend, [(1, Y)], replace=False) == [Y]


def test_the_deciding_tier_is_followed_by_those_behind_it() -> None:
    it = Tiers()
    back_has_x_and_front_is_told_y(it)
    it.backend.flush()
    assert held(it.back.real, [1]) == [Y]
    evict(it.front, 1)
    assert held(it.backend, [1]) == [Y]
    it.close()


def test_a_record_that_waits_hides_what_its_tier_still_has() -> None:
    """Goal: no window between the answer and the queue's end. Method: the back stands still, the front evicts."""
    it = Tiers()
    offer(it.backend, [(1, X)], replace=False)
    it.backend.flush()
    it.back.gate.clear()
    evict(it.front, 1)
    assert offer(it.backend, [(1, Y)], replace=False) == [Y]
    assert it.back.at_gate.wait(WAIT_S)
    evict(it.front, 1)
    assert held(it.backend, [1]) == [Y]
    assert held(it.back.real, [1]) == [X]
    it.close()
    assert it.backend.counters.tiers[1].written == 2


def test_a_tier_that_does_not_get_a_record_does_not_keep_the_other_one() -> None:
    """Goal: neither a full queue nor a full tier leaves a denied record. Method: both, then the front evicts."""
    it = Tiers(ONE_WAITS)
    offer(it.back.real, [(1, X)], replace=False)
    it.back.gate.clear()
    assert offer(it.backend, [(2, X)], replace=False) == [X]  # fills the queue
    assert it.back.at_gate.wait(WAIT_S)
    assert offer(it.backend, [(1, Y)], replace=False) == [Y]
    evict(it.front, 1)
    assert held(it.backend, [1]) == [Absence.MISS]
    it.back.gate.set()
    it.backend.flush()
    assert held(it.back.real, [1]) == [Absence.MISS]
    assert held(it.backend, [1]) == [Absence.MISS]
    it.close()

    class Stubborn(FaultyTier):
        """Has no room to replace a record, and keeps the old one."""

        def put(self, headers, payloads, *, replace=False):
            return super().put(headers, payloads, replace=False)

    back = Stubborn()
    backend = TieredStore({"front": (front := FaultyTier()), "back": back}, QUICK)
    offer(backend, [(1, X)], replace=False)
    backend.flush()
    evict(front, 1)
    assert offer(backend, [(1, Y)], replace=False) == [Y]
    backend.flush()
    evict(front, 1)
    assert held(backend, [1]) == [Absence.MISS]
    backend.close()


def test_what_was_read_before_a_put_is_not_promoted_after_it() -> None:
    """Goal: a promotion does not undo an answer. Method: Y is put while a read has X from the back in its hands."""
    it = Tiers()
    offer(it.backend, [(1, X)], replace=False)
    it.backend.flush()
    evict(it.front, 1)
    real, once = it.back.get_into, threading.Event()

    def get_into(keys, buffers):
        found = real(keys, buffers)
        if not once.is_set():
            once.set()
            assert offer(it.backend, [(1, Y)], replace=True) == [Y]
            evict(it.front, 1)
        return found

    it.back.get_into = get_into
    assert held(it.backend, [1]) == [X]  # it began before
    it.backend.flush()
    assert held(it.backend, [1]) == [Y]
    it.close()


def test_a_promotion_on_its_way_gives_way_to_what_is_put() -> None:
    """Goal: the same, when the front's worker already holds X at its put."""
    it = Tiers()
    offer(it.back.real, [(1, X)], replace=False)
    it.front.gate.clear()
    assert held(it.backend, [1]) == [X]
    assert it.front.at_gate.wait(WAIT_S)
    teller = threading.Thread(target=offer, args=(it.backend, [(1, Y)]), kwargs={"replace": True})
    teller.start()
    teller.join(WAIT_S)
    assert not teller.is_alive()
    assert held(it.backend, [1]) == [Y]
    it.front.gate.set()
    it.backend.flush()
    for tier in it.tiers:
        assert held(tier.real, [1]) == [Y]
    it.close()


def test_a_promotion_that_lands_after_a_put_is_taken_back() -> None:
    """Goal: the same, when the promotion began while Y was being put. Method: Y is evicted before X lands."""
    landing = threading.Event()

    class Front(FaultyTier):
        backend = None

        def put(self, headers, payloads, *, replace=False):
            if headers[0].origin == X.origin:
                assert landing.wait(WAIT_S)
            elif self.backend is not None:
                backend, self.backend = self.backend, None
                assert held(backend, [1]) == [X]
                until("X is on its way", lambda: backend._lanes[0].waiting[key_of(1)].in_flight)
            return super().put(headers, payloads, replace=replace)

    front, back = Front(), FaultyTier()
    front.backend = backend = TieredStore({"front": front, "back": back}, ALL_WAITS)
    offer(back.real, [(1, X)], replace=False)
    assert offer(backend, [(1, Y)], replace=False) == [Y]
    evict(front, 1)
    landing.set()
    backend.flush()
    assert held(backend, [1]) == [Y]
    backend.close()


def test_a_front_that_was_away_follows_what_the_back_has_decided() -> None:
    it = Tiers()
    offer(it.backend, [(1, X), (2, FEW)], replace=False)
    it.backend.flush()
    it.front.failing = True
    assert offer(it.backend, [(1, Y), (2, X)], replace=True) == [Y, X]
    it.front.failing = False
    assert held(it.backend, [1, 2]) == [Y, X]
    it.come_back()
    assert held(it.front.real, [1, 2]) == [Y, X]
    it.close()


def test_a_key_that_waits_for_the_front_is_decided_by_what_waits() -> None:
    """Goal: an answer stands while the front has not got the record. Method: the back decided, the front is well."""
    it = Tiers()
    it.front.failing = True
    assert offer(it.backend, [(1, X)], replace=False) == [X]
    it.front.gate.clear()
    it.front.failing = False
    until("the breakers close", lambda: all(lane.writes.closed for lane in it.backend._lanes))
    assert offer(it.backend, [(1, Y)], replace=False) == [X]
    assert offer(it.backend, [(1, Y)], replace=True) == [Y]
    assert held(it.backend, [1]) == [Y]
    it.come_back()
    for tier in it.tiers:
        assert held(tier.real, [1]) == [Y]
    it.close()

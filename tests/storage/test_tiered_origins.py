"""Tiers that have records of different computations under one key: what ``put`` denied is never handed out."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from budget import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.origins import NUMBERS, Content, batches, held, is_more, offer
from cache_manager.testing.records import BOTH, FIRST, key_of
from tests.storage.faulty_tiers import WAIT_S, FaultyTier, Tiers

X, Y, FEW = Content(1, BOTH), Content(2, BOTH), Content(1, FIRST)


def evict(tier: FaultyTier, n: int) -> None:
    """The tier makes room, of its own accord."""
    tier.real.delete([key_of(n)])


class OriginTiersMachine(RuleBasedStateMachine):
    """Puts of several computations while tiers evict, fail and refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Tiers()
        self.told: dict[int, Content | None] = dict.fromkeys(range(NUMBERS))

    def teardown(self) -> None:
        self.it.close()

    @rule(batch=batches, replace=st.booleans())
    def put(self, batch: list[tuple[int, Content]], replace: bool) -> None:
        with suppress(StorageError):
            for (n, _), answer in zip(batch, offer(self.it.backend, batch, replace=replace), strict=True):
                self.told[n] = answer or self.told[n]  # no room: a tier that was not asked may have what it had
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

    @rule(tier=st.integers(0, 1), fault=st.sampled_from(["failing", "full"]))
    def break_a_tier(self, tier: int, fault: str) -> None:
        setattr(self.it.tiers[tier], fault, True)

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


TestOriginTiers = OriginTiersMachine.TestCase
TestOriginTiers.settings = examples(60, stateful_step_count=25)


def only_the_back_has_x(it: Tiers) -> None:
    """X went to both tiers, and the front evicted it."""
    assert offer(it.backend, [(1, X)], replace=False) == [X]
    evict(it.front, 1)


@pytest.mark.parametrize("replace", [False, True])
def test_a_record_stays_whichever_tier_has_it_unless_it_is_replaced(replace: bool) -> None:
    """Goal: an eviction in the front changes no answer; and none is read from one tier that another one denies."""
    it = Tiers()
    only_the_back_has_x(it)
    last = Y if replace else X
    assert offer(it.backend, [(1, Y)], replace=replace) == [last]
    assert held(it.back.real, [1]) == [last]
    assert held(it.front.real, [1]) == [Y if replace else Absence.MISS]
    assert held(it.backend, [1]) == [last]
    evict(it.front, 1)
    assert held(it.backend, [1]) == [last]
    it.close()


def test_no_room_denies_nothing_that_a_tier_has_which_was_not_asked() -> None:
    """The front is left in peace when the back has no room: ``None``, and what was stored before is read later."""
    it = Tiers(pause_ms=60_000)
    assert offer(it.backend, [(1, X)], replace=False) == [X]
    evict(it.back, 1)
    it.front.failing = it.back.full = True
    with pytest.raises(StorageError):
        it.backend.delete([key_of(0)])
    assert offer(it.backend, [(1, Y)], replace=True) == [None]
    assert held(it.backend, [1]) == [Absence.MISS]
    it.come_back()
    assert held(it.backend, [1]) == [X]
    it.close()


def test_a_tier_with_more_rows_decides() -> None:
    it = Tiers()
    only_the_back_has_x(it)
    for replace in (False, True):
        assert offer(it.backend, [(1, FEW)], replace=replace) == [X]
        assert held(it.backend, [1]) == [X]
        evict(it.front, 1)
    it.close()


def test_what_is_being_replaced_is_not_read_from_one_tier_and_then_another() -> None:
    """Goal: X is not read after Y. Method: the back's put of Y stands still, and the front evicts Y meanwhile."""
    it = Tiers()
    assert offer(it.backend, [(1, X)], replace=False) == [X]
    it.back.gate.clear()
    told: list[object] = []
    teller = threading.Thread(
        target=lambda: told.extend(offer(it.backend, [(1, Y)], replace=True)), daemon=True, name="teller"
    )
    teller.start()
    try:
        assert it.back.at_gate.wait(WAIT_S)
        assert held(it.front.real, [1]) == [Y]
        assert held(it.backend, [1]) == [Absence.MISS]
        evict(it.front, 1)
        assert held(it.backend, [1]) == [Absence.MISS]
    finally:
        it.back.gate.set()
        teller.join(WAIT_S)
    assert told == [Y]
    assert held(it.backend, [1]) == [Y]
    it.close()


def test_a_tier_that_does_not_get_a_record_does_not_keep_the_other_one() -> None:
    """Goal: neither a failing nor a full tier leaves a denied record. Method: both, then the front evicts."""
    it = Tiers()
    offer(it.back.real, [(1, X)], replace=False)
    it.back.failing = True
    assert offer(it.backend, [(1, Y)], replace=True) == [Y]
    evict(it.front, 1)
    it.back.failing = False
    assert held(it.backend, [1]) == [Absence.MISS]
    it.come_back()
    assert held(it.back.real, [1]) == [Absence.MISS]
    it.close()

    class Stubborn(FaultyTier):
        """Has no room to replace a record, and keeps the old one."""

        def put(self, headers, payloads, *, replace=False):
            return super().put(headers, payloads, replace=False)

    back = Stubborn()
    backend = TieredStore({"front": (front := FaultyTier()), "back": back}, pause_ms=1)
    offer(backend, [(1, X)], replace=False)
    assert offer(backend, [(1, Y)], replace=True) == [Y]
    evict(front, 1)
    assert held(backend, [1]) == [Absence.MISS]
    backend.close()


def test_a_put_that_failed_after_it_had_stored_leaves_nothing_that_was_denied() -> None:
    """Goal: a front that stores Y and then fails does not hand it out when the back's answer was X."""

    class Late(FaultyTier):
        def put(self, headers, payloads, *, replace=False):
            super().put(headers, payloads, replace=replace)
            raise StorageError("stored, and then failed")

    back = FaultyTier()
    backend = TieredStore({"front": Late(), "back": back}, pause_ms=1)
    offer(back.real, [(1, X)], replace=False)
    assert offer(backend, [(1, Y)], replace=False) == [X]
    assert held(backend, [1]) == [X]
    backend.flush()
    assert held(backend, [1]) == [X]
    backend.close()


def test_what_was_read_before_a_put_is_not_promoted_after_it() -> None:
    """Goal: a promotion does not undo an answer. Method: Y is put while a read has X from the back in its hands."""
    it = Tiers()
    only_the_back_has_x(it)
    told: list[object] = []
    teller = threading.Thread(
        target=lambda: told.extend(offer(it.backend, [(1, Y)], replace=True)), daemon=True, name="teller"
    )
    it.back.during_get = teller.start
    assert held(it.backend, [1]) == [X]  # it began before
    it.back.during_get = None
    teller.join(WAIT_S)
    assert told == [Y]
    for backend in (it.backend, *(tier.real for tier in it.tiers)):
        assert held(backend, [1]) == [Y]
    it.close()


def test_a_put_waits_for_a_promotion_on_its_way() -> None:
    """Goal: the same, when the promotion has begun. Method: the front's put of X stands still; Y comes behind it."""
    it = Tiers()
    offer(it.back.real, [(1, X)], replace=False)
    it.front.gate.clear()
    read: list[object] = []
    reader = threading.Thread(target=lambda: read.extend(held(it.backend, [1])), daemon=True)
    teller = threading.Thread(target=offer, args=(it.backend, [(1, Y)]), kwargs={"replace": True}, daemon=True)
    try:
        reader.start()
        assert it.front.at_gate.wait(WAIT_S)
        teller.start()
    finally:
        it.front.gate.set()
        for thread in (reader, teller):
            thread.join(WAIT_S)
    assert read == [X]
    for backend in (it.backend, *(tier.real for tier in it.tiers)):
        assert held(backend, [1]) == [Y]
    it.close()


def test_a_front_that_was_away_follows_what_the_back_has_decided() -> None:
    it = Tiers()
    offer(it.backend, [(1, X), (2, FEW)], replace=False)
    it.front.failing = True
    assert offer(it.backend, [(1, Y), (2, X)], replace=True) == [Y, X]
    it.front.failing = False
    assert held(it.backend, [1, 2]) == [Y, X]
    it.come_back()
    assert held(it.backend, [1, 2]) == [Y, X]
    assert held(it.front.real, [1, 2]) == [Y, X]
    it.close()

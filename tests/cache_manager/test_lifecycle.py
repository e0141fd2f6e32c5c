"""The life of the blocks of one tier: the law, and a machine over the table of arrays whose model is a few sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.books import Books
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.keys import KeyChain, Namespace
from cache_manager.leases import Leases
from cache_manager.lifecycle import ALLOWED, ILLEGAL, IN_MOTION, NEXT, TRANSITIONS, Event, State
from cache_manager.memory import GENERATION_SHIFT
from cache_manager.regions.heap import HeapRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.step import Step
from cache_manager.table import BlockTable

BLOCKS, TOKENS = 5, 2
LAYOUT = RecordLayout((AuxBlockDataSpec("routing", (2,), "uint8", TOKENS),))
OWNERS = ("a", "b", "c")
OWNER = st.sampled_from(OWNERS)
SOME = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True)


def test_the_law_of_the_table() -> None:
    """Goal: the sentence at the top of the table holds for the table. Method: read it off."""
    assert set(TRANSITIONS) == set(State)
    for state, events in TRANSITIONS.items():
        assert (Event.WRITE in events) == (state is State.HELD)
        if state in IN_MOTION:
            assert not {Event.ALLOCATE, Event.RENEW, Event.EVICT, Event.WRITE, Event.RESET_UNHELD} & set(events)
        for event in (Event.EVICT, Event.ALLOCATE, Event.RESET_UNHELD):
            if event in events:
                assert state in (State.FREE, State.CACHED), "only what nobody holds is given away or forgotten"
    reachable, frontier = {State.FREE}, [State.FREE]
    while frontier:
        for after in TRANSITIONS[frontier.pop()].values():
            if after not in reachable:
                reachable.add(after)
                frontier.append(after)
    assert reachable == set(State)
    for event in Event:
        for state in State:
            after = TRANSITIONS[state].get(event)
            assert ALLOWED[event][state] == (after is not None)
            assert NEXT[event][state] == (ILLEGAL if after is None else after)


def new_table(*, owned_by_engine: bool = False) -> BlockTable:
    return BlockTable("device", HeapRegion(LAYOUT, BLOCKS), owned_by_engine=owned_by_engine)


class LifecycleMachine(RuleBasedStateMachine):
    """The model: for each block its owners, departures, whether it is arriving, its lives, the devices that write."""

    def __init__(self) -> None:
        super().__init__()
        self.life = new_table()
        self.books = Books(KeyChain(Namespace("m", 1), LAYOUT))
        self.devices: list[tuple[Step, set[int]]] = []  # steps in place, and the blocks that they may still write
        self.owners: list[set[str]] = [set() for _ in range(BLOCKS)]
        self.departures = [0] * BLOCKS
        self.arriving = [False] * BLOCKS
        self.free = [True] * BLOCKS
        self.lives = [0] * BLOCKS

    def still(self, block: int) -> bool:
        return not self.departures[block] and not self.arriving[block]

    def fenced(self, block: int) -> bool:
        return any(block in blocks for _, blocks in self.devices)

    def attempt(self, call, blocks: list[int], allowed, *, fence: bool = False) -> bool:
        """Call it; if some block does not allow it, it must raise and change nothing."""
        ids = self.life.ids(blocks)
        culprits = [b for b in blocks if not allowed(b)] or [b for b in blocks if fence and self.fenced(b)]
        if not culprits:
            call(ids)
            return True
        before = self.life.states.copy(), self.life.generations.copy(), self.life.departures.copy()
        with pytest.raises(BlockStateError) as caught:
            call(ids)
        after = self.life.states, self.life.generations, self.life.departures
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        busy = not self.still(culprits[0]) or allowed(culprits[0])
        assert isinstance(caught.value, BlockBusyError) == busy, caught.value
        assert f"block {culprits[0]}" in str(caught.value)
        return False

    @rule(blocks=SOME, owner=OWNER)
    def allocate(self, blocks, owner) -> None:
        def allowed(b: int) -> bool:
            return not self.owners[b] and self.still(b)

        if self.attempt(lambda ids: self.life.allocate(ids, owner), blocks, allowed, fence=True):
            for b in blocks:
                self.owners[b], self.free[b] = {owner}, False
                self.lives[b] += 1

    @rule(blocks=SOME, data=st.data())
    def allocate_each(self, blocks, data) -> None:
        owners = data.draw(st.lists(OWNER, min_size=len(blocks), max_size=len(blocks)))

        def allowed(b: int) -> bool:
            return not self.owners[b] and self.still(b)

        if self.attempt(lambda ids: self.life.allocate(ids, each=owners), blocks, allowed, fence=True):
            for b, owner in zip(blocks, owners, strict=True):
                self.owners[b], self.free[b] = {owner}, False
                self.lives[b] += 1

    @rule(blocks=SOME)
    def a_device_begins_to_write(self, blocks) -> None:
        slots = [b * TOKENS for b in blocks]
        held = all(self.owners[b] and self.still(b) for b in blocks)
        if held:
            step = Step(self.life, self.books, slots, steps_max=99, in_place=True)
            self.devices.append((step, set(blocks)))
        else:
            with pytest.raises(BlockStateError):
                Step(self.life, self.books, slots, steps_max=99, in_place=True)

    @precondition(lambda self: self.devices)
    @rule(data=st.data(), commit=st.booleans())
    def a_device_is_done(self, data, commit) -> None:
        step, _ = self.devices.pop(data.draw(st.integers(0, len(self.devices) - 1)))
        if commit:
            step.commit()
        else:
            step.abort()

    @rule(blocks=SOME, owner=OWNER)
    def share(self, blocks, owner) -> None:
        if self.attempt(
            lambda ids: self.life.share(ids, owner), blocks, lambda b: not self.free[b] and not self.arriving[b]
        ):
            for b in blocks:
                self.owners[b].add(owner)

    @rule(blocks=SOME | st.none(), owner=OWNER)
    def release(self, blocks, owner) -> None:
        chosen = range(BLOCKS) if blocks is None else blocks
        expected = {b for b in chosen if self.owners[b] == {owner}}
        ids = None if blocks is None else self.life.ids(blocks)
        assert set(self.life.release(owner, ids).tolist()) == expected
        assert self.life.release(owner, ids).size == 0
        for b in chosen:
            self.owners[b].discard(owner)
        if blocks is None:
            assert self.life.leases.blocks(owner).size == 0, "released_owners_hold_nothing"

    @rule(blocks=SOME)
    def evict(self, blocks) -> None:
        if self.attempt(self.life.evict, blocks, lambda b: not self.owners[b] and self.still(b)):
            for b in blocks:
                self.free[b] = True
                self.lives[b] += 1

    @rule(blocks=SOME)
    def begin_departure(self, blocks) -> None:
        def call(ids) -> None:
            self.life.check(Event.BEGIN_DEPARTURE, ids)
            self.life.begin_departure(ids)

        if self.attempt(call, blocks, lambda b: not self.free[b] and not self.arriving[b]):
            for b in blocks:
                self.departures[b] += 1

    @precondition(lambda self: any(self.departures))
    @rule(data=st.data())
    def end_departure(self, data) -> None:
        block = data.draw(st.sampled_from([b for b in range(BLOCKS) if self.departures[b]]))
        self.life.end_departure(np.array([block]))
        self.departures[block] -= 1

    @rule(blocks=SOME)
    def begin_arrival(self, blocks) -> None:
        def call(ids) -> None:
            self.life.check_no_device(ids)
            self.life.check(Event.BEGIN_ARRIVAL, ids)
            self.life.begin_arrival(ids)

        if any(self.fenced(b) for b in blocks):
            with pytest.raises(BlockBusyError, match="no device that still writes it"):
                call(self.life.ids(blocks))
        elif self.attempt(call, blocks, self.still):
            for b in blocks:
                self.arriving[b] = True
                self.lives[b] += not self.owners[b]

    @precondition(lambda self: any(self.arriving))
    @rule(data=st.data(), arrived=st.booleans())
    def end_arrival(self, data, arrived) -> None:
        block = data.draw(st.sampled_from([b for b in range(BLOCKS) if self.arriving[b]]))
        self.life.end_arrival(np.array([block]), arrived=arrived)
        self.arriving[block] = False
        self.free[block] = not arrived and not self.owners[block]

    @rule()
    def reset(self) -> None:
        self.life.reset()
        for b in range(BLOCKS):
            self.lives[b] += 1
            if not self.owners[b] and self.still(b):
                self.free[b] = True

    @invariant()
    def states_are_what_happened(self) -> None:
        for b in range(BLOCKS):
            expected = State.FREE if self.free[b] else State.CACHED
            if self.owners[b]:
                expected = State.HELD
            if self.departures[b]:
                expected = State.LEAVING
            if self.arriving[b]:
                expected = State.ARRIVING
            assert State(int(self.life.states[b])) is expected

    @invariant()
    def no_block_is_free_and_owned(self) -> None:
        self.life.assert_consistent()

    @invariant()
    def reference_counts_equal_leases(self) -> None:
        for b in range(BLOCKS):
            assert self.life.leases.holders[b] == len(self.owners[b])
            assert {o for o in OWNERS if self.life.leases.holds(o, b)} == self.owners[b]
        for owner in OWNERS:
            mine = [b for b in range(BLOCKS) if owner in self.owners[b]]
            assert sorted(self.life.leases.blocks(owner).tolist()) == mine
            self.life.check_holder(owner, np.array(mine, np.int64))
        assert set(self.life.leases._blocks) == set().union(*self.owners)

    @invariant()
    def a_generation_is_a_count_of_lives(self) -> None:
        assert self.life.generations.tolist() == self.lives
        assert (self.life.region.words >> np.uint64(GENERATION_SHIFT)).tolist() == self.lives

    @invariant()
    def a_block_that_a_device_may_write_is_given_to_nobody(self) -> None:
        everything = np.arange(BLOCKS)
        fenced = [self.fenced(b) for b in range(BLOCKS)]
        assert self.life.busy(everything, devices_only=True).tolist() == fenced
        free = [not self.owners[b] and self.still(b) and not fenced[b] for b in range(BLOCKS)]
        assert self.life.available(everything).tolist() == free


TestLifecycle = LifecycleMachine.TestCase


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([0, 5], r"blocks: wanted device block ids in \[0, 5\), got 5"),
        ([-1], r"blocks: wanted device block ids in \[0, 5\), got -1"),
        ([2, 2], "blocks: wanted each block once, got block 2 twice"),
        ([0.5], "blocks: wanted a flat sequence of block ids, got float64"),
        ([[1]], "blocks: wanted a flat sequence of block ids, got int64 of shape"),
    ],
)
def test_bad_block_ids_are_named(blocks, message) -> None:
    with pytest.raises(InvalidInputError, match=message):
        new_table().ids(blocks)


def test_leases_of_one_owner_never_end_those_of_another() -> None:
    """Goal: the bug class of pins without owners. Method: two owners, one block, one releases twice."""
    leases, one = Leases(BLOCKS), np.array([1])
    leases.acquire("a", one)
    leases.acquire("b", one)
    leases.acquire("b", one)
    assert leases.release("a").tolist() == []
    assert leases.release("a").tolist() == []
    assert leases.holds("b", 1)
    assert leases.holders[1] == 1, "who holds a block twice holds it once"
    assert leases.release("b").tolist() == [1]


def test_a_claim_that_stays_follows_no_move() -> None:
    """Goal: the store works on these very blocks. Method: an owner and a job hold a block, everybody follows."""
    here, there, source, target = Leases(BLOCKS), Leases(BLOCKS), np.array([1]), np.array([3])
    here.acquire("a", source)
    here.acquire("job", source, stays=True)
    here.pass_on(source, there, target, here.followers(source, None))
    assert (here.holds("job", 1), here.holds("a", 1)) == (True, False)
    assert (there.holds("job", 3), there.holds("a", 3)) == (False, True)
    here.release("job")
    here.acquire("job", source)
    assert [name for name, _ in here.followers(source, None)] == ["job"], "a name that was given back stays no more"


def test_a_lease_that_ended_while_the_move_was_open_is_passed_on_to_nobody() -> None:
    here, there, source, target = Leases(BLOCKS), Leases(BLOCKS), np.array([1, 2]), np.array([3, 4])
    here.acquire("a", source)
    followers = here.followers(source, "a")
    here.release("a", np.array([1]))
    here.pass_on(source, there, target, followers)
    assert there.blocks("a").tolist() == [4]
    assert here.holders.sum() == 0


class EngineLivesMachine(RuleBasedStateMachine):
    """Where an engine owns the blocks: it gives them out when it likes, in generations of its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.life = new_table(owned_by_engine=True)
        self.generations = [0] * BLOCKS
        self.given: set[int] = set()
        self.departures = [0] * BLOCKS

    @rule(blocks=SOME, later=st.integers(1, 3))
    def renew(self, blocks, later) -> None:
        blocks = [b for b in blocks if not self.departures[b]]
        for b in blocks:
            self.generations[b] += later
        self.life.renew(np.array(blocks, np.int64), np.array([self.generations[b] for b in blocks], np.int64))
        self.given.update(blocks)

    @rule(blocks=SOME)
    def begin_departure(self, blocks) -> None:
        blocks = [b for b in blocks if b in self.given]
        self.life.begin_departure(np.array(blocks, np.int64))
        for b in blocks:
            self.departures[b] += 1

    @precondition(lambda self: any(self.departures))
    @rule(data=st.data())
    def end_departure(self, data) -> None:
        block = data.draw(st.sampled_from([b for b in range(BLOCKS) if self.departures[b]]))
        self.life.end_departure(np.array([block]))
        self.departures[block] -= 1

    @rule()
    def a_reset_leaves_generations_to_the_engine(self) -> None:
        self.life.reset()

    @invariant()
    def states_are_what_happened(self) -> None:
        for b in range(BLOCKS):
            still = State.HELD if b in self.given else State.FREE
            assert State(int(self.life.states[b])) is (State.LEAVING if self.departures[b] else still)
        assert self.life.generations.tolist() == self.generations
        self.life.assert_consistent()


TestEngineLives = EngineLivesMachine.TestCase

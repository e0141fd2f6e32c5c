"""The life cycle of one tier: the table's law, and a machine whose model is a few sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.leases import Leases
from cache_manager.lifecycle import IN_MOTION, TRANSITIONS, BlockLifecycle, Event, State

BLOCKS = 5
OWNERS = ("a", "b", "c")
OWNER = st.sampled_from(OWNERS)
SOME = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True)


def test_the_law_of_the_table() -> None:
    """Goal: the sentence at the top of the table holds for the table. Method: read it off."""
    assert set(TRANSITIONS) == set(State)
    for state, events in TRANSITIONS.items():
        assert (Event.WRITE in events) == (state is State.HELD)
        if state in IN_MOTION:
            assert not {Event.ALLOCATE, Event.EVICT, Event.WRITE, Event.RESET_UNHELD} & set(events)
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


class LifecycleMachine(RuleBasedStateMachine):
    """The model: for each block its owners, its departures, whether it is arriving, and its lives so far."""

    def __init__(self) -> None:
        super().__init__()
        self.life = BlockLifecycle("device", BLOCKS)
        self.owners: list[set[str]] = [set() for _ in range(BLOCKS)]
        self.departures = [0] * BLOCKS
        self.arriving = [False] * BLOCKS
        self.free = [True] * BLOCKS
        self.lives = [0] * BLOCKS

    def still(self, block: int) -> bool:
        return not self.departures[block] and not self.arriving[block]

    def attempt(self, call, blocks: list[int], allowed) -> bool:
        """Call it; if some block does not allow it, it must raise and change nothing."""
        ids = self.life.ids(blocks)
        if all(allowed(b) for b in blocks):
            call(ids)
            return True
        before = self.life.states.copy(), self.life.generations.copy()
        with pytest.raises(BlockStateError) as caught:
            call(ids)
        assert all(np.array_equal(a, b) for a, b in zip(before, (self.life.states, self.life.generations), strict=True))
        culprit = next(b for b in blocks if not allowed(b))
        assert isinstance(caught.value, BlockBusyError) == (not self.still(culprit)), caught.value
        assert f"block {culprit}" in str(caught.value)
        return False

    @rule(blocks=SOME, owner=OWNER)
    def allocate(self, blocks, owner) -> None:
        def allowed(b: int) -> bool:
            return not self.owners[b] and self.still(b)

        if self.attempt(lambda ids: self.life.allocate(ids, owner), blocks, allowed):
            for b in blocks:
                self.owners[b], self.free[b] = {owner}, False
                self.lives[b] += 1

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
        assert set(self.life.release(owner, ids)) == expected
        assert self.life.release(owner, ids) == []
        for b in chosen:
            self.owners[b].discard(owner)
        if blocks is None:
            assert self.life.leases.blocks(owner) == [], "released_owners_hold_nothing"

    @rule(blocks=SOME)
    def evict(self, blocks) -> None:
        if self.attempt(self.life.evict, blocks, lambda b: not self.owners[b] and self.still(b)):
            for b in blocks:
                self.free[b] = True
                self.lives[b] += 1

    @rule(blocks=SOME)
    def begin_departure(self, blocks) -> None:
        if self.attempt(self.life.begin_departure, blocks, lambda b: not self.free[b] and not self.arriving[b]):
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
        if self.attempt(self.life.begin_arrival, blocks, self.still):
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
            assert self.life.leases.count(b) == len(self.owners[b])
            assert self.life.leases.snapshot([b]) == [self.owners[b]]

    @invariant()
    def a_generation_is_a_count_of_lives(self) -> None:
        assert self.life.generations.tolist() == self.lives


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
        BlockLifecycle("device", BLOCKS).ids(blocks)


def test_leases_of_one_owner_never_end_those_of_another() -> None:
    """Goal: the bug class of pins without owners. Method: two owners, one block, one releases twice."""
    leases = Leases()
    leases.acquire("a", [1])
    leases.acquire("b", [1])
    assert leases.release("a") == []
    assert leases.release("a") == []
    assert leases.holds("b", 1)
    assert leases.release("b") == [1]

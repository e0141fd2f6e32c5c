"""The tables of a block manager grow while it lives: what a sequence has is the same before and after.

They begin with one sequence of one block, so that every machine that drives a manager lives through growth. The one
here makes them grow in both directions again and again, over content that is a function of the tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
from canary import canary_rows
from house import PROMPT, SPEC, House
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv import prefix_digest

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class GrowthMachine(RuleBasedStateMachine):
    """Room for everything, so nothing is evicted: whatever full block was computed is found, and nothing else is."""

    device, live_max = 600, 40

    def __init__(self) -> None:
        super().__init__()
        self.house = House(device=self.device, host=0)
        self.tokens: dict[str, list[int]] = {}
        self.known: set[tuple[int, ...]] = set()  # prefixes of whole blocks that were computed
        self.names = 0

    def teardown(self) -> None:
        self.house.close()

    def new_name(self) -> str:
        self.names += 1
        return f"s{self.names}"

    def pick(self, n: int) -> str:
        return list(self.tokens)[n % len(self.tokens)]

    def room(self) -> bool:
        return len(self.tokens) < self.live_max and self.house.manager.free_device_blocks > 100

    def compute(self, owners: list[str], more: list[int], *, batch: bool = False) -> None:
        """One forward pass over ``more`` of each: KV and rows of a token are those of all tokens up to it."""
        house, seqs = self.house, [self.house.manager.sequence(owner) for owner in owners]
        if batch:
            assert house.manager.append_batch(seqs).all()
            slots = [[slot] for slot in house.manager.slots_batch(seqs).tolist()]
        prefixes = []
        for n, owner in enumerate(owners):
            done = house.manager.computed(owner)
            if not batch:
                assert house.manager.append(owner, done + len(more))
                slots = [house.manager.slots(owner, done, done + len(more)).tolist()]
            tokens = self.tokens[owner] = [*self.tokens[owner][:done], *(more[n : n + 1] if batch else more)]
            prefixes += [tokens[: p + 1] for p in range(done, len(tokens))]
        flat = [slot for each in slots for slot in each]
        house.kv.write(flat, [prefix_digest(prefix) for prefix in prefixes])
        with house.aux.step(np.array(flat, np.int64)) as step:
            step.write("routing", canary_rows(SPEC, [tuple(prefix) for prefix in prefixes]))
        if batch:
            house.manager.publish_batch(seqs, more)
        else:
            house.manager.publish(owners[0], self.tokens[owners[0]])
        self.known.update(tuple(prefix) for prefix in prefixes if len(prefix) % 4 == 0)

    @precondition(room)
    @rule(tokens=TOKENS, n=st.integers(1, 4))
    def admit(self, tokens, n) -> None:
        for _ in range(n):
            owner, at = self.new_name(), 0
            while at + 4 < len(tokens) and tuple(tokens[: at + 4]) in self.known:
                at += 4
            admission = self.house.manager.allocate(owner, tokens)
            assert admission.cached_tokens == at, "found is what was computed, and nothing else"
            self.tokens[owner] = list(tokens)
            self.compute([owner], tokens[at:])

    @precondition(lambda self: self.tokens and self.room())
    @rule(parent=st.integers(0, 39), n=st.integers(1, 4))
    def fork(self, parent, n) -> None:
        name = self.pick(parent)
        for _ in range(n):
            child = self.new_name()
            self.house.manager.fork(name, child)
            self.tokens[child] = list(self.tokens[name])

    @precondition(lambda self: self.tokens and self.room())
    @rule(owner=st.integers(0, 39), more=TOKENS)
    def grow(self, owner, more) -> None:
        self.compute([self.pick(owner)], more)

    @precondition(lambda self: self.tokens and self.room())
    @rule(bits=st.integers(0, 2**40 - 1))
    def decode(self, bits) -> None:
        """One token of every sequence."""
        owners = list(self.tokens)
        self.compute(owners, [bits >> n & 1 for n in range(len(owners))], batch=True)

    @precondition(lambda self: self.tokens)
    @rule(owner=st.integers(0, 39))
    def free(self, owner) -> None:
        name = self.pick(owner)
        self.house.manager.free(name)
        del self.tokens[name]

    @invariant()
    def every_sequence_has_its_own_content(self) -> None:
        for owner, tokens in self.tokens.items():
            assert self.house.manager.computed(owner) == len(tokens)
            assert self.house.has_kv_of(owner, tokens)
            made = canary_rows(SPEC, [tuple(tokens[: p + 1]) for p in range(len(tokens))])
            assert np.array_equal(content(self.house, owner, len(tokens)), made)
        self.house.manager.assert_consistent()


TestGrowth = GrowthMachine.TestCase
TestGrowth.settings = settings(max_examples=30)


# ---------------------------------------------------------------- by example


def content(house: House, owner: str, n: int) -> np.ndarray:
    read = house.manager.read("routing", owner, 0, n)
    assert read.valid.all()
    return read.values


@pytest.mark.parametrize("before", range(1, 36))
def test_a_fork_of_any_number_of_sequences_goes_on_under_its_own_tokens(before: int) -> None:
    """Goal: a fork is a fork at whatever number of sequences a table grows. Method: `before` sequences, a fork of the
    first in the middle of a block; the child fills the block, and only its very tokens find it."""
    house = House(device=2 * before + 12, host=0)
    house.run("s0", PROMPT[:6])
    for n in range(1, before):
        house.run(f"s{n}", [100 + n, 7])
    house.manager.fork("s0", "child")
    assert house.manager.computed("child") == 6
    assert house.manager.append("child", 8)
    house.compute("child", PROMPT[:8])
    assert np.array_equal(content(house, "child", 8), canary_rows(SPEC, [("x", p) for p in range(8)]))
    assert house.run("other", [*PROMPT[:4], 0, 0, *PROMPT[6:9]]) == 4, "nobody computed these"
    assert house.run("same", PROMPT[:9]) == 8
    house.close()


@pytest.mark.parametrize("length", range(1, 36))
def test_a_sequence_of_any_length_keeps_its_blocks(length: int) -> None:
    """Goal: as above, of the number of blocks. Method: one sequence that grows block by block beside a short one."""
    house = House(device=length + 4, host=0)
    house.run("short", [9])
    tokens = [200]
    house.run("long", tokens)
    while len(tokens) < 4 * length:
        tokens.append(200 + len(tokens))
        assert house.manager.append("long", len(tokens))
        house.compute("long", tokens)
    assert len(house.manager.table("long")) == length
    assert np.array_equal(content(house, "long", len(tokens)), canary_rows(SPEC, [("x", p) for p in range(4 * length)]))
    assert np.array_equal(content(house, "short", 1), canary_rows(SPEC, [("x", 0)]))
    house.close()


class LateFailure(AuxBlocks):
    """Blocks whose next lease for a further owner fails, before it is there or after."""

    fail: str | None = None

    def share(self, blocks, owner) -> None:
        how, self.fail = self.fail, None
        if how == "before":
            raise MemoryError(how)
        super().share(blocks, owner)
        if how == "after":
            raise MemoryError(how)


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("call", ["fork", "hold"])
def test_a_fork_that_fails_leaves_nothing_of_the_child(call: str, how: str) -> None:
    """Goal: no half made child whose blocks are found under other tokens. Method: the lease fails; then the same call
    again, and every block comes back."""
    aux = LateFailure([SPEC], device_blocks=6, namespace=Namespace("m", 0))
    manager = BlockManager(aux)
    manager.allocate("a", PROMPT[:6])
    with aux.step(manager.slots("a", 0, 6)) as step:
        step.write("routing", canary_rows(SPEC, [("x", p) for p in range(6)]))
    manager.publish("a", PROMPT[:6])
    before = manager.table("a"), manager.computed("a"), aux.holders().tolist()
    aux.fail = how
    with pytest.raises(MemoryError):
        getattr(manager, call)("a", "child")
    assert manager.owners == {"a"}
    assert (manager.table("a"), manager.computed("a"), aux.holders().tolist()) == before
    manager.assert_consistent()
    getattr(manager, call)("a", "child")
    assert manager.owners == {"a", "child"}
    for owner in ("a", "child"):
        manager.free(owner)
    assert manager.free_device_blocks == 6
    aux.close()


def test_a_parent_and_its_child_are_found_by_keys_of_their_own() -> None:
    """Goal: what the child appends is no part of the parent's prefix. Method: both fill two further blocks with tokens
    of their own, in turns; each is found by its own tokens, and a mixture is found as far as it is the same."""
    house = House(device=16, host=0)
    start, tokens = PROMPT[:4], {"a": [*PROMPT[:4]], "child": [*PROMPT[:4]]}
    house.run("a", start)
    house.manager.fork("a", "child")
    for n in range(8):
        for owner, base in (("child", 50), ("a", 70)):
            tokens[owner].append(base + n)
            assert house.manager.append(owner, len(tokens[owner]))
            house.compute(owner, tokens[owner])
    for owner in tokens:
        assert house.run(f"like {owner}", [*tokens[owner], 1]) == 12
        house.manager.free(f"like {owner}")
    mixed = [*start, *tokens["child"][4:8], *tokens["a"][8:], 1]
    assert house.run("mixed", mixed) == 8
    house.close()

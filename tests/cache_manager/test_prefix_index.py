"""The prefix index against a model: a dict of keys, and a list in order of release."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.keys import BlockKey
from cache_manager.prefix_index import PrefixIndex

KEYS = [BlockKey(bytes([n])) for n in range(8)]
BLOCKS = range(6)


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: set[int] = set()
        self.keys: dict[BlockKey, int] = {}
        self.idle: list[int] = []

    @rule(block=st.sampled_from(BLOCKS))
    def hold(self, block) -> None:
        self.index.hold([block])
        self.held.add(block)
        if block in self.idle:
            self.idle.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def insert(self, data, key) -> None:
        free = [b for b in self.held if b not in self.keys.values()]
        if not free:
            return
        block = data.draw(st.sampled_from(sorted(free)))
        assert self.index.insert(key, block) == (key not in self.keys)
        self.keys.setdefault(key, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        loose = self.index.release(blocks)
        assert loose == [b for b in blocks if b not in self.keys.values()]
        self.held -= set(blocks)
        self.idle += [b for b in blocks if b not in loose]

    @rule()
    def evict(self) -> None:
        expected = self.idle.pop(0) if self.idle else None
        assert self.index.evict() == expected
        self.keys = {k: b for k, b in self.keys.items() if b != expected}

    @rule(block=st.sampled_from(BLOCKS))
    def remove(self, block) -> None:
        self.index.remove(block)
        self.keys = {k: b for k, b in self.keys.items() if b != block}
        self.idle = [b for b in self.idle if b != block]

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == self.idle
        self.keys, self.idle = {}, []

    @rule(wanted=st.lists(st.sampled_from(KEYS), unique=True))
    def match_is_the_longest_run(self, wanted) -> None:
        run = []
        for key in wanted:
            if key not in self.keys:
                break
            run.append(self.keys[key])
        assert self.index.match(wanted) == run

    @invariant()
    def no_leased_block_is_evictable(self) -> None:
        assert self.index.idle == len(self.idle)
        assert not set(self.idle) & self.held
        assert len(self.index) == len(self.keys)
        self.index.assert_consistent()


TestPrefixIndex = PrefixIndexMachine.TestCase

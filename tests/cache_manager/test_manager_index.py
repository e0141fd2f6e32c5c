"""The prefix index against a model: by key the blocks with its content, found one first, and the order of release."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_manager.keys import BlockKey
from cache_manager.manager.index import PrefixIndex

KEYS = [BlockKey(bytes([n])) for n in range(2)]
BLOCKS = range(5)


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(len(BLOCKS))
        self.held: set[int] = set()
        self.blocks: dict[BlockKey, list[int]] = {}  # the first is found, the others are duplicates
        self.idle: list[int] = []

    def key_of(self, block: int) -> BlockKey | None:
        return next((key for key, blocks in self.blocks.items() if block in blocks), None)

    def forget(self, block: int) -> None:
        key = self.key_of(block)
        if key is not None:
            self.blocks[key].remove(block)
            if not self.blocks[key]:
                del self.blocks[key]
        if block in self.idle:
            self.idle.remove(block)

    @initialize(blocks=st.sets(st.sampled_from(BLOCKS), min_size=3))
    def begin(self, blocks) -> None:
        self.hold(blocks)

    @rule(blocks=st.sets(st.sampled_from(BLOCKS), min_size=1))
    def hold(self, blocks) -> None:
        self.index.hold(blocks)
        self.held |= blocks
        self.idle = [block for block in self.idle if block not in blocks]

    @rule(pairs=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(BLOCKS)), min_size=1, max_size=6))
    def insert(self, pairs) -> None:
        for key, block in pairs:
            if block not in self.held or self.key_of(block) not in (None, key):
                continue
            blocks = self.blocks.setdefault(key, [])
            if block not in blocks:
                blocks.append(block)
            expected = None if blocks[0] == block else blocks[0]
            assert self.index.insert(key, block) == expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        expected = []
        for block in blocks:
            key = self.key_of(block)
            found = self.blocks[key][0] if key is not None else None
            if found != block:
                expected.append(block)
                self.forget(block)
            if found is not None and (found == block or found in self.idle):
                self.idle = [*(b for b in self.idle if b != found), found]
            self.held.discard(block)
        assert self.index.release(blocks) == expected

    @rule(block=st.sampled_from(BLOCKS))
    def promote(self, block) -> None:
        key = self.key_of(block)
        if key is None or self.blocks[key][0] == block:
            return
        before = self.blocks[key][0]
        self.index.promote(block)
        self.blocks[key] = [block, *(other for other in self.blocks[key] if other != block)]
        if before in self.idle:
            self.forget(before)

    @rule(without=st.sets(st.sampled_from(BLOCKS)), n=st.integers(0, 4))
    def the_oldest_come_first(self, without, n) -> None:
        assert self.index.oldest(n, without) == [b for b in self.idle if b not in without][:n]

    @precondition(lambda self: self.idle)
    @rule()
    def evict(self) -> None:
        """A block that is given away is found no more; its key goes to whoever else has the content."""
        (block,) = self.index.oldest(1)
        assert block == self.idle[0]
        key = self.key_of(block)
        self.index.remove(block)
        self.forget(block)
        assert self.index.match([key]) == self.blocks.get(key, [])[:1]

    @rule(block=st.sampled_from(BLOCKS))
    def remove(self, block) -> None:
        self.index.remove(block)
        self.forget(block)

    @rule(rarely=st.integers(0, 9))
    def clear(self, rarely) -> None:
        if rarely:
            return
        assert self.index.clear() == self.idle
        self.blocks, self.idle = {}, []

    @rule(wanted=st.lists(st.sampled_from(KEYS), unique=True))
    def match_is_the_longest_run(self, wanted) -> None:
        run = []
        for key in wanted:
            if key not in self.blocks:
                break
            run.append(self.blocks[key][0])
        assert self.index.match(wanted) == run

    @invariant()
    def no_leased_block_is_evictable(self) -> None:
        assert self.index.idle == len(self.idle)
        assert not set(self.index.oldest(len(BLOCKS))) & self.held
        assert len(self.index._blocks) == len(self.blocks)
        self.index.assert_consistent()

    @invariant()
    def a_block_has_the_key_it_was_given(self) -> None:
        for block in BLOCKS:
            key = self.key_of(block)
            assert self.index._keys.get(block) == key
            assert bool(self.index.indexed[block]) == (key is not None)
            blocks = self.blocks.get(key, [])
            heir = blocks[1] if blocks[:1] == [block] and len(blocks) > 1 else None
            assert self.index.heir(block) == heir


TestPrefixIndex = PrefixIndexMachine.TestCase

"""Which device blocks are free, cached or in use, and which one is given out next.

A block is *in use* by sequences, its readers; or *free*; or *cached*: unused, and found by a key; or *away*: unused,
but a forward pass in flight still writes its KV, or a holder keeps it. Several blocks may have the content of one key:
it is found at any of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import numpy as np

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import BlockKey


class BlockPool:
    """The device blocks of ``aux``; ``counts`` are the manager's."""

    def __init__(self, aux: AuxBlocks, counts: Counter[str]) -> None:
        self._aux, self._counts = aux, counts
        self.readers = [0] * aux.device_blocks
        self._free = list(range(aux.device_blocks - 1, -1, -1))  # the last one is given first
        self._away: dict[int, None] = {}  # in the order in which they were let go; some may be in use again
        self.kept: dict[str, list[int]] = {}  # from being given away, by holder
        self._blocks: dict[BlockKey, list[int]] = {}  # where each key is found, the earliest first
        self._keys: dict[int, BlockKey] = {}  # of each of these blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one released longest ago first

    @property
    def room(self) -> int:
        """How many blocks :meth:`choose` could name: free ones, and cached ones."""
        self._come_back()
        return len(self._free) + len(self._cached)

    def others_use(self, block: int) -> bool:
        """Whether more than one sequence may read the block, now or later by its key: then it must not be written."""
        return self.readers[block] > 1 or block in self._keys

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest run of ``keys`` that are found, as far as they have every required row."""
        choices = []
        for key in keys:
            if (blocks := self._blocks.get(key)) is None:
                break
            choices.append(blocks)
        found = [blocks[0] for blocks in choices]
        if found and not (complete := self._aux.complete(found)).all():
            for at in np.flatnonzero(~complete).tolist():
                if not (others := self._aux.complete(choices[at])).any():
                    self._counts["hits_cut_for_missing_rows"] += 1
                    return found[:at]
                found[at] = choices[at][int(np.argmax(others))]
        return found

    def publish(self, key: BlockKey, block: int) -> None:
        """A block in use is found by ``key`` from here on."""
        if block not in self._keys:
            self._keys[block] = key  # first: see rebuild()
            self._blocks.setdefault(key, []).append(block)
        assert self._keys[block] == key, f"block {block} is found by another key"

    # ---------------------------------------------------------------- giving

    def choose(self, n: int, without: Collection[int] = ()) -> list[int]:
        """``n`` blocks to :meth:`take`, free ones first, then cached ones, oldest first; none if there are fewer.

        Blocks ``without`` are about to be shared.
        """
        self._come_back()
        chosen = self._free[: -n - 1 : -1] if n else []
        if len(chosen) < n:
            chosen += islice((block for block in self._cached if block not in without), n - len(chosen))
        return chosen if len(chosen) == n else []

    def take(self, chosen: Sequence[int]) -> None:
        """Give a sequence the blocks that were chosen just now. They begin a new life first: where that is refused,
        nothing was taken."""
        lives = self._aux.renew(chosen)
        assert lives.all(), "a block without holders was not given out"
        for block in chosen:
            if (key := self._keys.pop(block, None)) is None:
                free = self._free.pop()
                assert free == block, "a block that choose() has not named"
            else:
                del self._cached[block]
                blocks = self._blocks[key]
                blocks.remove(block)
                if not blocks:
                    del self._blocks[key]
                self._counts["evicted_blocks"] += 1
            self.readers[block] = 1

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence uses these blocks, which are in use or cached."""
        for block in blocks:
            self.readers[block] += 1
            self._cached.pop(block, None)

    # ---------------------------------------------------------------- getting back

    def let_go(self, blocks: Sequence[int]) -> None:
        """A sequence stops using these blocks, in token order: an unused one is cached if a key finds it."""
        for block in reversed(blocks):  # a chain loses its tail before its head
            self.readers[block] -= 1
            if not self.readers[block]:
                self._away[block] = None

    def _come_back(self) -> None:
        """Blocks that are away become cached or free, except those still written or kept."""
        if not self._away:
            return
        away = [block for block in self._away if not self.readers[block]]
        kept = {block for blocks in self.kept.values() for block in blocks}
        left: dict[int, None] = {}
        free: list[int] = []
        for block, written in zip(away, self._aux.writing(away).tolist(), strict=True):
            if written or block in kept:
                left[block] = None
            elif block in self._keys:
                self._cached[block] = None
            else:
                free.append(block)
        self._away = left
        self._free += free

    def forget(self) -> None:
        """After a reset: nothing is found by key, and what was only cached is free."""
        self._free += self._cached
        for found in (self._keys, self._blocks, self._cached):
            found.clear()

    def rebuild(self, read: Iterable[int]) -> None:
        """After a call that did not come to its end: sequences read these blocks, each once for every one of them.

        ``_keys`` holds at each moment: a block gets a key when its content is in place, and loses it before it is given
        out. All else follows.
        """
        counts = Counter(read)
        self.readers = [counts[block] for block in range(len(self.readers))]
        self._blocks = {}
        for block, key in self._keys.items():
            self._blocks.setdefault(key, []).append(block)
        blocks = dict.fromkeys((*self._cached, *range(len(self.readers))))  # cached ones keep their order
        self._free, self._away, self._cached = [], {b: None for b in blocks if not counts[b]}, OrderedDict()
        self._come_back()

    def assert_consistent(self, read: Iterable[int]) -> None:
        """Raise ``AssertionError`` unless every block is free, cached, away or in use, once.

        ``read`` are the blocks of all sequences on the device, each once for every sequence that uses it.
        """
        found = [(key, block) for key, blocks in self._blocks.items() for block in blocks]
        assert sorted(found) == sorted((key, block) for block, key in self._keys.items()), "keys and blocks disagree"
        assert Counter(read) == {b: n for b, n in enumerate(self.readers) if n}, "counts differ from sequences' blocks"
        held, away = [b for b, n in enumerate(self.readers) if n], [b for b in self._away if not self.readers[b]]
        parts = [*self._free, *away, *self._cached, *held]
        assert sorted(parts) == list(range(len(self.readers))), "a device block is lost or in two places"

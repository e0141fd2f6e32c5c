"""Which block holds the content of which key, and which of them may be given away first.

Pure: the caller moves bytes and tells the life cycle; this only remembers and decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey


class PrefixIndex:
    """Keys to blocks, with least-recently-used order among the blocks that nobody holds.

    A key is *found* at one block. Further blocks with the key's content are its *duplicates*; the key passes to one of
    them when the block that it is found at is given away. The block that a key is found at is either *held* (never
    evicted) or *idle* (evicted oldest first); a duplicate is always held, for without a holder it is worth nothing.
    Release a sequence's blocks last first, so that a chain loses its tail before its head.
    """

    __slots__ = ("_blocks", "_idle", "_indexed_at", "_keys", "indexed")

    def __init__(self, blocks: int) -> None:
        self._blocks: dict[BlockKey, list[int]] = {}  # where each key is found, then its duplicates
        self._keys: dict[int, BlockKey] = {}  # of all of these
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.indexed: NDArray[np.bool_] = np.zeros(blocks, np.bool_)  # by block: whether it has a key
        self._indexed_at = self.indexed.data

    @property
    def idle(self) -> int:
        """How many blocks may be evicted."""
        return len(self._idle)

    def insert(self, key: BlockKey, block: int) -> int | None:
        """Index a held ``block`` under ``key``; the other block that the key is found at already, or ``None``.

        That one stays, and ``block`` is a duplicate of it.
        """
        if block not in self._keys:
            self._keys[block] = key
            self._indexed_at[block] = True
            if key not in self._blocks:
                self._blocks[key] = [block]
                return None
            self._blocks[key].append(block)
        assert self._keys[block] == key, f"block {block} is indexed under another key"
        found = self._blocks[key][0]
        return None if found == block else found

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest run of ``keys`` from the first on. Changes nothing."""
        found = []
        for key in keys:
            blocks = self._blocks.get(key)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def heir(self, block: int) -> int | None:
        """The duplicate that would get the key of ``block``, which is found by it; ``None`` if there is none."""
        key = self._keys.get(block)
        blocks = [] if key is None else self._blocks[key]
        return blocks[1] if len(blocks) > 1 and blocks[0] == block else None

    def promote(self, block: int) -> None:
        """From here on the key of the duplicate ``block`` is found there; the block before, if held, is the next heir.

        So a duplicate that was never found, because it has fewer rows, is heir after those that were.
        """
        blocks = self._blocks[self._keys[block]]
        before = blocks[0]
        blocks.remove(block)
        blocks.insert(0, block)
        if before in self._idle:
            self.remove(before)

    def hold(self, blocks: Iterable[int]) -> None:
        """Somebody holds these blocks: they cannot be evicted. Blocks that are not indexed are passed over."""
        for block in blocks:
            self._idle.pop(block, None)

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Nobody holds these blocks any more; those that no key is found at come back, for the free list."""
        loose = []
        for block in blocks:
            key = self._keys.get(block)
            if key is None:
                loose.append(block)
                continue
            found = self._blocks[key][0]
            if found != block:
                self.remove(block)
                loose.append(block)
            if found == block or found in self._idle:  # used just now, by way of its duplicate
                self._idle[found] = None
                self._idle.move_to_end(found)
        return loose

    def oldest(self, n: int, without: Collection[int] = ()) -> list[int]:
        """Up to ``n`` idle blocks that are not among ``without``, the one released longest ago first."""
        if without:
            return list(islice((block for block in self._idle if block not in without), n))
        return list(islice(self._idle, n))

    def remove(self, block: int) -> None:
        """Forget ``block``, whoever holds it: its key goes to a duplicate, if there is one. Without a key: nothing."""
        key = self._keys.pop(block, None)
        if key is None:
            return
        self._idle.pop(block, None)
        self._indexed_at[block] = False
        blocks = self._blocks[key]
        blocks.remove(block)
        if not blocks:
            del self._blocks[key]

    def clear(self) -> list[int]:
        """Forget everything; the blocks that were idle."""
        idle = list(self._idle)
        self._blocks.clear()
        self._keys.clear()
        self._idle.clear()
        self.indexed[:] = False
        return idle

    def assert_consistent(self) -> None:
        found = [(key, block) for key, blocks in self._blocks.items() for block in blocks]
        assert sorted(found) == sorted((key, block) for block, key in self._keys.items()), "keys and blocks disagree"
        assert all(self._blocks.values()), "a key that is found nowhere"
        assert self._idle.keys() <= {blocks[0] for blocks in self._blocks.values()}, "an idle block that no key is at"
        assert set(np.flatnonzero(self.indexed).tolist()) == self._keys.keys(), "the marks of indexed blocks differ"

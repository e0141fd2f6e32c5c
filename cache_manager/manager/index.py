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

    __slots__ = ("_blocks", "_duplicates", "_idle", "_indexed_at", "_keys", "indexed")

    def __init__(self, blocks: int) -> None:
        self._blocks: dict[BlockKey, int] = {}  # where each key is found
        self._keys: dict[int, BlockKey] = {}  # of found blocks and of duplicates
        self._duplicates: dict[BlockKey, list[int]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.indexed: NDArray[np.bool_] = np.zeros(blocks, np.bool_)  # by block: whether it has a key
        self._indexed_at = self.indexed.data

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def idle(self) -> int:
        """How many blocks may be evicted."""
        return len(self._idle)

    def insert(self, key: BlockKey, block: int) -> int | None:
        """Index a held ``block`` under ``key``; the other block that the key is found at already, or ``None``.

        That one stays, and ``block`` is a duplicate of it.
        """
        found = self._blocks.setdefault(key, block)
        if block not in self._keys:
            self._keys[block] = key
            self._indexed_at[block] = True
            if found == block:
                return None
            self._duplicates.setdefault(key, []).append(block)
        assert self._keys[block] == key, f"block {block} is indexed under another key"
        return None if found == block else found

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest run of ``keys`` from the first on. Changes nothing."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def key(self, block: int) -> BlockKey | None:
        return self._keys.get(block)

    def heir(self, block: int) -> int | None:
        """The duplicate that would get the key of ``block``, which is found by it; ``None`` if there is none."""
        key = self._keys.get(block)
        if key is None or self._blocks[key] != block or key not in self._duplicates:
            return None
        return self._duplicates[key][0]

    def promote(self, block: int) -> None:
        """From here on the key of the duplicate ``block`` is found there; the block before is a duplicate, or idle."""
        key = self._keys[block]
        duplicates, before = self._duplicates[key], self._blocks[key]
        duplicates.remove(block)
        self._blocks[key] = block
        if before in self._idle:
            self._forget(before)
            del self._idle[before]
        else:
            duplicates.append(before)
        if not duplicates:
            del self._duplicates[key]

    def _forget(self, block: int) -> None:
        del self._keys[block]
        self._indexed_at[block] = False

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
            found = self._blocks[key]
            if found != block:
                self._drop_duplicate(key, block)
                loose.append(block)
            if found == block or found in self._idle:  # used just now, by way of its duplicate
                self._idle[found] = None
                self._idle.move_to_end(found)
        return loose

    def _drop_duplicate(self, key: BlockKey, block: int) -> None:
        duplicates = self._duplicates[key]
        duplicates.remove(block)
        if not duplicates:
            del self._duplicates[key]
        self._forget(block)

    def oldest(self, n: int, without: Collection[int] = ()) -> list[int]:
        """Up to ``n`` idle blocks that are not among ``without``, the one released longest ago first."""
        if without:
            return list(islice((block for block in self._idle if block not in without), n))
        return list(islice(self._idle, n))

    def remove(self, block: int) -> None:
        """Forget ``block``, whoever holds it: its key goes to a duplicate, if there is one. Without a key: nothing."""
        key = self._keys.get(block)
        if key is None:
            return
        if self._blocks[key] != block:
            self._drop_duplicate(key, block)
            return
        self._idle.pop(block, None)
        self._forget(block)
        if key in self._duplicates:
            self._blocks[key] = heir = self._duplicates[key].pop(0)
            assert heir not in self._idle, "a duplicate is held"
            if not self._duplicates[key]:
                del self._duplicates[key]
        else:
            del self._blocks[key]

    def clear(self) -> list[int]:
        """Forget everything; the blocks that were idle."""
        idle = list(self._idle)
        self._blocks.clear()
        self._keys.clear()
        self._duplicates.clear()
        self._idle.clear()
        self.indexed[:] = False
        return idle

    def assert_consistent(self) -> None:
        found = {(key, block) for key, block in self._blocks.items()}
        others = {(key, block) for key, blocks in self._duplicates.items() for block in blocks}
        assert found | others == {(key, block) for block, key in self._keys.items()}, "keys and blocks disagree"
        assert not found & others, "a block is a duplicate of itself"
        assert all(self._duplicates.values()), "an empty list of duplicates"
        assert self._idle.keys() <= set(self._blocks.values()), "an idle block that no key is found at"
        assert set(np.flatnonzero(self.indexed).tolist()) == self._keys.keys(), "the marks of indexed blocks differ"


__all__ = ["PrefixIndex"]

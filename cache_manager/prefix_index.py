"""Which block holds the content of which key, and which of them may be given away first.

Pure: the caller moves bytes and tells the life cycle; this only remembers and decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cache_manager.keys import BlockKey


class PrefixIndex:
    """Keys to blocks, with least-recently-used order among the blocks that nobody holds.

    An indexed block is either *held* (never evicted) or *idle* (evicted oldest first). Release a sequence's blocks
    last first, so that a chain loses its tail before its head.
    """

    __slots__ = ("_blocks", "_idle", "_keys")

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def idle(self) -> int:
        """How many indexed blocks may be evicted."""
        return len(self._idle)

    def insert(self, key: BlockKey, block: int) -> bool:
        """Index a held ``block`` under ``key``; False if another block has that key already, which then stays."""
        if key in self._blocks:
            return self._blocks[key] == block
        assert block not in self._keys, f"block {block} is indexed under another key"
        self._blocks[key] = block
        self._keys[block] = key
        return True

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

    def hold(self, blocks: Iterable[int]) -> None:
        """Somebody holds these blocks: they cannot be evicted. Blocks that are not indexed are passed over."""
        for block in blocks:
            self._idle.pop(block, None)

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Nobody holds these blocks any more; those that are not indexed come back, for the free list."""
        loose = []
        for block in blocks:
            if block in self._keys:
                self._idle[block] = None
                self._idle.move_to_end(block)
            else:
                loose.append(block)
        return loose

    def evict(self) -> int | None:
        """Forget the idle block that was released longest ago, and return it; None when every block is held."""
        if not self._idle:
            return None
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block

    def remove(self, block: int) -> None:
        """Forget ``block``, idle or held; one that is not indexed is passed over."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
            self._idle.pop(block, None)

    def clear(self) -> list[int]:
        """Forget everything; the blocks that were idle."""
        idle = list(self._idle)
        self._blocks.clear()
        self._keys.clear()
        self._idle.clear()
        return idle

    def assert_consistent(self) -> None:
        assert {b: k for k, b in self._blocks.items()} == self._keys, "keys and blocks disagree"
        assert self._idle.keys() <= self._keys.keys(), "an idle block is not indexed"

"""Which device blocks are free, cached or in use, and which one is given out next.

A block is *in use* by sequences, its readers; or *free*; or *cached*: unused, and found by a key; or *draining*:
unused, but a forward pass in flight still writes its KV, or a holder keeps it. Several blocks may have the content of
one key: it is found at any of them.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import TransferProcessError
from cache_manager.keys import BlockKey
from cache_manager.manager.calls import Calls

logger = logging.getLogger(__name__)


class BlockPool:
    """The device blocks of ``aux``, none of them in use; ``counts`` and ``calls`` are the manager's.

    ``kept`` has blocks that must not be given away, by holder.
    """

    def __init__(self, aux: AuxBlocks, counts: Counter[str], calls: Calls, kept: Mapping[str, list[int]]) -> None:
        self._aux = aux
        self._counts = counts
        self._calls = calls
        self._kept = kept
        self.readers = [0] * aux.device_blocks
        self._free: list[int] = []  # the last one is given first
        # In the order in which they were let go; some may be in use again. At first all: a pass may still write them.
        self._draining: dict[int, None] = dict.fromkeys(range(aux.device_blocks - 1, -1, -1))
        self._blocks: dict[BlockKey, list[int]] = {}  # where each key is found, the earliest first
        self._keys: dict[int, BlockKey] = {}  # of each of these blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one released longest ago first

    @property
    def room(self) -> int:
        """How many blocks :meth:`choose` could name: free ones, and cached ones."""
        self._drain()
        return len(self._free) + len(self._cached)

    def others_use(self, block: int) -> bool:
        """Whether more than one sequence may read the block, now or later by its key: then it must not be written."""
        return self.readers[block] > 1 or block in self._keys

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest run of ``keys`` that are found, as far as they have every required row."""
        choices = []
        for key in keys:
            blocks = self._blocks.get(key)
            if blocks is None:
                break
            choices.append(blocks)
        matched = [blocks[0] for blocks in choices]
        if matched and not (complete := self._aux.complete(matched)).all():
            for at in np.flatnonzero(~complete).tolist():
                others = self._aux.complete(choices[at])
                if not others.any():
                    self._counts["hits_cut_for_missing_rows"] += 1
                    return matched[:at]
                matched[at] = choices[at][int(np.argmax(others))]
        return matched

    def publish(self, key: BlockKey, block: int) -> None:
        """A block in use is found by ``key`` from here on."""
        if block not in self._keys:
            self._keys[block] = key
            self._blocks.setdefault(key, []).append(block)
        assert self._keys[block] == key, f"block {block} is found by another key"

    # ---------------------------------------------------------------- giving

    def choose(self, n: int, without: Collection[int] = ()) -> list[int]:
        """``n`` blocks to :meth:`take`, free ones first, then cached ones, oldest first; none if there are fewer.

        Blocks ``without`` are about to be shared.
        """
        self._drain()
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
            key = self._keys.pop(block, None)
            if key is None:
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

    def moved(self, taken: list[int], move: Callable[[], None]) -> bool:
        """Whether blocks were moved; if not, the blocks ``taken`` for them are free again, their cached content lost.

        The loss of a process that moves blocks counts as no room now. Other errors of a move are raised.
        """
        try:
            move()
        except BaseException as error:
            self.let_go(taken)
            if not isinstance(error, TransferProcessError):
                self._calls.undone = True
                raise
            self._counts["moves_failed"] += 1
            logger.warning("blocks were not moved, going on without that: %s", str(error))
            return False
        return True

    # ---------------------------------------------------------------- getting back

    def let_go(self, blocks: Sequence[int]) -> None:
        """A sequence stops using these blocks, in token order: an unused one is cached if a key finds it."""
        for block in reversed(blocks):  # a chain loses its tail before its head
            self.readers[block] -= 1
            if not self.readers[block]:
                self._draining[block] = None

    def _drain(self) -> None:
        """Blocks that are draining become cached or free, except those still written or kept."""
        if not self._draining:
            return
        draining = [block for block in self._draining if not self.readers[block]]
        kept = {block for blocks in self._kept.values() for block in blocks}
        left: dict[int, None] = {}
        free: list[int] = []
        for block, written in zip(draining, self._aux.writing(draining).tolist(), strict=True):
            if written or block in kept:
                left[block] = None
            elif block in self._keys:
                self._cached[block] = None
            else:
                free.append(block)
        self._draining = left
        self._free += free

    def forget(self) -> None:
        """After a reset: nothing is found by key, and what was only cached is free."""
        self._free += self._cached
        self._keys.clear()
        self._blocks.clear()
        self._cached.clear()

    def assert_consistent(self, read: Iterable[int]) -> None:
        """Raise ``AssertionError`` unless every block is free, cached, draining or in use, once.

        ``read`` are the blocks of all sequences on the device, each once for every sequence that uses it.
        """
        by_key = [(key, block) for key, blocks in self._blocks.items() for block in blocks]
        assert sorted(by_key) == sorted((key, block) for block, key in self._keys.items()), "keys and blocks disagree"
        assert Counter(read) == {b: n for b, n in enumerate(self.readers) if n}, "counts differ from sequences' blocks"
        in_use = [block for block, n in enumerate(self.readers) if n]
        draining = [block for block in self._draining if not self.readers[block]]
        parts = [*self._free, *draining, *self._cached, *in_use]
        assert sorted(parts) == list(range(len(self.readers))), "a device block is lost or in two places"

"""Which computation's KV is in each block of a table, by a random name, and who else knows that name.

While ``own[block]`` is set nobody outside has seen the block's origin, so further writes go on under it. As soon as the
content or the name leaves the table, ``own`` is cleared, and the next write or commit draws a new name. Origin 0 means:
rows of any origin may land here.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cache_manager.lock import Lock, change
from cache_manager.slots import Bits, Flags, Ints

ORIGIN_MAX: Final = (1 << 64) - 1


class Origins:
    """``names [blocks]`` and ``own [blocks]``; the ``lock``, which is the table's, is held by callers."""

    def __init__(self, blocks: int, lock: Lock) -> None:
        self.lock = lock
        self.names: Bits = np.zeros(blocks, np.uint64)
        self.own: Flags = np.zeros(blocks, np.bool_)
        self.exposures = 0  # how often names have become known outside; a step compares it at its commit
        self._random = np.random.default_rng()  # of the system's entropy

    def new(self, n: int) -> Bits:
        """New names ``[n]``: random numbers from 1 to 2**64 - 1."""
        return self._random.integers(1, ORIGIN_MAX, size=n, dtype=np.uint64, endpoint=True)

    def draw(self, blocks: Ints) -> None:
        """``blocks`` are about to be written here: give each an origin of its own."""
        own = self.own.take(blocks)
        if False in own.tobytes():
            self.draw_anew(blocks[~own])

    def draw_anew(self, blocks: Ints) -> None:
        """Give each of ``blocks`` a new origin of its own, whatever it has."""
        self.names[blocks] = self.new(blocks.size)
        self.own[blocks] = True

    def open(self, blocks: Ints | slice) -> None:
        """Rows of any origin may land in ``blocks``, where there is no KV yet."""
        self.names[blocks] = 0
        self.own[blocks] = False

    @change
    def carry(self, ids: Ints, origins: Bits) -> None:
        """The content of ``ids`` came from another place, where its origin was ``origins``; 0: none."""
        self.names[ids] = origins
        self._expose(ids)

    @change
    def fix(self, ids: Ints) -> None:
        """The content of ``ids`` leaves under its origin, which is drawn now for blocks without one."""
        unknown = ids[self.names.take(ids) == 0]
        self.names[unknown] = self.new(unknown.size)
        self._expose(ids)

    @change
    def hand_out(self, ids: Ints) -> list[int]:
        """The origins of ``ids``, for use outside; 0 for blocks without one."""
        self._expose(ids)
        return [int(origin) for origin in self.names.take(ids)]

    def _expose(self, ids: Ints) -> None:
        """The origins of ``ids`` become known outside: the next write or commit draws new ones."""
        self.own[ids] = False
        self.exposures += 1

    def takes(self, block: Ints, origin: int) -> bool:
        """Whether rows of ``origin`` may land in the ``block [1]``: its KV is of that origin, or of none that is known.
        What is computed here has an origin that no record names."""
        known = int(self.names[block].item())
        return bool(origin) and known in (0, origin)

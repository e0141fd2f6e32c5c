"""What engines do without kvroute: the experts of each token, in an array that is indexed by the slot of its KV.

A pass writes each token's row at the token's slot, and a sample that ends reads the slots of its blocks. That is right
as long as KV stays where it was computed. Nobody tells the array that KV was swapped, copied to another block or
restored from a store: it has then what was computed there last, or zeros, and no word says so.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class SlotBuffer:
    """Rows ``[slots, layers, top_k]``, int32, and whose they are. Nothing was written where they are zeros."""

    def __init__(self, slots: int, row_shape: Iterable[int]) -> None:
        self._rows = np.zeros((slots, *row_shape), np.int32)
        self._writers = [""] * slots

    def write(self, slots: NDArray[np.int64], ids: NDArray[np.int32], owner: str) -> None:
        """A pass has computed ``ids [tokens, layers, top_k]`` of ``owner`` at ``slots [tokens]``."""
        self._rows[slots] = ids
        for slot in slots.tolist():
            self._writers[slot] = owner

    def read(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """A copy of what stands at ``slots [tokens]``: ``[tokens, layers, top_k]``."""
        return self._rows[slots]

    def writer(self, slot: int) -> str:
        """Whose row was computed at this slot last; empty for none."""
        return self._writers[slot]

"""How rows are cut into parts, so that a rank reads its layers and its tokens and little else. Pure.

::

               layers
              0   1   2   3
    rows    +---+---+---+---+
    0       | 0 | 3 | 6 | 9 |       part_layers = 1, part_tokens = 4
    4       | 1 | 4 | 7 | 10|       part 4 has rows 4 to 7 of the second layer
    8       | 2 | 5 | 8 | 11|
            +---+---+---+---+
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.record import Buffer

Range = tuple[int, int]
"""Indices ``[start, stop)``, of rows or of layers."""

PART_NBYTES_LEAST: Final = 2 << 10
"""A part is not made smaller so that ranks read less; one of few rows, or of an operator who says so, is."""


@dataclass(frozen=True, slots=True)
class Grid:
    """``rows`` x ``layers`` cells of ``cell_nbytes``, the ids of one token in one layer.

    A part has ``part_layers`` of the layers (the last group may have fewer) and ``part_tokens`` rows.
    """

    rows: int
    layers: int
    cell_nbytes: int
    part_layers: int
    part_tokens: int

    @classmethod
    def fit(cls, rows: int, layers: int, cell_nbytes: int, *, part_layers: int, part_nbytes: int) -> Grid:
        """As many tokens a part as ``part_nbytes`` have room for, one at least, and twice the root of ``rows`` at most.

        A rank reads a part too much where its tokens end, and the sums of all parts: a root's worth of both. A part of
        less than :data:`PART_NBYTES_LEAST` is not worth its sum. Whoever has all layers in one part reads all of it.
        """
        part_layers = min(part_layers, layers)
        row_nbytes = part_layers * cell_nbytes
        room, least = part_nbytes // row_nbytes, PART_NBYTES_LEAST // row_nbytes
        most = rows if part_layers == layers else min(rows, max(2 * isqrt(rows), least))
        return cls(rows, layers, cell_nbytes, part_layers, max(1, min(room, most)))

    @property
    def bands(self) -> int:
        """Parts that the tokens of one group of layers are cut into."""
        return -(-self.rows // self.part_tokens)

    @property
    def parts(self) -> int:
        return -(-self.layers // self.part_layers) * self.bands

    @property
    def part_nbytes(self) -> int:
        """Of the largest part."""
        return self.part_tokens * self.part_layers * self.cell_nbytes

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return self.rows * self.layers * self.cell_nbytes

    def ranges(self, part: int) -> tuple[Range, Range]:
        """The rows and the layers of a part."""
        group, band = divmod(part, self.bands)
        row, layer = band * self.part_tokens, group * self.part_layers
        return (row, min(row + self.part_tokens, self.rows)), (layer, min(layer + self.part_layers, self.layers))

    def nbytes_of(self, part: int) -> int:
        (a, b), (first, last) = self.ranges(part)
        return (b - a) * (last - first) * self.cell_nbytes

    def offset_of(self, part: int) -> int:
        """Bytes of the parts before ``part``."""
        (a, _), (first, last) = self.ranges(part)
        return (self.rows * first + a * (last - first)) * self.cell_nbytes

    def needed(self, layers: Sequence[int], rows: Sequence[Range]) -> list[int]:
        """The parts that hold the given layers (increasing indices) of the given ranges of rows, in order."""
        bands = {band for a, b in rows if a < b for band in range(a // self.part_tokens, -(-b // self.part_tokens))}
        groups = sorted({layer // self.part_layers for layer in layers})
        return [group * self.bands + band for group in groups for band in sorted(bands)]

    # ---------------------------------------------------------------- bytes

    def cut(self, cells: NDArray[Any]) -> list[memoryview]:
        """The bytes of each part: its cells, row by row; ``cells`` are as :func:`cells_of` has them."""
        parts = list[memoryview]()
        for first in range(0, self.layers, self.part_layers):
            group = np.ascontiguousarray(cells[:, first : first + self.part_layers])
            copy = group.reshape(-1).view(np.uint8).data  # which the parts share
            nbytes = self.part_tokens * group.shape[1] * self.cell_nbytes
            parts += [copy[at : at + nbytes] for at in range(0, len(copy), nbytes)]
        return parts

    def paste(
        self,
        part: int,
        content: Buffer,
        cells: Sequence[NDArray[Any]],  # one [stop - start, len(layers)] for each range, as cells_of has them
        layers: Sequence[int],
        rows: Sequence[Range],
    ) -> None:
        """Put what a part has of the wanted layers and rows where it belongs."""
        (a, b), (first, last) = self.ranges(part)
        left, right = bisect_left(layers, first), bisect_left(layers, last)
        mine = [layer - first for layer in layers[left:right]]
        for (start, stop), target in zip(rows, cells, strict=True):
            low, high = max(a, start), min(b, stop)
            if low >= high:
                continue
            source = np.frombuffer(content, target.dtype).reshape(b - a, last - first)[low - a : high - a]
            there = source if len(mine) == last - first else source[:, mine]
            target[low - start : high - start, left:right] = there


def cells_of(ids: NDArray[Any]) -> NDArray[Any]:
    """A view ``[n, layers]`` of ``ids`` ``[n, layers, top_k]``, whose items are the ids of one token in one layer.

    Few bytes are copied as one number, which is several times faster than copying ids.
    """
    nbytes = ids.shape[2] * ids.itemsize
    cell = np.dtype(f"u{nbytes}" if nbytes in (1, 2, 4, 8) else f"V{nbytes}")
    return np.ascontiguousarray(ids).view(cell)[:, :, 0]

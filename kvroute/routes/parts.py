"""How rows are cut into parts, so that a rank reads little more than its layers and its tokens. Pure.

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
from math import isqrt
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cache_manager.errors import RowError
from cache_manager.record import Buffer
from kvroute.routes.layout import Layout
from kvroute.routes.spans import STOP_MAX, runs

Range = tuple[int, int]
"""Indices ``[start, stop)``, of rows or of layers."""

ROWS_MAX: Final = 1 << 24
"""Positions that one record may claim to have."""
IDS_MAX: Final = 1 << 36
PART_NBYTES_LEAST: Final = 2 << 10
"""Parts are not made smaller to let ranks read less; only few rows, or an operator's setting, make smaller ones."""


def tokens_of_parts(
    layout: Layout,
    rows: int,
    part_layers: int,
    part_nbytes: int,
) -> int:
    """As many tokens per part as fit ``part_nbytes``, at least one and at most twice the root of ``rows``.

    A rank reads up to one part too much where its tokens end, and the sums of all parts: the root balances both. A part
    of less than :data:`PART_NBYTES_LEAST` is not worth its sum. Parts of all layers have no such limit.
    """
    row_nbytes = part_layers * layout.cell_nbytes
    room = part_nbytes // row_nbytes
    least = PART_NBYTES_LEAST // row_nbytes
    most = rows if part_layers == len(layout.layer_ids) else min(rows, max(2 * isqrt(rows), least))
    return max(1, min(room, most))


class Extent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows a record has, of the positions ``[start, start + rows)``, and how they are cut into parts.

    A part has ``part_layers`` layers (the last group may have fewer) and ``part_tokens`` rows. A *cell* is the ids of
    one token in one layer.
    """

    layout: Layout
    rows: Annotated[int, Meta(ge=0)]
    start: Annotated[int, Meta(ge=0)]
    part_layers: Annotated[int, Meta(ge=1)]
    part_tokens: Annotated[int, Meta(ge=1, le=STOP_MAX)]

    def check(self) -> None:
        """Raise :class:`RowError` unless the fields fit together; allocates no memory for them."""
        if self.rows > ROWS_MAX or self.stop > STOP_MAX:
            wanted = f"at most {ROWS_MAX}, of positions before {STOP_MAX}"
            raise RowError("rows", wanted, f"{self.rows} from {self.start}")
        if self.part_layers > self.layers:
            raise RowError("part_layers", f"1 to {self.layers}", self.part_layers)
        ids = self.rows * self.layers * self.layout.top_k
        if ids > IDS_MAX:
            raise RowError("rows", f"at most {IDS_MAX} ids", ids)

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.rows

    @property
    def layers(self) -> int:
        return len(self.layout.layer_ids)

    @property
    def bands(self) -> int:
        """How many parts the tokens of one group of layers are cut into."""
        return -(-self.rows // self.part_tokens)

    @property
    def parts(self) -> int:
        return -(-self.layers // self.part_layers) * self.bands

    @property
    def part_nbytes(self) -> int:
        """Bytes of the largest part."""
        return self.part_tokens * self.part_layers * self.layout.cell_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.rows * self.layers * self.layout.cell_nbytes

    def starts(self, first: int, stop: int) -> list[int]:
        """Bytes before each of the parts ``[first, stop)``, and before the one behind them."""
        group, band = np.divmod(np.arange(first, stop + 1), self.bands or 1)
        layer = np.minimum(group * self.part_layers, self.layers)
        width = np.minimum(self.part_layers, self.layers - layer)
        cells = self.rows * layer + band * self.part_tokens * width
        starts: list[int] = (cells * self.layout.cell_nbytes).tolist()
        return starts

    def nbytes_of(self, run: Range) -> int:
        """Of the parts ``[first, stop)``."""
        first, stop = (self.starts(part, part)[0] for part in run)
        return stop - first

    def needed(self, layers: Sequence[int], rows: Sequence[Range]) -> tuple[Range, ...]:
        """The parts that hold the given layers (indices) of the given ranges of rows: runs of those side by side."""
        groups = np.zeros(-(-self.layers // self.part_layers), np.bool_)
        bands = np.zeros(self.bands, np.bool_)
        groups[[layer // self.part_layers for layer in layers]] = True
        for a, b in rows:
            if a < b:
                bands[a // self.part_tokens : -(-b // self.part_tokens)] = True
        return runs((groups[:, None] & bands).reshape(-1))

    # ---------------------------------------------------------------- bytes

    def cut(self, cells: NDArray[Any]) -> memoryview:
        """The bytes of all parts, one after another, each row by row; ``cells`` are as :func:`cells_of` has them.

        Where a part has all layers they are those of ``cells``, whose memory this shares.
        """
        body = cells
        width = self.part_layers
        groups = self.layers // self.part_layers
        if groups > 1 or groups * width < self.layers:
            body = np.empty(cells.size, cells.dtype)
            full = groups * width
            alike = cells[:, :full].reshape(self.rows, groups, width).swapaxes(0, 1)
            body[: alike.size].reshape(alike.shape)[...] = alike
            body[alike.size :].reshape(self.rows, self.layers - full)[...] = cells[:, full:]
        return body.reshape(-1).view(np.uint8).data

    def paste(
        self,
        run: Range,
        content: Buffer,
        cells: Sequence[NDArray[Any]],  # one [stop - start, len(layers)] for each range, from cells_of
        layers: Sequence[int],
        rows: Sequence[Range],
    ) -> None:
        """Put what the parts ``[first, stop)`` have of the wanted layers and rows where it belongs."""
        part = run[0]
        offset = 0
        while part < run[1]:  # one group of layers after another
            group, band = divmod(part, self.bands)
            part = min(run[1], (group + 1) * self.bands)
            a = band * self.part_tokens
            b = min(self.rows, (part - group * self.bands) * self.part_tokens)
            first = group * self.part_layers
            last = min((group + 1) * self.part_layers, self.layers)
            size = (b - a) * (last - first)
            block = np.frombuffer(content, cells[0].dtype, size, offset).reshape(b - a, last - first)
            offset += size * self.layout.cell_nbytes
            left = bisect_left(layers, first)
            right = bisect_left(layers, last)
            whole = right - left == last - first
            columns = slice(None) if whole else [layer - first for layer in layers[left:right]]
            for (start, stop), target in zip(rows, cells, strict=True):
                low = max(a, start)
                high = min(b, stop)
                if low < high:
                    target[low - start : high - start, left:right] = block[low - a : high - a, columns]


def cells_of(ids: NDArray[Any]) -> NDArray[Any]:
    """A view ``[n, layers]`` of ``ids`` ``[n, layers, top_k]``, whose items are the ids of one token in one layer.

    Few bytes are copied as one number, which is several times faster than copying ids.
    """
    nbytes = ids.shape[2] * ids.itemsize
    cell = np.dtype(f"u{nbytes}" if nbytes in (1, 2, 4, 8) else f"V{nbytes}")
    return np.ascontiguousarray(ids).view(cell)[:, :, 0]

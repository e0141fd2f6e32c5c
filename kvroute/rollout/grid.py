"""How a rollout's rows are cut into parts, so that a rank reads its layers and its tokens and little else. Pure.

::

               layer_ids
              0   1   2   3
    rows    +---+---+---+---+
    0       | 0 | 3 | 6 | 9 |       part_layers = 1 (per layer), part_tokens = 4
    4       | 1 | 4 | 7 | 10|       part 4 has rows 4 to 7 of the second layer
    8       | 2 | 5 | 8 | 11|
            +---+---+---+---+
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, InvalidInputError
from cache_manager.record import Buffer
from cache_manager.storage.url import StoreUrl

PART_NBYTES: Final = 64 << 10
"""Of a part, where nothing else is said."""
PART_NBYTES_MIN: Final = 64
PART_NBYTES_MAX: Final = 16 << 20

Range = tuple[int, int]
"""Indices ``[start, stop)``, of rows or of layers."""


@dataclass(frozen=True, slots=True)
class Grid:
    """``rows`` x ``layers`` cells of ``cell_nbytes``, the ids of one token in one layer."""

    rows: int
    layers: int
    cell_nbytes: int
    part_layers: int
    part_tokens: int

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

    def ranges(self, part: int) -> tuple[Range, Range]:
        """The rows and the layers of a part."""
        row, layer = part % self.bands * self.part_tokens, part // self.bands * self.part_layers
        return (row, min(row + self.part_tokens, self.rows)), (layer, min(layer + self.part_layers, self.layers))

    def nbytes_of(self, part: int) -> int:
        (a, b), (first, last) = self.ranges(part)
        return (b - a) * (last - first) * self.cell_nbytes

    def offset_of(self, part: int) -> int:
        """Bytes of the parts before this one."""
        (a, _), (first, last) = self.ranges(part)
        return (first * self.rows + a * (last - first)) * self.cell_nbytes

    def needed(self, wanted: Selection) -> list[int]:
        """The parts that hold what is wanted, in order."""
        size = self.part_tokens
        bands = {band for a, b in wanted.rows if a < b for band in range(a // size, -(-b // size))}
        groups = sorted({layer // self.part_layers for layer in wanted.layers})
        return [group * self.bands + band for group in groups for band in sorted(bands)]

    # ---------------------------------------------------------------- bytes

    def cut(self, ids: NDArray[Any]) -> list[memoryview]:
        """The bytes of every part: its cells, row by row, of ``ids`` ``[rows, layers, top_k]``."""
        cells, ranges = _cells_of(ids), map(self.ranges, range(self.parts))
        return [
            np.ascontiguousarray(cells[a:b, first:last]).reshape(-1).view(np.uint8).data
            for (a, b), (first, last) in ranges
        ]

    def paste(self, part: int, content: Buffer, wanted: Selection, room: Sequence[NDArray[Any]]) -> None:
        """Put what a part has of what is wanted where it belongs: ``room`` is ``[n, layers, top_k]`` for each range."""
        (a, b), (first, last) = self.ranges(part)
        left, right = bisect_left(wanted.layers, first), bisect_left(wanted.layers, last)
        mine = [layer - first for layer in wanted.layers[left:right]]
        for (start, stop), target in zip(wanted.rows, map(_cells_of, room), strict=True):
            low, high = max(a, start), min(b, stop)
            if low < high:
                source = np.frombuffer(content, target.dtype).reshape(b - a, last - first)[low - a : high - a]
                there = source if len(mine) == last - first else source[:, mine]
                target[low - start : high - start, left:right] = there


def _cells_of(ids: NDArray[Any]) -> NDArray[Any]:
    """A view ``[n, layers]`` of contiguous ``ids`` ``[n, layers, top_k]``: an item has one token's ids in one layer.

    Few bytes are copied as one number, which is several times faster than copying ids.
    """
    nbytes = ids.shape[2] * ids.itemsize
    cell = np.dtype(f"u{nbytes}" if nbytes in (1, 2, 4, 8) else f"V{nbytes}")
    return ids.view(cell)[:, :, 0]


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a rollout is wanted: layers, by index, and ranges of rows, by index."""

    layers: tuple[int, ...]
    layer_ids: tuple[int, ...]
    rows: tuple[Range, ...]

    @classmethod
    def of(
        cls,
        layer_ids: Sequence[int],
        positions: Range,
        layers: Sequence[int] | None,
        spans: Sequence[Range] | None,
    ) -> Self:
        """``layers`` are layer ids (those without a router do not count), ``spans`` ranges of positions.

        Raises :class:`InvalidInputError` for positions outside ``positions``, and when no layer is left.
        """
        wanted = set(layer_ids if layers is None else layers)
        chosen = [i for i, layer in enumerate(layer_ids) if layer in wanted]
        if not chosen:
            raise InvalidInputError("layers", f"one or more of {tuple(layer_ids)}", sorted(wanted))
        start, stop = positions
        rows: list[Range] = []
        for span in (positions,) if spans is None else spans:
            if not (len(span) == 2 and start <= span[0] <= span[1] <= stop):
                raise InvalidInputError("spans", f"ranges of positions inside [{start}, {stop}]", span)
            rows.append((span[0] - start, span[1] - start))
        return cls(tuple(chosen), tuple(layer_ids[i] for i in chosen), tuple(rows))

    def room(self, top_k: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:  # of [n, layers, top_k]
        """Arrays for the wanted ids, one for each range."""
        return [np.empty((b - a, len(self.layers), top_k), dtype) for a, b in self.rows]


@dataclass(frozen=True, slots=True)
class CutSettings:
    """``fused`` puts all layers of a row into one part; else every layer has its own parts, of ``part_nbytes`` at most.

    Per layer, a rank of pipeline parallelism reads its layers and nothing else; fused, a rollout has fewer parts.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("fused", "part")

    fused: bool = False
    part_nbytes: int = PART_NBYTES

    def __post_init__(self) -> None:
        if not PART_NBYTES_MIN <= self.part_nbytes <= PART_NBYTES_MAX:
            wanted = f"{PART_NBYTES_MIN} to {PART_NBYTES_MAX} bytes"
            raise ConfigError("rollout store parameter part", wanted, self.part_nbytes)

    @classmethod
    def from_url(cls, url: StoreUrl) -> Self:
        """The parameters ``fused`` (true or false) and ``part`` (a size)."""
        fused = url.choice("fused", ("true", "false"), "false") == "true"
        return cls(fused, url.nbytes("part", PART_NBYTES))

    def grid(self, rows: int, layers: int, cell_nbytes: int) -> Grid:
        """As many tokens a part as there is room for, one at least."""
        part_layers = layers if self.fused else 1
        room = self.part_nbytes // (part_layers * cell_nbytes)
        return Grid(rows, layers, cell_nbytes, part_layers, max(1, min(room, rows)))


__all__ = ["PART_NBYTES", "PART_NBYTES_MAX", "PART_NBYTES_MIN", "CutSettings", "Grid", "Range", "Selection"]

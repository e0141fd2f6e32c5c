"""What callers pass: as it is wanted, or an error that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.bits import Bits, Cells, Flags, Ints, words_of
from cache_manager.errors import ConfigError, InvalidInputError

Blocks = Sequence[int] | Ints

COUNT_END: Final = 1 << 31
_INT64: Final = np.dtype(np.int64)


def integers(
    values: Any,
    field: str,
    wanted: str,
    *,
    ndim: int = 1,
    n: int | None = None,
    error: type[InvalidInputError] = InvalidInputError,
) -> NDArray[np.int64]:
    """``values`` as a new int64 array of ``ndim`` dimensions, or ``error``: integers that fit, not a ragged sequence,
    ``n`` of them where that is given.

    New, because engines use one buffer for the slots of every step, and what was begun outlives the call. An empty
    sequence is an empty array whatever its type.
    """
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise error(field, wanted, "a ragged sequence") from ragged
    if array.dtype == _INT64 and array.ndim == ndim:  # nearly always; a third of astype() with caches cold
        found = array.copy()
    elif array.size == 0 and array.ndim >= 1:
        found = np.empty((0,) * ndim, np.int64)
    elif array.ndim != ndim or array.dtype.kind not in "iu":
        raise error(field, wanted, f"{array.dtype} of shape {array.shape}")
    elif array.dtype.kind == "u" and int(array.max()) >= 1 << 63:
        raise error(field, wanted, int(array.max()))
    else:
        found = array.astype(np.int64)
    if n is not None and found.size != n:
        raise error(field, f"{n}, {wanted}", found.size)
    return found


def unsigned(values: Any, field: str, wanted: str, *, n: int) -> Bits:
    """``n`` integers as uint64 ``[n]``, or :class:`InvalidInputError`."""
    array = values if isinstance(values, np.ndarray) and values.dtype == np.uint64 else integers(values, field, wanted)
    if array.ndim != 1 or array.size != n or (array.dtype != np.uint64 and count(array < 0)):
        raise InvalidInputError(field, f"{n}, {wanted}", f"{array.dtype} of shape {array.shape}")
    return array.astype(np.uint64)


def readable(given: Any) -> tuple[Ints | None, int]:
    """The integers ``[n]`` that ``given`` names in whatever form, ``None`` if it names none; and how many they are."""
    try:
        array = np.asarray(given).reshape(-1)
        with np.errstate(invalid="ignore"):
            numbers = array.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        return None, 1
    whole = array.dtype.kind in "iuf" and bool((numbers == array).all())
    return (numbers if whole else None), array.size


def count_in_range(value: int, field: str, low: int) -> int:
    """``value``, or :class:`ConfigError` unless it is an integer in ``[low, COUNT_END)``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < COUNT_END:
        raise ConfigError(field, f"an integer in [{low}, {COUNT_END})", repr(value))
    return value


class Numbers:
    """The ``blocks`` blocks of one tier and their slots, ``tokens`` each, as callers number them."""

    def __init__(self, name: str, blocks: int, tokens: int) -> None:
        self._name, self.blocks, self.tokens, self.end, self.cells = (
            name,
            blocks,
            tokens,
            blocks * tokens,
            Cells(tokens),
        )
        self.words_per_block = words_of(tokens)
        self._order: Ints = np.arange(blocks * self.words_per_block)
        self._seen: Ints = np.zeros(self._order.size, np.int64)  # these two mean nothing between calls
        self._mark: Flags = np.zeros(self.end, np.bool_)

    def ids(self, blocks: Blocks, field: str = "blocks") -> Ints:
        """``blocks`` as a new array, or :class:`InvalidInputError`: of this tier; they may be named several times."""
        ids = integers(blocks, field, "a flat sequence of block ids")
        if ids.size and not 0 <= (bad := extreme(ids)) < self.blocks:
            raise InvalidInputError(field, f"{self._name} block ids in [0, {self.blocks})", bad)
        return ids

    def known(self, blocks: Blocks) -> tuple[Ints, Flags]:
        """``blocks`` as an array, and which are blocks of the tier, each the first time it is named. Lock held."""
        ids = integers(blocks, "blocks", "a flat sequence of block ids")
        good: Flags = np.ones(ids.size, np.bool_)
        if ids.size and not (0 <= extreme(ids) < self.blocks and self.differ(ids)):
            good[:] = False
            good[np.unique(ids, return_index=True)[1]] = True
            good &= ids.view(np.uint64) < np.uint64(self.blocks)
        return ids, good

    def differ(self, numbers: Ints) -> bool:
        """Whether no two of ``numbers``, of blocks or of cells, are the same. The lock is held.

        Their places in the call are written at their own places, and read back: no sort.
        """
        if numbers.size > self._order.size:
            return False
        order = self._order[: numbers.size]
        self._seen[numbers] = order
        return self._seen.take(numbers).tobytes() == order.tobytes()  # as bytes: == touches more code

    def among(self, ids: Ints, others: Ints) -> Flags:
        """Which of ``ids``, of blocks or slots, are in ``others``: a tenth of what ``np.isin`` costs. Lock held."""
        self._mark[others] = True
        try:
            return self._mark.take(ids)
        finally:
            self._mark[others] = False

    def cells_of(self, slots: Ints) -> tuple[Ints, Bits] | None:
        """The cells of ``slots``, each once, and the bits in each; ``None`` if a slot is given twice. Lock held."""
        cells, bits = self.cells.bit_by_bit(slots)
        runs = slots.size > 1 and slots[1] == slots[0] + 1  # a prefill comes first, or there is none
        if not runs and self.differ(cells):  # one row of each sequence, as decode has them
            return cells, bits
        if self.differ((found := self.cells.run_by_run(slots, cells))[0]):
            return found
        ordered = np.sort(slots)
        return None if count(ordered[1:] == ordered[:-1]) else self.cells.of_ordered(ordered)


def extreme(ids: Ints) -> int:
    """A negative one of ``ids``, or the largest if there is none."""
    lowest: int = ids.item(ids.argmin())
    return lowest if lowest < 0 else ids.item(ids.argmax())

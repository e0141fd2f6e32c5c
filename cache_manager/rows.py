"""Rows that were read: the reader's own copy, in which nothing but valid rows means anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.bits import unpack_bits
from cache_manager.errors import InvalidInputError
from cache_manager.spec import AuxBlockDataSpec

MISSING_BYTE: Final = 0xFF


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were read: ``values`` ``[n, *row_shape]`` and ``valid`` ``[n]``; both are the caller's own.

    The bytes of a row that is not valid are all 0xFF.
    """

    values: NDArray[Any]
    valid: NDArray[np.bool_]

    @classmethod
    def of(cls, spec: AuxBlockDataSpec, copied: NDArray[np.uint8], bits: NDArray[np.uint64], window: slice) -> Self:
        """The rows ``window`` of blocks copied one after the other, ``[n, block_nbytes]``; takes ``copied`` over.

        ``bits`` are the blocks' validity words ``[n, W]``.
        """
        valid = unpack_bits(bits, spec.block_tokens).reshape(-1)[window]
        rows = copied.reshape(-1, spec.row_nbytes)[window]
        if np.count_nonzero(valid) != valid.size:
            rows[~valid] = MISSING_BYTE
        return cls(rows.reshape(-1).view(spec.numpy_dtype).reshape(valid.size, *spec.row_shape), valid)


def window_of(ids: int, start: int, stop: int | None, block_tokens: int) -> tuple[slice, slice]:
    """For rows ``[start, stop)`` of a sequence that lies in ``ids`` blocks: the blocks that hold them, and where
    the rows are among those blocks' rows.

    No ``stop`` is the end of the last block. Raises :class:`InvalidInputError` for rows outside the blocks.

    >>> window_of(10, 70, 130, block_tokens=64)
    (slice(1, 3, None), slice(6, 66, None))
    """
    tokens = ids * block_tokens
    end = tokens if stop is None else stop
    whole = isinstance(start, (int, np.integer)) and isinstance(end, (int, np.integer))
    if not (whole and 0 <= start <= end <= tokens):
        raise InvalidInputError("start, stop", f"0 <= start <= stop <= {tokens}, integers", f"{start!r}, {end!r}")
    first = int(start) // block_tokens
    last = -(-int(end) // block_tokens) if end > start else first
    at = int(start) - first * block_tokens if end > start else 0
    return slice(first, last), slice(at, at + int(end) - int(start))

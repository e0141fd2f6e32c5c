"""Turning what callers pass into arrays, or into an error that names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError


def integers(
    values: Any, field: str, wanted: str, *, ndim: int = 1, error: type[InvalidInputError] = InvalidInputError
) -> NDArray[np.int64]:
    """``values`` as a new int64 array of ``ndim`` dimensions, or ``error``: integers that fit, not a ragged sequence.

    New, because engines use one buffer for the slots of every step, and what was begun outlives the call. An empty
    sequence is an empty array whatever its type.
    """
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise error(field, wanted, "a ragged sequence") from ragged
    if array.size == 0 and array.ndim >= 1:
        return np.empty((0,) * ndim, dtype=np.int64)
    if array.ndim != ndim or array.dtype.kind not in "iu":
        raise error(field, wanted, f"{array.dtype} of shape {array.shape}")
    if array.dtype.kind == "u" and int(array.max()) >= 1 << 63:
        raise error(field, wanted, int(array.max()))
    return array.astype(np.int64)

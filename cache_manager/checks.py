"""What callers pass: as it is wanted, or an error that names the field."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, InvalidInputError

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


def count_in_range(value: int, field: str, low: int) -> int:
    """``value``, or :class:`ConfigError` unless it is an integer in ``[low, COUNT_END)``."""
    if not isinstance(value, int) or not low <= value < COUNT_END:
        raise ConfigError(field, f"an integer in [{low}, {COUNT_END})", repr(value))
    return value


def owner_name(owner: Hashable) -> Hashable:
    """``owner``, or :class:`InvalidInputError`: a non-empty string or an integer."""
    if isinstance(owner, str) and owner:  # nearly always, and an isinstance() of numpy's integers costs more
        return owner
    if isinstance(owner, (int, np.integer)) and not isinstance(owner, bool):
        return int(owner)
    raise InvalidInputError("owner", "a non-empty string or an integer", repr(owner))

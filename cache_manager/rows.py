"""Rows read out of a tier: copied without a lock, masked under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.checks import integers
from cache_manager.errors import InvalidInputError
from cache_manager.ledger import Ledger
from cache_manager.lifecycle import Blocks
from cache_manager.tier import Tier, unpack_bits


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were read: ``ids`` ``[n, *row_shape]`` and ``valid`` ``[n]``; both are the caller's own.

    The bytes of a row that is not valid are all 0xFF.
    """

    ids: NDArray[Any]
    valid: NDArray[np.bool_]


def read_rows(
    tier: Tier, ledger: Ledger, name: str, blocks: Blocks, start: int, stop: int | None, owner: str | None
) -> Rows:
    """See :meth:`AuxBlocks.read`."""
    index, tokens = tier.layout.index(name), tier.layout.block_tokens
    spec = tier.layout.specs[index]
    ids = integers(blocks, "blocks", "a flat sequence of block ids")
    tier.life.ids(np.unique(ids))
    start, end = _span(start, stop, ids.size * tokens)
    first = start // tokens
    ids = ids[first : -(-end // tokens)] if end > start else ids[:0]
    rows, words, lives = tier.gather(index, ids)
    with ledger.lock:
        if owner is not None:
            words[[not tier.life.leases.holds(owner, b) for b in ids.tolist()]] = 0
            words[tier.region.words[ids] != lives] = 0  # given to this owner after the bytes were copied
        at, n = start - first * tokens, end - start
        valid = unpack_bits(words, tokens).reshape(-1)[at : at + n]
        ledger.count("rows_read", n)
        ledger.count("rows_missing", n - int(np.count_nonzero(valid)))
    found = rows.reshape(-1, spec.row_nbytes)[at : at + n]
    if not valid.all():
        found[~valid] = 0xFF
    return Rows(found.reshape(-1).view(spec.numpy_dtype).reshape(n, *spec.row_shape), valid)


def _span(start: int, stop: int | None, tokens: int) -> tuple[int, int]:
    """``[start, stop)`` of ``tokens``, or :class:`InvalidInputError`; no ``stop`` is all of them."""
    end = tokens if stop is None else stop
    whole = isinstance(start, (int, np.integer)) and isinstance(end, (int, np.integer))
    if not (whole and 0 <= start <= end <= tokens):
        raise InvalidInputError("start, stop", f"0 <= start <= stop <= {tokens}, integers", f"{start!r}, {end!r}")
    return int(start), int(end)


__all__ = ["Rows", "read_rows"]

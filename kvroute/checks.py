"""A routing row is sound if every id names an expert, and no layer names one twice.

A prefill of 8,192 tokens of 58 layers x top-8 is 3.8 MB of ids, judged in a few milliseconds, for two reasons: ids are
compared by *column* (the j-th choices of many layers side by side, as vector instructions need them), and in chunks
that stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routing import id_dtype

FEW_IDS: Final = 512
"""Layers of tokens up to which ids are sorted: a decode step of few sequences, where calls are what costs."""
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
IDS_AT_ONCE: Final = 1 << 16
"""Layers of tokens judged at a time: with eight one-byte ids, 512 KiB of columns and as much of results."""


def whole(
    field: str,
    value: object,
    least: int = 0,
    *,
    error: type[InvalidInputError] = InvalidInputError,
) -> int:
    """``value`` as an integer of ``least`` or more; for anything else, also ``True``, ``error`` names the field."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise error(field, f"an integer of {least} or more", repr(value))
    return int(value)


def check_ids(
    ids: NDArray[Any],
    num_experts: int,
    layer_ids: Sequence[int],
    positions: Sequence[int] | NDArray[Any] | None = None,
) -> None:
    """Raise :class:`RowError` unless every row of ``ids`` ``[n, layers, top_k]`` can be a router's choice.

    Each id is in ``[0, num_experts)`` and no layer names an expert twice. The error names the layer id of the first bad
    row, and its position (without ``positions``: its index).
    """
    wrong = _unsound(ids.reshape(-1, ids.shape[-1]), num_experts)
    if wrong is None:
        return
    token, layer = divmod(int(wrong.argmax()), ids.shape[1])
    where = f"row {token if positions is None else positions[token]} layer {layer_ids[layer]}"
    row = ids[token, layer].tolist()
    outside = [id_ for id_ in row if not 0 <= id_ < num_experts]
    if outside:
        raise RowError(where, f"ids in [0, {num_experts})", outside[0])
    raise RowError(where, "distinct ids", row)


def valid_rows(spec: AuxBlockDataSpec, ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows of ``ids`` ``[n, layers, top_k]`` a router can have chosen: bool ``[n]``, new memory.

    A sound row's ids are in ``[0, num_experts)`` and distinct in each layer; so a row of zeros, which a capture that
    never ran leaves behind, is unsound unless ``top_k`` is 1. Ids may be of any integer dtype.

    Raises :class:`RowError` for ids of another shape than the spec's rows, and for a spec that is not one of routing.
    """
    if "num_experts" not in spec.attrs:
        raise RowError(f"{spec.name} spec", "a routing spec", "one without num_experts")
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu" or ids.ndim != 3 or ids.shape[1:] != spec.row_shape:
        wanted = f"integers of shape (n, {', '.join(map(str, spec.row_shape))})"
        raise RowError(f"{spec.name} rows", wanted, f"{ids.dtype} of shape {ids.shape}")
    wrong = unsound(ids, spec.attrs["num_experts"])
    return np.ones(len(ids), np.bool_) if wrong is None else ~wrong


def unsound(ids: NDArray[Any], num_experts: int) -> NDArray[np.bool_] | None:
    """The rows of integers ``ids`` ``[n, layers, top_k]`` that are not among :func:`valid_rows`: bool ``[n]``.

    ``None``: all are sound.
    """
    wrong = _unsound(ids.reshape(-1, ids.shape[2]), num_experts)
    return None if wrong is None else np.asarray(wrong.reshape(ids.shape[:2]).any(axis=1))


def _unsound(flat: NDArray[Any], num_experts: int) -> NDArray[np.bool_] | None:
    """Which rows of ``flat`` ``[m, top_k]`` no router can have chosen: bool ``[m]``, or ``None`` when all are sound."""
    if not flat.size:
        return None
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    bits = 8 * flat.dtype.itemsize
    signed = flat.dtype.kind == "i"
    plain = flat.view(_UNSIGNED[flat.dtype.itemsize]) if signed else flat  # a negative id is larger than any other
    end = min(num_experts, 1 << (bits - signed))
    if len(flat) <= FEW_IDS:
        ordered = plain.copy()
        ordered.sort()
        rises = ordered[:, :-1] < ordered[:, 1:]
        last = ordered[:, -1]
        if False not in rises.tobytes() and last.item(last.argmax()) < end:  # count_nonzero() touches more code
            return None
        return ~(rises.all(axis=1) & (last < end))
    wrong: NDArray[np.bool_] | None = None
    # With 256 experts in uint8 the dtype excludes larger ids.
    if (signed or not num_experts >> bits) and int(np.ascontiguousarray(plain).max()) >= end:
        wrong = np.logical_or.reduce(plain >= end, axis=1)
    dtype = id_dtype(num_experts)  # the narrower, the less there is to compare
    for first in range(0, len(flat), IDS_AT_ONCE):
        columns = flat[first : first + IDS_AT_ONCE].T.astype(dtype, order="C")
        answers = np.empty(columns.shape, np.bool_)
        for j in range(1, flat.shape[1]):
            same = np.equal(columns[:j], columns[j], out=answers[:j])
            if np.count_nonzero(same):
                wrong = np.zeros(len(flat), np.bool_) if wrong is None else wrong
                wrong[first : first + columns.shape[1]] |= same.any(axis=0)
    return wrong

"""What makes a routing row sound: every id names an expert, and no layer names one twice.

A prefill of 8,192 tokens of 58 layers x top-8 is 3.8 MB of ids, judged in a few milliseconds. Two habits make it so:
ids are compared by *column* (the j-th choices of many layers side by side, which is what vector instructions like),
and in chunks that stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cache_manager.errors import InvalidInputError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routing import id_dtype

_FEW: Final = 512
"""Layers of tokens up to which ids are sorted: a decode step of few sequences, where calls are what costs."""
_CHUNK: Final = 1 << 16
"""Layers of tokens judged at a time: with eight one-byte ids, 512 KiB of columns and as much of answers."""


def whole(field: str, value: object, least: int = 0, *, error: type[InvalidInputError] = InvalidInputError) -> int:
    """``value`` as an integer of ``least`` or more; ``error`` that names the field for anything else, ``True`` too."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise error(field, f"an integer of {least} or more", repr(value))
    return int(value)


def check_ids(
    ids: NDArray[Any], num_experts: int, layer_ids: Sequence[int], positions: Sequence[int] | NDArray[Any] | None = None
) -> None:
    """Raise :class:`RowError` unless every row of ``ids`` ``[n, layers, top_k]`` can be a router's choice.

    Each id is in ``[0, num_experts)`` and no layer names an expert twice. The error names the layer id of the first bad
    row, and its position (without ``positions``: its index); ids out of range are looked for first.
    """

    def where(flat: int) -> tuple[str, int, int]:
        token, layer = divmod(flat, ids.shape[1])
        return f"row {token if positions is None else positions[token]} layer {layer_ids[layer]}", token, layer

    if not ids.size:
        return
    flat = ids.reshape(-1, ids.shape[-1])
    if _may_leave_range(flat, num_experts):
        outside = (flat < 0) | (flat >= num_experts)
        if outside.any():
            row, k = np.argwhere(outside)[0].tolist()
            raise RowError(where(row)[0], f"ids in [0, {num_experts})", int(flat[row, k]))
    if (twice := _repeats(flat, id_dtype(num_experts))) is not None:
        name, token, layer = where(int(twice.argmax()))
        raise RowError(name, "distinct ids", ids[token, layer].tolist())


def valid_rows(spec: AuxBlockDataSpec, ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows of ``ids`` ``[n, layers, top_k]`` a router can have chosen: bool ``[n]``, new memory.

    A sound row's ids are in ``[0, num_experts)`` and distinct in each layer; so a row of zeros, which is what a capture
    that never ran leaves behind, is none unless ``top_k`` is 1. Ids may be of any integer dtype.

    Raises :class:`RowError` for ids of another shape than the spec's rows, and for a spec that is not one of routing.

    >>> from kvroute.routing import routing_spec
    >>> spec = routing_spec(num_experts=4, top_k=2, layer_ids=[0], num_layers=1, block_tokens=8)
    >>> valid_rows(spec, np.array([[[2, 0]], [[0, 0]], [[4, 1]], [[1, -1]]])).tolist()
    [True, False, False, False]
    """
    if "num_experts" not in spec.attrs:
        raise RowError(f"{spec.name} spec", "a routing spec", "one without num_experts")
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu" or ids.ndim != 3 or ids.shape[1:] != spec.row_shape:
        wanted = f"integers of shape (n, {', '.join(map(str, spec.row_shape))})"
        raise RowError(f"{spec.name} rows", wanted, f"{ids.dtype} of shape {ids.shape}")
    experts: int = spec.attrs["num_experts"]
    if ids.shape[0] * ids.shape[1] <= _FEW:
        ordered = np.sort(ids.view(ids.dtype.str.replace("i", "u")))  # a negative id is larger than any other then
        end = experts if ids.dtype.kind == "u" else min(experts, 1 << (8 * ids.itemsize - 1))
        rises, inside = ordered[..., :-1] < ordered[..., 1:], ordered[..., -1] < end
        if np.count_nonzero(rises) == rises.size and np.count_nonzero(inside) == inside.size:
            return np.ones(len(ids), np.bool_)
        return np.asarray(rises.all(axis=(1, 2)) & inside.all(axis=1))
    sound = np.ones(len(ids), np.bool_)
    if not ids.size:
        return sound
    flat = ids.reshape(-1, ids.shape[2])
    if _may_leave_range(flat, experts):
        sound &= ((ids >= 0) & (ids < experts)).all(axis=(1, 2))
    if (twice := _repeats(flat, id_dtype(experts))) is not None:
        sound &= ~twice.reshape(ids.shape[:2]).any(axis=1)
    return sound


def _may_leave_range(flat: NDArray[Any], num_experts: int) -> bool:
    """``False`` when all ids of ``flat`` ``[m, top_k]`` are in range; one pass over them at most."""
    signed, bits = flat.dtype.kind == "i", 8 * flat.dtype.itemsize
    if not signed and num_experts >> bits:
        return False  # 256 experts in uint8: the dtype says it
    if signed:  # seen as unsigned, a negative id is larger than any other
        flat = np.ascontiguousarray(flat).view(f"u{flat.dtype.itemsize}")
    return int(flat.max()) >= min(num_experts, 1 << (bits - signed))


def _repeats(flat: NDArray[Any], dtype: DTypeLike) -> NDArray[np.bool_] | None:
    """Which rows of ``flat`` ``[m, top_k]`` name an id twice: bool ``[m]``, or ``None`` when none does.

    ``dtype`` holds all ids that are in range: the narrower it is, the less there is to compare. Of a row that is out of
    range the answer says nothing.
    """
    k = flat.shape[1]
    found: NDArray[np.bool_] | None = None
    for first in range(0, len(flat), _CHUNK):
        columns = flat[first : first + _CHUNK].T.astype(dtype, order="C")
        answers = np.empty(columns.shape, np.bool_)
        for j in range(1, k):
            same = np.equal(columns[:j], columns[j], out=answers[:j])
            if np.count_nonzero(same):
                if found is None:
                    found = np.zeros(len(flat), np.bool_)
                found[first : first + columns.shape[1]] |= same.any(axis=0)
    return found

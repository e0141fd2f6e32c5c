"""What the encodings share: base64 that has one spelling, sizes that are checked first, layers without a router."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pybase64 import b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routes import Routes
from kvroute.routes.wire import from_base64

FIELD: Final = "routed_experts"
"""The name that every engine gives to the field."""
ROWS_MAX: Final = 1 << 24
"""Positions that one decoded answer may claim to have."""


def text_of(array: NDArray[Any]) -> str:
    """The base64 of the array's bytes in C order, little endian."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return b64encode_as_string(np.ascontiguousarray(little).data)


def bytes_of(field: str, text: Any, nbytes: int) -> bytes:
    """The ``nbytes`` bytes that ``text`` is the base64 of; the size is checked before anything is decoded."""
    if not isinstance(text, str):
        raise RowError(field, f"base64 of {nbytes} bytes", type(text).__name__)
    if len(text) != 4 * -(-nbytes // 3):
        raise RowError(field, f"base64 of {nbytes} bytes", f"{len(text)} characters")
    if len(found := from_base64(field, text)) != nbytes:
        raise RowError(field, f"base64 of {nbytes} bytes", f"{len(found)} bytes")
    return found


def rows_in(field: str, text: Any, row_nbytes: int) -> int:
    """How many rows of ``row_nbytes`` the base64 ``text`` holds, going by its length alone."""
    if not isinstance(text, str):
        raise RowError(field, f"base64 of rows of {row_nbytes} bytes", type(text).__name__)
    padding = len(text) - len(text[-2:].rstrip("=")) - len(text[:-2])
    nbytes = len(text) // 4 * 3 - padding
    if len(text) % 4 or nbytes < 0 or nbytes % row_nbytes:
        raise RowError(field, f"base64 of rows of {row_nbytes} bytes", f"{len(text)} characters")
    return checked_rows(field, nbytes // row_nbytes)


def checked_rows(field: str, rows: int) -> int:
    """``rows``, unless there are more than anybody may claim."""
    if not 0 <= rows <= ROWS_MAX:
        raise RowError(field, f"0 to {ROWS_MAX} rows", rows)
    return rows


def checked_shape(field: str, shape: tuple[int, ...], spec: AuxBlockDataSpec) -> tuple[int, int, int]:
    """``shape``, which has to be rows of ``spec``."""
    if len(shape) != 3 or shape[1:] != spec.row_shape:
        raise RowError(field, f"(rows, {', '.join(map(str, spec.row_shape))}), as the model has", shape)
    return checked_rows(field, shape[0]), shape[1], shape[2]


def to_all_layers(routes: Routes, dtype: str) -> NDArray[Any]:  # [n, num_layers, top_k]
    """The ids of a sequence without missing rows, with layers that have no router all zero."""
    rows = np.zeros((len(routes), routes.num_layers, routes.top_k), dtype)
    rows[:, list(routes.layer_ids)] = routes.ids
    return rows


def from_all_layers(
    rows: NDArray[Any],  # [n, num_layers, top_k]
    spec: AuxBlockDataSpec,
    start: int,
) -> Routes:
    """The routes of rows that have layers without a router too.

    Those have to be all zero: another number there says that the rows are of a model with other layers.
    """
    routed = list(spec.attrs["layer_ids"])
    dense = np.setdiff1d(np.arange(spec.attrs["num_layers"]), routed)
    if dense.size and (other := rows[:, dense].any(axis=(0, 2))).any():
        layer = int(dense[int(other.argmax())])
        raise RowError(f"{FIELD} layer {layer}", "zeros, as the model has no router there", "other ids")
    return of_ids(rows[:, routed] if dense.size else rows, None, spec, start)


def of_ids(
    ids: NDArray[Any],  # [n, layers, top_k]
    valid: NDArray[np.bool_] | None,  # [n] or [n, layers]; None: all
    spec: AuxBlockDataSpec,
    start: int,
) -> Routes:
    """Routes of decoded rows for the routers of ``spec``."""
    attrs = spec.attrs
    valid = np.ones(len(ids), np.bool_) if valid is None else valid
    return Routes(ids, valid, attrs["layer_ids"], attrs["num_experts"], attrs["num_layers"], start)


def signed_with(routes: Routes, dtype: str, missing: int) -> NDArray[Any]:  # [n, routed layers, top_k]
    """The ids in ``dtype``, and ``missing`` in every place of what is not known: a row, or a layer of it."""
    if routes.complete:
        return routes.ids.astype(dtype)
    ids = np.full((len(routes), len(routes.routed_layers), routes.top_k), missing, dtype)
    at = [i for i, layer in enumerate(routes.routed_layers) if layer in routes.layer_ids]
    ids[:, at] = np.where(routes.known[..., None], routes.ids.astype(dtype), np.array(missing, dtype))
    return ids


def missing_rows(routes: Routes) -> str | None:
    """Which rows, or layers of them, are missing, in one line; ``None`` when none is."""
    if routes.complete:
        return None
    ranges = ", ".join(f"[{start}, {stop})" for start, stop in routes.missing[:8])
    more = f" and {len(routes.missing) - 8} more ranges" if len(routes.missing) > 8 else ""
    lost = sum(stop - start for start, stop in routes.missing)
    gap = routes.first_gap(routes.stop, routes.start)
    first = "" if gap is None or gap[1] is None else f", of which {gap[0]} lacks layer {gap[1]}"
    return f"{lost} of {len(routes)} rows are missing: positions {ranges}{more}{first}"


def too_many_experts(routes: Routes, name: str, bits: int, experts_max: int) -> str | None:
    """Why ids of ``bits`` bits do not suffice; ``None`` when they do."""
    if routes.num_experts <= experts_max:
        return None
    return f"{name}'s encoding has ids of {bits} bits, and there are {routes.num_experts} experts"


__all__ = [
    "FIELD",
    "ROWS_MAX",
    "bytes_of",
    "checked_rows",
    "checked_shape",
    "from_all_layers",
    "missing_rows",
    "of_ids",
    "rows_in",
    "signed_with",
    "text_of",
    "to_all_layers",
    "too_many_experts",
]

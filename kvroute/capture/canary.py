"""The position canary: rows whose content says where they belong, to find code that moves rows to the wrong place.

With ``debug_mode`` the engine stores, in place of expert ids, numbers that no two (position, layer, k) share. The value
of a stale, shifted or foreign row then gives it away on every hop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routes import Routes
from kvroute.routing import routing_spec

CANARY_OF = "canary_of"
"""The attribute of a canary spec that keeps the number of experts of the model."""


def canary_spec(spec: AuxBlockDataSpec) -> AuxBlockDataSpec:
    """The spec of canary rows for the routing ``spec``: the same shape, ``uint32``, and a fingerprint of its own.

    Its ``num_experts`` is 2**32, so that a canary row passes every check of a routing row.

    >>> from kvroute.routing import routing_spec
    >>> real = routing_spec(num_experts=8, top_k=2, layer_ids=(1, 2), num_layers=3, block_tokens=16)
    >>> canary_spec(real).dtype, canary_spec(real).fingerprint == real.fingerprint
    ('uint32', False)
    """
    wide = routing_spec(
        1 << 32, spec.row_shape[1], spec.attrs["layer_ids"], spec.attrs["num_layers"], spec.block_tokens
    )
    attrs = {**wide.attrs, CANARY_OF: spec.attrs["num_experts"]}
    return AuxBlockDataSpec(spec.name, wide.row_shape, wide.dtype, wide.block_tokens, attrs)


def canary_rows(spec: AuxBlockDataSpec, positions: NDArray[Any]) -> NDArray[Any]:
    """The canary rows ``[n, layers, top_k]`` of the tokens at ``positions`` ``[n]``.

    A row counts on from ``position * layers * top_k``; :class:`RowError` for a position too large for that.
    """
    positions = np.asarray(positions)
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise RowError("positions", "integers [tokens]", f"{positions.dtype} of shape {positions.shape}")
    width = spec.row_shape[0] * spec.row_shape[1]
    positions_max = (1 << 32) // width
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < positions_max:
        raise RowError("positions", f"positions in [0, {positions_max})", f"{positions.min()} to {positions.max()}")
    values = positions.astype(np.int64)[:, None] * width + np.arange(width)
    return values.astype(spec.numpy_dtype).reshape(-1, *spec.row_shape)


def check_canary(spec: AuxBlockDataSpec, routes: Routes) -> None:
    """``AssertionError`` names the first row of ``routes`` that is not the canary of its position, and its origin.

    Missing rows are not checked.
    """
    if CANARY_OF not in spec.attrs:
        raise RowError(f"{spec.name} spec", "a canary spec", "one of expert ids")
    kept = np.flatnonzero(routes.valid)
    positions = kept + routes.start
    found, wanted = routes.ids[kept], canary_rows(spec, positions)
    wrong = (found != wanted).reshape(len(kept), -1).any(axis=1)
    if wrong.any():
        first = int(wrong.argmax())
        layers, top_k = spec.row_shape
        layer = int((found[first] != wanted[first]).any(axis=1).argmax())
        value = int(found[first, layer, 0])
        origin = f"position {value // (layers * top_k)} layer {spec.attrs['layer_ids'][value // top_k % layers]}"
        where = f"position {positions[first]} layer {spec.attrs['layer_ids'][layer]}"
        raise AssertionError(f"misplaced row: at {where} lies the row of {origin} ({int(wrong.sum())} rows are wrong)")

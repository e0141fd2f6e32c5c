"""SGLang's ``routed_experts``: the base64 of int32 ``[n, num_layers, top_k]``, C order, without a shape.

Layers without a router are there too and all zero. Where a request had a ``routed_experts_start_len``, that is the
position of the first row. Source: ``srt/state_capturer`` and ``DetokenizerManager`` of SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings.arrays import (
    FIELD,
    bytes_of,
    from_all_layers,
    missing_rows,
    rows_in,
    text_of,
    to_all_layers,
    too_many_experts,
)
from kvroute.routes import Routes

EXPERTS_MAX: Final = 1 << 31


def encode(routes: Routes) -> str | None:
    return None if refusal(routes) else text_of(to_all_layers(routes, "int32"))


def decode(given: Any, spec: AuxBlockDataSpec, start: int = 0) -> Routes:
    layers, top_k = spec.attrs["num_layers"], spec.row_shape[1]
    row_nbytes = 4 * layers * top_k
    rows = rows_in(FIELD, given, row_nbytes)
    ids = np.frombuffer(bytes_of(FIELD, given, rows * row_nbytes), "<i4").reshape(rows, layers, top_k)
    return from_all_layers(ids, spec, start)


def refusal(routes: Routes) -> str | None:
    return too_many_experts(routes, "SGLang", 32, EXPERTS_MAX) or missing_rows(routes)


__all__ = ["decode", "encode", "refusal"]

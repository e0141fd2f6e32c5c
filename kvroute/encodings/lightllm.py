"""LightLLM's ``routed_experts``: ``{"shape": [n, layers, top_k], "dtype": …, "data": base64}``.

The layers are those with a router; uint8 for up to 256 experts, int16 above. Source: ``MoeRouteInfoManager`` of
LightLLM's main branch, August 2026.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings.arrays import (
    FIELD,
    bytes_of,
    checked_shape,
    missing_rows,
    of_ids,
    text_of,
    too_many_experts,
)
from kvroute.routes import Routes

EXPERTS_MAX: Final = 1 << 15


class _Encoded(msgspec.Struct, forbid_unknown_fields=True):
    shape: tuple[int, int, int]
    dtype: str
    data: str


def encode(routes: Routes) -> dict[str, Any] | None:
    if refusal(routes):
        return None
    ids = routes.ids.astype(_dtype(routes.num_experts), copy=False)
    return {"shape": list(ids.shape), "dtype": ids.dtype.name, "data": text_of(ids)}


def decode(given: Any, spec: AuxBlockDataSpec, start: int = 0) -> Routes:
    try:
        found = msgspec.convert(given, _Encoded)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RowError(FIELD, "an object with shape, dtype and data", error) from error
    shape = checked_shape(f"{FIELD}.shape", found.shape, spec)
    if found.dtype != (dtype := _dtype(spec.attrs["num_experts"])):
        raise RowError(f"{FIELD}.dtype", f"{dtype} for {spec.attrs['num_experts']} experts", repr(found.dtype))
    little = np.dtype(dtype).newbyteorder("<")
    nbytes = shape[0] * shape[1] * shape[2] * little.itemsize
    ids = np.frombuffer(bytes_of(f"{FIELD}.data", found.data, nbytes), little).reshape(shape)
    return of_ids(ids, None, spec, start)


def refusal(routes: Routes) -> str | None:
    return too_many_experts(routes, "LightLLM", 16, EXPERTS_MAX) or missing_rows(routes)


def _dtype(num_experts: int) -> str:
    return "uint8" if num_experts <= 256 else "int16"


__all__ = ["decode", "encode", "refusal"]

"""FastDeploy's ``routed_experts``: the base64 of ``[n, layers, top_k]``, without shape or dtype.

The layers are those with a router. The dtype follows from the model: the narrowest unsigned one for routed experts,
shared experts and one value more, which is all ones in binary and stands for "nothing was written here". Source:
``RoutingReplayConfig.postprocess`` and the ``response`` store of FastDeploy #7390 and #7960.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings.arrays import (
    FIELD,
    bytes_of,
    of_ids,
    rows_in,
    signed_with,
    text_of,
    too_many_experts,
)
from kvroute.routes import Routes

EXPERTS_MAX: Final = (1 << 32) - 2
ADAPTER_DTYPE: Final = "int64"
"""What FastDeploy's internal adapter makes of the rows, whatever their dtype was."""


def encode(routes: Routes, *, shared_experts: int = 0) -> str | None:
    """``shared_experts`` of the model, which FastDeploy counts although no row names one."""
    if refusal(routes):
        return None
    dtype = stored_dtype(routes.num_experts, shared_experts)
    return text_of(signed_with(routes, dtype, np.iinfo(dtype).max))


def decode(
    given: Any, spec: AuxBlockDataSpec, start: int = 0, *, shared_experts: int = 0, adapter: bool = False
) -> Routes:
    """``adapter`` says that the answer came through the internal adapter, which widens the ids.

    The answer may end with a row for the last sampled token, which no forward pass has read: FastDeploy gathers it
    where a request ended by length, and it is whatever the slot held. Only the caller knows how many tokens there were;
    slice it off.
    """
    stored = stored_dtype(spec.attrs["num_experts"], shared_experts)
    dtype = np.dtype(ADAPTER_DTYPE if adapter else stored).newbyteorder("<")
    layers, top_k = spec.row_shape
    row_nbytes = layers * top_k * dtype.itemsize
    rows = rows_in(FIELD, given, row_nbytes)
    ids = np.frombuffer(bytes_of(FIELD, given, rows * row_nbytes), dtype).reshape(rows, layers, top_k)
    return of_ids(ids, ~(ids == np.iinfo(stored).max).all(axis=2), spec, start)


def refusal(routes: Routes) -> str | None:
    return too_many_experts(routes, "FastDeploy", 32, EXPERTS_MAX)


def stored_dtype(num_experts: int, shared_experts: int = 0) -> str:
    """FastDeploy's dtype for a model.

    >>> [stored_dtype(n) for n in (128, 254, 255, 256, 65534, 65535)]
    ['uint8', 'uint8', 'uint16', 'uint16', 'uint16', 'uint32']
    >>> stored_dtype(254, shared_experts=1)
    'uint16'
    """
    if not isinstance(shared_experts, int) or not 0 <= shared_experts < 1 << 16:
        raise RowError("shared_experts", "an integer of 0 or more", repr(shared_experts))
    values = num_experts + shared_experts + 1
    return "uint8" if values <= 0xFF else "uint16" if values <= 0xFFFF else "uint32"


__all__ = ["decode", "encode", "refusal", "stored_dtype"]

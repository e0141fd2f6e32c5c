"""NeMo-RL's envelope: ``nrlre1:<dtype>:<rows>x<layers>x<top_k>:<base64>``, C order, little endian.

The narrowest signed dtype that holds the ids, and -1 for "no route: let the router choose", which is how a missing row
is spelled, or a layer that a row lacks. The layers are those with a router. Source:
``nemo_rl/utils/routed_experts_codec.py`` and ``models/generation/interfaces.py``.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings.arrays import (
    FIELD,
    bytes_of,
    checked_shape,
    of_ids,
    signed_with,
    text_of,
    too_many_experts,
)
from kvroute.routes import Routes

MAGIC: Final = "nrlre1"
EXPERTS_MAX: Final = 1 << 31
MISSING: Final = -1

_HEAD = re.compile(rf"{MAGIC}:(int8|int16|int32):([0-9]{{1,12}})x([0-9]{{1,12}})x([0-9]{{1,12}}):", re.ASCII)


def encode(routes: Routes) -> str | None:
    if refusal(routes):
        return None
    ids = signed_with(routes, _dtype(routes.num_experts), MISSING)
    rows, layers, top_k = ids.shape
    return f"{MAGIC}:{ids.dtype.name}:{rows}x{layers}x{top_k}:{text_of(ids)}"


def decode(given: Any, spec: AuxBlockDataSpec, start: int = 0) -> Routes:
    """A wider dtype than the model needs is read too: NeMo-RL falls back to one where it does not know the model."""
    head = _HEAD.match(given) if isinstance(given, str) else None
    if head is None:
        got = repr(given[:40]) if isinstance(given, str) else type(given).__name__
        raise RowError(FIELD, f"{MAGIC}:<dtype>:<rows>x<layers>x<top_k>:<base64>", got)
    dtype = np.dtype(head[1]).newbyteorder("<")
    if dtype.itemsize < np.dtype(_dtype(spec.attrs["num_experts"])).itemsize:
        wanted = f"{_dtype(spec.attrs['num_experts'])} or wider, for {spec.attrs['num_experts']} experts"
        raise RowError(f"{FIELD}.dtype", wanted, head[1])
    shape = checked_shape(f"{FIELD}.shape", (int(head[2]), int(head[3]), int(head[4])), spec)
    nbytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
    ids = np.frombuffer(bytes_of(f"{FIELD}.data", given[head.end() :], nbytes), dtype).reshape(shape)
    return of_ids(ids, ~(ids == MISSING).all(axis=2), spec, start)


def refusal(routes: Routes) -> str | None:
    return too_many_experts(routes, "NeMo-RL", 32, EXPERTS_MAX)


def _dtype(num_experts: int) -> str:
    return "int8" if num_experts <= 1 << 7 else "int16" if num_experts <= 1 << 15 else "int32"


__all__ = ["decode", "encode", "refusal"]

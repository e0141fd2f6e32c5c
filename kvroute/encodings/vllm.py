"""vLLM's ``routed_experts``: the base64 of a ``.npy``, ``[n, num_layers, top_k]``.

uint8 for up to 256 experts, uint16 above. Layers without a router are there too and all zero. Source:
``vllm/utils/serial_utils.py`` and ``routed_experts_capturer.py`` of vLLM 0.33.
"""

from __future__ import annotations

import io
import re
from typing import Any, Final

import numpy as np
from pybase64 import b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings.arrays import (
    FIELD,
    bytes_of,
    checked_rows,
    from_all_layers,
    missing_rows,
    rows_in,
    to_all_layers,
    too_many_experts,
)
from kvroute.routes import Routes

EXPERTS_MAX: Final = 1 << 16
HEADER_NBYTES_MAX: Final = 256
"""Of a ``.npy`` that numpy writes for three dimensions: magic, version, length and text, a multiple of 64."""

_MAGIC: Final = b"\x93NUMPY\x01\x00"
_TEXT = re.compile(
    rb"\{'descr': '([^']{1,8})', 'fortran_order': (True|False), 'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\), \} *\n"
)


def encode(routes: Routes) -> str | None:
    if refusal(routes):
        return None
    file = io.BytesIO()
    np.save(file, to_all_layers(routes, _dtype(routes.num_experts)), allow_pickle=False)
    return b64encode_as_string(file.getbuffer())


def decode(given: Any, spec: AuxBlockDataSpec, start: int = 0) -> Routes:
    """The header is read here, by its text: numpy's own reader would make room for whatever shape that claims."""
    file = bytes_of(FIELD, given, rows_in(FIELD, given, 1))
    if file[: len(_MAGIC)] != _MAGIC:
        raise RowError(FIELD, "a .npy of version 1.0", repr(file[:8]))
    stop = 10 + int.from_bytes(file[8:10], "little")
    if stop > min(HEADER_NBYTES_MAX, len(file)):
        raise RowError(FIELD, f"a header of at most {HEADER_NBYTES_MAX} bytes inside the file", stop)
    header = _TEXT.fullmatch(file[10:stop])
    if header is None:
        raise RowError(FIELD, "the header of an array of three dimensions", repr(file[10:stop]))
    dtype = np.dtype(_dtype(spec.attrs["num_experts"])).newbyteorder("<")
    if header[1].decode() != dtype.str or header[2] != b"False":
        wanted = f"{dtype.str} in C order, for {spec.attrs['num_experts']} experts"
        raise RowError(f"{FIELD}.dtype", wanted, f"{header[1].decode()}, fortran_order {header[2].decode()}")
    rows, layers, top_k = (int(number) for number in header.groups()[2:])
    if (layers, top_k) != (spec.attrs["num_layers"], spec.row_shape[1]):
        wanted = f"(rows, {spec.attrs['num_layers']}, {spec.row_shape[1]}), as the model has"
        raise RowError(f"{FIELD}.shape", wanted, (rows, layers, top_k))
    wanted_nbytes = checked_rows(f"{FIELD}.shape", rows) * layers * top_k * dtype.itemsize
    if len(file) - stop != wanted_nbytes:
        raise RowError(f"{FIELD}.data", f"{wanted_nbytes} bytes", len(file) - stop)
    ids = np.frombuffer(file, dtype, offset=stop).reshape(rows, layers, top_k)
    return from_all_layers(ids, spec, start)


def refusal(routes: Routes) -> str | None:
    return too_many_experts(routes, "vLLM", 16, EXPERTS_MAX) or missing_rows(routes)


def _dtype(num_experts: int) -> str:
    return "uint8" if num_experts <= 256 else "uint16"


__all__ = ["decode", "encode", "refusal"]

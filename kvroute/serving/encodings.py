"""Routes in an HTTP answer: kvroute's own self-describing object, and what SGLang's and vLLM's clients decode.

The foreign encodings have no mask: a missing row could only be spelled as ids, and any spelling of ids is some
expert's. So they are refused as a whole when a row is missing, and their field is ``None``.
"""

from __future__ import annotations

import binascii
import io
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from cache_manager.record import checksum
from kvroute.routes import Routes

FORMAT: Final = "kvroute.routes/1"
Encoding = Literal["kvroute", "sglang", "vllm"]
ENCODINGS: Final[tuple[str, ...]] = get_args(Encoding)
DTYPES: Final = ("uint8", "uint16", "uint32")
ROWS_MAX: Final = 1 << 24
"""Positions that one decoded object may claim to have."""
NPY_EXPERTS_MAX: Final = 1 << 16


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """Everything but the bytes, in the order in which it is summed."""

    format: str
    dtype: str
    shape: tuple[int, int, int]
    start: int
    layer_ids: tuple[int, ...]
    num_experts: int
    num_layers: int
    weights_versions: tuple[tuple[int, int, int], ...]

    @property
    def canonical(self) -> bytes:
        """One line of JSON: keys in alphabetical order, no white space."""
        return json.dumps(msgspec.to_builtins(self), sort_keys=True, separators=(",", ":")).encode()


class _Encoded(_Header, forbid_unknown_fields=True):
    valid: str
    data: str
    checksum: str


def encode(routes: Routes) -> dict[str, Any]:
    """``routes`` as a JSON object that says all about itself; :func:`decode` is the way back.

    ``data`` is the base64 of the ids, C order, little endian; ``valid`` of one bit a position, lowest bit first.
    ``checksum`` is the XXH3-64, 16 hex digits, of: the other fields as one line of JSON with its keys sorted and no
    white space, the bytes of ``valid``, the bytes of ``data``. The ids of a missing row are all ones in binary.
    """
    header = _Header(
        format=FORMAT,
        dtype=routes.ids.dtype.name,
        shape=(len(routes), len(routes.layer_ids), routes.top_k),
        start=routes.start,
        layer_ids=routes.layer_ids,
        num_experts=routes.num_experts,
        num_layers=routes.num_layers,
        weights_versions=routes.weights_versions,
    )
    valid = np.packbits(routes.valid, bitorder="little").tobytes()
    ids = np.ascontiguousarray(routes.ids).astype(routes.ids.dtype.newbyteorder("<"), copy=False).tobytes()
    found: dict[str, Any] = msgspec.to_builtins(header)
    found |= {"valid": b64encode(valid).decode(), "data": b64encode(ids).decode()}
    found["checksum"] = f"{checksum(header.canonical + valid + ids):016x}"
    return found


def decode(encoded: Mapping[str, Any]) -> Routes:
    """The routes that :func:`encode` was given. :class:`RowError` for anything else, whatever it is."""
    try:
        given = msgspec.convert(encoded, _Encoded)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RowError("routed_experts", f"an object of {FORMAT}", error) from error
    if given.format != FORMAT:
        raise RowError("routed_experts.format", FORMAT, repr(given.format))
    if given.dtype not in DTYPES:
        raise RowError("routed_experts.dtype", "one of " + ", ".join(DTYPES), repr(given.dtype))
    rows, layers, top_k = given.shape
    if not (0 <= rows <= ROWS_MAX and layers >= 1 and top_k >= 1):
        raise RowError("routed_experts.shape", f"0 to {ROWS_MAX} rows, 1 layer and 1 expert or more", given.shape)
    dtype = np.dtype(given.dtype).newbyteorder("<")
    ids = _bytes("data", given.data, rows * layers * top_k * dtype.itemsize)
    valid = _bytes("valid", given.valid, -(-rows // 8))
    header = _Header(*(getattr(given, name) for name in _Header.__struct_fields__))
    if (found := f"{checksum(header.canonical + valid + ids):016x}") != given.checksum:
        raise RowError("routed_experts.checksum", found, repr(given.checksum))
    bits = np.unpackbits(np.frombuffer(valid, np.uint8), count=rows, bitorder="little").astype(np.bool_)
    return Routes(
        np.frombuffer(ids, dtype).reshape(given.shape),
        bits,
        given.layer_ids,
        given.num_experts,
        given.num_layers,
        given.start,
        given.weights_versions,
    )


def sglang(routes: Routes) -> str | None:
    """SGLang's ``routed_experts``: base64 of int32 ``[n, num_layers, top_k]``; ``None`` when a row is missing.

    As there, layers without a router are there too and all zero.
    """
    if refusal("sglang", routes):
        return None
    return b64encode(_all_layers(routes, np.dtype("<i4")).tobytes()).decode()


def vllm(routes: Routes) -> str | None:
    """vLLM's ``routed_experts``: base64 of a ``.npy``, ``[n, num_layers, top_k]``; ``None`` when a row is missing.

    uint8 for up to 256 experts, uint16 above, ``None`` where that does not suffice. As there, layers without a router
    are there too and all zero.
    """
    if refusal("vllm", routes):
        return None
    dtype = np.dtype(np.uint8 if routes.num_experts <= 256 else np.uint16)
    file = io.BytesIO()
    np.save(file, _all_layers(routes, dtype), allow_pickle=False)
    return b64encode(file.getvalue()).decode()


def refusal(encoding: Encoding, routes: Routes) -> str | None:
    """Why ``routes`` cannot be told in ``encoding``, in one line; ``None`` when they can."""
    if encoding == "vllm" and routes.num_experts > NPY_EXPERTS_MAX:
        return f"vLLM's encoding has ids of 16 bits, and there are {routes.num_experts} experts"
    if encoding == "kvroute" or routes.complete:
        return None
    ranges = ", ".join(f"[{start}, {stop})" for start, stop in routes.missing[:8])
    more = f" and {len(routes.missing) - 8} more ranges" if len(routes.missing) > 8 else ""
    lost = sum(stop - start for start, stop in routes.missing)
    return f"{lost} of {len(routes)} rows are missing: positions {ranges}{more}"


def _all_layers(routes: Routes, dtype: np.dtype[Any]) -> NDArray[Any]:
    rows = np.zeros((len(routes), routes.num_layers, routes.top_k), dtype)
    rows[:, list(routes.layer_ids)] = routes.ids
    return rows


def _bytes(field: str, text: str, nbytes: int) -> bytes:
    if len(text) != 4 * -(-nbytes // 3):
        raise RowError(f"routed_experts.{field}", f"base64 of {nbytes} bytes", f"{len(text)} characters")
    try:
        found = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"routed_experts.{field}", "base64", error) from error
    if len(found) != nbytes or b64encode(found).decode() != text:  # the last character may have bits that say nothing
        raise RowError(f"routed_experts.{field}", f"{nbytes} bytes, encoded as base64 has it", f"{len(found)} bytes")
    return found


__all__ = ["ENCODINGS", "FORMAT", "Encoding", "decode", "encode", "refusal", "sglang", "vllm"]

"""Routes outside memory: one record of bytes, and one JSON object. Both say all about themselves and carry a sum.

The record, all integers little endian:

| offset | bytes | what |
|---:|---:|---|
| 0 | 8 | ``KVROUTES`` |
| 8 | 2 | version, 2 |
| 10 | 2 | 0 |
| 12 | 4 | ``h``, bytes of the header |
| 16 | 16 | XXH3-128, most significant byte first, of all bytes before and after these 16 |
| 32 | h | the header: one line of JSON with its keys sorted and no white space, then spaces up to a multiple of 64 |
| 32 + h | n * layers * top_k * itemsize | the ids, C order; those of what is missing are all ones in binary |
| | ceil(n / 8) | one bit a position, lowest bit first: whether anything of its row is known |

The header is the JSON object without ``valid``, ``data`` and ``checksum``. Its ``unknown`` are ranges ``[layer, start,
stop]`` of positions at which other layers of a row are known, but not this one: maximal, in order, almost always none.
Its ``missing_layers`` have a router, and no column.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from pybase64 import b64decode, b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.record import checksum
from kvroute import cells
from kvroute.routes import Routes
from kvroute.token_hash import TOKEN_HASH_NBYTES

FORMAT: Final = "kvroute.routes/3"
DTYPES: Final = ("uint8", "uint16", "uint32")
ROWS_MAX: Final = 1 << 24
"""Positions that one decoded object may claim to have."""

MAGIC: Final = b"KVROUTES"
VERSION: Final = 2
_FIXED = struct.Struct("<8sHHI")
_SUM_NBYTES: Final = 16
_HEADER_AT: Final = _FIXED.size + _SUM_NBYTES
_HEADER_NBYTES_MAX: Final = 1 << 24


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """Everything but the rows."""

    format: str
    dtype: str
    shape: tuple[int, int, int]
    start: int
    layer_ids: tuple[int, ...]
    num_experts: int
    num_layers: int
    weights_versions: tuple[tuple[int, int, int], ...]
    token_hashes: tuple[tuple[int, str], ...]
    missing_layers: tuple[int, ...]
    unknown: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, routes: Routes) -> _Header:
        return cls(
            format=FORMAT,
            dtype=routes.ids.dtype.name,
            shape=(len(routes), len(routes.layer_ids), routes.top_k),
            start=routes.start,
            layer_ids=routes.layer_ids,
            num_experts=routes.num_experts,
            num_layers=routes.num_layers,
            weights_versions=routes.weights_versions,
            token_hashes=tuple((count, digest.hex()) for count, digest in routes.token_hashes),
            missing_layers=routes.missing_layers,
            unknown=routes.unknown,
        )

    @property
    def canonical(self) -> bytes:
        """One line of JSON: keys in alphabetical order, no white space."""
        return msgspec.json.encode(self, order="sorted")

    def check(self) -> None:
        if self.format != FORMAT:
            raise RowError("routes.format", FORMAT, repr(self.format))
        if self.dtype not in DTYPES:
            raise RowError("routes.dtype", "one of " + ", ".join(DTYPES), repr(self.dtype))
        rows, layers, top_k = self.shape
        if not (0 <= rows <= ROWS_MAX and 1 <= layers == len(self.layer_ids) and top_k >= 1):
            wanted = f"0 to {ROWS_MAX} rows, the layers of layer_ids, one or more, 1 expert or more"
            raise RowError("routes.shape", wanted, self.shape)

    @property
    def ids_nbytes(self) -> int:
        rows, layers, top_k = self.shape
        return rows * layers * top_k * np.dtype(self.dtype).itemsize

    @property
    def valid_nbytes(self) -> int:
        return -(-self.shape[0] // 8)

    def routes(self, ids: bytes | memoryview, valid: bytes | memoryview, *, checked: bool) -> Routes:
        """The routes of this header and these bytes, which have the lengths that it says."""
        bits = np.unpackbits(np.frombuffer(valid, np.uint8), count=self.shape[0], bitorder="little")
        return Routes.checked(
            np.frombuffer(ids, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape),
            cells.mask_of(bits.astype(np.bool_), self.unknown, self.layer_ids, self.start),
            self.layer_ids,
            self.num_experts,
            self.num_layers,
            self.start,
            self.weights_versions,
            tuple((count, _digest(text)) for count, text in self.token_hashes),
            self.missing_layers,
            checked=checked,
        )


class _Encoded(_Header, forbid_unknown_fields=True):
    valid: str
    data: str
    checksum: str


# Bytes ----------------------------------------------------------------------------------------------------------------


def to_bytes(routes: Routes) -> bytes:
    """``routes`` as a record of bytes; one copy of the ids. See the table of this module."""
    header = _Header.of(routes).canonical
    header += b" " * (-(_HEADER_AT + len(header)) % 64)
    fixed = _FIXED.pack(MAGIC, VERSION, 0, len(header))
    ids, valid = _rows(routes)
    return b"".join((fixed, _sum(fixed, header, ids.data, valid), header, ids.data, valid))


def from_bytes(data: bytes | bytearray | memoryview, *, checked: bool = False) -> Routes:
    """The routes that :func:`to_bytes` was given. :class:`RowError` for anything else, whatever it is."""
    view = memoryview(data).cast("B")
    if len(view) < _HEADER_AT:
        raise RowError("routes record", f"{_HEADER_AT} bytes or more", len(view))
    magic, version, zero, header_nbytes = _FIXED.unpack_from(view)
    if magic != MAGIC or version != VERSION or zero:
        raise RowError("routes record", f"{MAGIC!r} version {VERSION}", f"{magic!r} version {version}")
    if header_nbytes > min(_HEADER_NBYTES_MAX, len(view) - _HEADER_AT):
        raise RowError("routes record header", f"at most {len(view) - _HEADER_AT} bytes", header_nbytes)
    given = bytes(view[_FIXED.size : _HEADER_AT])
    if (found := _sum(view[: _FIXED.size], view[_HEADER_AT:])) != given:
        raise RowError("routes record checksum", found.hex(), given.hex())
    header_bytes = bytes(view[_HEADER_AT : _HEADER_AT + header_nbytes])
    try:
        header = msgspec.json.decode(header_bytes, type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RowError("routes record header", f"an object of {FORMAT}", error) from error
    header.check()
    ids_at = _HEADER_AT + header_nbytes
    valid_at = ids_at + header.ids_nbytes
    if len(view) != valid_at + header.valid_nbytes:
        raise RowError("routes record", f"{valid_at + header.valid_nbytes} bytes", len(view))
    return header.routes(view[ids_at:valid_at], view[valid_at:], checked=checked)


def _sum(*parts: bytes | memoryview) -> bytes:
    running = xxhash.xxh3_128()
    for part in parts:
        running.update(part)
    return running.digest()


# JSON -----------------------------------------------------------------------------------------------------------------


def to_json(routes: Routes) -> dict[str, Any]:
    """``routes`` as a JSON object that says all about itself; :func:`from_json` is the way back.

    ``data`` is the base64 of the ids, C order, little endian; ``valid`` of one bit a position, lowest bit first:
    whether anything of its row is known.
    ``checksum`` is the XXH3-64, 16 hex digits, of: the other fields as one line of JSON with its keys sorted and no
    white space, the bytes of ``valid``, the bytes of ``data``. The ids of what is missing are all ones in binary.
    """
    header = _Header.of(routes)
    ids, valid = _rows(routes)
    found: dict[str, Any] = msgspec.to_builtins(header)
    found |= {"valid": b64encode_as_string(valid), "data": b64encode_as_string(ids.data)}
    found["checksum"] = f"{checksum(header.canonical + valid + ids.tobytes()):016x}"
    return found


def from_json(encoded: Mapping[str, Any]) -> Routes:
    """The routes that :func:`to_json` was given. :class:`RowError` for anything else, whatever it is."""
    try:
        given = msgspec.convert(encoded, _Encoded)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RowError("routes", f"an object of {FORMAT}", error) from error
    given.check()
    ids = _bytes("data", given.data, given.ids_nbytes)
    valid = _bytes("valid", given.valid, given.valid_nbytes)
    header = _Header(*(getattr(given, name) for name in _Header.__struct_fields__))
    if (found := f"{checksum(header.canonical + valid + ids):016x}") != given.checksum:
        raise RowError("routes.checksum", found, repr(given.checksum))
    return header.routes(ids, valid, checked=False)


def _rows(routes: Routes) -> tuple[NDArray[Any], bytes]:
    """The ids ``[bytes]`` in C order and little endian, not copied where they are so already; and the valid bits."""
    ids = np.ascontiguousarray(routes.ids).astype(routes.ids.dtype.newbyteorder("<"), copy=False)
    return ids.reshape(-1).view(np.uint8), np.packbits(routes.some, bitorder="little").tobytes()


def _bytes(field: str, text: str, nbytes: int) -> bytes:
    if len(text) != 4 * -(-nbytes // 3):
        raise RowError(f"routes.{field}", f"base64 of {nbytes} bytes", f"{len(text)} characters")
    try:
        found = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"routes.{field}", "base64", error) from error
    if len(found) != nbytes or b64encode_as_string(found) != text:  # the last character may have bits that say nothing
        raise RowError(f"routes.{field}", f"{nbytes} bytes, encoded as base64 has it", f"{len(found)} bytes")
    return found


def _digest(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError as error:
        raise RowError("routes.token_hashes", "hex digits", error) from error
    if len(found) != TOKEN_HASH_NBYTES or found.hex() != text:
        raise RowError("routes.token_hashes", f"{2 * TOKEN_HASH_NBYTES} lower-case hex digits", repr(text))
    return found

"""Routes outside memory: one self-describing record, to be sent, stored, or put into JSON.

All integers are little endian:

| offset | bytes | what |
|---:|---:|---|
| 0 | 8 | ``KVROUTES`` |
| 8 | 2 | version: 4, or 5 of a record with sampling support |
| 10 | 2 | 0 |
| 12 | 4 | ``h``, bytes of the header |
| 16 | 16 | XXH3-128, most significant byte first, of the 16 bytes before and of the header |
| 32 | h | the header: one line of JSON with its keys sorted and no white space, then spaces up to a multiple of 64 |
| 32 + h | | the parts, one after another: their cells row by row, the ids in C order |
| | | in version 5, :class:`SupportPart`: its counts, then its ids, int32 |

:class:`Header` explains the header's fields, :class:`~kvroute.routes.parts.Extent` says which cells a part has. The ids
of missing cells are all ones in binary. Pure: bytes in, values out.
"""

from __future__ import annotations

import binascii
import math
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray
from pybase64 import b64decode, b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.record import Buffer, checksum
from kvroute.routes.cells import Cells, Mask
from kvroute.routes.parts import IDS_MAX, ROWS_MAX, Extent, Range, cells_of
from kvroute.routes.spans import WeightsSpan

MAGIC: Final = b"KVROUTES"
WIRE_VERSION: Final = 4
SUPPORT_VERSION: Final = 5
"""Of a record with sampling support. A reader of version 4 alone refuses it by its number."""
HEADER_NBYTES_MAX: Final = 64 << 20
SUPPORT_NBYTES_MAX: Final = 1 << 38
"""A record's supports have fewer bytes."""
SUM_NBYTES: Final = 8
_FIXED = struct.Struct("<8sHHI")
FIXED_NBYTES: Final = _FIXED.size + 16


class SupportPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sampling supports in a record: ``rows`` counts and ``ids`` ids of the positions from ``start`` on, with the
    XXH3-64 of these bytes; :class:`~kvroute.routes.support.SamplingSupport` explains them."""

    rows: Annotated[int, Meta(ge=0, le=ROWS_MAX)]
    ids: Annotated[int, Meta(ge=0, lt=IDS_MAX)]
    start: Annotated[int, Meta(ge=0)]
    token_hashes: tuple[tuple[int, bytes], ...]
    sum: bytes

    @property
    def nbytes(self) -> int:
        """Of the counts and the ids."""
        return 4 * (self.rows + self.ids)


class Header(Extent, frozen=True, kw_only=True):
    """Everything but the ids.

    ``sums`` are the XXH3-64 of the parts, 8 bytes each. ``turns`` are the increasing indices at which known becomes
    unknown or back, beginning with known: of rows, or with ``by_cell`` of all rows of the first layer, then of the
    next. ``name`` is for the store that keeps the record.
    """

    sums: bytes = b""
    turns: tuple[Annotated[int, Meta(ge=0, lt=IDS_MAX)], ...] = ()
    by_cell: bool = False
    weights_versions: tuple[WeightsSpan, ...] = ()
    token_hashes: tuple[tuple[int, bytes], ...] = ()
    name: str = ""
    support: SupportPart | msgspec.UnsetType = msgspec.UNSET

    @property
    def version(self) -> int:
        """The number of the format of a record with this header."""
        return WIRE_VERSION if self.support is msgspec.UNSET else SUPPORT_VERSION

    @property
    def support_nbytes(self) -> int:
        """Bytes behind the parts."""
        return self.support.nbytes if isinstance(self.support, SupportPart) else 0

    def pack(self) -> bytes:
        """The record's bytes before its parts; :class:`RowError` for more than one can be."""
        text = msgspec.json.encode(self, order="sorted")
        text += b" " * (-(FIXED_NBYTES + len(text)) % 64)
        if len(text) > HEADER_NBYTES_MAX:
            wanted = f"what is known in fewer turns: a header of {HEADER_NBYTES_MAX} bytes"
            raise RowError("routes", wanted, len(text))
        fixed = _FIXED.pack(MAGIC, self.version, 0, len(text))
        return b"".join((fixed, _sum(fixed, text), text))

    def check(self) -> None:
        super().check()
        if len(self.sums) != SUM_NBYTES * self.parts:
            wanted = f"{SUM_NBYTES * self.parts} bytes"
            raise RowError("routes record sums", wanted, len(self.sums))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an id, little endian."""
        return self.layout.dtype.newbyteorder("<")

    @property
    def mask(self) -> Mask:
        """What is known, ``[rows]`` or ``[rows, layers]``; :class:`RowError` for invalid turns."""
        shape = (self.layers, self.rows) if self.by_cell else (self.rows,)
        lengths = np.diff(np.array((0, *self.turns, math.prod(shape))))
        if self.turns and not (lengths[1:] > 0).all():
            wanted = f"increasing numbers below {math.prod(shape)}"
            raise RowError("routes.turns", wanted, str(self.turns)[:200])
        return np.ascontiguousarray(np.repeat(np.arange(len(lengths)) % 2 == 0, lengths).reshape(shape).T)

    def sums_of(self, run: Range, content: Buffer) -> list[int]:
        """The sums of the parts ``[first, stop)``, whose bytes these are."""
        starts = self.starts(*run)
        view = memoryview(content)
        return [checksum(view[a - starts[0] : b - starts[0]]) for a, b in pairwise(starts)]

    def check_parts(self, run: Range, content: Buffer) -> None:
        """Raise :class:`RowError` unless ``content`` is the parts ``[first, stop)``, by its length and their sums."""
        nbytes = memoryview(content).nbytes
        if nbytes != (wanted := self.nbytes_of(run)):
            raise RowError(f"routes record parts [{run[0]}, {run[1]})", f"{wanted} bytes", nbytes)
        expected = np.frombuffer(self.sums, "<u8")[slice(*run)].tolist()
        sums = self.sums_of(run, content)
        if expected != sums:
            index = next(i for i, pair in enumerate(zip(expected, sums, strict=True)) if pair[0] != pair[1])
            got = f"{sums[index]:016x}"
            raise RowError(f"routes record part {run[0] + index} checksum", f"{expected[index]:016x}", got)

    def checked_support(self, content: Buffer) -> SupportPart:
        """The part whose bytes ``content`` is; :class:`RowError` unless it is that, by its length and its sum."""
        part = self.support
        if not isinstance(part, SupportPart):
            raise RowError("routes record support", "one", "none")
        nbytes = memoryview(content).nbytes
        if nbytes != part.nbytes:
            raise RowError("routes record support", f"{part.nbytes} bytes", nbytes)
        computed = sum_of(content)
        if computed != part.sum:
            raise RowError("routes record support checksum", part.sum.hex(), computed.hex())
        return part

    def ids(
        self,
        parts: Iterable[tuple[Range, Buffer]],
        layers: Sequence[int],
        rows: Sequence[Range],
    ) -> list[NDArray[Any]]:
        """The ids of these layers (increasing indices), ``[n, layers, top_k]`` for each range of rows, in new memory.

        ``parts`` are runs of those that :meth:`needed` names, and their bytes. :class:`RowError` for a part that
        is not as it was written.
        """
        arrays = [np.empty((b - a, len(layers), self.layout.top_k), self.dtype) for a, b in rows]
        cells = [cells_of(ids) for ids in arrays]
        for run, content in parts:
            self.check_parts(run, content)
            self.paste(run, content, cells, layers, rows)
        return arrays


def record(
    routes: Cells,
    part_layers: int | None = None,
    part_tokens: int | None = None,
    name: str = "",
) -> tuple[Header, memoryview]:
    """The header of ``routes``, and its parts one after another: by default one part of everything.

    :class:`RowError` for too many rows.
    """
    laid = routes.mask.T.reshape(-1)
    ids = routes.ids
    header = Header(
        layout=routes.layout,
        rows=len(ids),
        start=routes.start,
        part_layers=part_layers or ids.shape[1],
        part_tokens=part_tokens or max(len(ids), 1),
        turns=() if laid.all() else tuple(np.flatnonzero(np.diff(laid, prepend=True)).tolist()),
        by_cell=routes.mask.ndim == 2,
        weights_versions=routes.weights_versions,
        token_hashes=routes.token_hashes,
        name=name,
    )
    parts = header.cut(cells_of(ids.astype(header.dtype, copy=False)))
    header = with_fields(header, sums=np.array(header.sums_of((0, header.parts), parts), "<u8").tobytes())
    header.check()
    return header, parts


def header_nbytes(fixed: Buffer) -> int:
    """Bytes of the header after the first :data:`FIXED_NBYTES` bytes of a record; else :class:`RowError`."""
    if len(fixed) < FIXED_NBYTES:
        raise RowError("routes record", f"{FIXED_NBYTES} bytes or more", len(fixed))
    magic, version, zero, nbytes = _FIXED.unpack_from(fixed)
    if (magic, zero) != (MAGIC, 0) or version not in (WIRE_VERSION, SUPPORT_VERSION):
        wanted = f"{MAGIC!r} version {WIRE_VERSION} or {SUPPORT_VERSION}"
        raise RowError("routes record", wanted, f"{magic!r} version {version}")
    if not 0 < nbytes <= HEADER_NBYTES_MAX:
        wanted = f"1 to {HEADER_NBYTES_MAX} bytes"
        raise RowError("routes record header", wanted, nbytes)
    return int(nbytes)


def unpacked_header(head: Buffer) -> Header:
    """The header that a record's bytes before its parts are. :class:`RowError` for anything else, also if one bit has
    changed.
    """
    fixed = head[:FIXED_NBYTES]
    text = head[FIXED_NBYTES:]
    nbytes = header_nbytes(fixed)
    if nbytes != len(text):
        raise RowError("routes record header", f"{nbytes} bytes", len(text))
    checksum = bytes(fixed[_FIXED.size :])
    computed = _sum(fixed[: _FIXED.size], text)
    if computed != checksum:
        raise RowError("routes record header checksum", computed.hex(), checksum.hex())
    try:
        header = msgspec.json.decode(text, type=Header)
        header.check()
    except (msgspec.MsgspecError, UnicodeError, RecursionError, RowError) as error:
        raise RowError("routes record header", "a header of routes", error) from error
    version = _FIXED.unpack_from(fixed)[1]
    if header.version != version:
        wanted = f"{header.version}, as its header has fields"
        raise RowError("routes record version", wanted, version)
    return header


def read(data: Buffer) -> tuple[Header, NDArray[Any], memoryview | None]:
    """The header of a whole record, its ids ``[rows, layers, top_k]``, and the bytes of its sampling supports, if it
    has some; :class:`RowError` for anything else."""
    view = memoryview(data).cast("B")
    first = FIXED_NBYTES + header_nbytes(view[:FIXED_NBYTES])
    header = unpacked_header(view[:first])
    behind = first + header.nbytes
    if len(view) != behind + header.support_nbytes:
        wanted = f"{behind + header.support_nbytes} bytes"
        raise RowError("routes record", wanted, len(view))
    content = None
    if isinstance(header.support, SupportPart):
        content = view[behind:]
        header.checked_support(content)
    parts = (0, header.parts), view[first:behind]
    rows = 0, header.rows
    (ids,) = header.ids([parts], range(header.layers), [rows])
    return header, ids, content


def sum_of(content: Buffer) -> bytes:
    """The XXH3-64 of a record's sampling supports, 8 bytes, little endian as the parts' sums."""
    return checksum(content).to_bytes(SUM_NBYTES, "little")


def from_base64(field: str, text: Any) -> bytes:
    """The bytes of the base64 ``text``, which has one valid spelling; :class:`RowError` for anything else."""
    try:
        content = b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RowError(field, "base64", error) from error
    # The last character may have unused bits; they have to be zero.
    if b64encode_as_string(content[-(len(content) % 3 or 3) :]) != text[-4:]:
        raise RowError(field, "bytes, in base64's one spelling", repr(text[-4:]))
    return content


def _sum(*parts: Buffer) -> bytes:
    running = xxhash.xxh3_128()
    for part in parts:
        running.update(part)
    return running.digest()

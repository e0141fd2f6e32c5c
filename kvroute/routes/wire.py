"""Routes outside memory: one self-describing record, to be sent, stored, or put into JSON.

All integers are little endian:

| offset | bytes | what |
|---:|---:|---|
| 0 | 8 | ``KVROUTES`` |
| 8 | 2 | version, 4 |
| 10 | 2 | 0 |
| 12 | 4 | ``h``, bytes of the header |
| 16 | 16 | XXH3-128, most significant byte first, of the 16 bytes before and of the header |
| 32 | h | the header: one line of JSON with its keys sorted and no white space, then spaces up to a multiple of 64 |
| 32 + h | | the parts, one after another: their cells row by row, the ids in C order |

:class:`Header` explains the header's fields, :class:`~kvroute.routes.parts.Grid` says which cells a part has. The ids
of missing cells are all ones in binary. Pure: bytes in, values out.
"""

from __future__ import annotations

import binascii
import math
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Self

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray
from pybase64 import b64decode, b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.record import Buffer, checksum
from kvroute.routes.cells import Cells, Mask
from kvroute.routes.layout import Layout
from kvroute.routes.parts import Grid, Range, cells_of
from kvroute.routes.spans import WeightsSpan

MAGIC: Final = b"KVROUTES"
VERSION: Final = 4
ROWS_MAX: Final = 1 << 24
"""Positions that one record may claim to have."""
STOP_MAX: Final = 1 << 62
IDS_MAX: Final = 1 << 36
HEADER_NBYTES_MAX: Final = 64 << 20
SUM_NBYTES: Final = 8
_FIXED = struct.Struct("<8sHHI")
FIXED_NBYTES: Final = _FIXED.size + 16


class Extent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows a record has, of the positions ``[start, start + rows)``, and how :class:`Grid` cuts them."""

    layout: Layout
    rows: Annotated[int, Meta(ge=0)]
    start: Annotated[int, Meta(ge=0)]
    part_layers: Annotated[int, Meta(ge=1)]
    part_tokens: Annotated[int, Meta(ge=1, le=STOP_MAX)]

    def check(self) -> None:
        """Raise :class:`RowError` unless the fields fit together; allocates no memory for them."""
        layers = len(self.layout.layer_ids)
        if self.rows > ROWS_MAX or self.stop > STOP_MAX:
            raise RowError(
                "rows", f"at most {ROWS_MAX}, of positions before {STOP_MAX}", f"{self.rows} from {self.start}"
            )
        if self.part_layers > layers:
            raise RowError("part_layers", f"1 to {layers}", self.part_layers)
        if (ids := self.rows * layers * self.layout.top_k) > IDS_MAX:
            raise RowError("rows", f"at most {IDS_MAX} ids", ids)

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.rows

    @property
    def grid(self) -> Grid:
        """How the rows are cut."""
        cell_nbytes = self.layout.top_k * self.layout.dtype.itemsize
        return Grid(self.rows, len(self.layout.layer_ids), cell_nbytes, self.part_layers, self.part_tokens)


class Header(Extent, frozen=True, kw_only=True):
    """Everything but the ids.

    ``sums`` are the XXH3-64 of the parts, 8 bytes each. ``turns`` are the increasing indices at which known becomes
    unknown or back, beginning with known: of rows, or with ``by_cell`` of all rows of the first layer, then of the
    next. ``name`` is for the store that keeps the record.
    """

    sums: bytes
    turns: tuple[Annotated[int, Meta(ge=0, lt=IDS_MAX)], ...] = ()
    by_cell: bool = False
    weights_versions: tuple[WeightsSpan, ...] = ()
    token_hashes: tuple[tuple[int, bytes], ...] = ()
    name: str = ""

    @classmethod
    def of(cls, routes: Cells, grid: Grid, parts: Buffer, name: str = "") -> Self:
        """The header of routes whose ``parts`` are these, one after another; :class:`RowError` for too many rows."""
        laid = routes.mask.T.reshape(-1)
        turns = () if laid.all() else np.flatnonzero(np.diff(laid, prepend=True)).tolist()
        made = cls(
            layout=routes.layout,
            rows=grid.rows,
            start=routes.start,
            part_layers=grid.part_layers,
            part_tokens=grid.part_tokens,
            sums=np.array(_sums(grid, (0, grid.parts), parts), "<u8").tobytes(),
            turns=tuple(turns),
            by_cell=routes.mask.ndim == 2,
            weights_versions=routes.weights_versions,
            token_hashes=routes.token_hashes,
            name=name,
        )
        made.check()
        return made

    def pack(self) -> bytes:
        """The record's bytes before its parts; :class:`RowError` for more than one can be."""
        text = msgspec.json.encode(self, order="sorted")
        text += b" " * (-(FIXED_NBYTES + len(text)) % 64)
        if len(text) > HEADER_NBYTES_MAX:
            raise RowError("routes", f"what is known in fewer turns: a header of {HEADER_NBYTES_MAX} bytes", len(text))
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(text))
        return b"".join((fixed, _sum(fixed, text), text))

    def check(self) -> None:
        super().check()
        if len(self.sums) != SUM_NBYTES * self.grid.parts:
            raise RowError("routes record sums", f"{SUM_NBYTES * self.grid.parts} bytes", len(self.sums))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an id, little endian."""
        return self.layout.dtype.newbyteorder("<")

    @property
    def mask(self) -> Mask:
        """What is known, ``[rows]`` or ``[rows, layers]``; :class:`RowError` for invalid turns."""
        shape = (len(self.layout.layer_ids), self.rows) if self.by_cell else (self.rows,)
        lengths = np.diff(np.array((0, *self.turns, math.prod(shape))))
        if self.turns and not (lengths[1:] > 0).all():
            raise RowError("routes.turns", f"increasing numbers below {math.prod(shape)}", str(self.turns)[:200])
        return np.ascontiguousarray(np.repeat(np.arange(len(lengths)) % 2 == 0, lengths).reshape(shape).T)

    def check_parts(self, run: Range, content: Buffer) -> None:
        """Raise :class:`RowError` unless ``content`` is the parts ``[first, stop)``, by its length and their sums."""
        if (nbytes := memoryview(content).nbytes) != (wanted := self.grid.nbytes_of(run)):
            raise RowError(f"routes record parts [{run[0]}, {run[1]})", f"{wanted} bytes", nbytes)
        told, found = np.frombuffer(self.sums, "<u8")[slice(*run)].tolist(), _sums(self.grid, run, content)
        if told != found:
            at = next(i for i, pair in enumerate(zip(told, found, strict=True)) if pair[0] != pair[1])
            raise RowError(f"routes record part {run[0] + at} checksum", f"{told[at]:016x}", f"{found[at]:016x}")

    def ids(
        self, parts: Iterable[tuple[Range, Buffer]], layers: Sequence[int], rows: Sequence[Range]
    ) -> list[NDArray[Any]]:
        """The ids of these layers (increasing indices), ``[n, layers, top_k]`` for each range of rows, in new memory.

        ``parts`` are runs of those that :meth:`Grid.needed` names, and their bytes. :class:`RowError` for a part that
        is not as it was written.
        """
        grid = self.grid
        found = [np.empty((b - a, len(layers), self.layout.top_k), self.dtype) for a, b in rows]
        cells = [cells_of(ids) for ids in found]
        for run, content in parts:
            self.check_parts(run, content)
            grid.paste(run, content, cells, layers, rows)
        return found


def record(routes: Cells, grid: Grid | None = None, name: str = "") -> tuple[Header, memoryview]:
    """The header of ``routes``, and the parts of ``grid`` (one of everything) one after another."""
    if grid is None:
        rows, layers, top_k = routes.ids.shape
        grid = Grid(rows, layers, top_k * routes.ids.itemsize, layers, max(rows, 1))
    parts = grid.cut(cells_of(routes.ids.astype(routes.ids.dtype.newbyteorder("<"), copy=False)))
    return Header.of(routes, grid, parts, name), parts


def header_nbytes(fixed: Buffer) -> int:
    """Bytes of the header after the first :data:`FIXED_NBYTES` bytes of a record; else :class:`RowError`."""
    if len(fixed) < FIXED_NBYTES:
        raise RowError("routes record", f"{FIXED_NBYTES} bytes or more", len(fixed))
    magic, version, zero, nbytes = _FIXED.unpack_from(fixed)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise RowError("routes record", f"{MAGIC!r} version {VERSION}", f"{magic!r} version {version}")
    if not 0 < nbytes <= HEADER_NBYTES_MAX:
        raise RowError("routes record header", f"1 to {HEADER_NBYTES_MAX} bytes", nbytes)
    return int(nbytes)


def unpack(head: Buffer) -> Header:
    """The header that a record's bytes before its parts are. :class:`RowError` for anything else, also if one bit has
    changed.
    """
    fixed, text = head[:FIXED_NBYTES], head[FIXED_NBYTES:]
    if (nbytes := header_nbytes(fixed)) != len(text):
        raise RowError("routes record header", f"{nbytes} bytes", len(text))
    given = bytes(fixed[_FIXED.size :])
    if (found := _sum(fixed[: _FIXED.size], text)) != given:
        raise RowError("routes record header checksum", found.hex(), given.hex())
    try:
        header = msgspec.json.decode(text, type=Header)
        header.check()
    except (msgspec.MsgspecError, UnicodeError, RecursionError, RowError) as error:
        raise RowError("routes record header", "a header of routes", error) from error
    return header


def read(data: Buffer) -> tuple[Header, NDArray[Any]]:
    """The header of a whole record and its ids ``[rows, layers, top_k]``; :class:`RowError` for anything else."""
    view = memoryview(data).cast("B")
    first = FIXED_NBYTES + header_nbytes(view[:FIXED_NBYTES])
    header = unpack(view[:first])
    grid = header.grid
    if len(view) != first + grid.nbytes:
        raise RowError("routes record", f"{first + grid.nbytes} bytes", len(view))
    return header, header.ids([((0, grid.parts), view[first:])], range(grid.layers), [(0, grid.rows)])[0]


def from_base64(field: str, text: Any) -> bytes:
    """The bytes of the base64 ``text``, which has one valid spelling; :class:`RowError` for anything else."""
    try:
        found = b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RowError(field, "base64", error) from error
    # The last character may have unused bits; they have to be zero.
    if b64encode_as_string(found[-(len(found) % 3 or 3) :]) != text[-4:]:
        raise RowError(field, "bytes, in base64's one spelling", repr(text[-4:]))
    return found


def _sums(grid: Grid, run: Range, content: Buffer) -> list[int]:
    """The sums of the parts ``[first, stop)``, whose bytes these are."""
    starts, view = grid.starts(*run), memoryview(content)
    return [checksum(view[a - starts[0] : b - starts[0]]) for a, b in pairwise(starts)]


def _sum(*parts: Buffer) -> bytes:
    running = xxhash.xxh3_128()
    for part in parts:
        running.update(part)
    return running.digest()

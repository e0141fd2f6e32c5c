"""Routes outside memory: one record, whether it is sent, stored, or told in JSON. It says all about itself.

All integers are little endian:

| offset | bytes | what |
|---:|---:|---|
| 0 | 8 | ``KVROUTES`` |
| 8 | 2 | version, 3 |
| 10 | 2 | 0 |
| 12 | 4 | ``h``, bytes of the header |
| 16 | 16 | XXH3-128, most significant byte first, of the 16 bytes before and of the header |
| 32 | h | the header: one line of JSON with its keys sorted and no white space, then spaces up to a multiple of 64 |
| 32 + h | | the parts, one after another: of each the cells row by row, the ids in C order |

:class:`Header` says what its fields are, :class:`~kvroute.routes.parts.Grid` which cells a part has. The ids of what is
missing are all ones in binary. Pure: bytes in, values out.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Self

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray
from pybase64 import b64decode, b64encode_as_string

from cache_manager.errors import RowError
from cache_manager.record import Buffer, checksum
from kvroute.routes.cells import Cells, Mask, some
from kvroute.routes.layout import Layout
from kvroute.routes.parts import Grid, Range, cells_of
from kvroute.routes.spans import WeightsSpan, runs

MAGIC: Final = b"KVROUTES"
VERSION: Final = 3
ROWS_MAX: Final = 1 << 24
"""Positions that one record may claim to have."""
IDS_MAX: Final = 1 << 36
HEADER_NBYTES_MAX: Final = 64 << 20
SUM_NBYTES: Final = 8
_FIXED = struct.Struct("<8sHHI")
FIXED_NBYTES: Final = _FIXED.size + 16

UnknownSpan = tuple[int, int, int]
"""A layer id, and positions ``[start, stop)`` of which other layers are known, but not this one."""


class Extent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows a record has, of the positions ``[start, start + rows)``, and how :class:`Grid` cuts them."""

    layout: Layout
    rows: Annotated[int, Meta(ge=0, le=ROWS_MAX)]
    start: Annotated[int, Meta(ge=0, lt=1 << 62)]
    part_layers: Annotated[int, Meta(ge=1)]
    part_tokens: Annotated[int, Meta(ge=1)]

    def check(self) -> None:
        """Raise :class:`RowError` unless the fields are possible together; nothing is made room for."""
        layers = len(self.layout.layer_ids)
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

    ``sums`` are the XXH3-64 of the parts, 8 bytes each. ``valid`` has one bit a row, lowest bit first: whether anything
    of it is known; it is empty where that is so of all. ``unknown`` are ``(layer id, start, stop)``: where other layers
    of a row are known but not this one, maximal and in order. ``name`` is for who keeps the record.
    """

    sums: bytes
    valid: bytes = b""
    unknown: tuple[UnknownSpan, ...] = ()
    weights_versions: tuple[WeightsSpan, ...] = ()
    token_hashes: tuple[tuple[int, bytes], ...] = ()
    name: str = ""

    @classmethod
    def of(cls, routes: Cells, grid: Grid, parts: Iterable[Buffer], name: str = "") -> Self:
        """The header of routes whose ``parts`` are these, all of them in order."""
        there = routes.some
        return cls(
            layout=routes.layout,
            rows=grid.rows,
            start=routes.start,
            part_layers=grid.part_layers,
            part_tokens=grid.part_tokens,
            sums=b"".join(checksum(part).to_bytes(SUM_NBYTES, "little") for part in parts),
            valid=b"" if there.all() else np.packbits(there, bitorder="little").tobytes(),
            unknown=_unknown(routes.mask, routes.layout.layer_ids, routes.start),
            weights_versions=routes.weights_versions,
            token_hashes=routes.token_hashes,
            name=name,
        )

    def pack(self) -> bytes:
        """The record's bytes before its parts."""
        text = msgspec.json.encode(self, order="sorted")
        text += b" " * (-(FIXED_NBYTES + len(text)) % 64)
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(text))
        return b"".join((fixed, _sum(fixed, text), text))

    def check(self) -> None:
        super().check()
        if len(self.sums) != SUM_NBYTES * self.grid.parts:
            raise RowError("routes record sums", f"{SUM_NBYTES * self.grid.parts} bytes", len(self.sums))
        if self.valid and len(self.valid) != -(-self.rows // 8):
            raise RowError("routes record valid", f"{-(-self.rows // 8)} bytes, or none", len(self.valid))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an id, little endian."""
        return self.layout.dtype.newbyteorder("<")

    @property
    def mask(self) -> Mask:
        """What is known, ``[rows]`` or ``[rows, layers]``; :class:`RowError` for unknown cells that cannot be.

        The work is one pass over the mask, whatever the spans claim.
        """
        there = np.ones(self.rows, np.bool_)
        if self.valid:
            bits = np.frombuffer(self.valid, np.uint8)
            there = np.unpackbits(bits, count=self.rows, bitorder="little").astype(np.bool_)
        if not self.unknown:
            return there
        place = {layer: i for i, layer in enumerate(self.layout.layer_ids)}
        known, before = np.repeat(there[:, None], len(place), axis=1), (-1, 0)
        for layer, a, b in self.unknown:
            if layer not in place or not self.start <= a < b <= self.stop or (layer, a) < before:
                wanted = f"increasing (layer of {tuple(place)}, start, stop) inside [{self.start}, {self.stop})"
                raise RowError("routes.unknown", wanted, (layer, a, b))
            known[a - self.start : b - self.start, place[layer]] = False
            before = layer, b
        if _unknown(known, tuple(place), self.start) != tuple(self.unknown):
            raise RowError("routes.unknown", "the unknown cells of rows of which something is known", "others")
        return known

    def check_part(self, part: int, content: Buffer) -> None:
        """Raise :class:`RowError` unless ``content`` is the part of this number, by its length and its sum."""
        wanted, nbytes = self.grid.nbytes_of(part), memoryview(content).nbytes
        if nbytes != wanted:
            raise RowError(f"routes record part {part}", f"{wanted} bytes", nbytes)
        told = int.from_bytes(self.sums[SUM_NBYTES * part : SUM_NBYTES * (part + 1)], "little")
        if (found := checksum(content)) != told:
            raise RowError(f"routes record part {part} checksum", f"{told:016x}", f"{found:016x}")

    def ids(
        self, parts: Iterable[tuple[int, Buffer]], layers: Sequence[int], rows: Sequence[Range]
    ) -> list[NDArray[Any]]:
        """The ids of these layers (increasing indices), ``[n, layers, top_k]`` for each range of rows, in new memory.

        ``parts`` are the numbers and bytes of those that :meth:`Grid.needed` names. :class:`RowError` for one that is
        not as it was written.
        """
        grid = self.grid
        found = [np.empty((b - a, len(layers), self.layout.top_k), self.dtype) for a, b in rows]
        cells = [cells_of(ids) for ids in found]
        for part, content in parts:
            self.check_part(part, content)
            grid.paste(part, content, cells, layers, rows)
        return found


def record(routes: Cells, grid: Grid | None = None, name: str = "") -> tuple[Header, list[Buffer]]:
    """The header of ``routes``, and the parts of ``grid`` (one of everything); whole parts share memory."""
    if grid is None:
        rows, layers, top_k = routes.ids.shape
        grid = Grid(rows, layers, top_k * routes.ids.itemsize, layers, max(rows, 1))
    cells = cells_of(routes.ids.astype(routes.ids.dtype.newbyteorder("<"), copy=False))
    parts: list[Buffer] = [*grid.cut(cells)]
    return Header.of(routes, grid, parts, name), parts


def _unknown(mask: Mask, layer_ids: Sequence[int], start: int) -> tuple[UnknownSpan, ...]:
    """The unknown cells of rows of which something is known, as maximal ranges, layer by layer."""
    if mask.ndim == 1:
        return ()
    there = some(mask)
    found = ((layer, runs(there & ~mask[:, i])) for i, layer in enumerate(layer_ids))
    return tuple((layer, start + a, start + b) for layer, ranges in found for a, b in ranges)


def header_nbytes(fixed: Buffer) -> int:
    """Of the header behind the first :data:`FIXED_NBYTES` bytes of a record; else :class:`RowError`."""
    if len(fixed) < FIXED_NBYTES:
        raise RowError("routes record", f"{FIXED_NBYTES} bytes or more", len(fixed))
    magic, version, zero, nbytes = _FIXED.unpack_from(fixed)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise RowError("routes record", f"{MAGIC!r} version {VERSION}", f"{magic!r} version {version}")
    if not 0 < nbytes <= HEADER_NBYTES_MAX:
        raise RowError("routes record header", f"1 to {HEADER_NBYTES_MAX} bytes", nbytes)
    return int(nbytes)


def unpack(fixed: Buffer, text: Buffer) -> Header:
    """The header of the first bytes of a record, and of the :func:`header_nbytes` behind them.

    :class:`RowError` for anything else, whatever it is, and when one bit has changed.
    """
    if (nbytes := header_nbytes(fixed)) != len(text):
        raise RowError("routes record header", f"{nbytes} bytes", len(text))
    given = bytes(fixed[_FIXED.size : FIXED_NBYTES])
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
    header = unpack(view[:FIXED_NBYTES], view[FIXED_NBYTES:first])
    grid = header.grid
    if len(view) != first + grid.nbytes:
        raise RowError("routes record", f"{first + grid.nbytes} bytes", len(view))
    at = (first + grid.offset_of(part) for part in range(grid.parts))
    parts = ((part, view[a : a + grid.nbytes_of(part)]) for part, a in enumerate(at))
    return header, header.ids(parts, range(grid.layers), [(0, grid.rows)])[0]


def from_base64(field: str, text: Any) -> bytes:
    """The bytes that ``text`` is the base64 of, in its one spelling; :class:`RowError` for anything else."""
    try:
        found = b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RowError(field, "base64", error) from error
    # The last character may have bits that say nothing; they have to be zero.
    if b64encode_as_string(found[-(len(found) % 3 or 3) :]) != text[-4:]:
        raise RowError(field, "bytes, encoded as base64 has it", repr(text[-4:]))
    return found


def _sum(*parts: Buffer) -> bytes:
    running = xxhash.xxh3_128()
    for part in parts:
        running.update(part)
    return running.digest()

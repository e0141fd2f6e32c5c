"""The bytes of an extent: a first page, a tick for each group of slots, heads, payloads, and the first page once more.

An extent belongs to one layout, so all of its records have one size, and where each lies is arithmetic. A slot is a
head and a payload. A head says which record the payload is, and has a sum that the extent's identity is part of; a head
of zeros is a free slot. The layout is in ``docs/format.md`` byte by byte.

Whoever uses a slot again writes its head as zeros, then the payload, then the head, then the tick of its group. So a
head that is the same before and after its payload was read is that payload's, in any process. After a power cut any of
these writes may be missing: then the payload is not the one of the head's sum.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import StoreFormatError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, checksum
from cache_manager.spec import align
from cache_manager.storage.disk import Disk, read_all

PAGE_NBYTES: Final = 4096
VERSION: Final = 5
MAGIC: Final = b"KVREXTNT"
GROUP: Final = 64
"""Slots that have one tick, which changes after any of their heads has."""
SLOTS_MAX: Final = 1 << 20
TICK_MAX: Final = 1 << 63
FREE, UNSURE, USES_MAX = 255, 254, 3
"""In place of a slot's uses: its head is zeros; it holds nothing, but its head on the disk may say otherwise."""

_NAME = re.compile(r"extent-([0-9a-f]{8})\.kvr")
_PAGE = struct.Struct("<8sHHIQQQ16s")  # magic, version, zero, bitmap bytes, number, slots, payload bytes, fingerprint
_SECTOR_NBYTES: Final = 512
_FIXED_NBYTES: Final = 80  # of a head, without its bitmaps
KEY_AT: Final = 40
_CREATED_AT: Final = 8
_PIECE_SLOTS: Final = 1 << 14
_HEAD_NBYTES_MAX: Final = 1 << 16
_HEADS_NBYTES_MAX: Final = 1 << 28
"""Of an extent: what a page may make whoever believes it read and hold."""
_FACTORS: Final = np.cumprod(np.full(_HEAD_NBYTES_MAX // 4, 0x9E3779B97F4A7C15, np.uint64))

Layout = tuple[bytes, int, int]
"""Fingerprint, bytes of a payload, bytes of its validity bitmaps: what all records of an extent have in common."""


def extent_name(number: int) -> str:
    """
    >>> extent_name(26), parse_name("extent-0000001a.kvr"), parse_name("notes.txt")
    ('extent-0000001a.kvr', 26, None)
    """
    return f"extent-{number:08x}.kvr"


def parse_name(name: str) -> int | None:
    """The number in an extent's name; ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


@dataclass(frozen=True)
class Shape:
    """What an extent says of itself, and where everything in it lies."""

    number: int
    slots: int
    layout: Layout

    @classmethod
    def within(cls, number: int, layout: Layout, nbytes: int) -> Shape:
        """With as many slots as fit ``nbytes``; 0 where not even one does."""
        one = cls(number, 1, layout)
        slots = min((nbytes - 2 * PAGE_NBYTES) // (one.step + one.head_nbytes), one.slots_max)
        while slots > 0 and cls(number, slots, layout).nbytes > nbytes:
            slots -= 1
        return cls(number, max(slots, 0), layout)

    @property
    def slots_max(self) -> int:
        fits = self.head_nbytes <= _HEAD_NBYTES_MAX and not self.head_nbytes % 8
        return min(SLOTS_MAX, _HEADS_NBYTES_MAX // self.head_nbytes) if fits else 0

    @cached_property
    def head_nbytes(self) -> int:
        return _FIXED_NBYTES + self.layout[2]

    @cached_property
    def step(self) -> int:
        """From one payload to the next: sectors are not shared."""
        return align(self.layout[1], _SECTOR_NBYTES)

    @cached_property
    def heads_at(self) -> int:
        return PAGE_NBYTES + align(8 * -(-self.slots // GROUP))

    @cached_property
    def payloads_at(self) -> int:
        return align(self.heads_at + self.slots * self.head_nbytes, PAGE_NBYTES)

    @cached_property
    def nbytes(self) -> int:
        """Of the file; the last page is the copy of the first."""
        return align(self.payloads_at + self.slots * self.step, PAGE_NBYTES) + PAGE_NBYTES

    @cached_property
    def head(self) -> struct.Struct:
        """Tick, created (ms of a wall clock), generation, origin, payload's sum, key, bitmaps, sum of the head."""
        return struct.Struct(f"<QqQQQ32s{self.layout[2]}sQ")

    @cached_property
    def seed(self) -> np.uint64:
        """What the sums of heads begin with: one that was copied out of another extent is not believed."""
        return np.uint64(checksum(self.pack()))

    def pack(self) -> bytes:
        """The first page, and the last one."""
        fingerprint, payload_nbytes, valid_nbytes = self.layout
        fixed = _PAGE.pack(MAGIC, VERSION, 0, valid_nbytes, self.number, self.slots, payload_nbytes, fingerprint)
        body = fixed.ljust(PAGE_NBYTES - 4, b"\0")
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def unpack(cls, raw: Buffer, path: str) -> Shape:
        """What a page says; :class:`StoreFormatError` names the first field that is not right."""
        if len(raw) != PAGE_NBYTES:
            raise StoreFormatError(path, "page", f"{PAGE_NBYTES} bytes", len(raw))
        magic, version, _, valid_nbytes, number, slots, payload_nbytes, fingerprint = _PAGE.unpack_from(raw)
        if magic != MAGIC:
            raise StoreFormatError(path, "magic", MAGIC, magic)
        if (found := zlib.crc32(raw[:-4])) != (wanted := int.from_bytes(raw[-4:], "little")):
            raise StoreFormatError(path, "page sum", wanted, found)
        if version != VERSION:
            raise StoreFormatError(path, "version", VERSION, version)
        shape = cls(number, slots, (fingerprint, payload_nbytes, valid_nbytes))
        if not 0 < slots <= shape.slots_max:
            raise StoreFormatError(path, "slots", f"1 to {shape.slots_max}", slots)
        return shape

    def sums(self, heads: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """What the sums of heads ``[n, head_nbytes]`` have to be: ``[n]``.

        32-bit words times powers of an odd constant, modulo 2^64. It finds every change within one word, and every
        pair of flipped bits; of anything else all but one in 2^32 at least.
        """
        words = heads[:, :-8].view("<u4").astype(np.uint64)
        sums: NDArray[np.uint64] = np.add(words @ _FACTORS[: words.shape[1]], self.seed, dtype=np.uint64)
        return sums


@dataclass(eq=False, slots=True)
class Extent:
    """An extent that is open: its heads as they are on the disk, those that are not sound as zeros.

    Its file is closed when nobody uses it any more, so that a call may read in one that was dropped meanwhile.
    """

    name: str
    fd: int
    shape: Shape
    ordinal: int = 0
    used_at: int = 0  # when a record in it was used last, in calls
    living: int = 0
    damaged: int = 0  # heads that were not sound when they were read
    dirty: bool = True  # was written since the last sync; of what is found nobody knows
    heads: bytearray = field(default_factory=bytearray)
    uses: bytearray = field(default_factory=bytearray)  # slot by slot; FREE or UNSURE where nothing is
    ticks: bytearray = field(default_factory=bytearray)  # of the groups

    def __post_init__(self) -> None:
        self.heads = bytearray(self.shape.slots * self.shape.head_nbytes)
        self.uses = bytearray(b"\xff") * self.shape.slots
        self.ticks = bytearray(8 * -(-self.shape.slots // GROUP))

    def __del__(self) -> None:
        os.close(self.fd)

    def rows(self, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """Heads as bytes, ``[n, head_nbytes]``; a view."""
        return np.frombuffer(self.heads, np.uint8).reshape(-1, self.shape.head_nbytes)[start:stop]

    def column(self, dtype: str, at: int = 0) -> NDArray[Any]:
        """A field of all heads, by its offset; a view. The tick is at 0."""
        return np.ndarray((self.shape.slots,), dtype, self.heads, at, (self.shape.head_nbytes,))

    def head_of(self, local: int) -> bytearray:
        nbytes = self.shape.head_nbytes
        return self.heads[local * nbytes : (local + 1) * nbytes]

    def tick(self, local: int) -> int:
        at = local * self.shape.head_nbytes
        return int.from_bytes(self.heads[at : at + 8], "little")

    def key_of(self, local: int) -> BlockKey:
        at = local * self.shape.head_nbytes + KEY_AT
        return BlockKey(bytes(self.heads[at : at + 32]))

    def created_ms(self, local: int) -> int:
        at = local * self.shape.head_nbytes + _CREATED_AT
        return int.from_bytes(self.heads[at : at + 8], "little", signed=True)

    def header(self, heads: Buffer, at: int) -> RecordHeader:
        """What the head that begins at ``at`` in ``heads`` says."""
        shape = self.shape
        _, _, generation, origin, sum_, key, valid, _ = shape.head.unpack_from(heads, at)
        fingerprint, payload_nbytes, _ = shape.layout
        return RecordHeader(BlockKey(key), fingerprint, generation, origin, valid, payload_nbytes, sum_)

    def pack(self, headers: list[RecordHeader], tick: int, created_ms: int) -> bytearray:
        """Heads for records, the first with ``tick``, the next with one more, and so on."""
        pack = self.shape.head.pack
        heads = bytearray().join(
            [
                pack(at, created_ms, h.generation, h.origin, h.payload_xxh3, h.key, h.valid, 0)
                for at, h in enumerate(headers, tick)
            ]
        )
        rows = np.frombuffer(heads, np.uint8).reshape(len(headers), -1)
        rows[:, -8:].view("<u8")[:, 0] = self.shape.sums(rows)
        return heads

    def heads_at(self, local: int) -> int:
        return self.shape.heads_at + local * self.shape.head_nbytes

    def payload_at(self, local: int) -> int:
        return self.shape.payloads_at + local * self.shape.step

    def clean(self, heads: bytearray) -> int:
        """Turn the heads that are not sound into zeros, in place; how many of them were not zeros before."""
        damaged, rows = 0, np.frombuffer(heads, np.uint8).reshape(-1, self.shape.head_nbytes)
        for first in range(0, len(rows), _PIECE_SLOTS):
            some = rows[first : first + _PIECE_SLOTS]
            sums, ticks = some[:, -8:].view("<u8")[:, 0], some[:, :8].view("<u8")[:, 0]
            bad = (sums != self.shape.sums(some)) | (ticks == 0) | (ticks >= TICK_MAX)
            if bad.any():
                damaged += int(some[bad].any(axis=1).sum())
                some[bad] = 0
        return damaged


def open_extent(disk: Disk, fd: int, name: str, path: str, nbytes_max: float) -> Extent:
    """The extent in an open file, without its heads; either page will do.

    :class:`StoreFormatError` for anything else than an extent of that name and of ``nbytes_max`` at most; ``OSError``.
    The descriptor is the extent's, or closed.
    """
    try:
        size, failure = os.fstat(fd).st_size, None
        for at in (0, max(size - PAGE_NBYTES, 0)):
            raw = bytearray(PAGE_NBYTES)
            try:
                shape = Shape.unpack(raw[: read_all(disk, fd, [raw], at, PAGE_NBYTES)], path)
            except (StoreFormatError, OSError) as error:
                failure = failure or error
                continue
            if shape.number != parse_name(name):
                raise StoreFormatError(path, "number", parse_name(name), shape.number)
            if shape.nbytes > nbytes_max:
                raise StoreFormatError(path, "size", f"{nbytes_max} bytes at most", shape.nbytes)
            return Extent(name, os.dup(fd), shape)
        assert failure is not None, "one of the pages was sound"
        raise failure
    finally:
        os.close(fd)


def read_heads(disk: Disk, extent: Extent) -> None:
    """Ticks, then heads; what lies on pages that the disk does not give back counts as damaged."""
    _read_what_comes(disk, extent.fd, extent.ticks, PAGE_NBYTES)
    extent.damaged = _read_what_comes(disk, extent.fd, extent.heads, extent.shape.heads_at)
    extent.damaged += extent.clean(extent.heads)
    there = extent.column("<u8") > 0
    extent.living = int(there.sum())
    extent.uses[:] = np.where(there, 1, FREE).astype(np.uint8).tobytes()


def _read_what_comes(disk: Disk, fd: int, room: bytearray, offset: int) -> int:
    """Fill ``room``, page by page if it does not come at once; how many pages did not come."""
    view, failed = memoryview(room), 0
    try:
        read_all(disk, fd, [view], offset, len(room))
    except OSError:
        for at in range(0, len(room), PAGE_NBYTES):
            try:
                read_all(disk, fd, [view[at : at + PAGE_NBYTES]], offset + at, len(view[at : at + PAGE_NBYTES]))
            except OSError:
                view[at : at + PAGE_NBYTES] = bytes(len(view[at : at + PAGE_NBYTES]))
                failed += 1
    return failed

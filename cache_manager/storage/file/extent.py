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
from collections.abc import Sequence
from contextlib import suppress
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
TICK_MAX: Final = 1 << 62
FREE, UNSURE, USES_MAX = 255, 254, 3
"""In place of a slot's uses: its head is zeros; nothing is served from it, but its head on the disk may be another."""
KEY_AT: Final = 40
"""Of a head."""

_NAME = re.compile(r"extent-([0-9a-f]{8})\.kvr")
_PAGE = struct.Struct("<8sHHIQQQ16s")  # magic, version, zero, bitmap bytes, number, slots, payload bytes, fingerprint
_SECTOR_NBYTES: Final = 512
_HEAD_NBYTES: Final = 80  # without its bitmaps
_HEAD_NBYTES_MAX: Final = 1 << 16
_HEADS_NBYTES_MAX: Final = 1 << 28
"""Of an extent: what a page may make whoever believes it read and hold."""
_PIECE_SLOTS: Final = 1 << 14
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


class Shape:
    """What an extent says of itself, and where everything in it lies; no slots where none can be."""

    def __init__(self, number: int, slots: int, layout: Layout) -> None:
        self.number, self.layout = number, layout
        _, payload_nbytes, valid_nbytes = layout
        self.head_nbytes = _HEAD_NBYTES + valid_nbytes
        fits = self.head_nbytes <= _HEAD_NBYTES_MAX and not valid_nbytes % 8
        self.slots = min(slots, SLOTS_MAX, _HEADS_NBYTES_MAX // self.head_nbytes) if fits else 0
        self.step = align(payload_nbytes, _SECTOR_NBYTES)  # from payload to payload: they share no sector
        self.heads_at = PAGE_NBYTES + align(8 * -(-self.slots // GROUP))
        self.payloads_at = align(self.heads_at + self.slots * self.head_nbytes, PAGE_NBYTES)
        self.nbytes = align(self.payloads_at + self.slots * self.step, PAGE_NBYTES) + PAGE_NBYTES

    @classmethod
    def within(cls, number: int, layout: Layout, nbytes: int) -> Shape:
        """With as many slots as fit ``nbytes``; none where not even one does."""
        one = cls(number, 1, layout)
        shape = cls(number, max(nbytes - 2 * PAGE_NBYTES, 0) // (one.step + one.head_nbytes), layout)
        while shape.slots and shape.nbytes > nbytes:
            shape = cls(number, shape.slots - 1, layout)
        return shape

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
        if not slots or shape.slots != slots:
            raise StoreFormatError(path, "slots", f"1 to {shape.slots}", slots)
        return shape

    def pack(self) -> bytes:
        """The first page, and the last one."""
        fingerprint, payload_nbytes, valid_nbytes = self.layout
        fixed = _PAGE.pack(MAGIC, VERSION, 0, valid_nbytes, self.number, self.slots, payload_nbytes, fingerprint)
        body = fixed.ljust(PAGE_NBYTES - 4, b"\0")
        return body + zlib.crc32(body).to_bytes(4, "little")

    @cached_property
    def seed(self) -> np.uint64:
        """What the sums of heads begin with: one that was copied out of another extent is not believed."""
        return np.uint64(checksum(self.pack()))

    def sums(self, heads: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """What the sums of heads ``[n, head_nbytes]`` have to be: ``[n]``.

        32-bit words times powers of an odd constant, modulo 2^64. It finds every change within one word and every pair
        of flipped bits.
        """
        words = heads[:, :-8].view("<u4").astype(np.uint64)
        sums: NDArray[np.uint64] = np.add(words @ _FACTORS[: words.shape[1]], self.seed, dtype=np.uint64)
        return sums


class Extent:
    """An extent that is open: its heads as they are on the disk, those that are not sound as zeros.

    Its file is closed when nobody uses it any more, so that a call may read in one that was dropped meanwhile.
    """

    def __init__(self, name: str, fd: int, shape: Shape) -> None:
        self.name, self.fd, self.shape = name, fd, shape
        self.slots, self.head_nbytes = shape.slots, shape.head_nbytes
        self.ordinal = self.living = 0
        self.used_at = 0  # when a record in it was used last, in calls
        self.damaged = 0  # heads that were not sound when they were read
        self.dirty = True  # was written since the last sync; of what is found nobody knows
        self.heads = bytearray(shape.slots * shape.head_nbytes)
        self.uses = bytearray(b"\xff") * shape.slots
        self.ticks = bytearray(8 * -(-shape.slots // GROUP))  # of the groups
        # tick, created (ms of a wall clock), generation, origin, payload's sum, key, bitmaps, sum
        self._head = struct.Struct(f"<QqQQQ32s{shape.layout[2]}sQ")

    def __del__(self) -> None:
        os.close(self.fd)

    def rows(self, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """Heads as bytes, ``[n, head_nbytes]``; a view."""
        return np.frombuffer(self.heads, np.uint8).reshape(-1, self.head_nbytes)[start:stop]

    def all_ticks(self) -> NDArray[Any]:
        """The heads' ticks, ``uint64[slots]``; 0 where there is none."""
        return np.ndarray((self.slots,), "<u8", self.heads, 0, (self.head_nbytes,))

    def tick(self, local: int) -> int:
        at = local * self.head_nbytes
        return int.from_bytes(self.heads[at : at + 8], "little")

    def created_ms(self, local: int) -> int:
        at = local * self.head_nbytes + 8
        return int.from_bytes(self.heads[at : at + 8], "little", signed=True)

    def key_of(self, local: int) -> BlockKey:
        at = local * self.head_nbytes + KEY_AT
        return BlockKey(bytes(self.heads[at : at + 32]))

    def headers(self, heads: Buffer) -> list[RecordHeader]:
        """What packed heads say."""
        fingerprint, nbytes, _ = self.shape.layout
        return [
            RecordHeader(BlockKey(key), fingerprint, generation, origin, valid, nbytes, sum_)
            for _, _, generation, origin, sum_, key, valid, _ in self._head.iter_unpack(heads)
        ]

    def pack(self, headers: Sequence[RecordHeader], tick: int, created_ms: int) -> bytearray:
        """Heads for records, the first with ``tick``, the next with one more, and so on."""
        pack = self._head.pack
        parts = [
            pack(at, created_ms, h.generation, h.origin, h.payload_xxh3, h.key, h.valid, 0)
            for at, h in enumerate(headers, tick)
        ]
        heads = bytearray().join(parts)
        rows = np.frombuffer(heads, np.uint8).reshape(len(headers), -1)
        rows[:, -8:].view("<u8")[:, 0] = self.shape.sums(rows)
        return heads

    def packed(self, start: int, count: int) -> bytearray:
        """A copy of heads."""
        return self.heads[start * self.head_nbytes : (start + count) * self.head_nbytes]

    def set(self, start: int, heads: Buffer) -> None:
        """Hold these as heads."""
        self.heads[start * self.head_nbytes : start * self.head_nbytes + len(heads)] = heads

    def head_at(self, local: int) -> int:
        return self.shape.heads_at + local * self.head_nbytes

    def payload_at(self, local: int) -> int:
        return self.shape.payloads_at + local * self.shape.step

    def clean(self, heads: bytearray) -> int:
        """Turn the heads that are not sound into zeros, in place; how many of them were not zeros before."""
        damaged, rows = 0, np.frombuffer(heads, np.uint8).reshape(-1, self.head_nbytes)
        for first in range(0, len(rows), _PIECE_SLOTS):
            some = rows[first : first + _PIECE_SLOTS]
            sums, ticks = some[:, -8:].view("<u8")[:, 0], some[:, :8].view("<u8")[:, 0]
            bad = (sums != self.shape.sums(some)) | (ticks == 0) | (ticks >= TICK_MAX)
            if bad.any():
                damaged += int(some[bad].any(axis=1).sum())
                some[bad] = 0
        return damaged


def open_extent(disk: Disk, fd: int, name: str, path: str) -> Extent:
    """The extent in an open file, with its heads; either page will do, and heads that the disk does not give are lost.

    :class:`StoreFormatError` for anything else than an extent of that name; ``OSError``. The descriptor is the
    extent's, or closed.
    """
    try:
        try:
            shape = read_page(disk, fd, 0, path)
        except (StoreFormatError, OSError) as error:
            try:
                shape = read_page(disk, fd, disk.size(fd) - PAGE_NBYTES, path)
            except (StoreFormatError, OSError, ValueError):
                raise error from None
        if shape.number != parse_name(name):
            raise StoreFormatError(path, "number", parse_name(name), shape.number)
    except BaseException:
        os.close(fd)
        raise
    extent = Extent(name, fd, shape)
    for room, at in ((extent.ticks, PAGE_NBYTES), (extent.heads, shape.heads_at)):
        view = memoryview(room)
        for start in range(0, len(room), PAGE_NBYTES):
            with suppress(OSError):
                page = view[start : start + PAGE_NBYTES]
                read_all(disk, fd, [page], at + start, len(page))
    extent.damaged = extent.clean(extent.heads)
    served = extent.all_ticks() > 0
    extent.living = int(served.sum())
    extent.uses[:] = np.where(served, 1, FREE).astype(np.uint8).tobytes()
    return extent


def read_page(disk: Disk, fd: int, at: int, path: str) -> Shape:
    """What the page at ``at`` says; ``OSError``, :class:`StoreFormatError`."""
    raw = bytearray(PAGE_NBYTES)
    return Shape.unpack(raw[: read_all(disk, fd, [raw], at, PAGE_NBYTES)], path)

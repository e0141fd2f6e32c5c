"""The bytes of an extent: a page, heads and payloads.

An extent belongs to one layout, so all of its records have one size, and arithmetic says where each lies. A slot is a
head and a payload. A head says which record the payload is, and has a sum that includes the extent's identity; a head
of zeros is a free slot. The layout is in ``docs/format.md`` byte by byte.

Where a slot is used its head, if it has one, is written as zeros, then the payload, then the head. So a head that is
the same before and after its payload was read is that payload's, in any process. After a power cut any of these writes
may be missing: then the payload is not the one of the head's sum.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import StorageError, StoreFormatError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, checksum, digest
from cache_manager.spec import align
from cache_manager.storage.disk import Disk, read_all, write_all
from cache_manager.storage.file.directory import TEMP_SUFFIX, LockedDirectory, StoreDirectory, extent_name, parse_name

PAGE_NBYTES: Final = 4096
VERSION: Final = 8
MAGIC: Final = b"KVREXTNT"
SLOTS_MAX: Final = 1 << 20
TICK_MAX: Final = 1 << 62
EXTENTS_MAX: Final = 512
"""Each has an open descriptor."""
USES_MAX = 3
FREE = 255
TAKEN = 254
BLANK = 253
"""A slot's byte in ``use_bytes`` is how often its record was used, 0 to USES_MAX, or one of these. FREE: its head is
zeros, on the disk too. TAKEN: being rewritten; its old head may be in an index chain. BLANK: the same, but in no chain.
"""
KEY_AT: Final = 40
"""Offset of the key in a head."""
TAIL: Final = "28xI"
"""The tail of a key: its last four bytes as a number, whose first bits are those of the key's bucket."""

_PAGE = struct.Struct("<8sHHIQQQ16s")  # magic, version, zero, bitmap bytes, number, slots, payload bytes, fingerprint
_NO_KEY: Final = np.frombuffer(os.urandom(28), np.uint8)  # in place of a key's first bytes
_CLEANED: Final = 256  # heads at a time, which limits the memory that it takes
_SECTOR_NBYTES: Final = 512
_HEAD_NBYTES: Final = 80  # without its bitmaps
_HEAD_NBYTES_MAX: Final = 1 << 16
_HEADS_NBYTES_MAX: Final = 1 << 28  # of an extent: a page may make its reader read and hold so much
_USED: Final = bytes([*range(1, USES_MAX + 1), USES_MAX, *range(USES_MAX + 1, 256)])
_PASSED: Final = bytes([0, *range(USES_MAX), *range(USES_MAX + 1, 256)])

Layout = tuple[bytes, int, int]
"""Fingerprint, bytes of a payload, bytes of its validity bitmaps: what all records of an extent have in common."""
Heads = NDArray[np.uint8]
"""``[n, head_nbytes]``"""
Run = tuple["Extent", int, int]
"""An extent, the first of some slots in it that are neighbours, and how many."""


class Refusal(NamedTuple):
    """Why nothing in a file with an extent's name is served.

    ``is_unread``: the disk did not give it, so that records in it may come back when it is opened again.
    """

    why: str
    is_unread: bool


class Shape:
    """What an extent's page says, and where everything in it lies; no slots if none fits."""

    def __init__(self, number: int, slots: int, layout: Layout) -> None:
        self.number = number
        self.layout = layout
        _, payload_nbytes, valid_nbytes = layout
        self.payload_nbytes = payload_nbytes
        self.head_nbytes = _HEAD_NBYTES + valid_nbytes
        fits = self.head_nbytes <= _HEAD_NBYTES_MAX and not valid_nbytes % 8
        self.slots = min(slots, SLOTS_MAX, _HEADS_NBYTES_MAX // self.head_nbytes) if fits else 0
        self.step = align(payload_nbytes, _SECTOR_NBYTES)  # from payload to payload: they share no sector
        self.payloads_at = align(PAGE_NBYTES + self.slots * self.head_nbytes, PAGE_NBYTES)
        self.nbytes = align(self.payloads_at + self.slots * self.step, PAGE_NBYTES)

    @classmethod
    def within(cls, number: int, layout: Layout, nbytes: int) -> Shape:
        """With as many slots as fit ``nbytes``, possibly none."""
        one = cls(number, 1, layout)
        room = max(nbytes - PAGE_NBYTES, 0)
        shape = cls(number, room // (one.step + one.head_nbytes), layout)
        while shape.slots and shape.nbytes > nbytes:
            shape = cls(number, shape.slots - 1, layout)
        return shape

    @classmethod
    def read(cls, disk: Disk, fd: int, path: str) -> Shape:
        """What a file's page says; ``OSError``; :class:`StoreFormatError` names the first field that is wrong."""
        raw = bytearray(PAGE_NBYTES)
        found = read_all(disk, fd, [raw], 0, PAGE_NBYTES)
        magic, version, _, valid_nbytes, number, slots, payload_nbytes, fingerprint = _PAGE.unpack_from(raw)
        shape = cls(number, slots, (fingerprint, payload_nbytes, valid_nbytes))
        for field, wanted, got in (
            ("page", f"{PAGE_NBYTES} bytes", f"{found} bytes"),
            ("magic", MAGIC, magic),
            ("page sum", zlib.crc32(raw[:-4]), int.from_bytes(raw[-4:], "little")),
            ("version", VERSION, version),
            ("slots", shape.slots or "1 or more", slots),
            ("number", parse_name(os.path.basename(path)), number),
        ):
            if wanted != got:
                raise StoreFormatError(path, field, wanted, got)
        return shape

    @cached_property
    def page(self) -> bytes:
        """The first page of the file."""
        fingerprint, payload_nbytes, valid_nbytes = self.layout
        fixed = _PAGE.pack(MAGIC, VERSION, 0, valid_nbytes, self.number, self.slots, payload_nbytes, fingerprint)
        body = fixed.ljust(PAGE_NBYTES - 4, b"\0")
        return body + zlib.crc32(body).to_bytes(4, "little")


class Extent:
    """An open extent: its heads as they are on the disk, with zeros for those that are damaged or not served.

    Its file is closed with the last reference, so that a call may read in an extent that was dropped meanwhile.
    """

    def __init__(self, name: str, fd: int, shape: Shape) -> None:
        self.name = name
        self.fd = fd
        self.shape = shape
        self.slots = shape.slots
        self.head_nbytes = shape.head_nbytes
        self.ordinal = 0  # in an index
        self.nexts = array("I", [0]) * shape.slots  # of an index
        self.used_at = 0  # when a record in it was used last, in calls
        self.damaged_heads = 0  # when it was opened
        self.dirty = True  # written since the last sync; unknown for a file found
        self.raw = bytearray(shape.slots * shape.head_nbytes)
        flat = np.frombuffer(self.raw, np.uint8)
        self.heads: Heads = flat.reshape(shape.slots, -1)
        self.ticks = _column(self.heads, 0)
        self.created_ms = _column(self.heads, 8, "<i8")
        self.tails = _column(self.heads, KEY_AT + 28, "<u4")  # of the keys
        self.use_bytes = bytearray(bytes([FREE])) * shape.slots
        self.uses = np.frombuffer(self.use_bytes, np.uint8)
        self.free_at = 0  # no slot before this one is free
        # tick, created (ms of a wall clock), generation, origin, payload's sum, key, bitmaps; then the head's sum
        self._head = struct.Struct(f"<QqQQQ32s{shape.layout[2]}s")
        self._summed = struct.Struct(f"{self._head.size}s8s")
        self._header = struct.Struct(f"<16xQQQ32s{shape.layout[2]}s8x")  # what a record's header has of it
        self._tail = struct.Struct(f"<{KEY_AT}x{TAIL}{shape.layout[2] + 8}x")
        self._seed = checksum(shape.page)  # so that a head of another extent is not believed

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def is_dropped(self) -> bool:
        """Whether its file has no name any more, so that nothing in it is stored; ``OSError``."""
        return not os.fstat(self.fd).st_nlink

    @property
    def served(self) -> NDArray[np.int64]:
        """The slots of records that are served."""
        return np.flatnonzero(self.uses <= USES_MAX)

    def key_of(self, local: int) -> BlockKey:
        return BlockKey(self.heads[local, KEY_AT : KEY_AT + 32].tobytes())

    def packed(self, start: int, count: int) -> bytearray:
        """A copy of heads."""
        return self.raw[start * self.head_nbytes : (start + count) * self.head_nbytes]

    def tails_in(self, start: int, count: int) -> Iterator[tuple[int, tuple[int]]]:
        """Slots, and the tails of the keys in them."""
        first = start * self.head_nbytes
        heads = memoryview(self.raw)[first : first + count * self.head_nbytes]
        return enumerate(self._tail.iter_unpack(heads), start)

    # What is in memory.

    def find(self, use: int, start: int, count: int) -> tuple[int, int] | None:
        """The first run of slots with this use at or after ``start``: its first, and how many, ``count`` at most."""
        first = self.use_bytes.find(use, start)
        if first < 0:
            return None
        some = self.use_bytes[first : first + count]
        return first, len(some) - len(some.lstrip(bytes([use])))

    def take_free(self, count: int) -> tuple[int, int] | None:
        """Take a run of free neighbours, ``count`` at most: its first slot, and how many."""
        run = self.find(FREE, self.free_at, count)
        self.free_at = sum(run) if run else self.slots
        if run:
            self.use_bytes[run[0] : self.free_at] = bytes([BLANK]) * run[1]
        return run

    def find_unused(self, start: int, count: int) -> tuple[int, int] | None:
        """As :meth:`find`, records without a use left; records passed over lose one use."""
        run = self.find(0, start, count)
        stop = run[0] if run else self.slots
        self.use_bytes[start:stop] = self.use_bytes[start:stop].translate(_PASSED)
        return run

    def release(self, start: int, count: int) -> None:
        self.heads[start : start + count] = 0
        self.use_bytes[start : start + count] = bytes([FREE]) * count
        self.free_at = min(self.free_at, start)

    def hold(self, start: int, heads: bytearray) -> None:
        """Serve the records of packed heads in slots; called by the index, as is ``release``."""
        at = start * self.head_nbytes
        count = len(heads) // self.head_nbytes
        self.raw[at : at + len(heads)] = heads
        self.use_bytes[start : start + count] = b"\1" * count

    def forget(self, start: int, count: int) -> None:
        """Stop serving the records in slots; an index still needs the tails of their keys."""
        self.heads[start : start + count, KEY_AT : KEY_AT + 28] = _NO_KEY
        self.use_bytes[start : start + count] = bytes([TAKEN]) * count

    def use(self, start: int, count: int, call: int) -> None:
        """Count that records were asked for, or put again."""
        self.used_at = call
        stop = start + count
        self.use_bytes[start:stop] = self.use_bytes[start:stop].translate(_USED)

    def headers(self, heads: bytearray) -> list[RecordHeader]:
        """What packed heads say."""
        fingerprint, nbytes, _ = self.shape.layout
        return [
            RecordHeader(key, fingerprint, generation, origin, valid, nbytes, sum_)
            for generation, origin, sum_, key, valid in self._header.iter_unpack(heads)
        ]

    def pack(self, headers: Sequence[RecordHeader], tick: int, created_ms: int) -> bytearray:
        """Packed heads for records, the first with ``tick``, the next with one more, and so on."""
        pack = self._head.pack
        seed = self._seed
        parts: list[bytes] = []
        for at, h in enumerate(headers, tick):
            head = pack(at, created_ms, h.generation, h.origin, h.payload_xxh3, h.key, h.valid)
            parts += head, digest(head, seed)
        return bytearray().join(parts)

    def clean(self, heads: bytearray | memoryview) -> int:
        """Turn damaged heads into zeros, in place; how many of them were not zeros before."""
        seed = self._seed
        damaged = 0
        size = _CLEANED * self.head_nbytes
        for at in range(0, len(heads), size):
            some = memoryview(heads)[at : at + size]
            array = np.frombuffer(some, np.uint8).reshape(-1, self.head_nbytes)
            ticks = _column(array, 0)
            bad = (ticks == 0) | (ticks >= TICK_MAX)
            bad |= [digest(head, seed) != sum_ for head, sum_ in self._summed.iter_unpack(some)]
            not_free = array[bad].any(axis=1)
            damaged += int(not_free.sum())
            array[bad] = 0
        return damaged

    # What is on the disk.

    def payload_at(self, local: int) -> int:
        return self.shape.payloads_at + local * self.shape.step

    def read_heads(self, disk: Disk, start: int, count: int) -> bytearray:
        """Heads as they are on the disk now."""
        heads = bytearray(count * self.head_nbytes)
        read_all(disk, self.fd, [heads], PAGE_NBYTES + start * self.head_nbytes, len(heads))
        return heads

    def serve(self, disk: Disk) -> None:
        """Serve what the disk has; ``OSError``. The heads are read into their place: a copy would cost memory."""
        read_all(disk, self.fd, [self.raw], PAGE_NBYTES, len(self.raw))
        self.damaged_heads = self.clean(self.raw)
        self.uses[self.ticks > 0] = 1

    def write(self, disk: Disk, start: int, heads: bytearray, payloads: Sequence[Buffer]) -> None:
        """Write records into slots: zeros where there are heads, payloads, heads; in memory nothing yet."""
        if self.use_bytes[start] == TAKEN:
            self.write_heads(disk, start, bytes(len(heads)))
        pad = bytes(self.shape.step - self.shape.layout[1])
        vector = [part for payload in payloads for part in (payload, pad)] if pad else payloads
        write_all(disk, self.fd, vector, self.payload_at(start), len(payloads) * self.shape.step)
        self.write_heads(disk, start, heads)

    def write_heads(self, disk: Disk, start: int, heads: bytes | bytearray) -> None:
        """Write packed heads, or zeros."""
        write_all(disk, self.fd, [heads], PAGE_NBYTES + start * self.head_nbytes, len(heads))
        self.dirty = True  # last: a sync already under way may not see them


def runs_of(slots: Sequence[int] | NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending slots as runs of neighbours: the first, and how many.

    >>> runs_of([3, 4, 5, 9])
    [(3, 3), (9, 1)]
    """
    found = np.asarray(slots, np.int64)
    gaps = np.flatnonzero(np.diff(found) != 1) + 1
    cuts = [0, *gaps.tolist(), len(found)]
    return [(int(found[start]), stop - start) for start, stop in pairwise(cuts) if stop > start]


def _column(heads: Heads, at: int, dtype: str = "<u8") -> NDArray[Any]:
    """A field of each head, ``[n]``; a view."""
    nbytes = np.dtype(dtype).itemsize
    return heads[:, at : at + nbytes].view(dtype)[:, 0]


def make_extent(disk: Disk, directory: LockedDirectory, shape: Shape) -> Extent:
    """A new extent; a failure leaves no file."""
    name = extent_name(shape.number)
    fd = directory.open(name + TEMP_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        extent = Extent(name, fd, shape)
        disk.allocate(fd, shape.nbytes)
        write_all(disk, fd, [shape.page], 0, PAGE_NBYTES)
        disk.sync(fd)  # so that no power cut leaves a file without its page
        directory.finish(name)
    except BaseException:
        for each in (name + TEMP_SUFFIX, name):  # a rename that was answered with an error may have been done
            with suppress(OSError):  # the first failure says more
                directory.unlink(each)
        raise
    return extent


def open_extents(
    disk: Disk, directory: StoreDirectory, flags: int, refused: dict[str, Refusal], known: Container[str] = ()
) -> list[Extent]:
    """The extents of a directory that are not known yet, by name, with their heads; ``refused`` becomes the other files
    of such names. :class:`StorageError` when the directory cannot be read."""
    opened: list[Extent] = []
    try:
        extents = [name for name in sorted(directory.names()) if parse_name(name) is not None]
        names = [name for name in extents if name not in known]
    except OSError as error:
        raise StorageError(f"{directory.path}: cannot read the store: {error}") from error
    for name in refused.keys() - set(names):
        del refused[name]
    for name in names:
        path = str(directory.path / name)
        try:
            if len(opened) == EXTENTS_MAX:
                raise StoreFormatError(path, "extents", f"{EXTENTS_MAX} at most", len(names))
            opened.append(_open_extent(disk, directory.open(name, flags), path))
            refused.pop(name, None)
        except FileNotFoundError:
            continue  # a writer has dropped it
        except StoreFormatError as error:
            refused[name] = Refusal(str(error), is_unread=False)
        except OSError as error:
            refused[name] = Refusal(f"{path}: {error}", is_unread=True)
    return opened


def _open_extent(disk: Disk, fd: int, path: str) -> Extent:
    """The extent in an open file, which it owns, with its heads; the file is closed on failure."""
    try:
        shape = Shape.read(disk, fd, path)
    except (StoreFormatError, OSError):
        os.close(fd)
        raise
    extent = Extent(os.path.basename(path), fd, shape)
    extent.serve(disk)
    return extent

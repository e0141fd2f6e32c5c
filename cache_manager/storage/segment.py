"""The bytes of a file store: its marker, its segments, and how a segment is read back after a crash.

A segment is a header page and then records without holes between them: header, payload, zeros up to 64 bytes. The
layout is in ``docs/format.md`` byte by byte. A record is deleted by turning its magic from ``KVRR`` into ``KVRX`` in
place, which needs no room, survives a restart, and leaves every other byte as it was.

A scan goes from header to header and **stops at the first header that is not sound**: what follows may be payload, and
payload bytes are never taken for headers, or a payload could carry a record of somebody else's making.

A record that is replaced is appended anew and its older copy deleted. Where a crash leaves two copies, **the newer one
decides**: the one with the higher sequence of its segment and, in one segment, the higher offset. If it is deleted or
its payload is not sound, its key has no record: an older copy never comes back.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import Final

from cache_manager.errors import RecordError, StoreFormatError
from cache_manager.keys import BlockKey
from cache_manager.record import (
    HEADER_NBYTES_MAX,
    HEADER_NBYTES_MIN,
    MAGIC,
    RecordHeader,
    RunningChecksum,
    pack_header,
    unpack_header,
)
from cache_manager.spec import align
from cache_manager.storage.disk import Disk, read_all

PAGE_NBYTES: Final = 4096
VERSION: Final = 3
DEAD_MAGIC: Final = b"KVRX"
MARKER_NAME: Final = "kvroute.store"
LOCK_NAME: Final = "kvroute.lock"
TEMP_SUFFIX: Final = ".tmp"

_MARKER_MAGIC: Final = b"KVRSTORE"
SEGMENT_MAGIC: Final = b"KVRSEGMT"
CRC_RESIDUE: Final = 0x2144DF1C
"""The CRC-32 of any bytes that end in their own CRC-32, little-endian."""
_FIXED = struct.Struct("<8sHHIQ16sQ")  # magic, version, header bytes, zero, sequence, store id, created
_CRC = struct.Struct("<I")
_MARKER_NBYTES: Final = 64
_NAME = re.compile(r"segment-([0-9a-f]{16})\.kvr")

_KEY_AT: Final = 32
_SCAN_NBYTES: Final = 1024
_PIECE_NBYTES: Final = 1 << 20
_UNKNOWN_MS: Final = 0


def segment_name(sequence: int) -> str:
    """
    >>> segment_name(26), segment_sequence(segment_name(26)), segment_sequence("notes.txt")
    ('segment-000000000000001a.kvr', 26, None)
    """
    return f"segment-{sequence:016x}.kvr"


def segment_sequence(name: str) -> int | None:
    """The inverse of :func:`segment_name`; ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def _pack(magic: bytes, nbytes: int, sequence: int, store_id: bytes, created_ms: int) -> bytes:
    body = _FIXED.pack(magic, VERSION, nbytes, 0, sequence, store_id, created_ms).ljust(nbytes - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def pack_marker(store_id: bytes) -> bytes:
    """The 64 bytes that say: this directory is a store of this format, with this id (16 bytes)."""
    return _pack(_MARKER_MAGIC, _MARKER_NBYTES, 0, store_id, _UNKNOWN_MS)


def unpack_marker(raw: bytes, path: str) -> bytes:
    """The store's id; :class:`StoreFormatError` names the first field that is not right."""
    if len(raw) != _MARKER_NBYTES:
        raise StoreFormatError(path, "size", f"{_MARKER_NBYTES} bytes", len(raw))
    magic, version, _, _, _, store_id, _ = _FIXED.unpack_from(raw)
    if magic != _MARKER_MAGIC:
        raise StoreFormatError(path, "magic", _MARKER_MAGIC, magic)
    if version != VERSION:
        raise StoreFormatError(path, "version", VERSION, version)
    if zlib.crc32(raw) != CRC_RESIDUE:
        raise StoreFormatError(
            path, "crc", zlib.crc32(raw[: -_CRC.size]), _CRC.unpack_from(raw, len(raw) - _CRC.size)[0]
        )
    return bytes(store_id)


def pack_segment_page(sequence: int, store_id: bytes, created_s: float | None) -> bytes:
    """The header page of a segment; ``created_s`` is wall-clock time, ``None`` where nobody knows it any more."""
    created_ms = _UNKNOWN_MS if created_s is None else min(max(int(created_s * 1000), 1), (1 << 64) - 1)
    return _pack(SEGMENT_MAGIC, PAGE_NBYTES, sequence, store_id, created_ms)


@dataclass(frozen=True, slots=True)
class SegmentPage:
    """What a header page says: whether it is whole, and when its segment was created (wall clock) if it says so."""

    sound: bool
    created_s: float | None


def read_segment_page(raw: bytes, path: str, sequence: int, store_id: bytes) -> SegmentPage:
    """Damage of the page is no error and costs no record its checks, but nobody knows then how old the records are.

    :class:`StoreFormatError` for a file that is not a segment of this store or is in another version of the format.
    """
    magic, version, _, _, found, owner, created_ms = _FIXED.unpack_from(raw)
    if zlib.crc32(SEGMENT_MAGIC + raw[len(SEGMENT_MAGIC) :]) != CRC_RESIDUE:
        if magic != SEGMENT_MAGIC:
            raise StoreFormatError(path, "magic", SEGMENT_MAGIC, magic)
        return SegmentPage(False, None)
    if version != VERSION:
        raise StoreFormatError(path, "version", VERSION, version)
    if owner != store_id:
        raise StoreFormatError(path, "store id", store_id.hex(), owner.hex())
    if found != sequence:
        raise StoreFormatError(path, "sequence", sequence, found)
    return SegmentPage(magic == SEGMENT_MAGIC, None if created_ms == _UNKNOWN_MS else created_ms / 1000)


def page_is_missing(page: bytes | bytearray, found_nbytes: int) -> bool:
    """Whether a segment was cut within its page, or its first bytes never reached the disk: nothing can be in it."""
    start = bytes(page[: min(found_nbytes, len(SEGMENT_MAGIC))])
    return not any(page) or (found_nbytes < PAGE_NBYTES and SEGMENT_MAGIC.startswith(start))


def record_nbytes(header: RecordHeader) -> int:
    """Bytes that a record takes in a segment."""
    return header.nbytes + align(header.payload_nbytes)


def pack_dead_header(header: RecordHeader) -> bytes:
    """The header of a deleted record: all bytes as they were but the magic, so that a torn rewrite does no harm."""
    return DEAD_MAGIC + pack_header(header)[len(MAGIC) :]


def header_sum(packed: bytes) -> bytes:
    """The CRC-32 that a packed header ends in."""
    return packed[-_CRC.size :]


def header_is_sound(raw: bytes | bytearray, key: BlockKey, sum_: bytes) -> bool:
    """Whether the header bytes read back are whole, those of ``key``, and by their sum the very ones that were put.

    Nothing is unpacked: the CRC-32 of bytes that end in their own CRC-32 (little-endian) is one constant.
    """
    return zlib.crc32(raw) == CRC_RESIDUE and raw.endswith(sum_) and raw.startswith(key, _KEY_AT)


def header_is_dead(raw: bytes | bytearray, key: BlockKey, sum_: bytes) -> bool:
    """Whether the header bytes read back say that the record of ``key`` was deleted."""
    return raw.startswith(DEAD_MAGIC) and header_is_sound(MAGIC + raw[len(MAGIC) :], key, sum_)


@dataclass(slots=True)
class Scan:
    """What a segment holds: sound records and their offsets, where they end, and what was not sound."""

    records: list[tuple[int, RecordHeader]] = field(default_factory=list)
    torn: list[tuple[int, RecordHeader]] = field(default_factory=list)  # sound header, wrong payload
    dead: list[tuple[int, RecordHeader]] = field(default_factory=list)  # marked as deleted
    last: tuple[int, RecordHeader] | None = None  # the record, sound or dead, that ends at ``end``
    end: int = PAGE_NBYTES
    stopped: int = PAGE_NBYTES  # where reading ended
    damaged: bool = False


def scan(disk: Disk, fd: int, size: int, *, payloads: bool, start: int = PAGE_NBYTES) -> Scan:
    """Read the headers of a segment of ``size`` bytes; with ``payloads`` check the payloads too.

    Only the newest segment can hold a record whose write was cut off, so only there payloads are read. ``start`` is
    where a record begins. ``end`` is where the last sound record ends; ``damaged`` says that something other than
    zeros follows it.
    """
    result, at = Scan(end=start), start
    window, payload = bytearray(_SCAN_NBYTES), bytearray()
    while at + HEADER_NBYTES_MIN <= size:
        raw = memoryview(window)[: read_all(disk, fd, [memoryview(window)], at, len(window))]
        if not any(raw[: len(MAGIC)]):
            break
        header = _header(disk, fd, raw, at)
        if header is None or at + record_nbytes(header[0]) > size:
            result.damaged = True
            break
        found, dead = header
        after = at + record_nbytes(found)
        if not dead and payloads:
            if len(payload) < (piece_nbytes := min(found.payload_nbytes, _PIECE_NBYTES)):
                payload = bytearray(piece_nbytes)
            if not payload_is_sound(disk, fd, found, at, payload):
                result.torn.append((at, found))
                at = after
                continue
        if dead:
            result.dead.append((at, found))
        else:
            result.records.append((at, found))
        result.last = (at, found)
        at = result.end = after
    result.stopped = at
    return result


def payload_is_sound(disk: Disk, fd: int, header: RecordHeader, at: int, room: bytearray) -> bool:
    """Whether the payload behind the header at ``at`` is the one of its sum; read through ``room``, of any size.

    A header can claim more than memory holds, and a sparse file can have it.
    """
    found, window = RunningChecksum(), memoryview(room)
    at, left = at + header.nbytes, header.payload_nbytes
    while left:
        piece = window[: min(left, len(window))]
        if read_all(disk, fd, [piece], at, len(piece)) < len(piece):
            return False
        found.update(piece)
        at, left = at + len(piece), left - len(piece)
    return bool(found.intdigest() == header.payload_xxh3)


def _header(disk: Disk, fd: int, raw: memoryview, at: int) -> tuple[RecordHeader, bool] | None:
    """The header at the start of ``raw`` and whether its record is dead; ``None`` when it is not sound."""
    dead = bytes(raw[: len(MAGIC)]) == DEAD_MAGIC
    for nbytes in (len(raw), HEADER_NBYTES_MAX):
        if nbytes > len(raw):
            more = bytearray(nbytes)
            raw = memoryview(more)[: read_all(disk, fd, [memoryview(more)], at, nbytes)]
        try:
            return unpack_header(MAGIC + bytes(raw[len(MAGIC) :]) if dead else raw), dead
        except RecordError as error:
            if error.field != "size":
                return None
    return None

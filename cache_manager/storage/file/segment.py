"""The bytes of a file store: its marker, and its segments with their pages, records and indexes.

A segment is a header page, then records without holes between them (header, payload, zeros up to 64 bytes), then, once
no more records come, an index of them. The layout is in ``docs/format.md`` byte by byte. A record is deleted by turning
its magic from ``KVRR`` into ``KVRX`` in place, which needs no room, survives a restart, and leaves every other byte as
it was; in an index by the byte that stands for it.

**Payload bytes are never taken for headers**, or a payload could carry a record of somebody else's making: a record is
found behind another, or where an index or the segment's journal says that one begins.

A record that is replaced is appended anew and its older copy deleted. Where a crash leaves two copies, **the newer one
decides**: the one with the higher sequence of its segment and, in one segment, the higher offset. If it is deleted or
its payload is not sound, its key has no record: an older copy never comes back.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cache_manager.errors import StoreFormatError
from cache_manager.keys import BlockKey
from cache_manager.record import (
    HEADER_NBYTES_MAX,
    HEADER_NBYTES_MIN,
    MAGIC,
    START,
    Buffer,
    RecordHeader,
    checksum,
    pack_header,
)
from cache_manager.spec import align
from cache_manager.storage.disk import Disk, read_all

PAGE_NBYTES: Final = 4096
VERSION: Final = 4
READABLE: Final = (3, 4)
"""Version 3 had no indexes and no journals; everything else is the same."""
DEAD_MAGIC: Final = b"KVRX"
MARKER_NAME: Final = "kvroute.store"
LOCK_NAME: Final = "kvroute.lock"
TEMP_SUFFIX: Final = ".tmp"
SEQUENCE_MAX: Final = (1 << 63) - 1

_MARKER_MAGIC: Final = b"KVRSTORE"
SEGMENT_MAGIC: Final = b"KVRSEGMT"
INDEX_MAGIC: Final = b"KVRINDEX"
CRC_RESIDUE: Final = 0x2144DF1C
"""The CRC-32 of any bytes that end in their own CRC-32, little-endian."""
_FIXED = struct.Struct("<8sHHIQ16sQ")  # magic, version, header bytes, zero, sequence, store id, created
_CRC = struct.Struct("<I")
_FRAME = struct.Struct(
    "<8sHHIQQQ16sI"
)  # magic, version, zero, entries, sequence, offset, entries' xxh3, store id, zero
FRAME_NBYTES: Final = _FRAME.size + _CRC.size
_MARKER_NBYTES: Final = 64
_NAME = re.compile(r"segment-([0-9a-f]{16})\.(kvr|aside|journal)")
_KEY_AT: Final = 32
_UNKNOWN_MS: Final = 0

ENTRY: Final = struct.Struct("<32sQQIII4s")
ENTRY_NBYTES: Final = ENTRY.size
ENTRY_DTYPE: Final = np.dtype(
    [
        ("key", "V32"),
        ("offset", "<u8"),
        ("payload_nbytes", "<u8"),
        ("ordinal", "<u4"),
        ("number", "<u4"),
        ("header_nbytes", "<u4"),
        ("header_sum", "V4"),
    ]
)

_HEADER_DTYPE: Final = np.dtype(
    {
        "names": ["start", "key", "payload_xxh3"],
        "formats": [f"V{len(START)}", "V32", "<u8"],
        "offsets": [0, 32, 80],
        "itemsize": HEADER_NBYTES_MIN,
    }
)
"""What is looked at in many packed headers at once."""

LIVING, DELETED, UNSOUND, UNREADABLE = range(4)
"""What has become of a record: served; deleted, or given way; its payload is not the one of its sum; the disk does not
give it back now."""


class Entry(NamedTuple):
    """What an index says about a record: 64 bytes, in the order of :data:`ENTRY`."""

    key: BlockKey
    offset: int
    payload_nbytes: int
    ordinal: int  # of the segment, in memory; in a file this and the next are the record's origin
    number: int  # in the segment
    header_nbytes: int
    header_sum: bytes  # the CRC-32 that the packed header ends in

    @property
    def nbytes(self) -> int:
        """Of header, payload and padding."""
        return self.header_nbytes + align(self.payload_nbytes)


def segment_name(sequence: int, kind: str = "kvr") -> str:
    """``kvr`` is a segment, ``aside`` a damaged one, ``journal`` says where the records of an unfinished one begin.

    >>> segment_name(26), parse_name("segment-000000000000001a.aside"), parse_name("notes.txt")
    ('segment-000000000000001a.kvr', (26, 'aside'), None)
    """
    return f"segment-{sequence:016x}.{kind}"


def parse_name(name: str) -> tuple[int, str] | None:
    """The sequence and the kind in a file's name; ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1], 16), match[2]) if match else None


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
    if version not in READABLE:
        raise StoreFormatError(path, "version", " or ".join(map(str, READABLE)), version)
    if zlib.crc32(raw) != CRC_RESIDUE:
        raise StoreFormatError(path, "crc", zlib.crc32(raw[: -_CRC.size]), _CRC.unpack_from(raw, len(raw) - 4)[0])
    return bytes(store_id)


def pack_segment_page(sequence: int, store_id: bytes, created_s: float | None) -> bytes:
    """The header page of a segment; ``created_s`` is wall-clock time, ``None`` where nobody knows it any more."""
    created_ms = _UNKNOWN_MS if created_s is None else min(max(int(created_s * 1000), 1), (1 << 64) - 1)
    return _pack(SEGMENT_MAGIC, PAGE_NBYTES, sequence, store_id, created_ms)


def read_segment_page(raw: bytes, path: str, sequence: int, store_id: bytes) -> tuple[bool, float | None]:
    """Whether a header page is whole, and when its segment was created (wall clock) if it says so.

    Damage of the page is no error and costs no record its checks, but nobody knows then how old the records are.
    :class:`StoreFormatError` for a file that is not a segment of this store or is in another version of the format.
    """
    magic, version, _, _, found, owner, created_ms = _FIXED.unpack_from(raw)
    if zlib.crc32(SEGMENT_MAGIC + raw[len(SEGMENT_MAGIC) :]) != CRC_RESIDUE:
        if magic != SEGMENT_MAGIC and any(magic):  # zeros: a power cut took its first sector
            raise StoreFormatError(path, "magic", SEGMENT_MAGIC, magic)
        return False, None
    if version not in READABLE:
        raise StoreFormatError(path, "version", " or ".join(map(str, READABLE)), version)
    if owner != store_id:
        raise StoreFormatError(path, "store id", store_id.hex(), owner.hex())
    if found != sequence:
        raise StoreFormatError(path, "sequence", sequence, found)
    return magic == SEGMENT_MAGIC, None if created_ms == _UNKNOWN_MS else created_ms / 1000


def pack_entry(header: RecordHeader, offset: int, packed: bytes) -> bytes:
    """The index entry of the record at ``offset``; ``packed`` is its packed header."""
    low, high = header.origin & 0xFFFFFFFF, header.origin >> 32
    return ENTRY.pack(header.key, offset, header.payload_nbytes, low, high, len(packed), packed[-4:])


def unpack_entry(rows: Buffer, at: int) -> Entry:
    """The entry at that place of an index; its number is the place, its ordinal means nothing yet."""
    key, offset, payload_nbytes, _, _, header_nbytes, sum_ = ENTRY.unpack_from(rows, at * ENTRY_NBYTES)
    return Entry(key, offset, payload_nbytes, 0, at, header_nbytes, sum_)


def record_nbytes(header: RecordHeader) -> int:
    """Bytes that a record takes in a segment."""
    return header.nbytes + align(header.payload_nbytes)


def index_nbytes(entries: int) -> int:
    """Bytes of an index, without the zeros before its last frame."""
    return 2 * FRAME_NBYTES + entries * ENTRY_NBYTES + (entries + 63 & -64)


def states_at(end: int, entries: int) -> int:
    """Where the bytes are that stand for the records of an index that begins at ``end``."""
    return end + FRAME_NBYTES + entries * ENTRY_NBYTES


def pack_index(sequence: int, store_id: bytes, end: int, rows: Buffer, states: Buffer) -> bytes:
    """The index of a segment whose last record ends at ``end``: what follows there, up to the file's last byte."""
    count = len(states)
    fixed = _FRAME.pack(INDEX_MAGIC, VERSION, 0, count, sequence, end, checksum(rows), store_id, 0)
    frame = fixed + _CRC.pack(zlib.crc32(fixed))
    body = b"".join((frame, rows, bytes(state and DELETED for state in states)))
    nbytes = align(end + index_nbytes(count), PAGE_NBYTES) - end
    return body.ljust(nbytes - FRAME_NBYTES, b"\0") + frame


def read_index(
    disk: Disk, fd: int, size: int, sequence: int, store_id: bytes
) -> tuple[bytearray, bytearray, int] | None:
    """The index at the end of a segment's file of ``size`` bytes; ``None`` where there is none, or not a sound one.

    Entries in the order of their offsets, a state (``LIVING`` or ``DELETED``) for each, and where the last record ends.
    ``OSError`` where the disk does not give it back.
    """
    frame = bytearray(FRAME_NBYTES)
    if size < PAGE_NBYTES + FRAME_NBYTES or read_all(disk, fd, [frame], size - FRAME_NBYTES, len(frame)) < len(frame):
        return None
    magic, version, _, count, found, end, sum_, owner, _ = _FRAME.unpack_from(frame)
    if magic != INDEX_MAGIC or version != VERSION or zlib.crc32(frame) != CRC_RESIDUE:
        return None
    if (found, owner) != (sequence, store_id) or end + index_nbytes(count) > size or end < PAGE_NBYTES:
        return None
    rows, states = bytearray(count * ENTRY_NBYTES), bytearray(count)
    nbytes = len(rows) + count
    if read_all(disk, fd, [rows, states], end + FRAME_NBYTES, nbytes) < nbytes or checksum(rows) != sum_:
        return None
    return (rows, states, end) if _is_in_order(rows, end) else None


def _is_in_order(rows: bytearray, end: int) -> bool:
    """Whether records with headers that can be some lie behind each other, within the page and ``end``."""
    table = np.frombuffer(rows, ENTRY_DTYPE)
    headers = table["header_nbytes"]
    if ((headers < HEADER_NBYTES_MIN) | (headers > HEADER_NBYTES_MAX)).any():
        return False
    sizes = headers.astype(np.uint64) + (table["payload_nbytes"] + np.uint64(63)) // 64 * np.uint64(64)
    after = np.concatenate([np.array([PAGE_NBYTES], np.uint64), table["offset"] + sizes])
    starts = np.concatenate([table["offset"], np.array([end], np.uint64)])
    last = np.uint64(end)
    bounded = (table["payload_nbytes"] <= last).all() and (table["offset"] <= last).all()
    return bool(bounded and (after <= starts).all())


def header_is_sound(raw: bytes | bytearray, entry: Entry) -> bool:
    """Whether the header bytes read back are whole, of the entry's key, and by their sum the very ones that were put.

    Nothing is unpacked: the CRC-32 of bytes that end in their own CRC-32 (little-endian) is one constant.
    """
    return (
        raw.startswith(START)
        and zlib.crc32(raw) == CRC_RESIDUE
        and raw.endswith(entry.header_sum)
        and raw.startswith(entry.key, _KEY_AT)
    )


def are_sound(raw: memoryview, first: int, table: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records have the header and the payload that were put: bool, one an entry of ``table`` (``ENTRY_DTYPE``).

    ``raw`` is what the file has from the offset ``first`` on, to the end of the last of these records at least.
    """
    starts = table["offset"].astype(np.int64) - first
    payloads = starts + table["header_nbytes"]
    stops = payloads + table["payload_nbytes"].astype(np.int64)
    octets = np.frombuffer(raw, np.uint8)
    headers = sliding_window_view(octets, HEADER_NBYTES_MIN)[starts].view(_HEADER_DTYPE)[:, 0]
    header_sums = sliding_window_view(octets, 4)[payloads - 4].view("V4")[:, 0]
    where = list(zip(starts.tolist(), payloads.tolist(), stops.tolist(), strict=True))
    crcs = np.array([zlib.crc32(raw[start:payload]) for start, payload, _ in where])
    sums = np.array([checksum(raw[payload:stop]) for _, payload, stop in where], np.uint64)
    sound: NDArray[np.bool_] = crcs == CRC_RESIDUE
    sound &= (headers["start"] == np.void(START)) & (headers["key"] == table["key"])
    sound &= (header_sums == table["header_sum"]) & (headers["payload_xxh3"] == sums)
    return sound


def header_is_dead(raw: bytes | bytearray, entry: Entry) -> bool:
    """Whether the header bytes read back say that the record was deleted."""
    return raw.startswith(DEAD_MAGIC) and header_is_sound(MAGIC + raw[len(MAGIC) :], entry)


def read_header(disk: Disk, fd: int, entry: Entry) -> tuple[int, bytes]:
    """What the disk has in the place of a record's header, now: a state, and the bytes; ``OSError``.

    ``LIVING``: the header that was put. ``DELETED``: the same with the mark of deletion. ``UNSOUND``: something else.
    """
    raw = bytearray(entry.header_nbytes)
    read_all(disk, fd, [raw], entry.offset, len(raw))
    if header_is_sound(raw, entry):
        return LIVING, bytes(raw)
    return DELETED if header_is_dead(raw, entry) else UNSOUND, bytes(raw)


def stand_in_header(entry: Entry) -> bytes:
    """A deleted record's header for a place whose own one is not sound: a scan gets past it by its size."""
    bitmap = bytes((entry.header_nbytes - _FIXED_RECORD) // 8 * 8)
    header = RecordHeader(entry.key, bytes(16), 0, 0, bitmap, entry.payload_nbytes, 0)
    return DEAD_MAGIC + pack_header(header)[len(MAGIC) :]


_FIXED_RECORD: Final = 100
"""Bytes of a record's header beside its bitmaps and its padding."""

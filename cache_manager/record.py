"""A block's record outside memory: a header that says what follows, then the packed rows.

One header serves files, remote objects and the wire. It is checked on every read; the layout is in ``docs/format.md``
byte by byte. Pure: bytes in, values out.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from cache_manager.errors import RecordError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.spec import align

MAGIC: Final = b"KVRR"
VERSION: Final = 2
START: Final = MAGIC + VERSION.to_bytes(2, "little")
"""What every header of this version starts with."""
# magic, version, header bytes, payload bytes, fingerprint, key, generation, origin, payload xxh3, valid rows, bitmap
# bytes
_FIXED = struct.Struct("<4sHHQ16s32sQQQII")
_CRC = struct.Struct("<I")
HEADER_NBYTES_MIN: Final = align(_FIXED.size + _CRC.size)
HEADER_NBYTES_MAX: Final = 65_472

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; of a numpy array, its ``.data``."""


def nbytes_of(buffer: Buffer) -> int:
    """How many bytes it has: ``len`` of a view counts items."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


class RecordHeader(msgspec.Struct, frozen=True, gc=False):
    """What a record is: whose rows, which are valid, and the sum that proves the payload.

    ``valid`` holds, spec by spec, ``valid_words`` little-endian uint64 with one bit a row. ``generation`` is that of
    the block that the record was taken from, for tracing; it takes no part in equality of contents. ``origin`` names
    the computation that filled the block, 1 to 2^64 - 1: records of one key and one origin have equal rows wherever
    both have rows. 0: unknown.
    """

    key: BlockKey
    fingerprint: bytes
    generation: int
    origin: int
    valid: bytes
    payload_nbytes: int
    payload_xxh3: int

    @property
    def nbytes(self) -> int:
        """Bytes of this header when packed, a multiple of 64."""
        return align(_FIXED.size + len(self.valid) + _CRC.size)


checksum = xxhash.xxh3_64_intdigest
"""XXH3-64 of a payload."""
digest = xxhash.xxh3_64_digest
"""The same in eight bytes, the first one the most significant."""


@dataclass(frozen=True, slots=True)
class OfferedRecord:
    """A record that may be read where it lies for as long as its owner holds the block; not summed yet.

    ``payload`` must not change before the block is let go. ``origin`` and ``valid`` are as in :class:`RecordHeader`.
    """

    key: BlockKey
    fingerprint: bytes
    generation: int
    origin: int
    valid: bytes
    payload: Buffer

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.payload)

    def seal(self) -> RecordHeader:
        """The header that proves the payload; reads all of it."""
        return RecordHeader(
            key=self.key,
            fingerprint=self.fingerprint,
            generation=self.generation,
            origin=self.origin,
            valid=self.valid,
            payload_nbytes=self.nbytes,
            payload_xxh3=checksum(self.payload),
        )

    def pack(self) -> bytes:
        """The packed header that proves the payload; reads all of it."""
        return pack_header(self.seal())


def pack_header(header: RecordHeader) -> bytes:
    """The header's bytes: fixed fields, validity bitmap, zeros up to a multiple of 64, CRC-32 in the last four."""
    key = header.key
    fingerprint = header.fingerprint
    valid = header.valid
    size = len(valid)
    if len(key) != KEY_NBYTES or len(fingerprint) != 16 or size % 8:
        raise AssertionError(f"malformed header of key {key.hex()}, fingerprint {fingerprint.hex()}, {size} bytes")
    nbytes = _FIXED.size + size + _CRC.size + 63 & -64  # align, inlined: every record comes here
    rows = int.from_bytes(valid, "little").bit_count()
    numbers = header.generation, header.origin, header.payload_xxh3, rows, size
    fixed = _FIXED.pack(MAGIC, VERSION, nbytes, header.payload_nbytes, fingerprint, key, *numbers)
    body = (fixed + valid).ljust(nbytes - _CRC.size, b"\0")
    return body + zlib.crc32(body).to_bytes(4, "little")


def unpack_header(buffer: Buffer) -> RecordHeader:
    """The header at the start of ``buffer``; :class:`RecordError` names the first field that is not right."""
    raw = buffer if isinstance(buffer, bytes) else memoryview(buffer)  # slices of few bytes are cheaper than views
    if len(raw) < HEADER_NBYTES_MIN:
        raise RecordError("size", f"at least {HEADER_NBYTES_MIN} bytes", len(raw))
    magic, version, nbytes, payload_nbytes, fingerprint, key, generation, origin, xxh3, rows, valid_nbytes = (
        _FIXED.unpack_from(raw)
    )
    if magic != MAGIC:
        raise RecordError("magic", MAGIC, bytes(magic))
    if version != VERSION:
        raise RecordError("version", VERSION, version)
    end = _FIXED.size + valid_nbytes
    if valid_nbytes % 8 or nbytes != align(end + _CRC.size) or nbytes > HEADER_NBYTES_MAX:
        raise RecordError("header size", "a size that fits its bitmap", f"{nbytes} with a bitmap of {valid_nbytes}")
    if len(raw) < nbytes:
        raise RecordError("size", f"{nbytes} bytes of header", len(raw))
    crc_at = nbytes - _CRC.size
    found = zlib.crc32(raw[:crc_at])
    (crc,) = _CRC.unpack_from(raw, crc_at)
    if found != crc:
        raise RecordError("header crc", found, crc)
    valid = bytes(raw[_FIXED.size : end])
    count = int.from_bytes(valid, "little").bit_count()
    if count != rows:
        raise RecordError("valid rows", rows, count)
    return RecordHeader(BlockKey(key), fingerprint, generation, origin, valid, payload_nbytes, xxh3)


def takes_the_place(offered: RecordHeader, stored: RecordHeader, *, replace: bool) -> bool:
    """Whether an offered record replaces the one stored under its key; every store of records decides by this.

    A record of the same origin is replaced by one that has all of its valid rows and more. A record of another origin,
    or of another layout, is replaced only when the caller says ``replace``.
    """
    if offered.origin != stored.origin or offered.fingerprint != stored.fingerprint:
        return replace
    if offered.valid == stored.valid:
        return False
    there = int.from_bytes(stored.valid, "little")
    here = int.from_bytes(offered.valid, "little")
    return there & here == there


def check_record(header: RecordHeader, key: BlockKey, fingerprint: bytes, payload: Buffer) -> None:
    """Raise :class:`RecordError` unless ``header`` and ``payload`` are the sound record of ``key``."""
    if header.key != key:
        raise RecordError("key", key.hex(), header.key.hex())
    if header.fingerprint != fingerprint:
        raise RecordError("fingerprint", fingerprint.hex(), header.fingerprint.hex())
    nbytes = nbytes_of(payload)
    if header.payload_nbytes != nbytes:
        raise RecordError("payload size", nbytes, header.payload_nbytes)
    found = checksum(payload)
    if found != header.payload_xxh3:
        raise RecordError("payload checksum", header.payload_xxh3, found)

"""A file of routes: some layers of one rollout, with everything that a reader has to know about them. Little endian.

| offset | bytes | what |
|---:|---:|---|
| 0 | 8 | ``KVROLLTS`` |
| 8 | 2 | version, 2 |
| 10 | 2 | 0 |
| 12 | 4 | ``h``, bytes of the header, a multiple of 64 with the 32 before it |
| 16 | 16 | XXH3-128, most significant byte first, of the 16 bytes before and of the header |
| 32 | h | the header: one JSON object, then spaces |
| 32 + h | | the parts of these layers, band by band, each ``[rows, layers, top_k]`` in C order |

The header has the handle, the layer ids of this file, what of the rows is known, weights versions, token hashes, and a
sum for each part. A part is summed with XXH3-64. Pure: bytes in, values out; :mod:`kvroute.rollout.local` does the I/O.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import xxhash

from cache_manager.errors import InvalidInputError
from cache_manager.record import Buffer, checksum
from kvroute.rollout.handle import Manifest, RolloutHandle

MAGIC: Final = b"KVROLLTS"
VERSION: Final = 2
HEADER_NBYTES_MAX: Final = 64 << 20
_FIXED = struct.Struct("<8sHHI")
FIXED_NBYTES: Final = _FIXED.size + 16


class FileHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``sums[b]`` is the XXH3-64 of band ``b`` of these layers, 8 bytes each."""

    handle: RolloutHandle
    layer_ids: tuple[int, ...]
    manifest: Manifest
    sums: bytes

    def pack(self) -> bytes:
        """The file's bytes before its parts."""
        text = msgspec.json.encode(self)
        text += b" " * (-(FIXED_NBYTES + len(text)) % 64)
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(text))
        return fixed + _sum(fixed, text) + text

    def sum_of(self, band: int) -> int:
        return int.from_bytes(self.sums[8 * band : 8 * band + 8], "little")


def header_nbytes(fixed: Buffer) -> int:
    """Of the header whose first :data:`FIXED_NBYTES` bytes these are; :class:`InvalidInputError` if they are not."""
    if len(fixed) < FIXED_NBYTES:
        raise InvalidInputError("routes file", f"{FIXED_NBYTES} bytes or more", len(fixed))
    magic, version, zero, nbytes = _FIXED.unpack_from(fixed)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise InvalidInputError("routes file", f"{MAGIC!r} version {VERSION}", f"{magic!r} version {version}")
    if not 0 < nbytes <= HEADER_NBYTES_MAX:
        raise InvalidInputError("routes file header", f"at most {HEADER_NBYTES_MAX} bytes", nbytes)
    return int(nbytes)


def unpack(fixed: Buffer, text: Buffer) -> FileHeader:
    """The header; :class:`InvalidInputError` names the first thing that is not right."""
    given = bytes(memoryview(fixed)[_FIXED.size : FIXED_NBYTES])
    if (found := _sum(memoryview(fixed)[: _FIXED.size], text)) != given:
        raise InvalidInputError("routes file sum", found.hex(), given.hex())
    try:
        header = msgspec.json.decode(text, type=FileHeader)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidInputError("routes file header", "a header of routes", error) from error
    header.handle.check()
    header.manifest.check(header.handle.rows)
    if len(header.sums) != 8 * header.handle.grid.bands:
        raise InvalidInputError("routes file sums", f"{8 * header.handle.grid.bands} bytes", len(header.sums))
    return header


def sums_of(parts: list[Buffer]) -> bytes:
    return b"".join(checksum(part).to_bytes(8, "little") for part in parts)


def _sum(*parts: Buffer) -> bytes:
    running = xxhash.xxh3_128()
    for part in parts:
        running.update(part)
    return running.digest()


__all__ = ["FIXED_NBYTES", "FileHeader", "header_nbytes", "sums_of", "unpack"]

"""The first page of a shared region: what is in it, who made it, and whether it is whole. Bytes in, values out.

The byte layout is described in ``docs/format.md``, section "region".
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final, Literal, Self

import msgspec

from cache_manager.errors import RegionMismatchError
from cache_manager.record import Buffer
from cache_manager.regions.extent import BLOCKS_MAX, PAGE_NBYTES, Extent
from cache_manager.spec import RecordLayout

Purpose = Literal["host", "swap"]
PURPOSES: Final = ("host", "swap")

MAGIC: Final = b"kvregion"
VERSION: Final = 1
HEADER_NBYTES: Final = PAGE_NBYTES
FINGERPRINT_NBYTES: Final = 16

# magic, version, uid, region, blocks, record, specs, valid words, offsets of words, valid and rows, layout, uuid,
# boot id, owner pid, owner start, purpose
_FIXED = struct.Struct("<8sIIQQQIIQQQ16s16s16sQQ8s")
_CRC = struct.Struct("<I")
_CRC_OFFSET = 188
# epoch, namespace, then their CRC: the one part that changes, so it has a cache line and a sum of its own
_SCOPE = struct.Struct("<Q16s")
SCOPE_OFFSET: Final = 192
SCOPE_NBYTES: Final = _SCOPE.size + _CRC.size


class RegionHeader(msgspec.Struct, frozen=True, gc=False):
    """Everything about a region that never changes while it exists.

    ``owner_start`` is field 22 of ``/proc/<owner_pid>/stat``, clock ticks since the boot that ``boot_id`` names: the
    three together name one process for ever, where a pid alone is used again.
    """

    uid: int
    nbytes: int
    blocks: int
    record_nbytes: int
    specs: int
    valid_words: int
    words_offset: int
    valid_offset: int
    rows_offset: int
    layout: bytes
    uuid: bytes
    boot_id: bytes
    owner_pid: int
    owner_start: int
    purpose: Purpose

    @classmethod
    def of(
        cls, extent: Extent, *, purpose: Purpose, uid: int, uuid: bytes, boot_id: bytes, pid: int, start: int
    ) -> Self:
        """The header of a region with the arrays of ``extent``, made by the process that the last four name."""
        return cls(
            uid=uid,
            nbytes=extent.nbytes,
            blocks=extent.blocks,
            record_nbytes=extent.layout.nbytes,
            specs=len(extent.layout.specs),
            valid_words=extent.layout.valid_words,
            words_offset=extent.words_offset,
            valid_offset=extent.valid_offset,
            rows_offset=extent.rows_offset,
            layout=extent.layout.fingerprint,
            uuid=uuid,
            boot_id=boot_id,
            owner_pid=pid,
            owner_start=start,
            purpose=purpose,
        )

    def extent(self, region: str, layout: RecordLayout) -> Extent:
        """The region's arrays, once every number here is what ``layout`` and ``blocks`` make it.

        Raises :class:`RegionMismatchError` naming the first field that is not.
        """
        if self.layout != layout.fingerprint:
            raise RegionMismatchError(region, "layout fingerprint", layout.fingerprint.hex(), self.layout.hex())
        if not 1 <= self.blocks <= BLOCKS_MAX:
            raise RegionMismatchError(region, "blocks", f"1 to {BLOCKS_MAX}", self.blocks)
        extent = Extent(layout, self.blocks, HEADER_NBYTES)
        for field, wanted, got in (
            ("record bytes", layout.nbytes, self.record_nbytes),
            ("specs", len(layout.specs), self.specs),
            ("valid words", layout.valid_words, self.valid_words),
            ("words offset", extent.words_offset, self.words_offset),
            ("valid offset", extent.valid_offset, self.valid_offset),
            ("rows offset", extent.rows_offset, self.rows_offset),
            ("size", extent.nbytes, self.nbytes),
        ):
            if wanted != got:
                raise RegionMismatchError(region, field, wanted, got)
        return extent


def pack_header(header: RegionHeader) -> bytes:
    """The first 192 bytes of a region: fixed fields, zeros, CRC-32 in the last four.

    A creator writes everything but the magic first and the magic, the first eight bytes, last.
    """
    body = _FIXED.pack(
        MAGIC,
        VERSION,
        header.uid,
        header.nbytes,
        header.blocks,
        header.record_nbytes,
        header.specs,
        header.valid_words,
        header.words_offset,
        header.valid_offset,
        header.rows_offset,
        header.layout,
        header.uuid,
        header.boot_id,
        header.owner_pid,
        header.owner_start,
        header.purpose.encode(),
    ).ljust(_CRC_OFFSET, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def unpack_header(region: str, page: Buffer) -> RegionHeader:
    """The header at the start of ``page``; :class:`RegionMismatchError` names the first field that is not right."""
    raw = bytes(page[:SCOPE_OFFSET])
    if len(raw) < SCOPE_OFFSET:
        raise RegionMismatchError(region, "size", f"at least {HEADER_NBYTES}", len(raw))
    magic, version, *fields, purpose = _FIXED.unpack_from(raw)
    if magic != MAGIC:
        raise RegionMismatchError(region, "magic", MAGIC, magic)
    if version != VERSION:
        raise RegionMismatchError(region, "version", VERSION, version)
    (crc,) = _CRC.unpack_from(raw, _CRC_OFFSET)
    if (found := zlib.crc32(raw[:_CRC_OFFSET])) != crc:
        raise RegionMismatchError(region, "header crc", crc, found)
    name = purpose.rstrip(b"\0").decode("ascii", "replace")
    if name not in PURPOSES:
        raise RegionMismatchError(region, "purpose", " or ".join(PURPOSES), name)
    values: tuple[Any, ...] = (*fields, name)
    return RegionHeader(*values)


def pack_scope(epoch: int, namespace: bytes) -> bytes:
    """The 28 bytes at ``SCOPE_OFFSET``: whose rows these are since when."""
    body = _SCOPE.pack(epoch, namespace)
    return body + _CRC.pack(zlib.crc32(body))


def unpack_scope(raw: Buffer) -> tuple[int, bytes] | None:
    """Epoch and namespace fingerprint, or None when ``raw`` was taken while they were being changed."""
    epoch, namespace = _SCOPE.unpack_from(raw)
    (crc,) = _CRC.unpack_from(raw, _SCOPE.size)
    return (epoch, namespace) if zlib.crc32(bytes(raw[: _SCOPE.size])) == crc else None

"""What a shared region says about itself: how many blocks of which specs, and whose rows. Bytes in, values out.

The byte layout is described in ``docs/format.md``, section "Region".
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from cache_manager.errors import InvalidInputError, RegionMismatchError
from cache_manager.record import Buffer
from cache_manager.regions.region import BLOCKS_MAX, PAGE_NBYTES, Extent
from cache_manager.spec import AuxBlockDataSpec, RecordLayout, align, canonical_json

MAGIC: Final = b"kvregion"
VERSION: Final = 2
HEADER_NBYTES_MAX: Final = 1 << 16
FINGERPRINT_NBYTES: Final = 16

_FIXED = struct.Struct("<8sIIQQ16s16s")  # magic, version, nbytes of the specs, blocks, size, layout, uuid
_CRC = struct.Struct("<I")
CRC_OFFSET: Final = 124
# the namespace, then its CRC: the one part that changes, so it has a cache line and a sum of its own
NAMESPACE_OFFSET: Final = 128
NAMESPACE_NBYTES: Final = FINGERPRINT_NBYTES + _CRC.size
SPECS_OFFSET: Final = 192


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """What never changes in a region: its random name, and where its arrays lie (by layout and blocks)."""

    uuid: bytes
    extent: Extent


def extent_of(layout: RecordLayout, blocks: int) -> Extent:
    """Where the arrays of ``blocks`` blocks lie behind a header; :class:`InvalidInputError` if that is too long."""
    nbytes = align(SPECS_OFFSET + len(_specs(layout)), PAGE_NBYTES)
    if nbytes > HEADER_NBYTES_MAX:
        raise InvalidInputError("region layout", f"specs of at most {HEADER_NBYTES_MAX} bytes as JSON", nbytes)
    return Extent(layout, blocks, nbytes)


def pack_header(header: RegionHeader) -> bytes:
    """The bytes ``[extent.header_nbytes]`` at the start of a region; its namespace is zeros, which no namespace is."""
    extent = header.extent
    specs = _specs(header.extent.layout)
    fields = (len(specs), extent.blocks, extent.nbytes, extent.layout.fingerprint, header.uuid)
    body = _FIXED.pack(MAGIC, VERSION, *fields).ljust(CRC_OFFSET, b"\0")
    body += _CRC.pack(zlib.crc32(body))
    return (body.ljust(SPECS_OFFSET, b"\0") + specs).ljust(extent.header_nbytes, b"\0")


def unpack_header(region: str, start: Buffer) -> RegionHeader:
    """The header in the first ``HEADER_NBYTES_MAX`` bytes of a region, or all of a shorter one.

    Raises :class:`RegionMismatchError` naming the first field that is not right.
    """
    raw = bytes(start)
    if len(raw) < PAGE_NBYTES:
        raise RegionMismatchError(region, "size", f"at least {PAGE_NBYTES}", len(raw))
    magic, version, specs_nbytes, blocks, nbytes, layout, uuid = _FIXED.unpack_from(raw)
    if magic != MAGIC:
        raise RegionMismatchError(region, "magic", MAGIC, magic)
    if version != VERSION:
        raise RegionMismatchError(region, "version", VERSION, version)
    (crc,) = _CRC.unpack_from(raw, CRC_OFFSET)
    if (found := zlib.crc32(raw[:CRC_OFFSET])) != crc:
        raise RegionMismatchError(region, "header crc", crc, found)
    specs = _parsed(raw[SPECS_OFFSET : SPECS_OFFSET + specs_nbytes])
    if specs is None or specs.fingerprint != layout:
        raise RegionMismatchError(region, "specs", f"those of layout {layout.hex()}", "others")
    if not 1 <= blocks <= BLOCKS_MAX:
        raise RegionMismatchError(region, "blocks", f"1 to {BLOCKS_MAX}", blocks)
    extent = extent_of(specs, blocks)
    if extent.nbytes != nbytes:
        raise RegionMismatchError(region, "size", extent.nbytes, nbytes)
    return RegionHeader(uuid, extent)


def pack_namespace(namespace: bytes) -> bytes:
    """The bytes at ``NAMESPACE_OFFSET``; ``namespace`` is :attr:`Namespace.fingerprint`."""
    if not isinstance(namespace, bytes) or len(namespace) != FINGERPRINT_NBYTES:
        raise InvalidInputError("region namespace", f"a fingerprint of {FINGERPRINT_NBYTES} bytes", repr(namespace))
    return namespace + _CRC.pack(zlib.crc32(namespace))


def unpack_namespace(raw: Buffer) -> bytes | None:
    """The namespace's fingerprint, or None when ``raw`` was taken while it was being changed."""
    namespace = bytes(raw[:FINGERPRINT_NBYTES])
    (crc,) = _CRC.unpack_from(raw, FINGERPRINT_NBYTES)
    return namespace if zlib.crc32(namespace) == crc else None


def _specs(layout: RecordLayout) -> bytes:
    return canonical_json([spec.to_json() for spec in layout.specs])


def _parsed(raw: bytes) -> RecordLayout | None:
    """The layout that :func:`_specs` wrote; None for anything else."""
    try:
        return RecordLayout(tuple(AuxBlockDataSpec.from_json(spec) for spec in json.loads(raw)))
    except (ValueError, TypeError):  # SpecError is a ValueError
        return None

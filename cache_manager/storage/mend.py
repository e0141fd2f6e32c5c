"""A record's header in which one bit has turned, turned back. Pure: bytes in, bytes out.

A CRC-32 does more than notice a wrong bit, it names it: the sums of two headers differ by a number that depends on
nothing but which bits differ. So of a damaged header there is at most one that is one bit away and has a right sum.
Random bytes have such a neighbour once in some million times, which is why the caller has to see the payload's sum
agree before it believes what came out here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from cache_manager.errors import RecordError
from cache_manager.record import HEADER_NBYTES_MAX, HEADER_NBYTES_MIN, MAGIC, RecordHeader, unpack_header
from cache_manager.spec import ALIGNMENT
from cache_manager.storage.segment import CRC_RESIDUE, DEAD_MAGIC

_ONES: Final = 0xFFFFFFFF
_SIZE_AT: Final = 6  # of the header's own size, uint16


def flipped_bit(raw: bytes) -> int | None:
    """Which bit to turn so that bytes which end in their own CRC-32 are sound again; ``None`` if no one bit does it.

    >>> body = bytes(range(60)); whole = bytearray(body + zlib.crc32(body).to_bytes(4, "little"))
    >>> whole[7] ^= 1 << 3
    >>> flipped_bit(bytes(whole)) == 7 * 8 + 3
    True
    """
    wanted = zlib.crc32(raw) ^ CRC_RESIDUE
    # What each bit of the last byte changes in the sum; and, a zero byte further each time, of the bytes before it.
    changes = [zlib.crc32(bytes([1 << bit])) ^ zlib.crc32(b"\0") for bit in range(8)]
    for at in range(len(raw) - 1, -1, -1):
        if wanted in changes:
            return 8 * at + changes.index(wanted)
        changes = [zlib.crc32(b"\0", change ^ _ONES) ^ _ONES for change in changes]
    return None


def mend_header(raw: bytes) -> tuple[bytes, RecordHeader] | None:
    """The header that ``raw`` starts with but for one bit, packed and unpacked; ``None`` when there is none.

    A deleted record's header comes back as one of a deleted record, and so does one that may have been.
    """
    magic = int.from_bytes(raw[: len(MAGIC)], "little") ^ int.from_bytes(DEAD_MAGIC, "little")
    dead = magic.bit_count() <= 1
    alive = MAGIC + raw[len(MAGIC) :] if dead else raw
    for nbytes in _sizes(alive):
        candidate = bytearray(alive[:nbytes])
        if zlib.crc32(candidate) != CRC_RESIDUE:  # else the magic was all that was wrong
            if (bit := flipped_bit(bytes(candidate))) is None:
                continue
            candidate[bit // 8] ^= 1 << bit % 8
        try:
            header = unpack_header(candidate)
        except RecordError:
            continue
        if header.nbytes == nbytes:
            return (DEAD_MAGIC + bytes(candidate[len(MAGIC) :]) if dead else bytes(candidate)), header
    return None


def _sizes(raw: bytes) -> Iterator[int]:
    """What the header's size may be: what it says, or that with one bit turned."""
    said = int.from_bytes(raw[_SIZE_AT : _SIZE_AT + 2], "little")
    for turned in (0, *(1 << bit for bit in range(16))):
        nbytes = said ^ turned
        if nbytes % ALIGNMENT == 0 and HEADER_NBYTES_MIN <= nbytes <= min(HEADER_NBYTES_MAX, len(raw)):
            yield nbytes

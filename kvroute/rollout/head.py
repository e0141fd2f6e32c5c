"""What belongs to a whole rollout beside its parts: small, fetched by every rank, and proof of every part.

A rollout outside memory is a head, then its parts; each store lays them where it likes. Little endian.

| offset | bytes | what |
|---:|---:|---|
| 0 | 8 | ``KVROLLTS`` |
| 8 | 2 | version, 3 |
| 10 | 2 | 0 |
| 12 | 4 | ``n``, bytes that follow the sum |
| 16 | 16 | XXH3-128, most significant byte first, of the 16 bytes before and the ``n`` after |
| 32 | n | the fields of :class:`Head`, MessagePack |
| | | the parts in the order of their numbers, where they lie behind it |

Pure: bytes in, values out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError
from cache_manager.record import Buffer, checksum
from kvroute import cells
from kvroute.cells import UnknownSpan
from kvroute.rollout.grid import Selection
from kvroute.rollout.handle import HEAD_NBYTES_MAX, RolloutHandle
from kvroute.routes import Routes

MAGIC: Final = b"KVROLLTS"
VERSION: Final = 3
_FIXED = struct.Struct("<8sHHI16s")
_SUMMED: Final = _FIXED.size - 16

Read = Callable[[int, int], Buffer]
"""``(offset, nbytes)`` of a head to its bytes, fewer at its end."""


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """``sums`` are the XXH3-64 of the parts, 8 bytes each.

    ``valid`` has one bit a row, lowest bit first: whether anything of it is known; it is empty where that is so of all.
    ``unknown`` are ``(layer id, start, stop)``: where it is known of other layers but not of this one.
    """

    handle: RolloutHandle
    valid: bytes
    unknown: tuple[UnknownSpan, ...]
    weights_versions: tuple[tuple[int, int, int], ...]
    token_hashes: tuple[tuple[int, bytes], ...]
    sums: bytes

    @classmethod
    def of(cls, handle: RolloutHandle, routes: Routes, parts: Sequence[Buffer]) -> Self:
        some = routes.some
        valid = b"" if some.all() else np.packbits(some, bitorder="little").tobytes()
        sums = b"".join(checksum(part).to_bytes(8, "little") for part in parts)
        return cls(handle, valid, routes.unknown, routes.weights_versions, routes.token_hashes, sums)

    def pack(self) -> bytes:
        """:class:`InvalidInputError` where it is larger than a head may be."""
        body = msgspec.msgpack.encode(self)
        if len(body) > HEAD_NBYTES_MAX - _FIXED.size:
            raise InvalidInputError("rollout head", f"at most {HEAD_NBYTES_MAX} bytes", len(body))
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(body), b"")
        return fixed[:_SUMMED] + _sum(fixed, body) + body

    @classmethod
    def read(cls, read: Read) -> tuple[Self, int]:
        """The head, and its bytes; :class:`InvalidInputError` names the first thing that is not right."""
        fixed = read(0, _FIXED.size)
        if len(fixed) < _FIXED.size:
            raise InvalidInputError("rollout head", f"{_FIXED.size} bytes or more", len(fixed))
        magic, version, zero, nbytes, given = _FIXED.unpack(fixed)
        if (magic, version, zero) != (MAGIC, VERSION, 0):
            raise InvalidInputError("rollout head", f"{MAGIC!r} version {VERSION}", f"{magic!r} version {version}")
        if nbytes > HEAD_NBYTES_MAX - _FIXED.size:
            raise InvalidInputError("rollout head", f"at most {HEAD_NBYTES_MAX} bytes", nbytes)
        body = read(_FIXED.size, nbytes)
        if (found := _sum(fixed, body)) != given:
            raise InvalidInputError("rollout head sum", found.hex(), given.hex())
        try:
            head = msgspec.msgpack.decode(body, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidInputError("rollout head", "the fields of a head", error) from error
        head.handle.check()
        for name, nbytes in (("valid", -(-head.handle.rows // 8)), ("sums", 8 * head.handle.grid.parts)):
            if len(found := getattr(head, name)) != nbytes and (name != "valid" or found):
                raise InvalidInputError(f"rollout head {name}", f"{nbytes} bytes", len(found))
        return head, _FIXED.size + len(body)

    def verify(self, part: int, content: Buffer) -> None:
        """:class:`InvalidInputError` unless these are the bytes of a part."""
        wanted = int.from_bytes(self.sums[8 * part : 8 * part + 8], "little")
        if len(content) != self.handle.grid.nbytes_of(part) or (found := checksum(content)) != wanted:
            got = f"{len(content)} bytes" if len(content) != self.handle.grid.nbytes_of(part) else found
            raise InvalidInputError(f"part {part}", wanted, got)

    def routes(self, ids: Sequence[NDArray[Any]], wanted: Selection) -> list[Routes]:
        """Routes of what was wanted, one for each of its ranges of rows, with ``ids`` ``[n, layers, top_k]``.

        The ids were checked before they were put. :class:`InvalidInputError` for a head that says of them what cannot
        be.
        """
        handle = self.handle
        there = np.ones(handle.rows, np.bool_)
        if self.valid:
            bits = np.frombuffer(self.valid, np.uint8)
            there = np.unpackbits(bits, count=handle.rows, bitorder="little").astype(np.bool_)
        mask = cells.mask_of(there, self.unknown, handle.layer_ids, handle.start)  # [rows] or [rows, layers]
        mask = mask if mask.ndim == 1 else mask[:, list(wanted.layers)]
        found = []
        for rows, (first, last) in zip(ids, wanted.rows, strict=True):
            start, stop = handle.start + first, handle.start + last
            versions = ((max(a, start), min(b, stop), v) for a, b, v in self.weights_versions)
            fields = (
                wanted.layer_ids,
                handle.num_experts,
                handle.num_layers,
                start,
                tuple(span for span in versions if span[0] < span[1]),
                tuple((n, digest) for n, digest in self.token_hashes if n <= stop + 1),
                (*handle.missing_layers, *(n for n in handle.layer_ids if n not in wanted.layer_ids)),
            )
            found.append(Routes.checked(rows, mask[first:last], *fields))
        return found


def _sum(fixed: Buffer, body: Buffer) -> bytes:
    running = xxhash.xxh3_128(memoryview(fixed)[:_SUMMED])
    running.update(body)
    return running.digest()


__all__ = ["Head", "Read"]

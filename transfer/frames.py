"""How the payloads of a message travel in bulk frames: small ones copied together, as a frame costs more than a copy.

The law: frames hold whole payloads, in the order of the entries, and nothing else. As many frames as entries means one
payload each. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_manager.record import Buffer
from transfer.errors import RemoteProtocolError


def join(
    payloads: Sequence[Buffer], nbytes: Sequence[int], joined_nbytes_max: int, frame_nbytes_max: int
) -> tuple[Buffer, ...]:
    """The frames for ``payloads`` of sizes ``nbytes``: those up to ``joined_nbytes_max`` are copied to one frame with
    their neighbours, as far as that is within ``frame_nbytes_max``; larger ones, and one that stands alone, are their
    own frame and not copied.
    """
    frames: list[Buffer] = []
    small: list[Buffer] = []
    small_nbytes = 0
    for payload, size in zip(payloads, nbytes, strict=True):
        joins = size <= joined_nbytes_max
        if small and not (joins and small_nbytes + size <= frame_nbytes_max):
            frames.append(_one(small))
            small, small_nbytes = [], 0
        if joins:
            small.append(payload)
            small_nbytes += size
        else:
            frames.append(payload)
    if small:
        frames.append(_one(small))
    return tuple(frames)


def nbytes_of(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _one(payloads: Sequence[Buffer]) -> Buffer:
    return payloads[0] if len(payloads) == 1 else b"".join(payloads)


def split(frames: Sequence[memoryview], nbytes: Sequence[int]) -> Sequence[memoryview]:
    """Views of the payloads in ``frames``, which are to have the sizes ``nbytes``, all positive.

    :class:`RemoteProtocolError` unless frames end where payloads do. With one frame for each, sizes are the caller's to
    check: one that is wrong is then wrong alone.
    """
    if len(frames) == len(nbytes):
        return frames
    payloads: list[memoryview] = []
    for frame in frames:
        start, size = 0, frame.nbytes
        while start < size:
            end = start + nbytes[len(payloads)] if len(payloads) < len(nbytes) else size + 1
            if end > size:
                raise RemoteProtocolError(f"bulk: wanted whole payloads in a frame, got {size} bytes")
            payloads.append(frame[start:end])
            start = end
    if len(payloads) != len(nbytes):
        raise RemoteProtocolError(f"bulk: wanted {len(nbytes)} payloads, got {len(payloads)}")
    return payloads

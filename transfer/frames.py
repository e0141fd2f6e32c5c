"""How the payloads of a message travel in bulk frames: small ones copied together, as a frame costs more than a copy.

The law: frames hold whole payloads, in the order of the entries, and nothing else. As many frames as entries means one
payload each. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from cache_manager.record import Buffer
from transfer.errors import RemoteProtocolError

JOINED_NBYTES_MAX: Final = 128 << 10
"""Payloads up to this size are copied together; larger ones are sent from where they lie."""


def join(payloads: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """The frames for ``payloads``: small neighbours share one, which is a copy unless it is of one payload."""
    frames: list[Buffer] = []
    for small, run in groupby(payloads, lambda payload: nbytes_of(payload) <= JOINED_NBYTES_MAX):
        each = list(run)
        frames += [b"".join(each)] if small and len(each) > 1 else each
    return tuple(frames)


def nbytes_of(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


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

"""Whole messages over a stream socket between a process and a child of its own: a length, then that many bytes."""

from __future__ import annotations

import socket
import struct
from typing import Final

_LENGTH: Final = struct.Struct("<I")
FRAME_NBYTES_MAX: Final = 16 << 20


def send_frame(end: socket.socket, body: bytes) -> None:
    """Send one frame whole; ``OSError`` when the other end is gone, and then part of it may be out."""
    assert len(body) <= FRAME_NBYTES_MAX
    end.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(end: socket.socket) -> bytes | None:
    """One frame; ``None`` when the other end is gone or says a length that cannot be."""
    head = _exactly(end, _LENGTH.size)
    if head is None:
        return None
    (nbytes,) = _LENGTH.unpack(head)
    return _exactly(end, nbytes) if nbytes <= FRAME_NBYTES_MAX else None


def _exactly(end: socket.socket, nbytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < nbytes:
        try:
            part = end.recv(min(nbytes - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)

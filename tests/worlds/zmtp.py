"""A raw ZMTP 3.0 connection (NULL mechanism), for sending what no ZeroMQ library would."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

from waiting import GIVE_UP_S

PATIENCE_S = GIVE_UP_S


@contextlib.contextmanager
def greeted(address: str) -> Iterator[socket.socket]:
    """Connected to a ``tcp://`` address and past the handshake, as a DEALER: what is sent now are frames."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer:
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        peer.sendall(bytes((4, len(ready))) + ready)
        seen = b""
        while b"READY" not in seen:
            more = peer.recv(4096)
            assert more, "the server hung up in the handshake"
            seen += more
        yield peer

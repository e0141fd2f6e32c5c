"""TCP ports of this machine for servers that have to be told one, or have to come back on it."""

from __future__ import annotations

import atexit
import socket


def hold_port() -> int:
    """A port that is this run's until it ends, though nothing listens on it yet.

    Its socket is bound first and made reusable after: the system no longer gives the port to others, neither for an
    outgoing connection nor for port 0, while a server that is told the port can bind it, as servers do, with
    SO_REUSEADDR.
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    atexit.register(held.close)
    return int(held.getsockname()[1])

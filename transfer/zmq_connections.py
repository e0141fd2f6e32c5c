"""Who is connected to a server, and what ZeroMQ has no limit for.

ZeroMQ bounds frames and whole messages, but neither connections nor the frames of a message that never ends. Both are
bounded here, by shutting the connection down. The file descriptors are libzmq's: one is touched only by way of a
duplicate that was seen to be a connection of our listener, so that a number which has been used again is left alone.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

UNFINISHED_NBYTES_MAX: Final = 2 << 20
"""Of one connection; more than a few frames and what the kernel holds."""

_TCP_INFO_NBYTES: Final = 136
_BYTES_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received of struct tcp_info, Linux >= 4.1


class Connections:
    """The open connections of one listener, by file descriptor."""

    def __init__(self, address: str, connections_max: int, frame_nbytes_max: int, total_nbytes_max: int) -> None:
        self._port = int(address.rpartition(":")[2]) if address.startswith("tcp://") else None
        self._path = address.removeprefix("ipc://")
        self._connections_max = connections_max
        self._each_nbytes_max = max(UNFINISHED_NBYTES_MAX, 4 * frame_nbytes_max)
        self._total_nbytes_max = max(total_nbytes_max, self._each_nbytes_max)
        self._seen: dict[int, int] = {}  # bytes received when a message was last seen complete
        self._spoke: set[int] = set()  # delivered a message since the last sweep
        self._cut: set[int] = set()  # shut down, and not seen to be gone yet
        self.refused = 0
        self.cut = 0

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, fd: int) -> bool:
        return fd in self._seen

    def accepted(self, fd: int) -> None:
        """A connection is there; one too many is shut down."""
        self._cut.discard(fd)
        if len(self._seen) >= self._connections_max:
            self.refused += 1
            self._shut_down(fd)
            return
        self._seen[fd] = 0

    def disconnected(self, fd: int) -> None:
        self._seen.pop(fd, None)
        self._spoke.discard(fd)
        self._cut.discard(fd)

    def spoke(self, fd: int) -> None:
        """A whole message of this connection was taken."""
        self._spoke.add(fd)

    def cut_off(self, fd: int) -> None:
        """Shut a connection down for what came by it; once, however long it takes to be gone."""
        if fd not in self._cut:
            self._cut.add(fd)
            self.cut += 1
            self._shut_down(fd)

    def sweep(self) -> None:
        """Shut down what sends messages without an end. Call it when every whole message was taken."""
        if self._port is None:
            return
        unfinished: list[tuple[int, int]] = []
        for fd, seen in list(self._seen.items()):
            received = self._received_nbytes(fd)
            if received is None:
                continue
            if fd in self._spoke:
                self._seen[fd] = received
            else:
                unfinished.append((received - seen, fd))
        self._spoke.clear()
        total = sum(nbytes for nbytes, _ in unfinished)
        for nbytes, fd in sorted(unfinished, reverse=True):
            if nbytes <= self._each_nbytes_max and total <= self._total_nbytes_max:
                break
            total -= nbytes
            self.cut_off(fd)

    def _received_nbytes(self, fd: int) -> int | None:
        ours = self._ours(fd)
        if ours is None:
            return None
        with ours:
            info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        if len(info) < _TCP_INFO_NBYTES:
            return None
        return int(_BYTES_RECEIVED.unpack(info)[0])

    def _shut_down(self, fd: int) -> None:
        ours = self._ours(fd)
        if ours is not None:
            with ours:
                try:
                    ours.shutdown(socket.SHUT_RDWR)
                except OSError:  # it has just gone by itself
                    return

    def _ours(self, fd: int) -> socket.socket | None:
        """A duplicate of ``fd``, if that is still a connection which our listener accepted."""
        try:
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        try:
            name = duplicate.getsockname()
            ours = name == self._path if self._port is None else isinstance(name, tuple) and name[1] == self._port
            if ours and duplicate.type == socket.SOCK_STREAM:
                duplicate.getpeername()  # not the listener itself
                return duplicate
        except OSError:
            pass
        duplicate.close()
        return None

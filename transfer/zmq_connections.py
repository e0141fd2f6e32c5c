"""Who is connected to a server: ZeroMQ has no limit for that.

Of too many connections, one that has not said anything yet makes room, the oldest first, and then the one that was
silent longest. The file descriptors are libzmq's: one is touched only by way of a duplicate that was seen to be a
connection of our listener, so that a number which has been used again is left alone.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from contextlib import suppress
from os import dup


class Connections:
    """The open connections of one listener, by file descriptor."""

    def __init__(self, address: str, connections_max: int) -> None:
        self._port = int(address.rpartition(":")[2]) if address.startswith("tcp://") else None
        self._path = address.removeprefix("ipc://")
        self._connections_max = connections_max
        self._silent: OrderedDict[int, None] = OrderedDict()  # those that said nothing yet, the oldest first
        self._spoke: OrderedDict[int, None] = OrderedDict()  # the others, the one heard last at the end
        self._cut: set[int] = set()  # shut down, and not seen to be gone yet
        self.evicted = 0
        self.cut = 0

    def __len__(self) -> int:
        return len(self._silent) + len(self._spoke)

    def __contains__(self, fd: int) -> bool:
        return fd in self._silent or fd in self._spoke

    def accepted(self, fd: int) -> None:
        """A connection is there; of too many the idlest is shut down."""
        self.disconnected(fd)
        if len(self) >= self._connections_max:
            idlest, _ = (self._silent or self._spoke).popitem(last=False)
            self.evicted += 1
            self._cut.add(idlest)
            self._shut_down(idlest)
        self._silent[fd] = None

    def disconnected(self, fd: int) -> None:
        self._silent.pop(fd, None)
        self._spoke.pop(fd, None)
        self._cut.discard(fd)

    def spoke(self, fd: int) -> None:
        """A message of this connection was taken."""
        if fd in self._spoke:
            self._spoke.move_to_end(fd)
        elif fd in self._silent:
            del self._silent[fd]
            self._spoke[fd] = None

    def cut_off(self, fd: int) -> None:
        """Shut a connection down for what came by it, or did not; once, however long it takes to be gone."""
        if fd not in self._cut:
            self._cut.add(fd)
            self.cut += 1
            self._shut_down(fd)

    def _shut_down(self, fd: int) -> None:
        ours = self._ours(fd)
        if ours is not None:
            with ours, suppress(OSError):  # it has just gone by itself
                ours.shutdown(socket.SHUT_RDWR)

    def _ours(self, fd: int) -> socket.socket | None:
        """A duplicate of ``fd``, if that is still a connection which our listener accepted."""
        try:
            duplicate = socket.socket(fileno=dup(fd))
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

"""The serving half of a ZeroMQ link: a ROUTER, its connections, and the admission of clients.

ZeroMQ has no limit for connections. Of too many, one that has not sent a message yet makes room, the oldest first, and
then the one that was silent longest. The file descriptors belong to libzmq: the code touches one only through a
duplicate that is checked to be a connection of our listener, so that a reused number is left alone.
"""

from __future__ import annotations

import logging
import os
import socket as system
from collections import OrderedDict
from contextlib import suppress

import zmq
from zmq.utils import z85

from transfer.link import Peer
from transfer.zmq_settings import ZmqSettings
from transfer.zmq_sockets import EVENTS_MAX, ZAP_DOMAIN, Socket, bind, events, monitored, router

log = logging.getLogger(__name__)


class ZmqServer:
    """A bound ROUTER and its connections by file descriptor; a client that has sent a message can be answered."""

    def __init__(self, context: zmq.Context[Socket], settings: ZmqSettings, address: str) -> None:
        self.settings = settings
        self.refused_keys = 0
        self.evicted = 0
        self.cut = 0
        self._silent: OrderedDict[int, None] = OrderedDict()  # connections without a message yet, the oldest first
        self._spoke: OrderedDict[int, Peer] = OrderedDict()  # the other connections, the one heard last at the end
        self._clients: dict[Peer, tuple[int, bytes]] = {}  # each peer's descriptor and routing id
        self._cut: set[int] = set()  # shut down, but their end is not reported yet
        self._file: tuple[str, int] | None = None  # the file of an ipc address, which ZeroMQ leaves behind
        self.zap: Socket | None = None
        if settings.keys is not None:  # bind ZAP first: no client enters unchecked
            self.zap = context.socket(zmq.ROUTER)
            self.zap.bind("inproc://zeromq.zap.01")
        self.socket = router(context, settings)
        self.monitor = monitored(self.socket)
        try:
            self.address = bind(self.socket, address)
        except BaseException:
            self.close(0)
            raise
        if (path := self.address.removeprefix("ipc://")) != self.address:
            self._file = path, os.lstat(path).st_ino

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """The sockets to poll, in the order in which they are to be read."""
        return (self.monitor, self.socket) if self.zap is None else (self.zap, self.monitor, self.socket)

    @property
    def connections(self) -> int:
        return len(self._silent) + len(self._spoke)

    def routing_id(self, peer: Peer) -> bytes | None:
        """The routing id of ``peer``, if it is connected."""
        return self._clients.get(peer, (0, None))[1]

    def sender(self, routing_id: bytes, frame: zmq.Frame, lost: list[Peer]) -> Peer | None:
        """The sender of ``frame``, noted as a peer that can be answered; ``None`` if it speaks an ancient ZMTP."""
        try:
            fd = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # ZMTP 1 and 2 have no handshake with a descriptor
            return None
        peer = Peer(b"client " + routing_id)
        if self._spoke.get(fd) == peer:
            self._spoke.move_to_end(fd)
            return peer
        if fd not in self._silent:
            lost += self.watch()  # its connection was reported before its message, but not read yet
        if fd in self._silent:  # otherwise it has gone already: its message counts, but it cannot be answered
            del self._silent[fd]
            if (before := self._clients.get(peer)) is not None:  # restarted, and the old connection is still there
                del self._spoke[before[0]]
                self._silent[before[0]] = None
            self._spoke[fd] = peer
            self._clients[peer] = fd, routing_id
        return peer

    def watch(self) -> list[Peer]:
        """Note new and lost connections; returns the peers that were lost."""
        lost = []
        for event, fd in events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                continue
            self._cut.discard(fd)
            self._silent.pop(fd, None)
            if (peer := self._spoke.pop(fd, None)) is not None:
                del self._clients[peer]
                lost.append(peer)
            if event == zmq.EVENT_ACCEPTED:
                lost += self._make_room()
                self._silent[fd] = None
        return lost

    def _make_room(self) -> list[Peer]:
        """Shut the idlest connection down if there are too many; returns the peer lost by that, if any."""
        if self.connections < self.settings.connections_max:
            return []
        self.evicted += 1
        if self._silent:
            self._shut_down(self._silent.popitem(last=False)[0])
            return []
        fd, peer = self._spoke.popitem(last=False)
        del self._clients[peer]
        self._shut_down(fd)
        return [peer]

    def cut_off(self, peer: Peer) -> None:
        """Shut the connection of ``peer`` down, because it sent forbidden messages or none; once, until it is gone."""
        fd, _ = self._clients.get(peer, (-1, b""))
        if fd >= 0 and fd not in self._cut:
            self.cut += 1
            self._shut_down(fd)

    def _shut_down(self, fd: int) -> None:
        self._cut.add(fd)
        with suppress(OSError), system.socket(fileno=os.dup(fd)) as duplicate:  # an error: it has just closed by itself
            name = duplicate.getsockname()
            end = f":{name[1]}" if isinstance(name, tuple) else f"//{name}"
            duplicate.getpeername()  # an error: the listener itself
            if self.address.endswith(end) and duplicate.type == system.SOCK_STREAM:
                duplicate.shutdown(system.SHUT_RDWR)

    def admit(self) -> None:
        """Answer ZAP requests (RFC 27): a client with our key is admitted."""
        assert self.zap is not None
        assert self.settings.keys is not None
        for _ in range(EVENTS_MAX):
            try:
                frames = self.zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route, empty, version, request, domain, *_, mechanism, credentials = frames
            key = z85.encode(credentials) if len(credentials) == 32 else b""
            known = domain == ZAP_DOMAIN and mechanism == b"CURVE" and key == self.settings.keys.public
            if not known:
                self.refused_keys += 1
                if self.refused_keys == 1:
                    log.warning("%s: %r is not our key; refused, others are counted", self.address, key)
            answer = (b"200", b"OK") if known else (b"400", b"unknown key")
            self.zap.send_multipart([route, empty, version, request, *answer, b"", b""])

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        for socket in self.sockets:
            socket.close(linger=linger_ms)
        if self._file is not None:
            with suppress(OSError):
                if os.lstat(self._file[0]).st_ino == self._file[1]:  # still ours
                    os.unlink(self._file[0])
        self._clients.clear()

"""The serving half of a ZeroMQ link: a ROUTER, who is connected to it, and whom it lets in.

ZeroMQ has no limit for connections. Of too many, one that has not said anything yet makes room, the oldest first, and
then the one that was silent longest. The file descriptors are libzmq's: one is touched only by way of a duplicate that
was seen to be a connection of our listener, so that a number which has been used again is left alone.
"""

from __future__ import annotations

import logging
import socket as system
from collections import OrderedDict
from contextlib import suppress
from os import dup
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from transfer.link import Peer
from transfer.zmq_settings import ZmqSettings
from transfer.zmq_sockets import ZAP_DOMAIN, BoundPath, bind, router

EVENTS_MAX: Final = 1024
MONITORED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]


class ZmqServer:
    """A bound ROUTER and its connections by file descriptor; who spoke by one can be answered."""

    def __init__(self, context: zmq.Context[Socket], settings: ZmqSettings, address: str) -> None:
        self.settings = settings
        self.refused_keys = 0
        self.evicted = 0
        self.cut = 0
        self._silent: OrderedDict[int, None] = OrderedDict()  # those that said nothing yet, the oldest first
        self._spoke: OrderedDict[int, Peer] = OrderedDict()  # the others, the one heard last at the end
        self._clients: dict[Peer, tuple[int, bytes]] = {}  # who is at which of them, and how the ROUTER names it
        self._cut: set[int] = set()  # shut down, and not seen to be gone yet
        self.zap: Socket | None = None
        if settings.curve_server is not None:  # bind ZAP first: nobody enters unchecked
            self.zap = context.socket(zmq.ROUTER)
            self.zap.bind("inproc://zeromq.zap.01")
        self.socket = router(context, settings)
        self.monitor = monitored(self.socket)
        self._path = BoundPath("")
        try:
            self.address = bind(self.socket, address)
            self._path = BoundPath(self.address)
        except BaseException:
            self.close(0)
            raise

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """Those to poll."""
        return (self.socket, self.monitor) if self.zap is None else (self.socket, self.monitor, self.zap)

    @property
    def peers(self) -> int:
        return len(self._clients)

    @property
    def connections(self) -> int:
        return len(self._silent) + len(self._spoke)

    def routing_id(self, peer: Peer) -> bytes | None:
        """How the ROUTER names ``peer``, if that is connected."""
        return self._clients.get(peer, (0, None))[1]

    def sender(self, routing_id: bytes, frame: zmq.Frame, lost: list[Peer]) -> Peer | None:
        """Who sent ``frame``, noted as somebody who can be answered; ``None`` for one that speaks an ancient ZMTP."""
        try:
            fd = int(frame.get(zmq.SRCFD))
            user = b"" if self.settings.curve_server is None else str(frame.get("User-Id")).encode()
        except zmq.ZMQError:  # ZMTP 1 and 2 have no handshake that says anything
            return None
        peer = Peer(b"client " + user + b" " + routing_id)
        if self._spoke.get(fd) == peer:
            self._spoke.move_to_end(fd)
            return peer
        if fd not in self._silent:
            lost += self.watch()  # its arrival was reported before its message, but not seen yet
        if fd in self._silent:  # else it has gone already: heard, but not noted
            del self._silent[fd]
            if (before := self._clients.get(peer)) is not None:  # restarted, and the old connection is still there
                del self._spoke[before[0]]
                self._silent[before[0]] = None
            self._spoke[fd] = peer
            self._clients[peer] = fd, routing_id
        return peer

    def watch(self) -> list[Peer]:
        """Note who came and who went; the peers that went."""
        lost = []
        for event, fd in events(self.monitor):
            if event not in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
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
        """Shut the idlest connection down if there are too many; the peer that is lost by that."""
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
        """Shut the connection of ``peer`` down for what came by it, or did not; once, until it is gone."""
        fd, _ = self._clients.get(peer, (-1, b""))
        if fd >= 0 and fd not in self._cut:
            self.cut += 1
            self._shut_down(fd)

    def _shut_down(self, fd: int) -> None:
        self._cut.add(fd)
        if (ours := self._ours(fd)) is not None:
            with ours, suppress(OSError):  # it has just gone by itself
                ours.shutdown(system.SHUT_RDWR)

    def _ours(self, fd: int) -> system.socket | None:
        """A duplicate of ``fd``, if that is still a connection which our listener accepted."""
        try:
            duplicate = system.socket(fileno=dup(fd))
        except OSError:
            return None
        try:
            name = duplicate.getsockname()
            end = f":{name[1]}" if isinstance(name, tuple) else f"//{name}"
            if self.address.endswith(end) and duplicate.type == system.SOCK_STREAM:
                duplicate.getpeername()  # not the listener itself
                return duplicate
        except OSError:
            pass
        duplicate.close()
        return None

    def admit(self) -> None:
        """Answer ZAP requests (RFC 27): a client whose public key is on the list has it as its user id."""
        assert self.zap is not None
        assert self.settings.curve_server is not None
        for _ in range(EVENTS_MAX):
            try:
                frames = self.zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route, empty, version, request, domain, *_, mechanism, credentials = frames
            key = z85.encode(credentials) if len(credentials) == 32 else b""
            known = domain == ZAP_DOMAIN and mechanism == b"CURVE" and key in self.settings.curve_server.clients
            if not known:
                self.refused_keys += 1
                if self.refused_keys == 1:
                    log.warning("%s: the key %r is not on the list; refused, counted from now on", self.address, key)
            answer = (b"200", b"OK", key) if known else (b"400", b"unknown key", b"")
            self.zap.send_multipart([route, empty, version, request, *answer, b""])

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        for socket in self.sockets:
            socket.close(linger=linger_ms)
        self._path.remove()
        self._clients.clear()


def monitored(socket: Socket) -> Socket:
    """A socket that tells of the connections of ``socket``."""
    monitor = socket.get_monitor_socket(MONITORED)
    monitor.linger = 0
    return monitor


def events(monitor: Socket) -> list[tuple[int, int]]:
    """What a monitor has to tell, as (event, file descriptor)."""
    found: list[tuple[int, int]] = []
    while len(found) < EVENTS_MAX and int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        event = recv_monitor_message(monitor, zmq.NOBLOCK)
        found.append((int(event["event"]), int(event["value"])))
    return found

"""The serving half of a ZeroMQ link: a ROUTER, who is connected to it, and whom it lets in."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from transfer.link import Peer
from transfer.zmq_connections import Connections
from transfer.zmq_settings import ZmqSettings
from transfer.zmq_sockets import ZAP_DOMAIN, BoundPath, bind, router

EVENTS_MAX: Final = 1024
MONITORED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]


@dataclass(slots=True)
class _Client:
    routing_id: bytes
    fd: int


class ZmqServer:
    """A bound ROUTER and the table of the clients that it can answer; the idlest one of too many is forgotten."""

    def __init__(self, context: zmq.Context[Socket], settings: ZmqSettings, address: str) -> None:
        self.settings = settings
        self.forgotten_peers = 0
        self.refused_keys = 0
        self._clients: OrderedDict[Peer, _Client] = OrderedDict()
        self._by_fd: dict[int, Peer] = {}
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
        self.connections = Connections(self.address, settings.connections_max)

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """Those to poll."""
        return (self.socket, self.monitor) if self.zap is None else (self.socket, self.monitor, self.zap)

    @property
    def peers(self) -> int:
        return len(self._clients)

    def routing_id(self, peer: Peer) -> bytes | None:
        """How the ROUTER names ``peer``, if that is connected."""
        client = self._clients.get(peer)
        return None if client is None else client.routing_id

    def sender(self, routing_id: bytes, frame: zmq.Frame, lost: list[Peer]) -> Peer | None:
        """Who sent ``frame``, noted as somebody who can be answered; ``None`` for one that speaks an ancient ZMTP."""
        try:
            fd = int(frame.get(zmq.SRCFD))
            user = b"" if self.settings.curve_server is None else str(frame.get("User-Id")).encode()
        except zmq.ZMQError:  # ZMTP 1 and 2 have no handshake that says anything
            return None
        peer = Peer(b"client " + user + b" " + routing_id)
        known = self._clients.get(peer)
        if known is None or known.fd != fd:
            if fd not in self.connections:
                lost += self.watch()  # its arrival was reported before its message, but not seen yet
            if fd not in self.connections:
                return peer  # it has gone already: heard, but not noted
            self._note(peer, _Client(routing_id, fd))
        self._clients.move_to_end(peer)
        self.connections.spoke(fd)
        return peer

    def watch(self) -> list[Peer]:
        """Note who came and who went; the peers that went."""
        lost = []
        for event, fd in events(self.monitor):
            if event == zmq.EVENT_ACCEPTED:
                self.connections.accepted(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                self.connections.disconnected(fd)
                if (peer := self._by_fd.pop(fd, None)) is not None:
                    self._clients.pop(peer, None)
                    lost.append(peer)
        return lost

    def cut_off(self, peer: Peer) -> None:
        """Shut the connection of ``peer`` down for what came by it."""
        if (client := self._clients.get(peer)) is not None:
            self.connections.cut_off(client.fd)

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

    def _note(self, peer: Peer, client: _Client) -> None:
        if (known := self._clients.get(peer)) is not None:
            self._by_fd.pop(known.fd, None)
        elif len(self._clients) >= self.settings.peers_max:
            _, forgotten = self._clients.popitem(last=False)
            self._by_fd.pop(forgotten.fd, None)
            self.forgotten_peers += 1
        if (before := self._by_fd.pop(client.fd, None)) is not None:
            self._clients.pop(before, None)
        self._clients[peer] = client
        self._by_fd[client.fd] = peer


def monitored(socket: Socket) -> Socket:
    """A socket that tells of the connections of ``socket``."""
    monitor = socket.get_monitor_socket(MONITORED)
    monitor.linger = 0
    return monitor


def events(monitor: Socket) -> list[tuple[int, int]]:
    """What a monitor has to tell, as (event, file descriptor)."""
    found = []
    for _ in range(EVENTS_MAX):
        try:
            event = recv_monitor_message(monitor, zmq.NOBLOCK)
        except zmq.Again:
            break
        found.append((int(event["event"]), int(event["value"])))
    return found


__all__ = ["ZmqServer", "events", "monitored"]

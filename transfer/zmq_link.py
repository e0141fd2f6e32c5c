"""Messages over ZeroMQ: a ROUTER that serves, and a DEALER for every server that is connected to.

Bulk travels in frames of its own. One thread owns the endpoint: only it may call methods, except :meth:`ZmqLink.wake`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import zmq

from cache_manager.record import Buffer, nbytes_of
from transfer.errors import TransferError
from transfer.link import Arrival, LinkEvent, Peer, PeerFound, PeerLost
from transfer.messages import ENTRIES_MAX
from transfer.zmq_server import ZmqServer
from transfer.zmq_settings import ZmqSettings, check_address
from transfer.zmq_sockets import Socket, dealer, events, monitored

FRAMES_MAX: Final = ENTRIES_MAX + 1
"""Frames of a message: control and bulk."""

ZERO_COPY_NBYTES: Final = 256 << 10
"""Bulk frames from this size on are sent without a copy; smaller ones are copied, which is cheaper."""

_LAST: Final = int(zmq.NOBLOCK)  # plain ints: the library's flags cost more than a small copy
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(slots=True)
class ZmqCounters:
    """Counts of a link since it was made.

    ``dropped_messages`` had too many frames or none, ``refused_keys`` are not ours.
    """

    received_messages: int = 0
    dropped_messages: int = 0
    refused_keys: int = 0


@dataclass(slots=True)
class _Server:
    peer: Peer
    socket: Socket
    monitor: Socket
    connected: bool = False
    used: int = 0

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


class ZmqLink:
    """A :class:`~transfer.link.Link`; it binds when it is made, or raises :class:`~cache_manager.errors.ConfigError`.

    A peer that we connected to is named by its address, a peer that connected to us by the routing id it chose. A
    message to a peer that is not connected is not taken. Only the loss of a server is reported.
    """

    def __init__(self, settings: ZmqSettings | None = None) -> None:
        self.settings = settings = settings or ZmqSettings()
        self.address = ""
        self._pid = os.getpid()
        self._closed = False
        self._identity = settings.identity or b"K" + secrets.token_bytes(15)
        self._servers: dict[Peer, _Server] = {}
        self._at: dict[Any, _Server] = {}  # by socket, and by monitor
        self._news: list[PeerFound | PeerLost] = []
        self._uses = itertools.count(1)
        self._counters = ZmqCounters()
        self._server: ZmqServer | None = None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * settings.servers_max + 64)  # three each, and some that are closing
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._wakes, zmq.POLLIN)
        if settings.bind is not None:
            try:
                self._server = ZmqServer(self._context, settings, settings.bind)
                self.address = self._server.address
                for socket in self._server.sockets:
                    self._poller.register(socket, zmq.POLLIN)
            except BaseException:
                self.close(0)
                raise

    @property
    def counters(self) -> ZmqCounters:
        refused_keys = 0 if self._server is None else self._server.refused_keys
        return replace(self._counters, refused_keys=refused_keys)

    def connect(self, address: str) -> Peer:
        """The peer at ``address``, which need not be there yet.

        :class:`TransferError` when ``servers_max`` others are connected (an unconnected one makes room), or when ZeroMQ
        cannot connect: it cannot parse the address, or no descriptor is left.
        """
        self._open()
        peer = Peer(b"server " + address.encode() if isinstance(address, str) else b"")
        server = self._servers.get(peer)
        if server is None:
            check_address(address, "address", curve=self.settings.keys is not None)
            if len(self._servers) >= self.settings.servers_max:
                self._forget_server()
            server = self._servers[peer] = self._connected(peer, address)
            for socket in (server.monitor, server.socket):
                self._poller.register(socket, zmq.POLLIN)
                self._at[socket] = server
        server.used = next(self._uses)
        return peer

    def send(self, peer: Peer, control: bytes, bulk: Sequence[Buffer] = ()) -> bool:
        self._open()
        assert len(bulk) < FRAMES_MAX, f"{len(bulk)} bulk frames where a message has fewer than {FRAMES_MAX}"
        server = self._servers.get(peer)
        if server is not None:
            server.used = next(self._uses)
            if not server.connected:  # ZeroMQ reports a loss before it stops taking messages for the lost peer
                return False
            return _sent(server.socket, (control, *bulk))
        routing_id = ZmqServer.routing_id(peer)
        if self._server is None or routing_id is None:
            return False
        return _sent(self._server.socket, (routing_id, control, *bulk))

    def poll(self, timeout_s: float, limit: int = 64) -> list[LinkEvent]:
        self._open()
        came: list[LinkEvent] = []
        for source, _ in zmq.zmq_poll(self._poller.sockets, 0 if self._news else max(int(timeout_s * 1000 + 0.999), 0)):
            server = self._at.get(source)
            if server is not None:
                if source is server.socket:
                    self._take(source, server.peer, came, limit)
                else:
                    self._watch(server)
            elif source == self._wakes:
                os.eventfd_read(self._wakes)
            elif self._server is not None:
                if source is self._server.socket:
                    self._take(source, None, came, limit)
                else:
                    self._server.admit()
        if self._news:  # messages of a peer come before its loss
            room = max(limit - len(came), 0)
            came += self._news[:room]
            del self._news[:room]
        return came

    def wake(self) -> None:
        with self._waking:  # against close: the descriptor may be another file's a moment later
            if self._wakes >= 0:
                try:
                    os.eventfd_write(self._wakes, 1)
                except BlockingIOError:  # so often that it wakes anyway
                    return

    def close(self, linger_s: float = 0.5) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # a fork's copy: the threads behind these sockets are the parent's
        linger_ms = max(int(linger_s * 1000), 0)
        for end in (self._server, *self._servers.values()):
            if end is not None:
                end.close(linger_ms)
        self._context.term()
        with self._waking:
            os.close(self._wakes)
            self._wakes = -1
        self._servers.clear()
        self._at.clear()

    def _connected(self, peer: Peer, address: str) -> _Server:
        with contextlib.ExitStack() as undo:
            try:
                socket = dealer(self._context, self.settings, self._identity, address)
                undo.callback(socket.close, linger=0)
                monitor = monitored(socket)
                undo.callback(monitor.close, linger=0)
                socket.connect(address)
            except zmq.ZMQError as error:
                raise TransferError(f"connect: {error}") from error
            undo.pop_all()
        return _Server(peer, socket, monitor)

    def _open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise TransferError("the ZeroMQ link is closed, or was made before a fork")

    def _take(self, socket: Socket, server: Peer | None, came: list[LinkEvent], limit: int) -> None:
        """Add the messages that are there to ``came``, up to ``limit``; a client's starts with its routing id."""
        more = True  # the poller has said so
        while more and len(came) < limit:
            try:
                frames = [frame := socket.recv(_LAST, copy=False)]
            except zmq.Again:  # its connection has just gone
                return
            while frame.more:
                frame = socket.recv(copy=False)
                if len(frames) <= FRAMES_MAX + 1:  # further frames are only removed from the queue
                    frames.append(frame)
            self._counters.received_messages += 1
            sender = server or ZmqServer.client(frames.pop(0).bytes)
            if frames and len(frames) <= FRAMES_MAX:
                control, *bulk = frames
                came.append(Arrival(sender, control.bytes, [frame.buffer for frame in bulk], frames.clear))
            else:
                self._counters.dropped_messages += 1
            more = bool(zmq.zmq_poll([(socket, zmq.POLLIN)], 0))  # the socket's own option costs five times as much

    def _watch(self, server: _Server) -> None:
        for event in events(server.monitor):
            was_connected = server.connected
            server.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if server.connected:
                self._news.append(PeerFound(server.peer))
            elif was_connected:
                self._news.append(PeerLost(server.peer))

    def _forget_server(self) -> None:
        idle = [(server.used, peer) for peer, server in self._servers.items() if not server.connected]
        if not idle:
            raise TransferError(f"servers_max: wanted at most {self.settings.servers_max} servers, got another")
        server = self._servers.pop(min(idle)[1])
        for socket in (server.monitor, server.socket):
            self._poller.unregister(socket)
            del self._at[socket]
        server.close(0)


def _sent(socket: Socket, frames: Sequence[Buffer]) -> bool:
    """Whether the whole message was taken; otherwise no part of it was."""
    left = len(frames)
    for frame in frames:
        left -= 1
        try:
            socket.send(frame, _MORE if left else _LAST, copy=nbytes_of(frame) < ZERO_COPY_NBYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise TransferError(f"send: {error}") from error
            if left == len(frames) - 1:
                return False
            # The peer went away within the message: later frames are taken and dropped, like the whole.
    return True

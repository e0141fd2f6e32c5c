"""Messages over ZeroMQ: a ROUTER that serves, and a DEALER for every server that is connected to.

Bulk travels in frames of its own. One thread owns the endpoint: all but :meth:`ZmqLink.wake` is called by it.
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

from cache_manager.record import Buffer
from transfer.errors import TransferError
from transfer.link import Arrival, Came, Peer, PeerFound, PeerLost
from transfer.messages import ENTRIES_MAX, nbytes_of
from transfer.zmq_server import ZmqServer
from transfer.zmq_settings import ZmqSettings, check_address
from transfer.zmq_sockets import EVENTS_MAX, Socket, dealer, events, monitored

FRAMES_MAX: Final = ENTRIES_MAX + 1
"""Of a message: control and bulk."""

ZERO_COPY_NBYTES: Final = 256 << 10
"""Bulk frames from this size on are sent from where they lie; smaller ones are copied, which is cheaper."""

_LAST: Final = int(zmq.NOBLOCK)  # as numbers: the library's flags cost more than a small copy
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)


@dataclass(slots=True)
class ZmqCounters:
    """What a link has met since it was made.

    ``dropped_messages`` had too many frames or none; ``evicted_connections`` were the idlest of too many,
    ``cut_connections`` sent what nobody may or did not read; ``refused_keys`` are not ours. ``connections`` are those
    of this moment.
    """

    received_messages: int = 0
    dropped_messages: int = 0
    lost_peers: int = 0
    evicted_connections: int = 0
    cut_connections: int = 0
    refused_keys: int = 0
    connections: int = 0


@dataclass(slots=True)
class _Server:
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

    A peer that we connected to is named by its address, one that connected to us by the routing id it chose. A message
    that is sent to a peer which is not connected is not taken.
    """

    def __init__(self, settings: ZmqSettings | None = None) -> None:
        self.settings = settings = settings or ZmqSettings()
        self.address = ""
        self._pid = os.getpid()
        self._closed = False
        self._identity = settings.identity or b"K" + secrets.token_bytes(15)
        self._servers: dict[Peer, _Server] = {}
        self._news: list[PeerFound | PeerLost] = []
        self._uses = itertools.count(1)
        self._counters = ZmqCounters()
        self._server: ZmqServer | None = None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * settings.servers_max + 64)  # three each, and those on their way out
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
        if (server := self._server) is None:
            return replace(self._counters)
        done = {"evicted_connections": server.evicted, "cut_connections": server.cut}
        return replace(self._counters, **done, refused_keys=server.refused_keys, connections=server.connections)

    def connect(self, address: str) -> Peer:
        """The peer at ``address``, which need not be there yet.

        :class:`TransferError` when ``servers_max`` others are connected (one that is not makes room), or when ZeroMQ
        cannot: it has an address for nobody, or no descriptor left.
        """
        self._open()
        peer = Peer(b"server " + address.encode() if isinstance(address, str) else b"")
        if peer not in self._servers:
            check_address(address, "address", curve=self.settings.keys is not None)
            if len(self._servers) >= self.settings.servers_max:
                self._forget_server()
            server = self._servers[peer] = self._connected(address)
            self._poller.register(server.socket, zmq.POLLIN)
            self._poller.register(server.monitor, zmq.POLLIN)
        self._servers[peer].used = next(self._uses)
        return peer

    def send(self, peer: Peer, control: bytes, bulk: Sequence[Buffer] = ()) -> bool:
        self._open()
        assert len(bulk) < FRAMES_MAX, f"{len(bulk)} bulk frames where a message has fewer than {FRAMES_MAX}"
        server = self._servers.get(peer)
        if server is not None:
            server.used = next(self._uses)
            if not server.connected:  # ZeroMQ tells of a loss before it stops taking messages for who was lost
                return False
            return _sent(server.socket, (control, *bulk))
        routing_id = None if self._server is None else self._server.routing_id(peer)
        if self._server is None or routing_id is None:
            return False
        return _sent(self._server.socket, (routing_id, control, *bulk))

    def poll(self, timeout_s: float, limit: int = 64) -> list[Came]:
        self._open()
        ready = dict(self._poller.poll(0 if self._news else max(int(timeout_s * 1000 + 0.999), 0)))
        if ready.pop(self._wakes, None):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakes)
        came: list[Came] = []
        if ready and self._server is not None:
            self._poll_server(self._server, ready, came, limit)
        for peer, server in list(self._servers.items()) if ready else ():
            if server.monitor in ready:
                self._watch(peer, server)
            if server.socket in ready:
                self._take(server.socket, peer, came, limit)
        # What a peer said before it was lost comes first.
        room = max(limit - len(came), 0)
        came += self._news[:room]
        del self._news[:room]
        return came

    def cut(self, peer: Peer) -> None:
        if self._server is not None:
            self._server.cut_off(peer)

    def wake(self) -> None:
        with self._waking:  # against close: the number may be another file's a moment later
            if self._wakes >= 0:
                with contextlib.suppress(BlockingIOError):  # so often that it wakes anyway
                    os.eventfd_write(self._wakes, 1)

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

    def _connected(self, address: str) -> _Server:
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
        return _Server(socket, monitor)

    def _open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise TransferError("the ZeroMQ link is closed, or was made before a fork")

    def _poll_server(self, server: ZmqServer, ready: dict[Any, int], came: list[Came], limit: int) -> None:
        if server.zap in ready:
            server.admit()
        if server.monitor in ready:
            self._lose(server.watch())
        if server.socket in ready:
            self._take(server.socket, None, came, limit)

    def _take(self, socket: Socket, peer: Peer | None, came: list[Came], limit: int) -> None:
        """Add the messages that are there to ``came``, up to ``limit``; a client's starts with its routing id."""
        while len(came) < limit and int(socket.getsockopt(_EVENTS)) & _POLLIN:
            frames = [frame := socket.recv(_LAST, copy=False)]
            while frame.more:
                frame = socket.recv(copy=False)
                if len(frames) <= FRAMES_MAX + 1:  # the rest is only taken out of the queue
                    frames.append(frame)
            self._counters.received_messages += 1
            sender = peer
            if peer is None and self._server is not None:
                lost: list[Peer] = []
                named = frames.pop(0).bytes
                sender = self._server.sender(named, frames[0], lost) if frames else None
                self._lose(lost)
            if sender is None or len(frames) > FRAMES_MAX:
                self._counters.dropped_messages += 1
                if sender is not None:
                    self.cut(sender)
            else:
                control, *bulk = frames
                came.append(Arrival(sender, control.bytes, [frame.buffer for frame in bulk], frames.clear))

    def _watch(self, peer: Peer, server: _Server) -> None:
        for event, _ in events(server.monitor):
            was, server.connected = server.connected, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if server.connected:
                self._news.append(PeerFound(peer))
            elif was:
                self._lose([peer])

    def _lose(self, peers: list[Peer]) -> None:
        self._counters.lost_peers += len(peers)
        self._news += map(PeerLost, peers[: max(EVENTS_MAX - len(self._news), 0)])

    def _forget_server(self) -> None:
        idle = [(s.used, peer) for peer, s in self._servers.items() if not s.connected]
        if not idle:
            raise TransferError(f"servers_max: wanted at most {self.settings.servers_max} servers, got another")
        server = self._servers.pop(min(idle)[1])
        for socket in (server.monitor, server.socket):
            self._poller.unregister(socket)
        server.close(0)


def _sent(socket: Socket, frames: Sequence[Buffer]) -> bool:
    """Whether the whole message was taken; else nothing of it."""
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
            # The peer went away within the message: the rest is taken and dropped, as the whole will be.
    return True

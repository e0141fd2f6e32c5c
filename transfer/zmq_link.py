"""Messages over ZeroMQ: a ROUTER that serves, and a DEALER for every server that is connected to.

Bulk travels in frames of its own. One thread owns the endpoint: all but :meth:`ZmqLink.wake` is called by it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import zmq

from cache_manager.record import Buffer
from transfer.errors import TransferError
from transfer.frames import nbytes_of
from transfer.link import Arrival, Came, Peer, PeerFound, PeerLost
from transfer.zmq_server import EVENTS_MAX, ZmqServer, events, monitored
from transfer.zmq_settings import ZmqSettings, check_address
from transfer.zmq_sockets import dealer

_LAST: Final = int(zmq.NOBLOCK)  # as numbers: the library's flags cost more than a small copy
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)


@dataclass(frozen=True, slots=True)
class ZmqCounters:
    """What a link has met since it was made.

    ``dropped_messages`` had too many frames or none; ``evicted_connections`` were the idlest of too many,
    ``cut_connections`` sent what nobody may or did not read; ``refused_keys`` are not on the list. ``peers`` and
    ``connections`` are those of this moment.
    """

    received_messages: int = 0
    dropped_messages: int = 0
    lost_peers: int = 0
    evicted_connections: int = 0
    cut_connections: int = 0
    refused_keys: int = 0
    peers: int = 0
    connections: int = 0


@dataclass(slots=True)
class _Server:
    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connected: bool = False
    used: int = 0

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


class ZmqLink:
    """A :class:`~transfer.link.Link`; it binds when it is made, or raises :class:`~cache_manager.errors.ConfigError`.

    A peer that we connected to is named by its address, one that connected to us by the routing id it chose and, with
    CURVE, by its public key. A message that is sent to a peer which is not connected is not taken.
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
        self._counts = dict.fromkeys(("received_messages", "dropped_messages", "lost_peers"), 0)
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
        counters = ZmqCounters(**self._counts)
        if (server := self._server) is None:
            return counters
        return replace(
            counters,
            evicted_connections=server.evicted,
            cut_connections=server.cut,
            refused_keys=server.refused_keys,
            peers=server.peers,
            connections=server.connections,
        )

    def connect(self, address: str) -> Peer:
        """The peer at ``address``, which need not be there yet.

        :class:`TransferError` when ``servers_max`` others are connected (one that is not makes room), or when ZeroMQ
        cannot: it has an address for nobody, or no descriptor left.
        """
        peer = Peer(b"server " + address.encode()) if isinstance(address, str) else Peer(b"")
        server = self._servers.get(peer)
        if server is None:
            check_address(address, "address", curve=self.settings.curve_client is not None)
            self._open()
            if len(self._servers) >= self.settings.servers_max:
                self._forget_server()
            server = self._servers[peer] = self._connected(address)
            self._poller.register(server.socket, zmq.POLLIN)
            self._poller.register(server.monitor, zmq.POLLIN)
        server.used = next(self._uses)
        return peer

    def send(self, peer: Peer, control: bytes, bulk: Sequence[Buffer] = ()) -> bool:
        self._open()
        if len(bulk) + 2 > self.settings.frames_max:
            raise AssertionError(f"{len(bulk)} bulk frames where a message has at most {self.settings.frames_max - 2}")
        server = self._servers.get(peer)
        if server is not None:
            server.used = next(self._uses)
            if not server.connected:  # ZeroMQ tells of a loss before it stops taking messages for who was lost
                return False
            return self._send(server.socket, [control], bulk)
        routing_id = None if self._server is None else self._server.routing_id(peer)
        if self._server is None or routing_id is None:
            return False
        return self._send(self._server.socket, [routing_id, control], bulk)

    def _send(self, socket: zmq.Socket[bytes], head: list[bytes], bulk: Sequence[Buffer]) -> bool:
        zero_copy_nbytes = self.settings.zero_copy_nbytes
        left = len(head) + len(bulk)
        for i, part in enumerate((*head, *bulk)):
            left -= 1
            try:
                socket.send(part, _MORE if left else _LAST, copy=nbytes_of(part) < zero_copy_nbytes)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise TransferError(f"send: {error}") from error
                if i == 0:
                    return False
                # The peer went away within the message: the rest is taken and dropped, as the whole will be.
        return True

    def poll(self, timeout_s: float, limit: int = 64) -> list[Came]:
        self._open()
        wait_ms = 0 if self._news else max(int(timeout_s * 1000 + 0.999), 0)
        ready = dict(self._poller.poll(wait_ms))
        if self._wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakes)
        came: list[Came] = []
        if self._server is not None:
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
        if self._server is not None:
            self._server.close(linger_ms)
        for server in self._servers.values():
            server.close(linger_ms)
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
        return _Server(address, socket, monitor)

    def _open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise TransferError("the ZeroMQ link is closed, or was made before a fork")

    def _poll_server(self, server: ZmqServer, ready: Mapping[Any, int], came: list[Came], limit: int) -> None:
        if server.zap in ready:
            server.admit()
        if server.monitor in ready:
            self._lose(server.watch())
        if server.socket in ready:
            self._take(server.socket, None, came, limit)

    def _take(self, socket: zmq.Socket[bytes], peer: Peer | None, came: list[Came], limit: int) -> None:
        """Add the messages that are there to ``came``, up to ``limit``."""
        while len(came) < limit and int(socket.getsockopt(_EVENTS)) & _POLLIN:
            frames = [frame := socket.recv(_LAST, copy=False)]
            while frame.more:
                frame = socket.recv(copy=False)
                if len(frames) <= self.settings.frames_max:  # the rest is only taken out of the queue
                    frames.append(frame)
            self._counts["received_messages"] += 1
            if peer is None:
                self._take_client(frames, came)
            elif len(frames) >= self.settings.frames_max:
                self._counts["dropped_messages"] += 1
            else:
                came.append(_arrival(peer, frames))

    def _take_client(self, frames: list[zmq.Frame], came: list[Came]) -> None:
        """A client's message: its routing id, control, bulk."""
        assert self._server is not None
        lost: list[Peer] = []
        sender = None
        if len(frames) > 1:
            sender = self._server.sender(frames[0].bytes, frames[1], lost)
        self._lose(lost)
        if sender is not None and len(frames) <= self.settings.frames_max:
            came.append(_arrival(sender, frames[1:]))
            return
        self._counts["dropped_messages"] += 1
        if sender is not None:
            self._server.cut_off(sender)

    def _watch(self, peer: Peer, server: _Server) -> None:
        for event, _ in events(server.monitor):
            was, server.connected = server.connected, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if server.connected:
                self._news.append(PeerFound(peer))
            elif was:
                self._lose([peer])

    def _lose(self, peers: list[Peer]) -> None:
        self._counts["lost_peers"] += len(peers)
        self._news += map(PeerLost, peers[: max(EVENTS_MAX - len(self._news), 0)])

    def _forget_server(self) -> None:
        idle = [(s.used, peer) for peer, s in self._servers.items() if not s.connected]
        if not idle:
            raise TransferError(f"servers_max: wanted at most {self.settings.servers_max} servers, got another")
        server = self._servers.pop(min(idle)[1])
        for socket in (server.monitor, server.socket):
            self._poller.unregister(socket)
        server.close(0)


def _arrival(peer: Peer, frames: list[zmq.Frame]) -> Arrival:
    """The message in ``frames``, which are kept until its receiver lets go."""
    control, *bulk = frames
    return Arrival(peer, control.bytes, [frame.buffer for frame in bulk], frames.clear)

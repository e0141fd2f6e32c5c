"""Messages over ZeroMQ: a ROUTER that serves, and a DEALER for every server that is connected to.

Bulk travels in frames of its own. One thread owns the endpoint: all but :meth:`ZmqLink.wake` is called by it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from cache_manager.record import Buffer
from transfer.errors import TransferError
from transfer.link import Arrival, Peer, PeerLost
from transfer.zmq_guard import Connections
from transfer.zmq_settings import ZmqSettings, check_address
from transfer.zmq_sockets import ZAP_DOMAIN, bind, dealer, router

BUFFERS_POLL_MS: Final = 2
"""How soon a buffer that was sent from where it lies is noticed to be free."""

SWEEP_S: Final = 0.1
EVENTS_MAX: Final = 1024
FREED_S: Final = 5.0
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ZmqCounters:
    """What a link has met since it was made.

    ``dropped_messages`` had too many frames or none; ``forgotten_peers`` were the idlest of too many;
    ``refused_connections`` were too many, ``cut_connections`` sent a message without an end; ``refused_keys`` are not
    on the list. ``peers``, ``connections`` and ``buffers_in_flight`` are those of this moment.
    """

    received_messages: int = 0
    dropped_messages: int = 0
    lost_peers: int = 0
    forgotten_peers: int = 0
    refused_connections: int = 0
    cut_connections: int = 0
    refused_keys: int = 0
    peers: int = 0
    connections: int = 0
    buffers_in_flight: int = 0


@dataclass(slots=True)
class _Client:
    routing_id: bytes
    fd: int


@dataclass(slots=True)
class _Server:
    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connected: bool = False
    used: int = 0


@dataclass(slots=True)
class _Sent:
    """A message whose sender waits to hear that its buffers are free."""

    trackers: list[Any]
    on_sent: Callable[[], None] | None
    peer: Peer
    parts: list[Buffer] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(tracker.done for tracker in self.trackers)


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
        self._clients: OrderedDict[Peer, _Client] = OrderedDict()
        self._by_fd: dict[int, Peer] = {}
        self._sent: list[_Sent] = []
        self._lost: list[PeerLost] = []
        self._uses = itertools.count(1)
        self._counts = dict.fromkeys(
            ("received_messages", "dropped_messages", "lost_peers", "forgotten_peers", "refused_keys"), 0
        )
        self._sweep_s = 0.0
        self._router: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self._connections = Connections("ipc://", 0, 0, 0)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * settings.servers_max + 16)
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wakes, zmq.POLLIN)
        if settings.bind is not None:
            try:
                self._serve(settings.bind)
            except BaseException:
                self.close(0)
                raise

    @property
    def counters(self) -> ZmqCounters:
        return ZmqCounters(
            **self._counts,
            refused_connections=self._connections.refused,
            cut_connections=self._connections.cut,
            peers=len(self._clients),
            connections=len(self._connections),
            buffers_in_flight=len(self._sent),
        )

    def connect(self, address: str) -> Peer:
        """The peer at ``address``, which need not be there yet.

        :class:`TransferError` when ``servers_max`` others are connected; one that is not makes room.
        """
        check_address(address, "address")
        peer = Peer(b"server " + address.encode())
        server = self._servers.get(peer)
        if server is None:
            self._open()
            if len(self._servers) >= self.settings.servers_max:
                self._forget_server()
            socket, monitor = self._monitored(dealer(self._context, self.settings, self._identity, address))
            socket.connect(address)
            server = self._servers[peer] = _Server(address, socket, monitor)
            self._poller.register(socket, zmq.POLLIN)
            self._poller.register(monitor, zmq.POLLIN)
        server.used = next(self._uses)
        return peer

    def send(
        self,
        peer: Peer,
        control: bytes,
        bulk: Sequence[Buffer] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> bool:
        self._open()
        if len(bulk) + 2 > self.settings.frames_max:
            raise AssertionError(f"{len(bulk)} bulk frames where a message has at most {self.settings.frames_max - 2}")
        server = self._servers.get(peer)
        if server is not None:
            socket, head = server.socket, []
            server.used = next(self._uses)
        else:
            client = self._clients.get(peer)
            if client is None or self._router is None:
                return False
            socket, head = self._router, [client.routing_id]
        return self._send(socket, peer, [*head, control, *bulk], len(bulk), on_sent)

    def _send(
        self,
        socket: zmq.Socket[bytes],
        peer: Peer,
        parts: list[Buffer],
        bulk: int,
        on_sent: Callable[[], None] | None,
    ) -> bool:
        zero_copy_nbytes = self.settings.zero_copy_nbytes
        trackers: list[Any] = []
        last, first_bulk = len(parts) - 1, len(parts) - bulk
        for i, part in enumerate(parts):
            flags = zmq.NOBLOCK if i == last else zmq.NOBLOCK | zmq.SNDMORE
            try:
                if i >= first_bulk and _nbytes(part) >= zero_copy_nbytes:
                    trackers.append(socket.send(part, flags, copy=False, track=True))
                else:
                    socket.send(part, flags)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise TransferError(f"send: {error}") from error
                if i == 0:
                    return False
                # The peer went away within the message: the rest is taken and dropped, as the whole will be.
        if on_sent is not None or trackers:
            self._sent.append(_Sent(trackers, on_sent, peer, parts if trackers else []))
        return True

    def poll(self, timeout_s: float, limit: int = 64) -> list[Arrival | PeerLost]:
        self._open()
        freed = self._free()
        ready = dict(self._poller.poll(self._wait_ms(0.0 if freed or self._lost else timeout_s)))
        if self._wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakes)
        if self._zap is not None and self._zap in ready:
            self._admit(self._zap)
        if self._monitor is not None and self._monitor in ready:
            self._watch(self._monitor)
        came: list[Arrival | PeerLost] = []
        drained = self._router is None or self._router not in ready
        if self._router is not None and not drained:
            drained = self._take(self._router, None, came, limit)
        for peer, server in list(self._servers.items()):
            if server.monitor in ready:
                self._watch_server(peer, server)
            if server.socket in ready and len(came) < limit:
                self._take(server.socket, peer, came, limit)
        if drained and len(self._connections) and (now_s := time.monotonic()) >= self._sweep_s:
            self._sweep_s = now_s + SWEEP_S
            self._connections.sweep()
        self._free()
        # What a peer said before it was lost comes first.
        room = max(limit - len(came), 0)
        came += self._lost[:room]
        del self._lost[:room]
        return came

    def wake(self) -> None:
        try:
            os.eventfd_write(self._wakes, 1)
        except (BlockingIOError, OSError):  # full: it wakes anyway; closed: nobody polls
            return

    def close(self, linger_s: float = 0.5) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # a fork's copy: the threads behind these sockets are the parent's
        for monitored in (self._router, *(server.socket for server in self._servers.values())):
            if monitored is not None:
                monitored.disable_monitor()
        sockets = [s for server in self._servers.values() for s in (server.monitor, server.socket)]
        for socket in (self._monitor, self._router, self._zap, *sockets):
            if socket is not None:
                socket.close(linger=max(int(linger_s * 1000), 0))
        self._context.term()
        os.close(self._wakes)
        self._wakes = -1
        give_up_s = time.monotonic() + FREED_S
        for sent in self._sent:  # libzmq has let go; pyzmq's own thread says so in a moment
            for tracker in sent.trackers:
                with contextlib.suppress(zmq.NotDone):
                    tracker.wait(max(give_up_s - time.monotonic(), 0))
            assert sent.done, "a closed ZeroMQ context holds no buffer"
            if sent.on_sent is not None:
                sent.on_sent()
        self._sent.clear()
        self._servers.clear()
        self._clients.clear()

    def _open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise TransferError("the ZeroMQ link is closed, or was made before a fork")

    def _wait_ms(self, timeout_s: float) -> int:
        wait_ms = max(int(timeout_s * 1000 + 0.999), 0)
        if self._sent:
            wait_ms = min(wait_ms, BUFFERS_POLL_MS)
        if len(self._connections):
            wait_ms = min(wait_ms, int(SWEEP_S * 1000))
        return wait_ms

    def _serve(self, address: str) -> None:
        settings = self.settings
        if settings.curve_server is not None:
            self._zap = self._context.socket(zmq.ROUTER)
            self._zap.linger = 0
            self._zap.bind("inproc://zeromq.zap.01")
            self._poller.register(self._zap, zmq.POLLIN)
        self._router, self._monitor = self._monitored(router(self._context, settings))
        self.address = bind(self._router, address)
        self._connections = Connections(
            self.address, settings.connections_max, settings.served_frame_nbytes_max, settings.unfinished_nbytes_max
        )
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _monitored(self, socket: zmq.Socket[bytes]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        monitor = socket.get_monitor_socket(_EVENTS)
        monitor.linger = 0
        return socket, monitor

    def _take(self, socket: zmq.Socket[bytes], peer: Peer | None, came: list[Arrival | PeerLost], limit: int) -> bool:
        """Add the messages that are there to ``came``, up to ``limit``; whether none is left."""
        while len(came) < limit:
            try:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frames = [frame]
            while frame.more:
                frame = socket.recv(copy=False)
                if len(frames) <= self.settings.frames_max:  # the rest is only taken out of the queue
                    frames.append(frame)
            self._counts["received_messages"] += 1
            sender = self._sender(frames.pop(0), frames) if peer is None else peer
            if sender is None or not frames or len(frames) >= self.settings.frames_max:
                self._counts["dropped_messages"] += 1
                continue
            came.append(_Arrived(sender, frames).arrival())
        return False

    def _sender(self, routing_id: zmq.Frame, frames: list[zmq.Frame]) -> Peer | None:
        """Who sent this, noted as somebody who can be answered."""
        name = routing_id.bytes
        if not frames:
            return None
        user, fd = b"", int(frames[0].get(zmq.SRCFD))
        if self.settings.curve_server is not None:
            user = str(frames[0].get("User-Id")).encode()
        peer = Peer(b"client " + user + b" " + name)
        known = self._clients.get(peer)
        if known is None or known.fd != fd:
            assert self._monitor is not None
            if fd not in self._connections:
                self._watch(self._monitor)  # its arrival was reported before its message, but not seen yet
            if fd not in self._connections:
                return peer  # it has gone already: heard, but not noted
            self._note(peer, _Client(name, fd))
        self._clients.move_to_end(peer)
        self._connections.spoke(fd)
        return peer

    def _note(self, peer: Peer, client: _Client) -> None:
        if (known := self._clients.get(peer)) is not None:
            self._by_fd.pop(known.fd, None)
        elif len(self._clients) >= self.settings.peers_max:
            _, forgotten = self._clients.popitem(last=False)
            self._by_fd.pop(forgotten.fd, None)
            self._counts["forgotten_peers"] += 1
        if (before := self._by_fd.pop(client.fd, None)) is not None:
            self._clients.pop(before, None)
        self._clients[peer] = client
        self._by_fd[client.fd] = peer

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        for event, fd in _events(monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._connections.accepted(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections.disconnected(fd)
                if (peer := self._by_fd.pop(fd, None)) is not None:
                    self._clients.pop(peer, None)
                    self._lose(peer)

    def _watch_server(self, peer: Peer, server: _Server) -> None:
        for event, _ in _events(server.monitor):
            was, server.connected = server.connected, event == zmq.EVENT_CONNECTED
            if was and not server.connected:
                self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        self._counts["lost_peers"] += 1
        if len(self._lost) < EVENTS_MAX:
            self._lost.append(PeerLost(peer))

    def _forget_server(self) -> None:
        busy = {sent.peer for sent in self._sent}
        idle = [(s.used, peer) for peer, s in self._servers.items() if not s.connected and peer not in busy]
        if not idle:
            raise TransferError(f"servers_max: wanted at most {self.settings.servers_max} servers, got another")
        server = self._servers.pop(min(idle)[1])
        server.socket.disable_monitor()
        for socket in (server.monitor, server.socket):
            self._poller.unregister(socket)
            socket.close(linger=0)

    def _free(self) -> bool:
        """Report the messages whose buffers nobody reads any more; whether there were any."""
        if not self._sent:
            return False
        done: list[_Sent] = []
        waiting: list[_Sent] = []
        for sent in self._sent:
            (done if sent.done else waiting).append(sent)
        self._sent = waiting
        for sent in done:
            if sent.on_sent is not None:
                sent.on_sent()
        return bool(done)

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        """Answer ZAP requests (RFC 27): a client whose public key is on the list has it as its user id."""
        assert self.settings.curve_server is not None
        for _ in range(EVENTS_MAX):
            try:
                frames = zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route, (version, request, domain) = frames[: frames.index(b"") + 1], frames[frames.index(b"") + 1 :][:3]
            key = z85.encode(frames[-1]) if len(frames[-1]) == 32 else b""
            known = domain == ZAP_DOMAIN and frames[-2] == b"CURVE" and key in self.settings.curve_server.clients
            self._counts["refused_keys"] += not known
            answer = (b"200", b"OK", key) if known else (b"400", b"unknown key", b"")
            zap.send_multipart([*route, version, request, *answer, b""])


class _Arrived:
    """The frames of a message, kept until its receiver has let go."""

    __slots__ = ("frames", "sender")

    def __init__(self, sender: Peer, frames: list[zmq.Frame]) -> None:
        self.sender = sender
        self.frames = frames

    def arrival(self) -> Arrival:
        control, *bulk = self.frames
        return Arrival(self.sender, control.bytes, [frame.buffer for frame in bulk], self.frames.clear)


def _events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    found = []
    for _ in range(EVENTS_MAX):
        try:
            event = recv_monitor_message(monitor, zmq.NOBLOCK)
        except zmq.Again:
            break
        found.append((int(event["event"]), int(event["value"])))
    return found


def _nbytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


__all__ = ["ZmqCounters", "ZmqLink"]

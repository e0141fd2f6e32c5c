"""The serving half of a ZeroMQ link: a ROUTER, and with keys the admission of clients.

A client is named by the routing id that it chose. What bounds clients are the options in ``zmq_sockets.py``: a
handshake ends in bounded time, a frame and a queue have a size. ZeroMQ has no limit for connections: ``SECURITY.md``
says who can make too many.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils import z85

from transfer.link import Peer
from transfer.zmq_settings import ZmqSettings
from transfer.zmq_sockets import REQUESTS_MAX, ZAP_DOMAIN, Socket, bind, router

_CLIENT: Final = b"client "

log = logging.getLogger(__name__)


class ZmqServer:
    """A bound ROUTER. A client can be answered while it is connected."""

    def __init__(self, context: zmq.Context[Socket], settings: ZmqSettings, address: str) -> None:
        self.settings = settings
        self.refused_keys = 0
        self._file: tuple[str, int] | None = None  # the file of an ipc address, which ZeroMQ leaves behind
        self.zap: Socket | None = None
        if settings.keys is not None:  # bind ZAP first: no client enters unchecked
            self.zap = context.socket(zmq.ROUTER)
            self.zap.bind("inproc://zeromq.zap.01")
        self.socket = router(context, settings)
        try:
            self.address = bind(self.socket, address)
        except BaseException:
            self.close(0)
            raise
        path = self.address.removeprefix("ipc://")
        if path != self.address:
            self._file = path, os.lstat(path).st_ino

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """The sockets to poll, in the order in which they are to be read."""
        return (self.socket,) if self.zap is None else (self.zap, self.socket)

    @staticmethod
    def client(routing_id: bytes) -> Peer:
        """The peer with this routing id."""
        return Peer(_CLIENT + routing_id)

    @staticmethod
    def routing_id(peer: Peer) -> bytes | None:
        """The routing id of ``peer``, if it is a client's name."""
        return peer.removeprefix(_CLIENT) if peer.startswith(_CLIENT) else None

    def admit(self) -> None:
        """Answer ZAP requests (RFC 27): a client with our key is admitted."""
        assert self.zap is not None
        assert self.settings.keys is not None
        for _ in range(REQUESTS_MAX):
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
        for socket in self.sockets:
            socket.close(linger=linger_ms)
        if self._file is not None:
            with suppress(OSError):
                if os.lstat(self._file[0]).st_ino == self._file[1]:  # still ours
                    os.unlink(self._file[0])

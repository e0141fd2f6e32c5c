"""Sockets with every limit set, and binding them where nobody else is."""

from __future__ import annotations

import os
import socket as system
import stat
from typing import Final

import zmq

from cache_manager.errors import ConfigError
from transfer.zmq_settings import ZmqSettings

ZAP_DOMAIN: Final = b"kvroute"
BUFFER_NBYTES: Final = 1 << 20


def router(context: zmq.Context[zmq.Socket[bytes]], settings: ZmqSettings) -> zmq.Socket[bytes]:
    """A server's socket, not bound yet: sending to nobody is an error, and a restarted client takes its name over."""
    socket = _limited(context.socket(zmq.ROUTER), settings, settings.bind or "")
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.RCVHWM, settings.served_messages_max)
    socket.setsockopt(zmq.MAXMSGSIZE, settings.served_frame_nbytes_max)
    socket.setsockopt(zmq.BACKLOG, settings.connections_max)
    if settings.curve_server is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, settings.curve_server.keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer from our list nobody comes in
    return socket


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], settings: ZmqSettings, identity: bytes, address: str
) -> zmq.Socket[bytes]:
    """A client's socket, not connected yet: nothing is queued for a server that is not there."""
    socket = _limited(context.socket(zmq.DEALER), settings, address)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RCVHWM, settings.received_messages_max)
    socket.setsockopt(zmq.MAXMSGSIZE, settings.frame_nbytes_max)
    socket.setsockopt(zmq.RECONNECT_IVL, settings.reconnect_ms)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, max(settings.reconnect_max_ms, settings.reconnect_ms))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, settings.handshake_ms)
    if settings.curve_client is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, settings.curve_client.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, settings.curve_client.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, settings.curve_client.keys.secret)
    return socket


def bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind and answer the address that clients connect to. A live server's ipc path, or a file, is left alone."""
    if address.startswith("ipc://"):
        _free_path(address.removeprefix("ipc://"))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError("bind", "an address that is free", f"{address}: {error.strerror}") from error
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if bound.startswith("ipc://"):
        os.chmod(bound.removeprefix("ipc://"), 0o600)
    return bound


class BoundPath:
    """The file of a bound ipc address (of another kind of address: nothing), which ZeroMQ leaves behind."""

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("ipc://") if address.startswith("ipc://") else ""
        self._file = _identity(self._path)

    def remove(self) -> None:
        """Remove it, if it is still the same one."""
        if self._file is not None and _identity(self._path) == self._file:
            os.unlink(self._path)


def _free_path(path: str) -> None:
    """Raise unless nothing, or what a dead server left, is at ``path``: ZeroMQ would remove whatever is there."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError("bind", "a path in a directory that is there", f"{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError("bind", "a path where there is nothing, or a socket", path)
    with system.socket(system.AF_UNIX, system.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise ConfigError("bind", "a path that is free", f"{path}: {error.strerror}") from error
    raise ConfigError("bind", "a path that no server uses", path)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _limited(socket: zmq.Socket[bytes], settings: ZmqSettings, address: str) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, 0)  # of a lost peer nothing is kept; close() sets its own
    socket.setsockopt(zmq.SNDHWM, settings.sent_messages_max)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    # Not ZMTP heartbeats: libzmq 4.3.5 aborts the process when one is due on a connection whose peer has died while its
    # messages waited at the high-water mark. A peer that is alive but stopped is the lease's business.
    probe_s = max(settings.silence_ms // 3000, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, probe_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, settings.silence_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, settings.handshake_ms)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.SNDBUF, BUFFER_NBYTES)
    socket.setsockopt(zmq.RCVBUF, BUFFER_NBYTES)
    socket.copy_threshold = 0  # who sends without a copy has decided so
    return socket

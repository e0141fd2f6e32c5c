"""Sockets with every limit set, events of their connections, and binding to a free address."""

from __future__ import annotations

import os
import socket as system
import stat
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from cache_manager.errors import ConfigError
from transfer.messages import CONTROL_NBYTES_MAX, RECORD_NBYTES_MAX
from transfer.zmq_settings import ZmqSettings

ZAP_DOMAIN: Final = b"kvroute"
REQUESTS_MAX: Final = 1024
"""Most admissions at a time."""

EVENTS_MAX: Final = 1024
MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

SENT_MESSAGES_MAX: Final = 64
RECEIVED_MESSAGES_MAX: Final = 16
SERVED_MESSAGES_MAX: Final = 8
"""Whole messages that are kept for each peer, each server and each client until they are sent or taken. A message with
endless frames has no limit: a peer that has the key, or runs on this machine, is trusted not to send one."""

BACKLOG_MAX: Final = 256
"""Connections that wait to be accepted."""

HANDSHAKE_MS: Final = 5_000
RECONNECT_MS: Final = 50
RECONNECT_MAX_MS: Final = 500
SILENCE_MS: Final = 10_000
"""A TCP peer whose machine is silent for about this long is lost."""

BUFFER_NBYTES: Final = 1 << 20

Socket = zmq.Socket[bytes]


def router(context: zmq.Context[Socket], settings: ZmqSettings) -> Socket:
    """A server's socket, not bound yet: sending to an absent client is an error, a restarted client takes over its
    name."""
    socket = _limited(context.socket(zmq.ROUTER), settings.bind or "", SERVED_MESSAGES_MAX, CONTROL_NBYTES_MAX)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.BACKLOG, BACKLOG_MAX)
    if settings.keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, settings.keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no client enters without our answer
    return socket


def dealer(context: zmq.Context[Socket], settings: ZmqSettings, identity: bytes, address: str) -> Socket:
    """A client's socket, not connected yet: nothing is queued for a server that is not there."""
    socket = _limited(context.socket(zmq.DEALER), address, RECEIVED_MESSAGES_MAX, RECORD_NBYTES_MAX)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, HANDSHAKE_MS)
    if settings.keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, settings.keys.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, settings.keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, settings.keys.secret)
    return socket


def monitored(socket: Socket) -> Socket:
    """A socket with the connection events of ``socket``."""
    monitor = socket.get_monitor_socket(MONITORED)
    monitor.linger = 0
    return monitor


def events(monitor: Socket) -> list[int]:
    """A monitor's events."""
    happened: list[int] = []
    while len(happened) < EVENTS_MAX and int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        happened.append(int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"]))
    return happened


def bind(socket: Socket, address: str) -> str:
    """Bind, and return the address that clients connect to. A live server's ipc path, or a file, is left alone."""
    path = address.removeprefix("ipc://") if address.startswith("ipc://") else ""
    if path:
        _free(path)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError("bind", "an address that is free", f"{address}: {error.strerror}") from error
    if path:
        os.chmod(path, 0o600)
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound


def _free(path: str) -> None:
    """Raise unless ``path`` is free or a dead server's socket: ZeroMQ would remove anything there."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError("bind", "a path where there is nothing, or a socket", path)
        with system.socket(system.AF_UNIX, system.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        raise ConfigError("bind", "a path that is free", f"{path}: {error.strerror}") from error
    raise ConfigError("bind", "a path that no server uses", path)


def _limited(socket: Socket, address: str, received_max: int, frame_nbytes_max: int) -> Socket:
    socket.setsockopt(zmq.LINGER, 0)  # no message is kept for a lost peer; close() sets its own
    socket.setsockopt(zmq.SNDHWM, SENT_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, received_max)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_nbytes_max)  # a larger frame ends the connection
    socket.setsockopt(zmq.IMMEDIATE, 1)
    # Not ZMTP heartbeats: libzmq 4.3.5 aborts the process when one is due on a connection whose peer has died while its
    # messages waited at the high-water mark. The lease deals with a peer that is alive but stopped.
    probe_s = max(SILENCE_MS // 3000, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, probe_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, probe_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, SILENCE_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.SNDBUF, BUFFER_NBYTES)
    socket.setsockopt(zmq.RCVBUF, BUFFER_NBYTES)
    socket.copy_threshold = 0  # the sender decides about copies
    return socket

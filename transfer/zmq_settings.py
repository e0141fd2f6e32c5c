"""What a ZeroMQ link can be told, and the addresses it takes. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Final

from cache_manager.errors import ConfigError
from transfer.curve import CurveClient, CurveServer

IPC_PATH_NBYTES_MAX: Final = 107
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.*_-]{1,253}):([0-9]{1,5}|\*)")

_MOST: Final = {"_nbytes": 1 << 40, "_ms": 3_600_000, "_max": 1 << 20}
"""By what a name has in it, the first that it has."""


@dataclass(frozen=True, slots=True)
class ZmqSettings:
    """One endpoint; :class:`ConfigError` names what cannot be.

    ``bind`` makes it a server as well: ``ipc:///path`` or ``tcp://127.0.0.1:PORT`` (port ``*``: any that is free). An
    address that other machines reach needs CURVE keys: ``curve_server`` to ``bind`` to it, ``curve_client`` to
    ``connect``. ``identity`` names a client to its servers; the default is 16 random bytes, which no peer can guess.

    A TCP peer whose machine says nothing for about ``silence_ms`` is lost.

    Larger frames than ``served_frame_nbytes_max`` (to the server) or ``frame_nbytes_max`` (to the client) end the
    connection that they come by. Bulk frames from ``zero_copy_nbytes`` on are sent from where they lie, smaller ones
    are copied, which is cheaper. Of what has come but not been taken yet, ``served_messages_max`` whole messages are
    kept for each client, ``received_messages_max`` for each server. A message of frames without an end has no limit: a
    peer that has a listed key, or runs on this machine, is trusted not to send one.
    """

    bind: str | None = None
    identity: bytes | None = None
    curve_server: CurveServer | None = None
    curve_client: CurveClient | None = None
    sent_messages_max: int = 64
    received_messages_max: int = 16
    served_messages_max: int = 8
    frames_max: int = 1026
    connections_max: int = 256
    servers_max: int = 256
    served_frame_nbytes_max: int = 1 << 20
    frame_nbytes_max: int = 256 << 20
    zero_copy_nbytes: int = 256 << 10
    silence_ms: int = 10_000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 500
    handshake_ms: int = 5_000

    def __post_init__(self) -> None:
        if self.bind is not None:
            check_address(self.bind, "bind", curve=self.curve_server is not None)
        if self.identity is not None and (not 1 <= len(self.identity) <= 64 or self.identity[0] == 0):
            raise ConfigError("identity", "1 to 64 bytes, the first not 0", repr(self.identity))
        for field in fields(self):
            value = getattr(self, field.name)
            most = next((most for unit, most in _MOST.items() if unit in field.name), None)
            if most and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
                raise ConfigError(field.name, f"an integer from 1 to {most}", repr(value))
        if self.frames_max < 2:
            raise ConfigError("frames_max", "at least 2", self.frames_max)


def check_address(address: str, field: str, *, curve: bool) -> None:
    """Raise :class:`ConfigError` unless ``address`` can be bound or connected to, with or without ``curve`` keys."""
    if not isinstance(address, str):
        raise ConfigError(field, "ipc:///PATH or tcp://HOST:PORT", repr(address)[:80])
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not PurePosixPath(path).is_absolute() or len(path.encode()) > IPC_PATH_NBYTES_MAX:
            raise ConfigError(field, f"ipc:// and an absolute path of at most {IPC_PATH_NBYTES_MAX} bytes", address)
        return
    match = _TCP.fullmatch(address)
    if match is None or (match[2] != "*" and int(match[2]) >= 65_536):
        raise ConfigError(field, "ipc:///PATH or tcp://HOST:PORT", repr(address))
    if not curve and not is_loopback(match[1].strip("[]")):
        raise ConfigError(field, "an address of this machine alone where there are no CURVE keys", repr(address))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name other than ``localhost`` may be anything.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("*"), is_loopback("eth0")
    (True, True, False, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

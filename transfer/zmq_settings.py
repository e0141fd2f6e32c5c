"""The settings of a ZeroMQ link, and the addresses it accepts. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from cache_manager.errors import ConfigError
from transfer.curve import CurveKeys

IPC_PATH_NBYTES_MAX: Final = 107
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.*_-]{1,253}):([0-9]{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class ZmqSettings:
    """One endpoint; :class:`ConfigError` names an invalid setting.

    ``bind`` makes it a server as well: ``ipc:///path`` or ``tcp://127.0.0.1:PORT`` (port ``*``: any free one). An
    address that other machines reach needs ``keys``, which all peers have. ``identity`` names a client to its servers;
    the default is 16 random bytes, which no peer can guess. Beyond ``servers_max`` servers one that is not connected
    makes room.
    """

    bind: str | None = None
    identity: bytes | None = None
    keys: CurveKeys | None = None
    servers_max: int = 256

    def __post_init__(self) -> None:
        if self.bind is not None:
            check_address(self.bind, "bind", curve=self.keys is not None)
        if self.identity is not None and (not 1 <= len(self.identity) <= 64 or self.identity[0] == 0):
            raise ConfigError("identity", "1 to 64 bytes, the first not 0", repr(self.identity))
        if type(self.servers_max) is not int or not 1 <= self.servers_max <= 1 << 16:
            raise ConfigError("servers_max", f"an integer from 1 to {1 << 16}", repr(self.servers_max))


def check_address(address: str, field: str, *, curve: bool) -> None:
    """Raise :class:`ConfigError` unless ``address`` can be bound or connected to, with or without ``curve`` keys."""
    if isinstance(address, str) and address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not PurePosixPath(path).is_absolute() or len(path.encode()) > IPC_PATH_NBYTES_MAX:
            raise ConfigError(field, f"ipc:// and an absolute path of at most {IPC_PATH_NBYTES_MAX} bytes", address)
        return
    match = _TCP.fullmatch(address) if isinstance(address, str) else None
    if match is None or (match[2] != "*" and int(match[2]) >= 65_536):
        raise ConfigError(field, "ipc:///PATH or tcp://HOST:PORT", repr(address)[:80])
    if not curve and not is_loopback(match[1].strip("[]")):
        raise ConfigError(field, "an address of this machine alone, without CURVE keys", repr(address))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name other than ``localhost`` counts as reachable.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("*"), is_loopback("eth0")
    (True, True, False, False, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""The settings of a Mooncake store, and their names in its URL. Pure.

``mooncake://HOST:PORT/PREFIX?segment=1GiB&timeout_ms=3000``; ``docs/concepts/mooncake.md`` lists the parameters.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.storage.url import StoreUrl

SEGMENT_NBYTES_MIN: Final = 16 << 20
ARENA_NBYTES_MIN: Final = 1 << 20
ADMIN_PORT: Final = 9003
DURATION_MS_MAX: Final = 600_000

_PREFIX = re.compile(r"[A-Za-z0-9._@:-]+(/[A-Za-z0-9._@:-]+)*")
_ADDRESS = re.compile(r"([A-Za-z0-9.-]{1,253}):([0-9]{1,5})")
_DURATIONS: Final = ("timeout_ms", "connect_ms", "full_ms")


def parse_address(text: str, field: str) -> tuple[str, int]:
    """``HOST:PORT``, taken apart.

    >>> parse_address("127.0.0.1:50051", "master")
    ('127.0.0.1', 50051)
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65_536:
        raise ConfigError(field, "HOST:PORT", repr(text))
    return match[1], int(match[2])


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """One store's settings; :class:`ConfigError` names an invalid one.

    ``segment_nbytes`` above 0 lends that much of this machine's memory to the pool, in a process of its own.
    ``timeout_ms`` is ``call_s`` of the process (:class:`cache_manager.storage.apart.ApartSettings`). A put that finds
    the pool full, or another writer in the middle of its key, tries again for ``full_ms``.
    """

    master: str
    prefix: str = "kvroute"
    segment_nbytes: int = 0
    arena_nbytes: int = 64 << 20
    admin: str = ""  # of the master; empty: port 9003 of its host
    host: str = ""  # this machine's address for others; empty: the one used towards the master
    protocol: str = "tcp"
    devices: str = ""
    timeout_ms: int = 3_000
    connect_ms: int = 15_000
    full_ms: int = 1_000
    log: str = ""  # a file for what the native clients print

    def __post_init__(self) -> None:
        parse_address(self.master, "mooncake: master")
        parse_address(self.admin or self.master, "mooncake: store parameter admin")
        if not _PREFIX.fullmatch(self.prefix) or len(self.prefix) > 200:
            raise ConfigError("mooncake: store path", f"at most 200 characters of {_PREFIX.pattern}", repr(self.prefix))
        for name, got, least, most in (
            ("segment", self.segment_nbytes or SEGMENT_NBYTES_MIN, SEGMENT_NBYTES_MIN, sys.maxsize),
            ("arena", self.arena_nbytes, ARENA_NBYTES_MIN, sys.maxsize),
            *((name, getattr(self, name), 1, DURATION_MS_MAX) for name in _DURATIONS),
        ):
            if not least <= got <= most:
                raise ConfigError(f"mooncake: store parameter {name}", f"{least} to {most}", got)

    @property
    def admin_address(self) -> tuple[str, int]:
        return parse_address(self.admin or f"{self.master.rpartition(':')[0]}:{ADMIN_PORT}", "mooncake: admin")

    @classmethod
    def from_url(cls, url: StoreUrl) -> MooncakeSettings:
        """``mooncake://HOST:PORT/PREFIX?...``"""
        url.allow("segment", "arena", "admin", "host", "protocol", "device", "log", *_DURATIONS)
        given = url.parameters
        return cls(
            master=url.host,
            prefix=url.path.strip("/") or "kvroute",
            segment_nbytes=url.nbytes("segment", 0),
            arena_nbytes=url.nbytes("arena", 64 << 20),
            admin=given.get("admin", ""),
            host=given.get("host", ""),
            protocol=url.choice("protocol", ("tcp", "rdma"), "tcp"),
            devices=given.get("device", ""),
            log=given.get("log", ""),
            **{name: url.milliseconds(name, 0) for name in _DURATIONS if name in given},
        )


def native_environment(timeout_ms: int) -> dict[str, str]:
    """Environment variables of the native client, for short waits; the operator's own values win."""
    seconds = str(max(-(-timeout_ms // 1000), 1))
    return {
        "MC_LOG_LEVEL": "ERROR",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # each costs 4 s
        "MC_RPC_TIMEOUT_MS": str(timeout_ms),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_LANES_PER_PEER": "16",  # transfers to a hung peer time out lane by lane
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    }

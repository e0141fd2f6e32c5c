"""How much a file store may keep, and how long. Pure: no clock, no disk.

Ages are differences of wall-clock times, because they must outlive the process, and wall clocks jump. Whatever a jump
does, bytes are verified as always; what it can do is this. Forward: records go early. Back by less than the time to
live: records stay longer by the jump. Back by more: they lie so far in the future that their age is anybody's guess,
and they go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.spec import align
from cache_manager.storage.disk import Space
from cache_manager.storage.slots.extent import PAGE_NBYTES

QUOTA_NBYTES: Final = 4 << 30
QUOTA_NBYTES_MIN: Final = 8 * PAGE_NBYTES
EXTENT_NBYTES_MIN: Final = 128 << 10
"""Of the default extents, where the quota has room for one."""
EXTENTS: Final = 32
"""That a quota is divided into: whole ones change hands between layouts."""
EXTENTS_MAX: Final = 512
"""Each has a descriptor open."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one store; :class:`ConfigError` for those that cannot be kept."""

    quota_nbytes: int
    extent_nbytes: int
    ttl_s: float | None = None
    min_free_nbytes: int = 0
    min_free_percent: int = 0

    def __post_init__(self) -> None:
        if self.quota_nbytes < QUOTA_NBYTES_MIN:
            raise ConfigError("quota", f"{QUOTA_NBYTES_MIN} bytes or more", f"{self.quota_nbytes} bytes")
        if self.extent_nbytes < QUOTA_NBYTES_MIN or self.quota_nbytes // self.extent_nbytes > EXTENTS_MAX:
            wanted = f"{QUOTA_NBYTES_MIN} bytes or more, and {EXTENTS_MAX} in a quota at most"
            raise ConfigError("extent", wanted, f"{self.extent_nbytes} bytes")
        check_ttl(self.ttl_s)
        if self.min_free_nbytes < 0:
            raise ConfigError("min_free", "0 bytes or more", self.min_free_nbytes)
        if not 0 <= self.min_free_percent < 100:
            raise ConfigError("min_free", "0 to 99 per cent", f"{self.min_free_percent}%")

    @property
    def asks_for_space(self) -> bool:
        """Whether the file system's room has to be looked at."""
        return self.min_free_nbytes > 0 or self.min_free_percent > 0

    def check_space(self, space: Space | None) -> None:
        """:class:`ConfigError` where the file system cannot hold the reserve and one extent, even if it is empty."""
        if space is not None and self.reserve_nbytes(space) + self.extent_nbytes > space.total_nbytes:
            room = max(space.total_nbytes - self.extent_nbytes, 0)
            wanted = f"at most {room} bytes, so that an extent of {self.extent_nbytes} bytes fits; lower min_free"
            raise ConfigError(
                "min_free", f"{wanted} or use a larger file system", f"{self.reserve_nbytes(space)} bytes"
            )

    def reserve_nbytes(self, space: Space) -> int:
        """What the file system has to keep free."""
        return max(self.min_free_nbytes, -(-space.total_nbytes * self.min_free_percent // 100))

    def room_nbytes(self, used_nbytes: int, space: Space | None) -> int:
        """What may be allocated now; below zero where so much has to go.

        >>> limits = Limits(1 << 20, 1 << 16, min_free_nbytes=1000)
        >>> limits.room_nbytes(1 << 19, Space(66_000, 1 << 30)), limits.room_nbytes(1 << 20, None)
        (65000, 0)
        """
        room = self.quota_nbytes - used_nbytes
        return room if space is None else min(room, space.free_nbytes - self.reserve_nbytes(space))


def default_extent_nbytes(quota_nbytes: int) -> int:
    """A 32nd of the quota, or 128 KiB, or all of it."""
    wanted = align(max(quota_nbytes // EXTENTS, EXTENT_NBYTES_MIN), PAGE_NBYTES)
    return min(wanted, max(quota_nbytes, QUOTA_NBYTES_MIN))


def check_ttl(ttl_s: float | None) -> None:
    """:class:`ConfigError` unless it is a time that can be waited for."""
    if ttl_s is not None and not 0 < ttl_s < float("inf"):
        raise ConfigError("ttl", "a positive number of seconds", ttl_s)


def is_older(created_ms: int, now_s: float, limit_s: float) -> bool:
    """Whether what was created then, in ms of the wall clock, has reached ``limit_s`` at ``now_s``.

    As far in the future counts as too old: a clock that was set back says nothing about age.

    >>> is_older(100_000, 130.0, 60.0), is_older(100_000, 160.0, 60.0), is_older(100_000, 40.0, 60.0)
    (False, True, True)
    """
    return abs(now_s - created_ms / 1000) >= limit_s

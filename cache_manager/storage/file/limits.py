"""How much a file store may keep, how long, and what goes when something must. Pure: no clock, no disk.

Age is counted by segment: a record is as old as the segment it is in, and a segment that is written takes no records
any more once it has lived an eighth of the time to live. So a record is served for at least 7/8 of it, unless room
is needed, and never longer.

Ages are differences of wall-clock times, because they must outlive the process, and wall clocks jump. Whatever a jump
does, bytes are verified as always; what it can do is this. Forward: records go early. Back by less than the time to
live: records stay longer by the jump. Back by more: they lie so far in the future that their age is anybody's guess,
and they go. A segment whose creation time was lost to damage has no known age, and goes too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.spec import align
from cache_manager.storage.disk import Space
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.storage.file.table import Segment

QUOTA_NBYTES: Final = 4 << 30
SEGMENT_NBYTES: Final = 512 << 10
"""Of the default segments, where the quota has room for 32 of them."""
SEGMENT_NBYTES_MIN: Final = 16 << 10
SEGMENTS_MAX: Final = 512
WRITTEN_SHARE: Final = 1 / 8
"""Of the time to live: how long a segment takes records."""
KEPT_NBYTES_MAX: Final = 1 << 20
"""Of the records that one call takes along from segments that make room: they are in memory, and the call waits."""


def default_segment_nbytes(quota_nbytes: int) -> int:
    """A 256th of the quota: with so many the segment used least recently is nearly the record used least recently.

    Small quotas have fewer, so that pages and indexes take little of them.
    """
    wanted = max(-(-quota_nbytes // 256), min(SEGMENT_NBYTES, quota_nbytes // 32))
    return max(align(wanted, PAGE_NBYTES), SEGMENT_NBYTES_MIN)


def is_older(created_s: float | None, now_s: float, limit_s: float | None) -> bool:
    """Whether what was created at ``created_s`` has reached ``limit_s`` at ``now_s``, both of the wall clock.

    >>> is_older(100.0, 130.0, 60.0), is_older(100.0, 160.0, 60.0), is_older(None, 130.0, 60.0)
    (False, True, True)

    As far in the future counts as too old: a clock that was set back says nothing about age.

    >>> is_older(100.0, 90.0, 60.0), is_older(100.0, 40.0, 60.0), is_older(None, 0.0, None)
    (False, True, False)
    """
    return limit_s is not None and (created_s is None or abs(now_s - created_s) >= limit_s)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one store; :class:`ConfigError` for those that cannot be kept."""

    quota_nbytes: int
    segment_nbytes: int
    ttl_s: float | None = None
    min_free_nbytes: int = 0
    min_free_percent: int = 0

    def __post_init__(self) -> None:
        segment_nbytes, quota_nbytes = self.segment_nbytes, self.quota_nbytes
        if segment_nbytes < SEGMENT_NBYTES_MIN or segment_nbytes % PAGE_NBYTES:
            raise ConfigError("segment", f"a multiple of {PAGE_NBYTES}, {SEGMENT_NBYTES_MIN} or more", segment_nbytes)
        if not 2 <= quota_nbytes // segment_nbytes <= SEGMENTS_MAX:
            wanted = f"2 to {SEGMENTS_MAX} segments of {segment_nbytes} bytes"
            fitting = default_segment_nbytes(quota_nbytes)
            if quota_nbytes < 2 * SEGMENT_NBYTES_MIN:
                remedy = f"give quota={2 * SEGMENT_NBYTES_MIN} or more"
            else:
                remedy = f"leave segment out, or give segment={fitting}"
            raise ConfigError("quota", f"{wanted}; {remedy}", f"{quota_nbytes} bytes")
        check_ttl(self.ttl_s)
        if self.min_free_nbytes < 0:
            raise ConfigError("min_free", "0 bytes or more", self.min_free_nbytes)
        if not 0 <= self.min_free_percent < 100:
            raise ConfigError("min_free", "0 to 99 per cent", f"{self.min_free_percent}%")

    def check_space(self, space: Space | None) -> None:
        """:class:`ConfigError` where the file system cannot hold the reserve and one segment, even if it is empty."""
        if space is not None and self.reserve_nbytes(space) + self.segment_nbytes > space.total_nbytes:
            wanted = f"at most {max(space.total_nbytes - self.segment_nbytes, 0)} bytes, so that a segment of"
            remedy = "lower min_free or segment, or use a larger file system"
            raise ConfigError(
                "min_free",
                f"{wanted} {self.segment_nbytes} bytes fits; {remedy}",
                f"{self.reserve_nbytes(space)} bytes",
            )

    def reserve_nbytes(self, space: Space) -> int:
        """What the file system has to keep free."""
        return max(self.min_free_nbytes, -(-space.total_nbytes * self.min_free_percent // 100))

    @property
    def kept_nbytes(self) -> int:
        """What one call may take along of segments that make room, which leaves it room for its own.

        With a time to live nothing, because what is taken along would be as young as its new segment.
        """
        return 0 if self.ttl_s is not None else min(self.quota_nbytes // 4, KEPT_NBYTES_MAX)

    @property
    def asks_for_space(self) -> bool:
        """Whether the file system's room has to be looked at."""
        return self.min_free_nbytes > 0 or self.min_free_percent > 0

    def short_nbytes(self, used_nbytes: int, new_nbytes: int, space: Space | None) -> int:
        """Bytes that must go before ``new_nbytes`` may come: for the quota or the disk's reserve, whichever is more.

        >>> limits = Limits(1 << 20, 1 << 16, min_free_nbytes=1000)
        >>> limits.short_nbytes(1 << 19, 1 << 16, Space(66_000, 1 << 30)), limits.short_nbytes(1 << 20, 100, None)
        (536, 100)
        """
        short = used_nbytes + new_nbytes - self.quota_nbytes
        if space is not None:
            short = max(short, self.reserve_nbytes(space) + new_nbytes - space.free_nbytes)
        return max(short, 0)

    def is_fully_written(self, created_s: float | None, now_s: float) -> bool:
        """Whether a segment has taken records for as long as it may."""
        return self.ttl_s is not None and is_older(created_s, now_s, self.ttl_s * WRITTEN_SHARE)


def check_ttl(ttl_s: float | None) -> None:
    """:class:`ConfigError` unless it is a time that can be waited for."""
    if ttl_s is not None and not 0 < ttl_s < float("inf"):
        raise ConfigError("ttl", "a positive number of seconds", ttl_s)


def victims(segments: Iterable[Segment], short_nbytes: int, short_files: int) -> list[Segment] | None:
    """The segments that go so that so many bytes and files are given back.

    One after the other, of the tenth that was used least recently the one in which fewest records were asked for. Those
    set aside go last, and before them those that the last call has used. ``None`` when all of them together would not
    do: then nothing should go, because nothing would be gained.
    """
    chosen: list[Segment] = []
    segments = list(segments)
    now = max((segment.touched_at for segment in segments), default=0)
    order = sorted(segments, key=lambda s: (s.aside, s.touched_at == now, s.used_at, s.sequence))
    candidates = max(len(order) // 10, 1)
    while order and (short_nbytes > 0 or short_files > len(chosen)):
        one = min(order[:candidates], key=lambda s: (s.aside, s.touched_at == now, s.hits.count(1)))
        order.remove(one)
        chosen.append(one)
        short_nbytes -= one.size
    return chosen if short_nbytes <= 0 and short_files <= len(chosen) else None

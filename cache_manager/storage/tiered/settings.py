"""What a tiered store can be told, and how its URL spells it. Pure.

``tiered:?queue=64MiB&full=drop,file:///dir?quota=4GiB,mooncake://HOST:PORT/PREFIX``;
``docs/concepts/tiered-store.md`` lists the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.storage.url import StoreUrl

DURATION_MS_MAX: Final = 600_000

_SIZES: Final = {"queue": "queue_nbytes", "promote": "promote_nbytes"}
_DURATIONS: Final = ("flush_ms", "delete_ms", "close_ms", "pause_ms", "pause_max_ms")


class WhenFull(StrEnum):
    """What becomes of a record whose later tier has a full queue."""

    WRITE = "write"  # the caller writes it to that tier and waits
    DROP = "drop"  # that tier does not get it


@dataclass(frozen=True, slots=True)
class TieredSettings:
    """One store's settings; :class:`ConfigError` names what cannot be.

    Every tier has a queue of ``queue_nbytes`` for records that were put and one of ``promote_nbytes`` for records that
    were read from a later tier (0: no promotion). ``flush``, ``delete`` and ``close`` wait as long as they are told
    and say what was left undone. ``failures_max`` failing calls in a row open a tier's breaker, for ``pause_ms`` at
    first.
    """

    queue_nbytes: int = 64 << 20
    promote_nbytes: int = 16 << 20
    when_full: WhenFull = WhenFull.WRITE
    flush_ms: int = 30_000
    delete_ms: int = 5_000
    close_ms: int = 5_000
    pause_ms: int = 500
    pause_max_ms: int = 10_000
    failures_max: int = 3

    def __post_init__(self) -> None:
        if self.queue_nbytes < 1:
            raise ConfigError("tiered: store parameter queue", "1 byte or more", self.queue_nbytes)
        if self.promote_nbytes < 0:
            raise ConfigError("tiered: store parameter promote", "0 bytes or more", self.promote_nbytes)
        for name in _DURATIONS:
            if not 0 < getattr(self, name) <= DURATION_MS_MAX:
                raise ConfigError(f"tiered: store parameter {name}", f"1 to {DURATION_MS_MAX}", getattr(self, name))
        if self.failures_max < 1:
            raise ConfigError("tiered: failures_max", "at least 1", self.failures_max)

    @classmethod
    def from_url(cls, url: StoreUrl) -> TieredSettings:
        """The parameters between ``tiered:`` and the first tier."""
        url.allow(*_SIZES, "full", *_DURATIONS)
        given: dict[str, int] = {}
        for name, field in _SIZES.items():
            if name in url.parameters:
                off = name == "promote" and url.parameters[name] == "0"
                given[field] = 0 if off else url.nbytes(name, default=0)
        for name in _DURATIONS:
            if name in url.parameters:
                text = url.parameters[name]
                if not (text.isascii() and text.isdecimal()):
                    raise ConfigError(f"tiered: store parameter {name}", "whole milliseconds", repr(text))
                given[name] = int(text)
        when_full = WhenFull(url.choice("full", tuple(WhenFull), WhenFull.WRITE))
        return cls(when_full=when_full, **given)


__all__ = ["TieredSettings", "WhenFull"]

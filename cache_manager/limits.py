"""Limits on the background jobs of a set of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from cache_manager.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JobLimits:
    """How much may be under way at once; a job that does not fit is refused, which is a normal answer.

    ``nbytes_max`` bounds staging, of rows and of KV that is stored beside them; a larger job is taken when it is the
    only one.
    """

    threads_max: int = 2
    jobs_max: int = 64
    nbytes_max: int = 1 << 30
    close_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("threads_max", "jobs_max", "nbytes_max"):
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, "an integer of 1 or more", repr(value))
        if not 0 <= self.close_s < float("inf"):
            raise ConfigError("close_s", "a finite number of seconds, 0 or more", self.close_s)

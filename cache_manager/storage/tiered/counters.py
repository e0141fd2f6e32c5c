"""What a tiered store has done so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Of one tier; records unless it says otherwise.

    ``queued = written + promoted + refused + cancelled + abandoned + waiting``, always.
    """

    name: str
    hits: int = 0  # keys that this tier answered, from its queue included
    queue_hits: int = 0  # of these, those that were still waiting to be put here
    corrupt: int = 0  # copies that failed their checks and were deleted from this tier only
    failed_reads: int = 0  # keys of calls that failed
    failed_writes: int = 0
    bypassed_reads: int = 0  # keys that were not asked for because the breaker was open
    bypassed_writes: int = 0  # records that a caller did not write here, for that reason; most were queued
    queued: int = 0
    written: int = 0  # from the queue, of records that were put
    promoted: int = 0  # from the queue, of records that were read from a later tier
    refused: int = 0  # from the queue, but the tier had no room
    cancelled: int = 0  # deleted while they waited
    abandoned: int = 0  # still waiting when the store was closed
    waiting: int = 0  # now
    waiting_nbytes: int = 0  # now
    written_through: int = 0  # the queue was full, and the caller wrote them
    dropped: int = 0  # the queue was full, and this tier did not get them
    dropped_promotions: int = 0
    owed_deletes: int = 0  # now: hidden from readers, to be deleted here
    deleted: int = 0  # keys
    worker_errors: int = 0  # calls of the worker that ended with what is no StorageError
    read_openings: int = 0  # of the breaker
    write_openings: int = 0


@dataclass(frozen=True, slots=True)
class TieredCounters:
    """``asked = sum of the tiers' hits + misses + corrupt + failed``, always; keys of ``get_into``."""

    asked: int
    misses: int
    incomplete_misses: int  # of these, those that a tier was not able to answer
    corrupt: int  # no tier had a sound copy, and one had a bad one
    failed: int  # of calls that raised, because no tier answered
    tiers: tuple[TierCounters, ...]


__all__ = ["TierCounters", "TieredCounters"]

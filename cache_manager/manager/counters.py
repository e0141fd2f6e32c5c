"""The counters of a block manager, which its parts share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerCounters:
    """What happened since the start; every number only grows."""

    sequences: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    restored_tokens: int = 0
    persisted_blocks: int = 0
    evicted_blocks: int = 0
    preemptions: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    cow_blocks: int = 0
    cow_tokens: int = 0
    hits_cut_for_missing_rows: int = 0
    store_failures: int = 0
    errands_refused: int = 0
    errands_cut: int = 0
    restores_abandoned: int = 0
    moves_failed: int = 0


Counts = Counter[str]
"""The books behind :class:`ManagerCounters`, by its fields; they belong to the scheduler's thread."""

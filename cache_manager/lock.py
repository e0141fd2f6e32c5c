"""The lock of one set of blocks, and what has happened under it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, fields

from cache_manager.errors import BlockBusyError, BlockStateError


@dataclass(frozen=True, slots=True)
class AuxCounters:
    """What happened since the start; every number only grows. A row counts once, whatever the number of specs."""

    rows_committed: int = 0
    rows_rejected: int = 0
    late_writes_dropped: int = 0
    bad_writes_dropped: int = 0
    steps_aborted: int = 0
    steps_dropped: int = 0
    swapped_out_rows: int = 0
    swapped_in_rows: int = 0
    copied_rows: int = 0
    moves_aborted: int = 0
    bad_moves_dropped: int = 0
    persisted_blocks: int = 0
    incomplete_blocks_not_persisted: int = 0
    restored_blocks: int = 0
    restored_without_rows: int = 0
    late_restores_dropped: int = 0
    incomplete_blocks_not_restored: int = 0
    absent_blocks_not_restored: int = 0
    corrupt_blocks_not_restored: int = 0
    failed_blocks_not_restored: int = 0
    blocks_of_another_origin_not_restored: int = 0
    cancelled_restores_dropped: int = 0
    jobs_begun: int = 0
    jobs_landed: int = 0
    jobs_cancelled: int = 0
    jobs_refused: int = 0
    rows_exported: int = 0
    rows_installed: int = 0
    late_installs_dropped: int = 0
    installs_of_another_origin_dropped: int = 0
    stale_keys: int = 0
    stale_blocks: int = 0
    rows_read: int = 0
    rows_missing: int = 0
    resets: int = 0
    feed_repetitions: int = 0
    feed_gaps: int = 0
    feed_operations_failed: int = 0
    feed_blocks_refused: int = 0


class Lock:
    """A lock for the threads of the process that made it; taken twice by one thread it raises instead of hanging.

    A finaliser or a signal handler may run in the middle of one of our own calls: it gets ``BlockBusyError``. A forked
    child shares the memory of a shared region, but has generations of its own: it gets ``BlockStateError``.
    """

    __slots__ = ("_counts", "_lock", "_owner", "_pid")

    def __init__(self) -> None:
        self._lock, self._owner, self._pid = threading.Lock(), 0, os.getpid()
        self._counts = {f.name: 0 for f in fields(AuxCounters)}

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise BlockStateError("blocks", "use by the process that made them", "a forked child")
        if self._owner == (me := threading.get_ident()):
            raise BlockBusyError("blocks", "a call from outside their own calls", "a finaliser or a signal handler")
        self._lock.acquire()
        self._owner = me

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter; the lock is held."""
        self._counts[name] += n

    def counters(self) -> AuxCounters:
        return AuxCounters(**self._counts)

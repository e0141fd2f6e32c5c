"""What the parts of :class:`AuxBlocks` share: one lock, the current key chain, the counters, and what is in flight."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cache_manager.checks import count_in_range
from cache_manager.errors import BlockStateError
from cache_manager.keys import KeyChain

if TYPE_CHECKING:
    from cache_manager.step import Step


@dataclass(frozen=True, slots=True)
class AuxCounters:
    """What happened since the start; every number only grows. A row counts once, whatever the number of specs."""

    rows_committed: int = 0
    rows_rejected: int = 0
    late_writes_dropped: int = 0
    steps_aborted: int = 0
    swapped_out_rows: int = 0
    swapped_in_rows: int = 0
    copied_rows: int = 0
    moves_aborted: int = 0
    persisted_blocks: int = 0
    incomplete_blocks_not_persisted: int = 0
    restored_blocks: int = 0
    late_restores_dropped: int = 0
    incomplete_blocks_not_restored: int = 0
    unaccompanied_blocks_not_restored: int = 0
    cancelled_restores_dropped: int = 0
    jobs_begun: int = 0
    jobs_landed: int = 0
    jobs_cancelled: int = 0
    jobs_refused: int = 0
    lookups_failed: int = 0
    rows_exported: int = 0
    rows_installed: int = 0
    late_installs_dropped: int = 0
    stale_keys: int = 0
    rows_read: int = 0
    rows_missing: int = 0
    resets: int = 0


class ProcessLock:
    """A lock for the threads of the process that made it; in a forked child it cannot be taken.

    A child shares the memory of a shared region, but has states and generations of its own: what it wrote would be
    taken for the parent's rows.
    """

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise BlockStateError("AuxBlocks", "use by the process that made it", "a forked child")
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Ledger:
    """The lock that guards states, generations, leases and validity, and the books kept under it.

    ``keys`` changes with a reset: whoever compares a key with it and acts on the answer does both under the lock.
    """

    __slots__ = ("_counts", "jobs", "keys", "lock", "moves", "steps", "steps_max")

    def __init__(self, keys: KeyChain, steps_max: int) -> None:
        count_in_range(steps_max, "steps_max", 1)
        self.lock = ProcessLock()
        self.keys = keys
        self.steps: list[Step] = []
        self.steps_max = steps_max
        self.moves = 0
        self.jobs = 0  # persists, restores and lookups that have not landed
        self._counts = {f.name: 0 for f in fields(AuxCounters)}

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter; the lock is held."""
        self._counts[name] += n

    def snapshot(self) -> AuxCounters:
        with self.lock:
            return AuxCounters(**self._counts)


class InFlight(ABC):
    """Work that has begun and is ended once: by :meth:`commit`, or by :meth:`abort`, which is harmless afterwards.

    As a context manager, an exception aborts, and leaving commits unless the body has ended it already. Whichever
    thread ends it, it ends once.
    """

    __slots__ = ("_ended",)
    _ended: bool  # read and written under the ledger's lock

    @abstractmethod
    def commit(self) -> object: ...

    @abstractmethod
    def abort(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif not self._ended:
            self.commit()

"""What the parts of one set of blocks share: the lock of the books, the current key chain, the counters.

Nobody waits for himself. A finaliser or a signal handler runs in the middle of whatever its thread was doing, which may
be one of our own calls: there, what gives something up (``free``, ``abort``, a dropped step) is put in a queue that the
interrupted call, or the next one, drains before it lets the lock go; every other call raises ``BlockBusyError``. The
lock is a re-entrant one, so that such a call gets as far as seeing that it is inside another; it never goes further.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cache_manager.errors import BlockBusyError, BlockStateError
from cache_manager.keys import KeyChain

if TYPE_CHECKING:
    from cache_manager.move import Move
    from cache_manager.records import Export


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


class Guard:
    """A lock for the threads of the process that made it, which knows when it is asked from inside itself.

    In a forked child it cannot be taken: a child shares the memory of a shared region, but has states and generations
    of its own, and what it wrote would be taken for the parent's rows.

    ``inner`` is a lock that may be taken inside it, and by itself: whoever has it does not wait for the guard, because
    another thread may have the guard and wait for ``inner``.
    """

    __slots__ = ("_busy", "_inside", "_later", "_lock", "_pid", "inner")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.inner = threading.Condition(threading.RLock())
        self._inside: Callable[[], bool] = self.inner._is_owned  # type: ignore[attr-defined]
        self._busy = False  # this thread is between enter and exit; read and written with the lock taken
        self._later: deque[Callable[[], object]] = deque()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise BlockStateError("AuxBlocks", "use by the process that made it", "a forked child")
        if not (inside := self._inside()):
            self._lock.acquire()
            if inside := self._busy:
                self._lock.release()
        if inside:
            raise BlockBusyError("AuxBlocks", "a call from outside its own calls", "a finaliser or a signal handler")
        self._busy = True
        if self._later:
            self._drain()

    def __exit__(self, *_: object) -> None:
        if self._later:
            self._drain()
        self._busy = False
        self._lock.release()

    def now_or_later(self, call: Callable[[], object]) -> None:
        """Run ``call``, which takes no lock, with the lock taken: now, or when the call that this one interrupts ends.

        Raises what ``call`` raises when it runs now; what it raises later has nobody to go to and is dropped, so that
        ``call`` should give something up and nothing else.
        """
        if os.getpid() != self._pid:
            raise BlockStateError("AuxBlocks", "use by the process that made it", "a forked child")
        if self._inside():
            self._later.append(call)
            return
        with self._lock:
            if self._busy:
                self._later.append(call)
                return
        with self:
            call()

    def _drain(self) -> None:
        while self._later:
            call = self._later.popleft()
            with suppress(BlockStateError):  # what it wanted to give up is in motion or given up: it came too late
                call()


class Books:
    """The lock that guards states, generations, leases and validity, and what is kept under it.

    ``keys`` changes with a reset: whoever compares a key with it and acts on the answer does both under the lock.
    """

    __slots__ = ("_counts", "guard", "keys", "moves")

    def __init__(self, keys: KeyChain) -> None:
        self.guard = Guard()
        self.keys = keys
        self.moves: dict[int, Callable[[], Move | Export | None]] = {}  # in flight, by id(): how to get at each
        self._counts = {f.name: 0 for f in fields(AuxCounters)}

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter; the lock is held."""
        self._counts[name] += n

    def snapshot(self) -> AuxCounters:
        """The counters; without the lock, so that a signal handler may ask."""
        return AuxCounters(**self._counts)


class InFlight(ABC):
    """Work that has begun and is ended once: by :meth:`commit`, or by :meth:`abort`, which is harmless afterwards.

    As a context manager, an exception aborts, and leaving commits unless the body has ended it already. Whichever
    thread ends it, it ends once. What is dropped is aborted.
    """

    __slots__ = ("__weakref__", "_books", "_ended")
    _books: Books
    _ended: bool  # read and written under the lock

    @abstractmethod
    def commit(self) -> object: ...

    def abort(self) -> None:
        """Make nothing of it readable, and let go what it keeps. Harmless after the end."""
        self._books.guard.now_or_later(lambda: self._give_up("aborted"))

    def __del__(self) -> None:
        if not self._ended:
            with suppress(BlockStateError):  # in a forked child it is not the child's
                self._books.guard.now_or_later(lambda: self._give_up("dropped"))

    @abstractmethod
    def _give_up(self, how: str, /) -> None:
        """End it, if it has not ended; the lock is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif not self._ended:
            self.commit()

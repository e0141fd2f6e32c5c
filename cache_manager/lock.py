"""The lock of one set of blocks, what has happened under it, and what becomes of an engine's mistakes.

If an exception from a signal handler (Ctrl-C, a timeout) ends a call in the middle:

* The lock is released, at whichever instruction that was: CPython runs no signal handler between a with statement's
  entering and its body, nor before the built-in method that leaves it. Only a second handler that raises while the
  exception of the first is on its way can leave the lock taken.
* Work that was half done is forgotten: before the next call begins, every row of every tier becomes unreadable, counted
  as ``interrupted_calls``. Blocks stay in their lives.
* A step or a job whose beginning was interrupted may or may not exist. Whoever catches the exception goes through
  ``steps`` and ``jobs``, and aborts or cancels what it has no reference to.
"""

from __future__ import annotations

import logging
import os
from _thread import RLock  # its class: threading.RLock is a function
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Final, TypeVar, cast

from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, KVRouteError
from cache_manager.slots import Ints

logger = logging.getLogger(__name__)

NAMED_MAX: Final = 8  # blocks that one error names
BUSY: Final = "a call while no other one of this thread runs"


@dataclass(frozen=True, slots=True)
class AuxCounters:
    """What happened since the start; every number only grows. A row counts once, whatever the number of specs."""

    rows_committed: int = 0
    late_writes_dropped: int = 0
    bad_writes_dropped: int = 0
    swapped_out_rows: int = 0
    swapped_in_rows: int = 0
    copied_rows: int = 0
    bad_moves_dropped: int = 0
    persisted_blocks: int = 0
    incomplete_blocks_not_persisted: int = 0
    refused_blocks_not_persisted: int = 0
    restored_blocks: int = 0
    late_restores_dropped: int = 0
    absent_blocks_not_restored: int = 0
    corrupt_blocks_not_restored: int = 0
    failed_blocks_not_restored: int = 0
    refused_blocks_not_restored: int = 0
    jobs_begun: int = 0
    jobs_refused: int = 0
    rows_exported: int = 0
    rows_installed: int = 0
    late_installs_dropped: int = 0
    installs_of_another_origin_dropped: int = 0
    installs_without_memory_dropped: int = 0
    foreign_keys: int = 0
    stale_keys: int = 0
    stale_blocks: int = 0
    rows_read: int = 0
    rows_missing: int = 0
    resets: int = 0
    feed_repetitions: int = 0
    feed_gaps: int = 0
    feed_operations_failed: int = 0
    interrupted_calls: int = 0


F = TypeVar("F", bound=Callable[..., Any])


class ProcessLock(RLock):  # type: ignore[misc]  # final for mypy alone
    """A lock for the threads of the process that made it.

    A finaliser or a signal handler in the middle of another call gets ``BlockBusyError``; a forked child, which has the
    lock as it was at the fork, gets ``BlockStateError``.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __enter__(self) -> None:  # type: ignore[override]
        if self._is_owned() or os.getpid() != self._pid:  # type: ignore[attr-defined]
            self.refuse()
        try:
            self.acquire()
        except BaseException:  # also from a signal handler, just after the lock was taken
            if self._is_owned():  # type: ignore[attr-defined]
                self.release()
            raise

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        mine: bool = self._is_owned()  # type: ignore[attr-defined]
        return mine

    def refuse(self) -> None:
        """Raise the error of a caller that may not wait for the lock."""
        if os.getpid() != self._pid:
            raise BlockStateError("blocks", "use by the process that made them", "a forked child")
        raise BlockBusyError("AuxBlocks", BUSY, "one of a finaliser or a signal handler, to be tried again later")


class Lock(ProcessLock):  # type: ignore[misc]  # as above
    """The lock over the tables of a set.

    Once it is ``closed``, every caller gets ``BlockStateError``. ``torn`` counts changes that have begun and not
    ended; a thread that takes the lock while ``torn`` is above 0 calls ``mend`` first. What was reported under the lock
    is logged by ``log``, behind it: see :class:`Mistakes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts = {f.name: 0 for f in fields(AuxCounters)}
        self.closed = False
        self.torn = 0
        self.mend: Callable[[], None] = lambda: None
        self.log: Callable[[], None] = lambda: None

    def __enter__(self) -> None:  # type: ignore[override]
        if self._is_owned() or os.getpid() != self._pid:  # type: ignore[attr-defined]
            self.refuse()
        try:
            self.acquire()
            if self.closed:
                self.check_open()
            while self.torn:
                self.mend()
                self.torn = 0
                self.release()
                self.log()
                self.acquire()
                self.check_open()
        except BaseException:  # also from a signal handler, just after the lock was taken
            if self._is_owned():  # type: ignore[attr-defined]
                self.release()
            raise

    def check_open(self) -> None:
        if self.closed:
            raise BlockStateError("AuxBlocks", "one that is open", "one that was closed")

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter; the lock is held."""
        self._counts[name] += n

    def counters(self) -> AuxCounters:
        return AuxCounters(**self._counts)


def change(method: F) -> F:
    """Mark a method that changes a table's state: if it does not come to its end, the lock stays torn."""

    @wraps(method)
    def whole(table: Any, *args: Any, **kwargs: Any) -> Any:
        lock = table.lock
        lock.torn += 1
        answer = method(table, *args, **kwargs)
        lock.torn -= 1
        return answer

    return cast("F", whole)


class Mistakes:
    """Drops and counts the mistakes of a set's callers, logging each kind once, or raises them: ``strict``.

    A logging handler may ask the set, wait for a thread that does, or raise. So a call that reports with the lock held
    calls :meth:`log` behind it, where its bookkeeping is done.
    """

    def __init__(self, lock: Lock, *, strict: bool) -> None:
        self.lock = lock
        self.strict = strict
        self._reported: set[str] = set()
        self.unlogged: deque[tuple[str, int, str]] = deque()
        lock.log = self.log

    def report(self, counter: str, n: int, why: str) -> None:
        """``n`` things are dropped, strict or not. The lock is held."""
        self.lock.count(counter, n)
        if counter not in self._reported:
            self._reported.add(counter)
            self.unlogged.append((why, n, counter))

    def log(self) -> None:
        """Log what was reported, unless a call that this thread is in the middle of has the lock and will do it."""
        while self.unlogged and not self.lock.is_mine:
            try:
                why, n, counter = self.unlogged.popleft()
            except IndexError:  # another thread logs it
                return
            logger.warning("%s; %d dropped, further ones are counted as %s", why, n, counter)

    def raise_or_report(self, counter: str, n: int, call: str, error: KVRouteError) -> None:
        """``n`` things were dropped for ``error``, which a strict set raises."""
        if self.strict:
            raise error
        with self.lock:
            self.report(counter, n, f"{call}: {error}")
        self.log()

    def report_loss(self, counter: str, n: int, call: str, error: BaseException, lose: Callable[[], None]) -> None:
        """The engine did what was refused here with ``error``: ``lose`` makes the rows that it overwrote unreadable. A
        closed set, or a forked child's copy, has nothing readable: there the loss is only counted."""
        why = f"{call}: {error if isinstance(error, KVRouteError) else repr(error)}"
        try:
            with self.lock:
                lose()
                self.report(counter, n, why)
        except BlockBusyError:
            self.lock.torn += 1  # in the middle of a call of our own: the next one forgets everything
            raise
        except BlockStateError:
            self.report(counter, n, why)
            raise
        finally:
            self.log()

    def report_blocks(self, counter: str, bad: Ints, call: str, wanted: str) -> None:
        """The blocks ``bad``, if any, were named by mistake: drop and count them, or raise when strict. The lock is
        held."""
        if not bad.size:
            return
        first = bad[:NAMED_MAX].tolist()
        named = ", ".join(map(str, first))
        more = f" and {bad.size - NAMED_MAX} more" if bad.size > NAMED_MAX else ""
        error = InvalidInputError(call, wanted, f"{'block' if bad.size == 1 else 'blocks'} {named}{more}")
        if self.strict:
            raise error
        self.report(counter, bad.size, str(error))

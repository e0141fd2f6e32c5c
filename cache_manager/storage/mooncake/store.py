"""The storage backend over a Mooncake pool: what callers see; :mod:`.writer` and :mod:`.reader` do it.

An object is a record: its packed header, then the payload. Its name is the key's; it is written once and never changed:
a record that takes another's place is put when the older object has been removed, by force. Whoever reads the older one
just then may get bytes of whatever took its memory, so that what is read counts when its sums are right, never because
of a result code.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cache_manager.errors import StorageError, StoreClosedError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.breaker import State
from cache_manager.storage.guard import ClosingStore
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.calls import Calls, by_count
from cache_manager.storage.mooncake.groups import GroupNames
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.mooncake.master import pool_usage
from cache_manager.storage.mooncake.reader import Reader
from cache_manager.storage.mooncake.settings import MooncakeSettings
from cache_manager.storage.mooncake.writer import Writer


@dataclass(frozen=True, slots=True)
class MooncakeCounters:
    """What a store has met so far; records unless it says otherwise."""

    refused: int = 0  # the pool stayed full, or somebody was in the middle of the key
    too_large: int = 0  # for the arena, or for the pool
    failed_reads: int = 0  # answered as misses beside others that were read
    failed_writes: int = 0
    bypassed: int = 0  # calls that were not made because a breaker was open
    lost_calls: int = 0  # calls that missed their deadline or whose native client ended
    rebuilds: int = 0  # native clients that replaced another
    owner_restarts: int = 0
    owner_failures: int = 0
    read_openings: int = 0
    write_openings: int = 0
    torn: int = 0  # records that changed while they were read, twice in a row: misses


class MooncakeStore(ClosingStore):
    """A ``StorageBackend`` in a Mooncake pool that other processes, and KV caches, share.

    Every call ends within ``settings.timeout_ms``. Records of one call that the pool fails to deliver beside others
    that it delivers are misses (or not stored) and are counted; when all fail, :class:`StorageError` has the cause,
    and while a breaker is open :class:`StoreUnavailableError` is raised at once. ``put`` answers the header that the
    pool has, which it may evict at any time, and ``None`` where it has no room, or another writer is in the middle of
    the key. A replacement is no single step: between removal and put, other writers may store theirs, and the answer
    names it. ``usage`` is the whole pool's.

    For the process that opened it: after ``fork`` every call raises :class:`StoreClosedError`.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.settings = settings
        self._pid = os.getpid()
        self._closed = False
        self._users = 0
        self._idle = threading.Condition()
        self._groups = GroupNames(settings.groups)
        self._link = Link(settings)
        self._calls = Calls(settings, self._link)
        self._writer = Writer(self._calls, self._groups)
        self._reader = Reader(self._calls)

    @property
    def counters(self) -> MooncakeCounters:
        """The counts of this moment."""
        link = self._link
        with link.lock:
            return MooncakeCounters(
                **link.counts,
                read_openings=link.reads.opened,
                write_openings=link.writes.opened,
            )

    @property
    def states(self) -> tuple[State, State]:
        """Of the breakers for reads and for writes."""
        with self._link.lock:
            return self._link.reads.state, self._link.writes.state

    @property
    def native_pid(self) -> int:
        """Of the native client's process at this moment."""
        return self._link.native_pid

    def name_groups(self, chunks: Mapping[BlockKey, str]) -> None:
        """The engine's own names of chunks whose rows are put next: rows and KV of a chunk are evicted together."""
        with self._link.lock:
            self._groups.learn(chunks)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        with self._calling() as give_up_s:
            return self._writer.put(headers, payloads, give_up_s, replace=replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        with self._calling() as give_up_s:
            return self._reader.get_into(keys, buffers, give_up_s)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._calling() as give_up_s:
            there = [False] * len(keys)

            def ask(chunk: list[int]) -> list[int]:
                request = wire.Exist([self._calls.name(keys[i]) for i in chunk])
                codes = self._link.call(self._link.reads, request, None, give_up_s)
                for i, code in zip(chunk, codes, strict=True):
                    there[i] = code == 1
                return codes

            self._calls.each("failed_reads", by_count(range(len(keys))), ask)
            return there

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._calling() as give_up_s:
            if left := self._calls.remove(list(dict.fromkeys(keys)), give_up_s):
                raise StorageError(f"the Mooncake pool failed to remove {len(left)} of {len(keys)} records")

    def flush(self) -> None:
        """Nothing to wait for: the pool is memory, and has every record that ``put`` answered ``True`` for."""
        with self._calling():
            pass

    def usage(self) -> Mapping[str, int]:
        with self._calling() as give_up_s:
            return pool_usage(self.settings.admin_address, give_up_s - time.monotonic())

    def close(self) -> None:
        """Idempotent; waits for calls that are running, at most ``timeout_ms``."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._link.stopping.set()
            self._idle.wait_for(lambda: self._users == 0, self.settings.timeout_s + 1.0)
        self._link.close()

    @contextmanager
    def _calling(self) -> Iterator[float]:
        """The deadline of a call, which counts as running until the block is left."""
        if os.getpid() != self._pid:
            raise StoreClosedError("the Mooncake store was opened before fork; open one in a spawned process")
        with self._idle:
            if self._closed:
                raise StoreClosedError("the Mooncake store is closed")
            self._users += 1
        try:
            yield time.monotonic() + self.settings.timeout_s
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()


__all__ = ["MooncakeCounters", "MooncakeStore"]

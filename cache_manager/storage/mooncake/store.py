"""The storage backend over a Mooncake pool.

An object is a record: its packed header, then the payload. Its name is the key's, so that it is written once and never
changed; two writers of one key write the same bytes. Whether the bytes that come back are those of the key is decided
by the header here and by the payload's sum in :class:`RecordStore`, never by a result code.

A key that was deleted while a reader's lease holds the object is *hidden*: absent for this store until the object is
gone, which the pool allows when the lease ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from cache_manager.errors import RecordError, StorageError, StoreClosedError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import HEADER_NBYTES_MAX, Buffer, RecordHeader, pack_header, unpack_header
from cache_manager.spec import align
from cache_manager.storage.breaker import State
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.codes import EXPIRED, FULL, INVALID, LEASED, describe, is_bug, is_failure, is_miss
from cache_manager.storage.mooncake.groups import GroupNames
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.mooncake.master import pool_usage
from cache_manager.storage.mooncake.settings import MooncakeSettings

FORMAT: Final = 1
HEADER_ROOM_NBYTES: Final = 1024
HIDDEN_MAX: Final = 65_536
SWEEP_S: Final = 1.0
LARGE_NBYTES: Final = 1 << 20
"""Records above this are compared with the pool's size first: each one that it has no room for makes it evict."""
BACK_OFF_S: Final = 0.01
BACK_OFF_MAX_S: Final = 0.2

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MooncakeCounters:
    """What a store has met so far; records unless it says otherwise."""

    refused: int = 0  # the pool stayed full, or an older object of the key cannot be removed yet
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
    hidden: int = 0  # now


class MooncakeStore:
    """A ``StorageBackend`` in a Mooncake pool that other processes, and KV caches, share.

    Every call ends within ``settings.timeout_ms``. Records of one call that the pool fails to deliver beside others
    that it delivers are misses (or not stored) and are counted; when all fail, :class:`StorageError` has the cause,
    and while a breaker is open :class:`StoreUnavailableError` is raised at once. ``put`` answers ``True`` for a record
    that the pool took or had; the pool may evict it at any time. ``usage`` is the whole pool's.

    For the process that opened it: after ``fork`` every call raises :class:`StoreClosedError`.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.settings = settings
        self._pid = os.getpid()
        self._closed = False
        self._users = 0
        self._idle = threading.Condition()
        self._hidden: dict[BlockKey, None] = {}
        self._groups = GroupNames(settings.groups)
        self._header_room = HEADER_ROOM_NBYTES
        self._link = Link(settings)
        self._sweeper = threading.Thread(target=self._sweep, name="kvroute-mooncake-sweep", daemon=True)
        self._sweeper.start()

    @property
    def counters(self) -> MooncakeCounters:
        """The counts of this moment."""
        link = self._link
        with link.lock:
            return MooncakeCounters(
                **link.counts,
                read_openings=link.reads.opened,
                write_openings=link.writes.opened,
                hidden=len(self._hidden),
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

    def put(self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer]) -> list[bool]:
        with self._calling() as give_up_s:
            todo: dict[BlockKey, tuple[RecordHeader, memoryview]] = {}
            stored: dict[BlockKey, bool] = {}
            for header, payload in zip(headers, payloads, strict=True):
                view = _bytes_of(payload)
                if view.nbytes != header.payload_nbytes:
                    raise RecordError("payload size", header.payload_nbytes, view.nbytes)
                stored[header.key] = False
                todo[header.key] = header, view
                self._header_room = max(self._header_room, header.nbytes)
            limit = self._record_nbytes_max(max((view.nbytes for _, view in todo.values()), default=0), give_up_s)
            for key in [key for key, (header, view) in todo.items() if header.nbytes + align(view.nbytes) > limit]:
                del todo[key]
                self._count("too_large", 1)
            full_s = min(time.monotonic() + self.settings.full_ms / 1e3, give_up_s)
            pause_s = BACK_OFF_S
            while True:
                self._unhide([key for key in todo if key in self._hidden], give_up_s)
                later = {key: record for key, record in todo.items() if key in self._hidden}
                later |= self._put(todo, later, stored, give_up_s)
                if not later or time.monotonic() + pause_s > full_s or self._link.stopping.wait(pause_s):
                    break
                todo, pause_s = later, min(2 * pause_s, BACK_OFF_MAX_S)
            self._count("refused", len(later))
            return [stored[header.key] for header in headers]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        with self._calling() as give_up_s:
            views = [_bytes_of(buffer) for _, buffer in zip(keys, buffers, strict=True)]
            found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
            wanted = [i for i, key in enumerate(keys) if key not in self._hidden]
            short, late = self._get(wanted, keys, views, found, self._header_room, give_up_s)
            short += self._get(late, keys, views, found, self._header_room, give_up_s)[0]
            for i in self._get(short, keys, views, found, HEADER_NBYTES_MAX, give_up_s)[0]:
                found[i] = Absence.CORRUPT  # longer than any record of this payload
            return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._calling() as give_up_s:
            there = [False] * len(keys)
            wanted = [i for i, key in enumerate(keys) if key not in self._hidden]

            def ask(chunk: list[int]) -> list[int]:
                request = wire.Exist([self._name(keys[i]) for i in chunk])
                codes = self._link.call(self._link.reads, request, None, give_up_s)
                for i, code in zip(chunk, codes, strict=True):
                    there[i] = code == 1
                return codes

            self._each("failed_reads", _by_count(wanted), ask)
            return there

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._calling() as give_up_s:
            with self._link.lock:
                if len(self._hidden) + len(keys) > HIDDEN_MAX:
                    raise StorageError(f"more than {HIDDEN_MAX} deleted records wait for their readers' leases to end")
                self._hidden.update(dict.fromkeys(keys))
            wait_s = min(time.monotonic() + self.settings.delete_ms / 1e3, give_up_s)
            left = list(dict.fromkeys(keys))
            while left := self._unhide(left, give_up_s):
                if time.monotonic() > wait_s or self._link.stopping.wait(BACK_OFF_S):
                    break

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
        self._sweeper.join(self.settings.timeout_s + 1.0)
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

    def _record_nbytes_max(self, largest_nbytes: int, give_up_s: float) -> int:
        """What a record may have, as far as it matters for records of at most ``largest_nbytes``."""
        limit = self._link.arena.nbytes // 2
        if largest_nbytes > LARGE_NBYTES:
            try:
                return min(
                    limit, pool_usage(self.settings.admin_address, give_up_s - time.monotonic())["capacity_nbytes"]
                )
            except StorageError:  # the pool answers for itself, then
                return limit
        return limit

    def _put(
        self,
        todo: Mapping[BlockKey, tuple[RecordHeader, memoryview]],
        hidden: Mapping[BlockKey, object],
        stored: dict[BlockKey, bool],
        give_up_s: float,
    ) -> dict[BlockKey, tuple[RecordHeader, memoryview]]:
        """Put what is not hidden; the records that the pool has no room for now."""
        full: dict[BlockKey, tuple[RecordHeader, memoryview]] = {}

        def send(chunk: list[tuple[RecordHeader, memoryview]]) -> list[int]:
            sizes = [header.nbytes + view.nbytes for header, view in chunk]
            offsets, start = self._ranges(sizes, give_up_s)
            arena = self._link.arena.view
            try:
                for (header, view), at in zip(chunk, offsets, strict=True):
                    body = at + header.nbytes
                    arena[at:body] = pack_header(header)
                    arena[body : body + view.nbytes] = view
            except BaseException:
                self._link.arena.give(start)
                raise
            with self._link.lock:
                groups = [self._groups.of(header.key) for header, _ in chunk]
            request = wire.Put([self._name(h.key) for h, _ in chunk], offsets, sizes, groups if any(groups) else [])
            codes = self._link.call(self._link.writes, request, start, give_up_s)
            self._link.arena.give(start)
            for record, code in zip(chunk, codes, strict=True):
                if is_bug(code):
                    raise AssertionError(f"put of {record[0].key.hex()}: {describe(code)}")
                stored[record[0].key] = code == 0
                if code == FULL:
                    full[record[0].key] = record
            return codes

        records = [record for key, record in todo.items() if key not in hidden]
        chunks = self._by_bytes(records, lambda record: record[0].nbytes + record[1].nbytes)
        self._each("failed_writes", chunks, send)
        return full

    def _get(
        self,
        wanted: Sequence[int],
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        found: list[RecordHeader | Absence],
        header_room: int,
        give_up_s: float,
    ) -> tuple[list[int], list[int]]:
        """Fill in the headers and absences of the keys numbered ``wanted``.

        Answers those that did not fit their range, and those whose lease ended while they were on their way.
        """
        short: list[int] = []
        late: list[int] = []
        limit = self._link.arena.nbytes // 2

        def receive(chunk: list[int]) -> list[int]:
            sizes = [header_room + views[i].nbytes for i in chunk]
            offsets, start = self._ranges(sizes, give_up_s)
            request = wire.Get([self._name(keys[i]) for i in chunk], offsets, sizes)
            codes = self._link.call(self._link.reads, request, start, give_up_s)
            try:
                for i, at, code in zip(chunk, offsets, codes, strict=True):
                    if code == INVALID:
                        short.append(i)
                    elif code == EXPIRED:
                        late.append(i)
                    elif code >= 0:
                        found[i] = _opened(self._link.arena.view[at : at + code], keys[i], views[i])
            finally:
                self._link.arena.give(start)
            return [0 if code == INVALID else code for code in codes]

        fitting = [i for i in wanted if align(header_room + views[i].nbytes) <= limit]
        chunks: list[list[int]] = []
        while fitting:  # the native side answers one of two equal names in a batch
            first = {keys[i]: i for i in reversed(fitting)}
            once = [i for i in fitting if first[keys[i]] == i]
            fitting = [i for i in fitting if first[keys[i]] != i]
            chunks += self._by_bytes(once, lambda i: header_room + views[i].nbytes)
        self._each("failed_reads", chunks, receive)
        return short, late

    def _unhide(self, keys: Sequence[BlockKey], give_up_s: float) -> list[BlockKey]:
        """Remove the objects of hidden keys; the keys that stay hidden because somebody still reads theirs."""
        left: list[BlockKey] = []

        def remove(chunk: list[BlockKey]) -> list[int]:
            request = wire.Remove([self._name(key) for key in chunk])
            codes = self._link.call(self._link.writes, request, None, give_up_s)
            with self._link.lock:
                for key, code in zip(chunk, codes, strict=True):
                    if code == LEASED or code == -703:
                        left.append(key)
                    elif code == 0 or is_miss(code):
                        self._hidden.pop(key, None)
            return codes

        self._each("failed_writes", _by_count(keys), remove)
        return left

    def _sweep(self) -> None:
        """The sweeper's loop: objects of hidden keys go when their leases have ended."""
        while not self._link.stopping.wait(SWEEP_S):
            with self._link.lock:
                hidden = list(self._hidden)[: wire.KEYS_PER_CALL_MAX]
                ready = self._link.writes.closed
            if hidden and ready:
                try:
                    self._unhide(hidden, time.monotonic() + self.settings.timeout_s)
                except StorageError:  # counted by the breaker; the keys stay hidden and are tried again
                    continue

    def _each(self, counter: str, chunks: list[list[_T]], call: Callable[[list[_T]], list[int]]) -> None:
        """Make the calls; raise when not one key got an answer, else count the keys that got none."""
        failed, answered = 0, 0
        error: StorageError | None = None
        for chunk in chunks:
            if error is None:
                try:
                    codes = call(chunk)
                except StorageError as stopped:
                    error = stopped
                else:
                    failures = [code for code in codes if is_failure(code)]
                    failed += len(failures)
                    answered += len(codes) - len(failures)
                    cause = failures[0] if failures else 0
                    continue
            failed += len(chunk)
        self._count(counter, failed)
        if failed and not answered:
            raise error or StorageError(f"Mooncake at {self.settings.master}: {describe(cause)}")

    def _by_bytes(self, items: Sequence[_T], nbytes: Callable[[_T], int]) -> list[list[_T]]:
        """Chunks of ``KEYS_PER_CALL_MAX`` items and a quarter of the arena at most; a larger item has its own."""
        limit = self._link.arena.nbytes // 4
        chunks: list[list[_T]] = []
        room = 0
        for item in items:
            size = align(nbytes(item))
            if not chunks or len(chunks[-1]) == wire.KEYS_PER_CALL_MAX or size > room:
                chunks.append([])
                room = limit
            chunks[-1].append(item)
            room -= size
        return chunks

    def _ranges(self, sizes: Sequence[int], give_up_s: float) -> tuple[list[int], int]:
        """Where each of a chunk's records lies in the arena, and the range that holds them all."""
        start = self._link.arena.take(sum(align(size) for size in sizes), give_up_s)
        if start is None:
            raise StorageError("the Mooncake arena stayed full; a larger one is the parameter arena")
        offsets, at = [], start
        for size in sizes:
            offsets.append(at)
            at += align(size)
        return offsets, start

    def _name(self, key: BlockKey) -> str:
        return f"{self.settings.prefix}/{FORMAT}/{key.hex()}"

    def _count(self, counter: str, by: int) -> None:
        if by:
            with self._link.lock:
                self._link.counts[counter] += by


def _by_count(items: Sequence[_T]) -> list[list[_T]]:
    most = wire.KEYS_PER_CALL_MAX
    return [list(items[at : at + most]) for at in range(0, len(items), most)]


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise RecordError("payload", "contiguous bytes", f"strides {view.strides}")
    return view.cast("B")


def _opened(raw: memoryview, key: BlockKey, view: memoryview) -> RecordHeader | Absence:
    """The header of a received object, whose payload is in ``view`` then; or corrupt."""
    try:
        header = unpack_header(raw)
    except RecordError:
        return Absence.CORRUPT
    if header.key != key or header.payload_nbytes != view.nbytes or header.nbytes + view.nbytes != raw.nbytes:
        return Absence.CORRUPT
    view[:] = raw[header.nbytes :]
    return header


__all__ = ["MooncakeCounters", "MooncakeStore"]

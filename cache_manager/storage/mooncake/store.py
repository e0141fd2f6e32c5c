"""The storage backend over a Mooncake pool: what callers see, and how records are read; :mod:`.writer` puts them.

An object is a record: its packed header, then the payload. Its name is the key's; it is written once and never changed:
a record that takes another's place is put when the older object has been removed, by force. Whoever reads the older one
just then may get bytes of whatever took its memory, so that what is read counts when its sums are right, never because
of a result code. A record that is not sound is read once more: when the same bytes come again it is corrupt, otherwise
it is not there any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cache_manager.errors import NoSpaceError, RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, Lent
from cache_manager.record import HEADER_NBYTES_MAX, Buffer, RecordHeader, check_record, checksum, unpack_header
from cache_manager.spec import align
from cache_manager.storage.batch import rounds
from cache_manager.storage.guard import ClosingStore, OpenCheck
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.breaker import State
from cache_manager.storage.mooncake.link import Link
from cache_manager.storage.mooncake.master import pool_usage
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
    """A ``StorageBackend`` and ``LendingBackend`` in a Mooncake pool that other processes, and KV caches, share.

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
        self._users = 0
        self._idle = threading.Condition()
        self._guard = OpenCheck("Mooncake store", self._idle)
        self._payload_nbytes = 0  # of the largest record that was put or asked for
        self._link = Link(settings)
        self._writer = Writer(self._link)

    @property
    def counters(self) -> MooncakeCounters:
        """The counts of this moment."""
        link = self._link
        with link.lock:
            openings = {"read_openings": link.reads.opened, "write_openings": link.writes.opened}
            return MooncakeCounters(**link.counts, **openings)

    @property
    def states(self) -> tuple[State, State]:
        """Of the breakers for reads and for writes."""
        with self._link.lock:
            return self._link.reads.state, self._link.writes.state

    def name_groups(self, groups: Mapping[BlockKey, str]) -> None:
        """Mooncake's eviction groups of records that are put next: the objects of one group are evicted together."""
        self._writer.name_groups(groups)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._payload_nbytes = max([self._payload_nbytes, *(header.payload_nbytes for header in headers)])
        with self._calling() as give_up_s:
            return self._writer.put(headers, payloads, give_up_s, replace=replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        views = [buffer.cast("B") for _, buffer in zip(keys, buffers, strict=True)]
        answers: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        self._payload_nbytes = max([self._payload_nbytes, *(view.nbytes for view in views)])
        with self._calling() as give_up_s:
            for turn, once in enumerate(rounds(keys)):  # the native side answers one of two equal names in a batch
                todo = {keys[i]: views[i] for i in once}
                found: dict[BlockKey, RecordHeader | Absence] = {}
                try:
                    unsound = self._read(todo, found, self._link.header_room, give_up_s)
                    again = self._read({key: todo[key] for key in unsound}, found, HEADER_NBYTES_MAX, give_up_s)
                except StorageError:
                    if not (turn or found):
                        raise
                    again = {}  # what is not found is a miss beside others, and is counted
                for key, came in again.items():
                    same = came != wire.EXPIRED and unsound[key] in (came, wire.INVALID)
                    found[key] = Absence.CORRUPT if same else Absence.MISS
                    self._link.count(torn=int(not same))
                for i in once:
                    answers[i] = found.get(keys[i], Absence.MISS)
        return answers

    def _read(
        self,
        todo: Mapping[BlockKey, memoryview],
        found: dict[BlockKey, RecordHeader | Absence],
        header_room: int,
        give_up_s: float,
    ) -> dict[BlockKey, int]:
        """Read what is sound into its buffer and ``found``; of what is not sound, the sum of what came.

        In its place ``INVALID`` where more came than there was room for, ``EXPIRED`` where the lease ended on the way.
        """
        link, unsound = self._link, dict[BlockKey, int]()
        most = link.arena.slot_nbytes
        sizes = {key: min(header_room + view.nbytes, most) for key, view in todo.items() if view.nbytes <= most}

        def receive(chunk: Sequence[BlockKey]) -> list[int]:
            with link.arena.lend([sizes[key] for key in chunk], give_up_s) as lent:
                request = wire.Get([link.name(key) for key in chunk], lent.offsets, lent.nbytes)
                codes = link.call(link.reads, request, give_up_s, lent)
                for key, at, code in zip(chunk, lent.offsets, codes, strict=True):
                    if code in (wire.INVALID, wire.EXPIRED):
                        unsound[key] = code
                    elif code >= 0:
                        raw, view = link.arena.view[at : at + code], todo[key]
                        try:
                            header = _header(raw, header_room)
                            if header.payload_nbytes == view.nbytes:
                                view[:] = raw[header.nbytes :]
                            check_record(header, key, header.fingerprint, view)
                            found[key] = header
                        except RecordError:
                            unsound[key] = checksum(raw)
                return codes

        link.each(link.reads, list(sizes), sizes.__getitem__, receive)
        return unsound

    @property
    def lent_nbytes_max(self) -> int:
        """As much as one native call brings; nothing until it is known how large records are, by one put or read."""
        return self._lent_nbytes_max(self._link.header_room, self._payload_nbytes)

    def _lent_nbytes_max(self, header_room: int, nbytes: int) -> int:
        records = self._link.arena.slot_nbytes // align(header_room + nbytes)
        return min(records, wire.KEYS_PER_CALL_MAX) * nbytes

    @contextmanager
    def borrow(self, keys: Sequence[BlockKey]) -> Iterator[list[Lent | Absence]]:
        """Records where they were received, by one native call.

        ``NoSpaceError`` also where something came that is not one whole record: :meth:`get_into` looks again.
        """
        link, once = self._link, list(dict.fromkeys(keys))
        header_room, nbytes = link.header_room, self._payload_nbytes  # both may grow meanwhile
        most = self._lent_nbytes_max(header_room, nbytes)
        if not 0 < len(once) * nbytes <= most:
            raise NoSpaceError("Mooncake arena", len(once) * nbytes, most, "borrow fewer records at once")
        sizes = [header_room + nbytes] * len(once)
        came: dict[BlockKey, Lent] = {}
        self._guard.check()
        link.admitted(link.reads)  # before a slot is waited for
        with self._calling() as give_up_s, link.arena.lend(sizes, give_up_s) as lent:

            def receive(chunk: Sequence[BlockKey]) -> list[int]:
                request = wire.Get([link.name(key) for key in chunk], lent.offsets, lent.nbytes)
                return link.call(link.reads, request, give_up_s, lent)

            codes = link.each(link.reads, once, lambda _: sizes[0], receive)
            try:
                for key, at, code in zip(once, lent.offsets, codes, strict=True):
                    if code in (wire.INVALID, wire.EXPIRED):
                        raise RecordError("object", f"{sizes[0]} bytes at most", wire.describe(code))
                    if code >= 0:
                        raw = link.arena.view[at : at + code].toreadonly()
                        header = _header(raw, header_room)
                        came[key] = header, raw[header.nbytes :]
            except RecordError as error:
                raise NoSpaceError("Mooncake arena", len(once) * nbytes, 0, "read it with get_into") from error
            try:
                yield [came.get(key, Absence.MISS) for key in keys]
            finally:
                for _, payload in came.values():
                    payload.release()

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._calling() as give_up_s:
            codes = self._link.ask(self._link.reads, wire.Exist, keys, give_up_s)
            return [code == 1 for code in codes]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._calling() as give_up_s:
            codes = self._link.ask(self._link.writes, wire.Remove, list(dict.fromkeys(keys)), give_up_s)
        if left := sum(map(wire.is_failure, codes)):
            raise StorageError(f"the Mooncake pool failed to remove {left} of {len(keys)} records")

    def flush(self) -> None:
        """Nothing to wait for: the pool is memory, and has every record that ``put`` answered for."""
        self._guard.check()

    def usage(self) -> Mapping[str, int]:
        with self._calling() as give_up_s:
            return pool_usage(self.settings.admin_address, give_up_s - time.monotonic())

    def close(self) -> None:
        """Idempotent; waits for calls that are running, at most ``timeout_ms``."""
        if not self._guard.close():
            return
        with self._idle:
            self._link.stopping.set()
            self._idle.wait_for(lambda: self._users == 0, self.settings.timeout_s + 1.0)
        self._link.close()

    @contextmanager
    def _calling(self) -> Iterator[float]:
        """The deadline of a call, which counts as running until the block is left."""
        self._guard.check()
        with self._idle:
            self._guard.check()
            self._users += 1
        try:
            yield time.monotonic() + self.settings.timeout_s
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()


def _header(raw: memoryview, header_room: int) -> RecordHeader:
    """The header of a received object; :class:`RecordError` when it is not one whole record."""
    header = unpack_header(bytes(raw[:header_room]))
    if header.nbytes + header.payload_nbytes != raw.nbytes:
        raise RecordError("size", header.nbytes + header.payload_nbytes, raw.nbytes)
    return header


__all__ = ["MooncakeCounters", "MooncakeStore"]

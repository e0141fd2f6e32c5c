"""What a store knows of its open segments: where each record is, who reads there, and what has grown too old.

Shared by the writer (:class:`cache_manager.storage.file.pool.SegmentPool`) and by readers
(:class:`cache_manager.storage.file.reader.FileReader`). ``index_lock`` guards everything here and is never held over
I/O: a call pins the segments that it reads, and one that goes meanwhile keeps its bytes until the last pin is gone.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from cache_manager.errors import StorageError
from cache_manager.keys import KEY_NBYTES, BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, unpack_checked_header
from cache_manager.spec import ALIGNMENT
from cache_manager.storage.disk import IOV_MAX, Disk, Room, read_all
from cache_manager.storage.file.limits import is_older
from cache_manager.storage.file.segment import (
    DELETED,
    ENTRY_NBYTES,
    LIVING,
    PAGE_NBYTES,
    UNREADABLE,
    Entry,
    header_is_dead,
    header_is_sound,
    unpack_entry,
)
from cache_manager.storage.file.table import KeyTable

_RUN_MAX: Final = IOV_MAX // 3
_NEVER: Final = (float("inf"), float("-inf"))
_LOOKS_MAX: Final = 4
_GAIN: Final = 2
"""How much of a segment the use of one of its n records stands for: 2/n, because it is seldom used alone."""


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file that is open, and what the store knows about it."""

    sequence: int
    name: str
    fd: int
    size: int  # of the file; counts against the quota
    created_s: float | None = None  # wall clock; None: unknown
    end: int = PAGE_NBYTES  # where the next record would go
    used_at: float = 0.0  # tick at which its records were used last, on an average: see use()
    touched_at: int = 0  # tick of the last use of any
    ordinal: int = 0  # in the table
    rows: bytearray = field(default_factory=bytearray)  # an entry of 64 bytes for each record
    states: bytearray = field(default_factory=bytearray)
    suspects: set[int] = field(default_factory=set)  # numbers of records that the disk did not give back
    indexed: bool = False  # its index is in the file
    aside: bool = False  # damaged: not written any more, dropped last
    journal_fd: int = -1
    pins: int = 0  # calls that use the descriptor outside the index lock
    dirty: bool = False  # bytes were written since the last sync
    unwritten: bool = False  # a sync failed: what it covered is to be written anew
    synced_records: int = 0  # how many were there at the last sync that worked
    marks: int = 0  # deletions of copies for which there is a newer one, so far
    synced_marks: int = 0  # how many of them are on stable storage
    dropped: bool = False  # close the descriptors when the last pin is gone
    expired: bool = False  # its records are in the table no more, its file is to go

    def use(self, tick: int, records: int = 1) -> None:
        """So many of its records are used: what was used of a segment counts, not that something was.

        By the last use alone a segment would stay for one record in it that is asked for again and again.
        """
        self.touched_at = tick
        self.used_at += (tick - self.used_at) * min(1.0, _GAIN * records / max(len(self.states), 1))

    def entry(self, number: int) -> Entry:
        return unpack_entry(self.rows, number)

    def close(self) -> None:
        for fd in (self.fd, self.journal_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.journal_fd = -1

    def __del__(self) -> None:
        self.close()


class Place(NamedTuple):
    """Where a record is."""

    segment: Segment
    number: int
    entry: Entry


Run = list[tuple[int, Place]]
"""Records that are neighbours in one segment, each with its position in the call."""


class SegmentIndex:
    """The open segments of a store and the table of the records in them."""

    def __init__(self, disk: Disk, ttl_s: float | None, path: object) -> None:
        self.index_lock = threading.Lock()
        self.table = KeyTable()
        self.segments: dict[int, Segment] = {}
        self.tick = 0
        self.used_nbytes = 0
        self.expired_segments = self.expired_records = self.failed_reads = 0
        self.sweepable = False  # an expired segment is still there
        self._disk = disk
        self._ttl_s = ttl_s
        self._path = path
        self._fresh = _NEVER  # no segment expires while the clock is between these

    def find(self, key: BlockKey) -> Place | None:
        """Held: index_lock."""
        if (found := self.table.find(key)) is None:
            return None
        segment = cast("Segment", found[0])
        return Place(segment, found[1], unpack_entry(segment.rows, found[1]))

    def join(self, segment: Segment) -> None:
        """Held: index_lock."""
        self.segments[segment.sequence] = segment
        self.used_nbytes += segment.size
        self._fresh = _NEVER
        self.table.join(segment)

    def take(self, segment: Segment) -> list[Place]:
        """Serve what is in a segment that joined; the copies, here and elsewhere, that give way to newer ones.

        A copy that is deleted or not sound decides like any other: no older one of its key is served. What decides
        only because the disk does not give it back now costs the older one nothing for good. Held: index_lock.
        """
        table, older = self.table, []
        others = [number for number, state in enumerate(segment.states) if state] if any(segment.states) else []
        for _, number, rows, there in table.add_all(segment):
            other = cast("Segment", rows)
            if (other.sequence, there) < (segment.sequence, number):
                table.remove(other, there)
                table.add(segment, number, segment.entry(number).key)
                older.append(Place(other, there, other.entry(there)))
            else:
                older.append(Place(segment, number, segment.entry(number)))
        for number in others:
            known = self.find(segment.entry(number).key)
            if known is not None and (known.segment.sequence, known.number) < (segment.sequence, number):
                table.remove(known.segment, known.number)
                if segment.states[number] != UNREADABLE:
                    older.append(known)
        return older

    def extend(self, segment: Segment, rows: bytes | bytearray, states: bytes | bytearray) -> list[Place]:
        """Serve what was appended to a segment that joined before; the copies that gave way. Held: index_lock."""
        table, first, older = self.table, len(segment.states), []
        segment.rows += rows
        segment.states += bytes(state or DELETED for state in states)
        for number, state in enumerate(states, first):
            at = number * ENTRY_NBYTES
            key = BlockKey(bytes(segment.rows[at : at + KEY_NBYTES]))
            known = self.find(key)
            if known is not None:
                if (known.segment.sequence, known.number) > (segment.sequence, number):
                    continue
                table.remove(known.segment, known.number)
                older.append(known)
            if state == LIVING:
                table.add(segment, number, key)
        return older

    def forget(self, segment: Segment) -> int:
        """Take a segment's records out of the table; how many were served. Held: index_lock."""
        return self.table.leave(segment)

    def let_go(self, segment: Segment) -> None:
        """Forget a segment and close it when the last call that reads it ends."""
        with self.index_lock:
            self.forget(segment)
            del self.segments[segment.sequence]
            self.used_nbytes -= segment.size
            segment.pins += 1
            segment.dropped = True
        self.unpin([segment])

    def unpin(self, segments: Iterable[Segment]) -> None:
        with self.index_lock:
            for segment in segments:
                segment.pins -= 1
                if segment.dropped and not segment.pins:
                    segment.close()

    def release(self) -> None:
        """Close every segment, those in use when their last pin goes."""
        with self.index_lock:
            for segment in self.segments.values():
                segment.pins += 1
                segment.dropped = True
        self.unpin(self.segments.values())

    def expire(self, now_s: float) -> None:
        """Hide the records of every segment that is too old; their files are for whoever may touch them.

        Costs a comparison unless something expires or segments have changed. Held: index_lock.
        """
        if self._ttl_s is None or self._fresh[0] < now_s < self._fresh[1]:
            return
        since, until = float("-inf"), float("inf")
        for segment in self.segments.values():
            if segment.expired:
                continue
            if is_older(segment.created_s, now_s, self._ttl_s):
                segment.expired = self.sweepable = True
                self.expired_segments += 1
                self.expired_records += self.forget(segment)
            elif segment.created_s is not None:
                since, until = max(since, segment.created_s - self._ttl_s), min(until, segment.created_s + self._ttl_s)
        self._fresh = (since, until)

    def header_of(self, place: Place) -> RecordHeader | None:
        """The header of a record whose segment is pinned, from the disk; ``None`` where it does not come back sound."""
        raw = bytearray(place.entry.header_nbytes)
        try:
            read_all(self._disk, place.segment.fd, [raw], place.entry.offset, len(raw))
        except OSError as error:
            if error.errno != errno.EIO:
                raise StorageError(f"{self._path}/{place.segment.name}: cannot read: {error}") from error
            return None
        return unpack_checked_header(raw) if header_is_sound(raw, place.entry) else None

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], now_s: float, check_open: Callable[[], None]
    ) -> list[RecordHeader | Absence]:
        """Read records straight into the callers' buffers; ``check_open`` is called under the lock, before each look.

        A record that is found deleted may have been replaced since it was looked up, and is looked up again. One that
        the disk does not give back is a miss, counted in ``failed_reads``, and is asked for again the next time.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        wanted: Sequence[int] = range(len(keys))
        for _ in range(_LOOKS_MAX):
            with self.index_lock:
                check_open()
                self.expire(now_s)
                runs = self._plan(wanted, keys, buffers, found)
            if not (dead := self._read_all(runs, buffers, found)):
                break
            with self.index_lock:
                wanted = [i for i, place in dead if self._is_replaced(place)]
            if not wanted:
                break
        return found

    def _is_replaced(self, dead: Place) -> bool:
        """Whether there is another record in the place of a deleted one, which is forgotten now. Held: index_lock."""
        now = self.find(dead.entry.key)
        if now is not None and now.segment is dead.segment and now.number == dead.number:
            self.table.remove(dead.segment, dead.number)
            return False
        return now is not None

    def _plan(
        self,
        wanted: Sequence[int],
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        found: list[RecordHeader | Absence],
    ) -> list[Run]:
        """Where to read what, with the segments pinned; ``found`` gets what no disk has to be asked. Held: index_lock.

        Keys that are asked for in the order in which they were put are read in one call.
        """
        self.tick += 1
        runs: list[Run] = []
        run: Run = []
        segment, after = None, -1
        for i in wanted:
            if (place := self.find(keys[i])) is None:
                continue
            entry = place.entry
            if entry.payload_nbytes != buffers[i].nbytes:
                found[i] = Absence.CORRUPT
            elif entry.offset == after and place.segment is segment and len(run) < _RUN_MAX:
                run.append((i, place))
                after += entry.nbytes
                place.segment.use(self.tick)
            else:
                run = [(i, place)]
                runs.append(run)
                segment, after = place.segment, entry.offset + entry.nbytes
                segment.pins += 1
                segment.use(self.tick)
        return runs

    def _read_all(self, runs: Sequence[Run], buffers: Sequence[memoryview], found: list[RecordHeader | Absence]) -> Run:
        """Read what was planned, check each header, and unpin; the records that were deleted meanwhile."""
        dead: Run = []
        try:
            for run in runs:
                self._read(run, buffers, found, dead)
        finally:
            self.unpin(run[0][1].segment for run in runs)
        return dead

    def _read(self, run: Run, buffers: Sequence[memoryview], found: list[RecordHeader | Absence], dead: Run) -> None:
        segment, first, last = run[0][1].segment, run[0][1].entry, run[-1][1].entry
        nbytes = last.offset + last.nbytes - first.offset
        vector: list[Room] = []
        raws = []
        for i, (_, _, entry) in run:
            raws.append(raw := bytearray(entry.header_nbytes))
            vector.append(raw)
            vector.append(buffers[i])
            if pad := -entry.payload_nbytes % ALIGNMENT:
                vector.append(bytearray(pad))
        unreadable = False
        try:
            whole = read_all(self._disk, segment.fd, vector, first.offset, nbytes) == nbytes
        except OSError as error:
            if error.errno != errno.EIO:
                raise StorageError(f"{self._path}/{segment.name}: cannot read: {error}") from error
            whole, unreadable = False, True
        if not whole and len(run) > 1:  # the file was cut, or a sector is bad: find out whose
            for one in run:
                self._read([one], buffers, found, dead)
            return
        if unreadable:
            with self.index_lock:
                self.failed_reads += 1
                segment.suspects.add(run[0][1].number)
            return
        for (i, place), raw in zip(run, raws, strict=True):
            if whole and header_is_sound(raw, place.entry):
                found[i] = unpack_checked_header(raw)
                if segment.suspects:
                    segment.suspects.discard(place.number)
            elif whole and header_is_dead(raw, place.entry):
                dead.append((i, place))  # since it was looked up: a miss
            else:
                found[i] = Absence.CORRUPT

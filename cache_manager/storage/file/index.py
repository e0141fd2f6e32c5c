"""What a store knows of its open segments: where each record is, who reads there, and what has grown too old.

Shared by the writer (:class:`cache_manager.storage.file.pool.SegmentPool`) and by readers
(:class:`cache_manager.storage.file.reader.FileReader`). ``index_lock`` guards everything here and is never held over
I/O: a call pins the segments that it reads, and one that goes meanwhile keeps its bytes until the last pin is gone.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final
from zlib import crc32

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, unpack_checked_header
from cache_manager.storage.disk import IOV_MAX, Disk, Room, read_all
from cache_manager.storage.file.limits import is_older
from cache_manager.storage.file.recovery import Content
from cache_manager.storage.file.segment import (
    CRC_RESIDUE,
    ENTRY_NBYTES,
    LIVING,
    Entry,
    header_is_dead,
    read_header,
)
from cache_manager.storage.file.table import KeyTable, Place, Segment
from cache_manager.storage.guard import OpenCheck

_RUN_MAX: Final = IOV_MAX // 3
_NEVER: Final = (float("inf"), float("-inf"))
_LOOKS_MAX: Final = 4

Wanted = tuple[int, Entry, bytearray]
"""A record, with its position in the call and room for its header."""

Run = tuple[Segment, list[Room], list[Wanted]]
"""Records that lie behind each other in one segment, and where their bytes go: they are read in one call."""

Found = list[RecordHeader | Absence]


class SegmentIndex:
    """The open segments of a store and the table of the records in them; ``clock`` is a wall clock."""

    def __init__(self, disk: Disk, ttl_s: float | None, path: object, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.index_lock = threading.Lock()
        self.guard = OpenCheck(path, self.index_lock)
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

    @contextmanager
    def looking(self) -> Iterator[None]:
        """With the index lock, in an open store, where nothing is too old; ``StoreClosedError``."""
        self.guard.check()
        now_s = self.clock()
        with self.index_lock:
            self.guard.check()
            self.expire(now_s)
            yield

    def join(self, segment: Segment) -> None:
        """Held: index_lock."""
        self.segments[segment.sequence] = segment
        self.used_nbytes += segment.size
        self._fresh = _NEVER
        self.table.join(segment)

    def serve(self, found: Sequence[tuple[Segment, Content]]) -> list[Place]:
        """Serve the records of segments, oldest first; where nothing was served yet, the copies that give way.

        Held: index_lock.
        """
        for segment, _ in found:
            self.join(segment)
        if not self.table.records:
            return self.table.load([(segment, content.rows, content.states) for segment, content in found])
        for segment, content in found:
            self.take(segment, content.rows, content.states)
        return []

    def take(self, segment: Segment, rows: bytes | bytearray, states: bytes | bytearray) -> None:
        """Serve what was found at the end of a segment that joined.

        The segment with the higher sequence has the newer copy, and in one segment what comes later. A copy that is
        deleted or not sound decides like any other: no older one of its key is served. Held: index_lock.
        """
        first = segment.count
        segment.count += len(states)
        for number, state in enumerate(states, first):
            row = bytes(rows[(number - first) * ENTRY_NBYTES : (number - first + 1) * ENTRY_NBYTES])
            known = self.table.find(BlockKey(row[:32]))
            if known is not None and (known[0].sequence, known[1].number) > (segment.sequence, number):
                continue
            if state == LIVING:
                self.table.add(segment, number, row)
            elif known is not None:
                self.table.remove(known)

    def let_go(self, segment: Segment) -> None:
        """Forget a segment and close it when the last call that reads it ends."""
        with self.index_lock:
            self.table.leave(segment)
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
        """Let go of every segment."""
        for segment in list(self.segments.values()):
            self.let_go(segment)

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
                self.expired_records += self.table.leave(segment)
            elif segment.created_s is not None:
                since, until = max(since, segment.created_s - self._ttl_s), min(until, segment.created_s + self._ttl_s)
        self._fresh = (since, until)

    def header_of(self, place: Place) -> RecordHeader | None:
        """The header of a record whose segment is pinned, from the disk; ``None`` where it does not come back sound."""
        segment, entry = place
        try:
            state, raw = read_header(self._disk, segment.fd, entry)
        except OSError as error:
            if error.errno != errno.EIO:
                raise StorageError(f"{self._path}/{segment.name}: cannot read: {error}") from error
            return None
        return unpack_checked_header(raw) if state == LIVING else None

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self.looking():
            return [place is not None for place in self.table.find_all(keys)]

    def hide(self, keys: Sequence[BlockKey]) -> list[Place]:
        """Serve these keys no more; where their records are, with their segments pinned."""
        with self.looking():
            places = [place for place in self.table.find_all(dict.fromkeys(keys)) if place is not None]
            for place in places:
                self.table.remove(place)
                place[0].pins += 1
        return places

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> Found:
        """Read records straight into the callers' buffers.

        A record that is not what was looked up may have been replaced meanwhile, and is looked up again. One that the
        disk does not give back is a miss, counted in ``failed_reads``, and is asked for again the next time.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        found: Found = [Absence.MISS] * len(keys)
        numbers: Sequence[int] = range(len(keys))
        for _ in range(_LOOKS_MAX):
            odd: list[tuple[int, Place]] = []
            self.guard.check()
            now_s = self.clock()
            with self.index_lock:  # looking(), without what a generator costs each read
                self.guard.check()
                self.expire(now_s)
                places = self.table.find_all([keys[i] for i in numbers])
                runs = plan(zip(numbers, places, strict=True), buffers, found)
                self.tick += 1
                for segment, _, records in runs:
                    segment.pins += 1
                    segment.hit(self.tick, records[0][1].number, len(records))
            try:
                for run in runs:
                    self._read(run, found, odd)
            finally:
                self.unpin([segment for segment, _, _ in runs])
            if not odd:
                break
            with self.index_lock:
                numbers = [i for i, place in odd if self._has_moved(i, place, found)]
        return found

    def _has_moved(self, i: int, place: Place, found: Found) -> bool:
        """Whether what was read where a record was is not what its key has now; if it is, a deleted one goes.

        Held: index_lock.
        """
        now = self.table.find(place[1].key)
        if now is None or now[1] != place[1]:
            found[i] = Absence.MISS
            return now is not None
        if found[i] is Absence.MISS:
            self.table.remove(now)
        return False

    def _read(self, run: Run, found: Found, odd: list[tuple[int, Place]]) -> None:
        """Read what was planned and check each header; ``odd`` gets the records whose headers are not as they were."""
        segment, vector, records = run
        first, last = records[0][1], records[-1][1]
        nbytes = last[1] + last[5] + (last[2] + 63 & -64) - first[1]
        unreadable = False
        try:
            whole = read_all(self._disk, segment.fd, vector, first[1], nbytes) == nbytes
        except OSError as error:
            if error.errno != errno.EIO:
                raise StorageError(f"{self._path}/{segment.name}: cannot read: {error}") from error
            whole, unreadable = False, True
        if not whole and len(records) > 1:  # the file was cut, or a sector is bad: find out whose
            buffers = iter(vector)
            for one in records:
                alone = list(islice(buffers, 3 if one[1][2] & 63 else 2))
                self._read((segment, alone, [one]), found, odd)
            return
        if unreadable:
            with self.index_lock:
                self.failed_reads += 1
                segment.suspects.add(first.number)
            return
        for i, entry, raw in records:
            if crc32(raw) == CRC_RESIDUE and raw.endswith(entry[6]) and raw.startswith(entry[0], 32) and whole:
                found[i] = unpack_checked_header(raw)
                continue
            found[i] = Absence.MISS if whole and header_is_dead(raw, entry) else Absence.CORRUPT
            odd.append((i, (segment, entry)))
        if segment.suspects:
            segment.suspects.difference_update([entry.number for _, entry, _ in records])


def plan(places: Iterable[tuple[int, Place | None]], buffers: Sequence[memoryview], found: Found) -> list[Run]:
    """What to read in which calls; ``found`` gets what no disk has to be asked.

    Keys that are asked for in the order in which they were put are read in one call.
    """
    runs: list[Run] = []
    vector: list[Room] = []
    records: list[Wanted] = []
    segment, after = None, -1
    for i, place in places:
        if place is None:
            continue
        where, entry = place
        _, offset, payload_nbytes, _, _, header_nbytes, _ = entry
        buffer, raw = buffers[i], bytearray(header_nbytes)
        if payload_nbytes != buffer.nbytes:
            found[i] = Absence.CORRUPT
            continue
        if offset == after and where is segment and len(records) < _RUN_MAX:
            vector += (raw, buffer)
            records.append((i, entry, raw))
        else:
            segment, vector, records = where, [raw, buffer], [(i, entry, raw)]
            runs.append((where, vector, records))
        after = offset + header_nbytes + payload_nbytes
        if pad := -payload_nbytes & 63:
            vector.append(bytearray(pad))
            after += pad
    return runs

"""What a store knows of its open segments: where each record is, who reads there, and what has grown too old.

Shared by the writer (:class:`cache_manager.storage.segments.SegmentPool`) and by readers
(:class:`cache_manager.storage.reader.FileReader`). ``index_lock`` guards everything here and is never held over I/O: a
call pins the segments that it reads, and a segment that goes meanwhile keeps its bytes until the last pin is gone.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import structs

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, pack_header
from cache_manager.spec import ALIGNMENT
from cache_manager.storage.disk import IOV_MAX, Disk, Room, read_all
from cache_manager.storage.limits import is_older
from cache_manager.storage.segment import header_is_dead, header_is_sound, header_sum, record_nbytes

_RUN_MAX: Final = IOV_MAX // 3
_NEVER: Final = (float("inf"), float("-inf"))
_SHARED_MAX: Final = 1024
_LOOKS_MAX: Final = 4

Run = list[tuple[int, "Place"]]
"""Records that are neighbours in one segment, each with its position in the call."""


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file that is open, and what the store knows about it."""

    sequence: int
    path: Path
    fd: int
    size: int  # of the file; counts against the quota
    end: int  # where the next record would go
    used_at: int  # tick of the last put or get
    created_s: float | None  # wall clock; None: unknown
    keys: list[BlockKey] = field(default_factory=list)  # of records written here, deleted ones too
    pins: int = 0  # calls that use the descriptor outside the index lock
    dirty: bool = False  # bytes were written since the last sync
    marks: int = 0  # deletions of copies for which there is a newer one, so far
    synced_marks: int = 0  # how many of them are on stable storage
    dropped: bool = False  # close the descriptor when the last pin is gone
    expired: bool = False  # its records are in the index no more, its file is to go


class Place(NamedTuple):
    """Where a record is, and its header as it was when it was sound."""

    sequence: int  # of the segment: places sort as they lie on the disk
    offset: int
    nbytes: int  # of header, payload and padding
    header_nbytes: int
    header: RecordHeader
    segment: Segment
    header_sum: bytes  # of the header as it lies on the disk


def _lies_at(place: Place) -> tuple[int, int]:
    """Of two copies of a record the newer one lies behind the other."""
    return place.sequence, place.offset


class SegmentIndex:
    """The open segments of a store and the index of the records in them."""

    def __init__(self, disk: Disk, ttl_s: float | None) -> None:
        self.index_lock = threading.Lock()
        self.index: dict[BlockKey, Place] = {}
        self.segments: dict[int, Segment] = {}
        self.tick = 0
        self.used_nbytes = 0
        self.expired_segments = self.expired_records = 0
        self.sweepable = False  # an expired segment is still there
        self._disk = disk
        self._ttl_s = ttl_s
        self._fresh = _NEVER  # no segment expires while the clock is between these
        self._shared: dict[bytes, bytes] = {}  # fingerprints and bitmaps of records that were read

    def add(self, segment: Segment) -> None:
        """Held: index_lock."""
        self.segments[segment.sequence] = segment
        self.used_nbytes += segment.size
        self._fresh = _NEVER

    def take(
        self, segment: Segment, records: Iterable[tuple[int, RecordHeader]], dead: Iterable[tuple[int, RecordHeader]]
    ) -> list[Place]:
        """Index what was read of a segment, by offsets; copies for which there is a newer one. Held: index_lock.

        ``dead`` are copies that are deleted or not sound: an older copy of their key is not served either.
        """
        index, older = self.index, []
        for offset, found in records:
            sum_, nbytes = header_sum(pack_header(found)), record_nbytes(found)
            header = self._with_shared_bytes(found)
            place = Place(segment.sequence, offset, nbytes, header.nbytes, header, segment, sum_)
            if (known := index.get(header.key)) is not None:
                known, place = sorted((known, place), key=_lies_at)
                older.append(known)
            index[header.key] = place
            segment.keys.append(header.key)
        for offset, header in dead:
            if (known := index.get(header.key)) is not None and _lies_at(known) < (segment.sequence, offset):
                older.append(index.pop(header.key))
        return older

    def _with_shared_bytes(self, header: RecordHeader) -> RecordHeader:
        """Equal but for the memory that it takes: fingerprints are all alike, and most bitmaps are full."""
        if len(self._shared) > _SHARED_MAX:
            self._shared.clear()
        share = self._shared.setdefault
        fingerprint, valid = header.fingerprint, header.valid
        return structs.replace(header, fingerprint=share(fingerprint, fingerprint), valid=share(valid, valid))

    def forget(self, segment: Segment) -> int:
        """Take a segment's records out of the index; how many there were. Held: index_lock."""
        before = len(self.index)
        for key in segment.keys:
            if (place := self.index.get(key)) is not None and place.segment is segment:
                del self.index[key]
        segment.keys = []
        return before - len(self.index)

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
                    os.close(segment.fd)

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

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], now_s: float, check_open: Callable[[], None]
    ) -> list[RecordHeader | Absence]:
        """Read records straight into the callers' buffers; ``check_open`` is called under the lock, before each look.

        A record that is found deleted may have been replaced since it was looked up, and is looked up again.
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
                wanted = [i for i, place in dead if self._is_replaced(keys[i], place)]
            if not wanted:
                break
        return found

    def _is_replaced(self, key: BlockKey, dead: Place) -> bool:
        """Whether there is another record in the place of a deleted one, which is forgotten now. Held: index_lock."""
        if self.index.get(key) is dead:
            del self.index[key]
        return key in self.index

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
        index, runs = self.index, []
        run: Run = []
        sequence = after = -1
        for i in wanted:
            if (place := index.get(keys[i])) is None:
                continue
            if place.header.payload_nbytes != buffers[i].nbytes:
                found[i] = Absence.CORRUPT
            elif place.offset == after and place.sequence == sequence and len(run) < _RUN_MAX:
                run.append((i, place))
                after += place.nbytes
            else:
                run = [(i, place)]
                runs.append(run)
                sequence, after = place.sequence, place.offset + place.nbytes
                place.segment.pins += 1
                place.segment.used_at = self.tick
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
        first, last = run[0][1], run[-1][1]
        segment, nbytes = first.segment, last.offset + last.nbytes - first.offset
        vector: list[Room] = []
        raws = []
        for i, place in run:
            raws.append(raw := bytearray(place.header_nbytes))
            vector.append(raw)
            vector.append(buffers[i])
            if pad := -place.header.payload_nbytes % ALIGNMENT:
                vector.append(bytearray(pad))
        try:
            whole = read_all(self._disk, segment.fd, vector, first.offset, nbytes) == nbytes
        except OSError as error:
            if error.errno != errno.EIO:
                raise StorageError(f"{segment.path}: cannot read: {error}") from error
            whole = False
        if not whole and len(run) > 1:  # the file was cut, or a sector is bad: find out whose
            for one in run:
                self._read([one], buffers, found, dead)
            return
        for (i, place), raw in zip(run, raws, strict=True):
            key, sum_ = place.header.key, place.header_sum
            if whole and header_is_sound(raw, key, sum_):
                found[i] = place.header
            elif whole and header_is_dead(raw, key, sum_):
                dead.append((i, place))  # since it was looked up: a miss
            else:
                found[i] = Absence.CORRUPT

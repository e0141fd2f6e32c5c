"""The open extents of a store and how records are found and read in them, for the writer and for readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader
from cache_manager.storage.disk import IOV_MAX, Disk, Room, SystemDisk, read_all
from cache_manager.storage.file.extent import Extent
from cache_manager.storage.file.index import KeyIndex, Place
from cache_manager.storage.guard import ClosingStore, OpenCheck

RUN_MAX: Final = IOV_MAX // 2
_LOOKS_MAX: Final = 4

Wanted = tuple[Extent, int, list[int], list[Room], bytearray]
"""Neighbours that are read in one call: extent, first slot, positions in the call, room for bytes, and their heads."""


class Shelf(ClosingStore):
    """What the writer and a reader have in common. ``lock`` guards everything in memory and is never held over I/O."""

    _quota_nbytes = 0  # of a reader, which has none

    def __init__(self, path: Path, disk: Disk | None, ttl_s: float | None, clock: Callable[[], float]) -> None:
        if ttl_s is not None and not 0 < ttl_s < float("inf"):
            raise ConfigError("ttl", "a positive number of seconds", ttl_s)
        self.path = path
        self.lock = threading.Lock()
        self.guard = OpenCheck(path, self.lock)
        self.index = KeyIndex()
        self.calls = 0  # that have used records
        self.failed_reads = 0
        self.refused: dict[str, str] = {}
        """Files with an extent's name that are none, or cannot be read now, and why; they are left alone."""
        self._disk: Disk = disk or SystemDisk()
        self._ttl_s, self._clock = ttl_s, clock
        self._suspects: set[int] = set()  # ticks of records that the disk did not give back

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four ``extents``, ``failed_reads``, that the disk did not give, and ``refused_files``."""
        with self.looking():
            extents = self.index.extents
            used_nbytes = sum(extent.shape.nbytes for extent in extents)
            capacity_nbytes = self._quota_nbytes or used_nbytes
            return {
                "records": sum(extent.living for extent in extents),
                "used_nbytes": used_nbytes,
                "free_nbytes": capacity_nbytes - used_nbytes,
                "capacity_nbytes": capacity_nbytes,
                "extents": len(extents),
                "failed_reads": self.failed_reads,
                "refused_files": len(self.refused),
            }

    @contextmanager
    def looking(self) -> Iterator[None]:
        """With the lock, in an open store; ``StoreClosedError``."""
        self.guard.check()
        with self.lock:
            self.guard.check()
            yield

    def find_all(self, keys: Iterable[BlockKey]) -> list[Place | None]:
        """The slots of records that are not too old, or ``None``. Held: lock.

        As far in the future counts as too old: a clock that was set back says nothing about age.
        """
        places = self.index.find_all(keys)
        if self._ttl_s is None:
            return places
        now_ms, ttl_ms = self._clock() * 1000, self._ttl_s * 1000
        return [p if p and abs(now_ms - p[0].created_ms[p[1]]) < ttl_ms else None for p in places]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self.looking():
            return [place is not None for place in self.find_all(keys)]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Read records straight into the callers' buffers; neighbours that are asked for in their order in one call.

        A record whose head has changed while it was read is looked up again. One that the disk does not give back is a
        miss, counted in ``failed_reads``, and is asked for again the next time.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        numbers: Sequence[int] = range(len(keys))
        for look in range(_LOOKS_MAX):
            changed: list[int] = []
            self.guard.check()
            with self.lock:  # looking(), without what a generator costs each read
                self.guard.check()
                places = self.find_all([keys[i] for i in numbers])
                runs = self._plan(numbers, places, buffers, found)
            for run in runs:
                self._read(run, found, changed)
            missing = [] if look else [i for i, place in enumerate(places) if place is None]
            if not (missing or changed) or not self._looked_again(changed):
                break
            numbers = missing + changed
        return found

    def _plan(
        self,
        numbers: Sequence[int],
        places: Sequence[Place | None],
        buffers: Sequence[memoryview],
        found: list[RecordHeader | Absence],
    ) -> list[Wanted]:
        """What to read in which calls; ``found`` gets what no disk has to be asked. Held: lock."""
        self.calls += 1
        planned: list[tuple[Extent, int, list[int], list[Room]]] = []
        positions, vector = list[int](), list[Room]()
        last, after = None, -1  # the extent of the record before, and the slot behind it
        for i, place in zip(numbers, places, strict=True):
            if place is None:
                continue
            extent, local = place
            if extent is not last:
                last, after = extent, -1
                extent.used_at = self.calls
                nbytes = extent.shape.layout[1]
                pad = bytearray(extent.shape.step - nbytes)
            extent.use(local)
            if buffers[i].nbytes != nbytes:
                found[i] = Absence.CORRUPT
                continue
            if local != after or len(positions) == RUN_MAX:
                positions, vector = [], []
                planned.append((extent, local, positions, vector))
            elif pad:
                vector.append(pad)
            positions.append(i)
            vector.append(buffers[i])
            after = local + 1
        return [(*run, run[0].packed(run[1], len(run[2]))) for run in planned]

    def _read(self, run: Wanted, found: list[RecordHeader | Absence], changed: list[int]) -> None:
        """Read what was planned; ``changed`` gets those whose heads are others by now."""
        extent, local, positions, vector, heads = run
        count, nbytes, step = len(positions), extent.head_nbytes, extent.shape.step
        wanted = (count - 1) * step + extent.shape.layout[1]
        absence: Absence | None = None
        try:
            if read_all(self._disk, extent.fd, vector, extent.payload_at(local), wanted) < wanted:
                absence = Absence.CORRUPT  # the file was cut
            now = self._heads_now(extent, local, count)
        except OSError:
            absence = Absence.MISS  # for now
        if absence and count > 1:  # find out whose
            rooms = vector[:: (len(vector) + count - 1) // count]
            for k, (i, room) in enumerate(zip(positions, rooms, strict=True)):
                self._read((extent, local + k, [i], [room], heads[k * nbytes : (k + 1) * nbytes]), found, changed)
        elif absence:
            found[positions[0]] = absence
            with self.lock:
                self.failed_reads += absence is Absence.MISS
                self._suspects.add(int.from_bytes(heads[:8], "little"))
        else:
            for k, (i, header) in enumerate(zip(positions, extent.headers(heads), strict=True)):
                if now == heads or now[k * nbytes : (k + 1) * nbytes] == heads[k * nbytes : (k + 1) * nbytes]:
                    found[i] = header
                else:
                    changed.append(i)

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        """The heads of slots whose payloads have just been read."""
        return extent.packed(local, count)

    def _looked_again(self, changed: Sequence[int]) -> bool:
        """Whether to look up again what was missing, or has ``changed`` while it was read."""
        return bool(changed)

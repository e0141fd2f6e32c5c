"""How records are found and read in the open extents of a store, for its writer and for readers beside it.

Many readers at once, in any process, beside the one writer or none. A reader takes no lock and writes no byte. **What a
writer's ``put`` has stored before a call, the call finds.** For that a key that is missing makes the reader ask, in one
small read, what the writer has changed since it looked last, and it reads the heads that have changed. A record whose
head is not the same after its payload was read is looked up again, or a miss: its slot was used again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, StorageError, StoreMissingError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.disk import Disk, Room, read_all
from cache_manager.storage.file.directory import Seen, StoreDirectory
from cache_manager.storage.file.extent import FREE, KEY_AT, Extent, open_extents, runs_of
from cache_manager.storage.file.index import KeyIndex, Place
from cache_manager.storage.guard import ClosingStore, OpenCheck

_LOOKS_MAX: Final = 4

Wanted = tuple[Extent, int, list[int], list[Room], bytearray]
"""Neighbours that are read in one call: extent, first slot, positions in the call, room for bytes, and their heads."""


class Shelf(ClosingStore):
    """What the writer and a reader have in common. ``lock`` guards everything in memory and is never held over I/O."""

    _quota_nbytes = 0  # of a reader, which has none
    _looks = 0  # that have ended, of a reader

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
        self._disk = disk or Disk()
        self._ttl_s, self._clock = ttl_s, clock
        self._suspects: set[int] = set()  # ticks of records that the disk did not give back

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four ``failed_reads``, that the disk did not give, and ``refused_files``."""
        with self.guard:
            extents = self.index.extents
            used_nbytes = sum(extent.shape.nbytes for extent in extents)
            capacity_nbytes = self._quota_nbytes or used_nbytes
            return {
                "records": sum(len(extent.served) for extent in extents),
                "used_nbytes": used_nbytes,
                "free_nbytes": capacity_nbytes - used_nbytes,
                "capacity_nbytes": capacity_nbytes,
                "failed_reads": self.failed_reads,
                "refused_files": len(self.refused),
            }

    def fresh(self, places: list[Place | None]) -> list[Place | None]:
        """``None`` instead of places whose records are too old. Held: lock.

        As far in the future counts as too old: a clock that was set back says nothing about age.
        """
        if self._ttl_s is None:
            return places
        now_ms, ttl_ms = self._clock() * 1000, self._ttl_s * 1000
        return [p if p and abs(now_ms - p[0].created_ms[p[1]]) < ttl_ms else None for p in places]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self.guard:
            return [place is not None for place in self.fresh(self.index.find_all(keys))]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Read records straight into the callers' buffers; neighbours that are asked for in their order in one call.

        A record whose head has changed while it was read is looked up again. One that the disk does not give back is a
        miss, counted in ``failed_reads``, and is asked for again the next time.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        wanted: Sequence[int] = range(len(keys))
        for look in range(_LOOKS_MAX):
            changed: list[int] = []
            looks = self._looks
            with self.guard:
                places = self.fresh(self.index.find_all([keys[i] for i in wanted] if look else keys))
                runs = self._plan(wanted, places, buffers, found)
            for run in runs:
                self._read(run, found, changed)
            missing = [] if look or None not in places else [i for i, place in enumerate(places) if place is None]
            if not (missing or changed) or not self._looked_again(changed, looks):
                break
            wanted = missing + changed
        return found

    def _plan(
        self,
        wanted: Sequence[int],
        places: Sequence[Place | None],
        buffers: Sequence[memoryview],
        found: list[RecordHeader | Absence],
    ) -> list[Wanted]:
        """What to read in which calls; ``found`` gets what no disk has to be asked. Held: lock."""
        self.calls += 1
        planned: list[tuple[Extent, int, list[int], list[Room]]] = []
        positions, vector = list[int](), list[Room]()
        last, after = None, -1  # the extent of the record before, and the slot behind it
        for i, place in zip(wanted, places, strict=True):
            if place is None:
                continue
            extent, local = place
            if extent is not last:
                last, after = extent, -1
                extent.used_at = self.calls
                nbytes = extent.shape.layout[1]
                pad = bytearray(extent.shape.step - nbytes)
            if buffers[i].nbytes != nbytes:
                found[i] = Absence.CORRUPT
                continue
            if local != after:
                positions, vector = [], []
                planned.append((extent, local, positions, vector))
            elif pad:
                vector.append(pad)
            positions.append(i)
            vector.append(buffers[i])
            after = local + 1
        for extent, local, positions, _ in planned:
            extent.use(local, len(positions))
        return [(*run, run[0].packed(run[1], len(run[2]))) for run in planned]

    def _read(self, run: Wanted, found: list[RecordHeader | Absence], changed: list[int]) -> None:
        """Read what was planned; ``changed`` gets those whose heads are others by now."""
        extent, local, positions, vector, heads = run
        count, nbytes, shape = len(positions), extent.head_nbytes, extent.shape
        wanted = (count - 1) * shape.step + shape.layout[1]
        absence: Absence | None = None
        try:
            if read_all(self._disk, extent.fd, vector, extent.payload_at(local), wanted) < wanted:
                absence = Absence.CORRUPT  # the file was cut
            now = self._heads_now(extent, local, count)
        except OSError:
            absence = Absence.MISS  # for now
        if absence is None:
            same = now == heads
            for k, (i, header) in enumerate(zip(positions, extent.headers(heads), strict=True)):
                if same or now[k * nbytes : (k + 1) * nbytes] == heads[k * nbytes : (k + 1) * nbytes]:
                    found[i] = header
                else:
                    changed.append(i)
        elif count > 1:  # find out whose
            rooms = vector[:: (len(vector) + count - 1) // count]
            for k, (i, room) in enumerate(zip(positions, rooms, strict=True)):
                self._read((extent, local + k, [i], [room], heads[k * nbytes : (k + 1) * nbytes]), found, changed)
        else:
            found[positions[0]] = absence
            with self.lock:
                self.failed_reads += absence is Absence.MISS
                self._suspects.add(int.from_bytes(heads[:8], "little"))

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        """The heads of slots whose payloads have just been read."""
        return extent.packed(local, count)

    def _looked_again(self, changed: Sequence[int], looks: int) -> bool:  # noqa: ARG002 - a reader's
        """Whether to look up again what was missing, or has ``changed`` while it was read, after so many ``looks``."""
        return bool(changed)


class FileReader(Shelf):
    """A ``StorageBackend`` that only reads; ``put`` is :class:`StoreReadOnlyError`.

    ``delete``, which is what a quarantine does, hides a record from this reader; its bytes are the writer's to judge.
    ``ttl_s`` is the reader's own: no record that is older is served, whatever the writer keeps. A store that is made
    anew at the same path is read from the next look on; one that was only moved is read on where it is. The room of
    what the writer drops is free when the reader has looked.

    :class:`StoreMissingError` where there is no store, unless ``waits`` says that nothing is there until a writer makes
    one; :class:`StoreFormatError` for something else.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ttl_s: float | None = None,
        waits: bool = False,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(directory, disk, ttl_s, clock)
        self._directory: StoreDirectory | None = None
        self._looking = threading.Lock()  # one look at a time; taken before the other
        self._seen: Seen | None = None
        try:
            self._directory = StoreDirectory.existing(directory)
        except StoreMissingError:
            if not waits:
                raise
        self._look()

    def put(
        self,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        *,
        replace: bool = False,  # noqa: ARG002 - the port's
    ) -> list[RecordHeader | None]:
        self.guard.check()
        if headers or payloads:
            raise StoreReadOnlyError(f"{self.path}: opened with mode=read; nothing can be put here")
        return []

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        looks, found = self._looks, super().contains(keys)
        return found if all(found) or not self._looked_again((), looks) else super().contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Hide records from this reader, until it is opened anew or the writer stores them anew."""
        with self.guard:
            for place in self.index.find_all(keys):
                if place:
                    place[0].forget(place[1])

    def flush(self) -> None:
        self.guard.check()

    def close(self) -> None:
        """Close the files, those in use when their last call ends; idempotent."""
        if not self.guard.closable:
            return
        with self._looking:
            if self.guard.close():
                self.index, self._directory = KeyIndex(), None

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        return extent.read_heads(self._disk, local, count)

    def _looked_again(self, changed: Sequence[int], looks: int) -> bool:  # noqa: ARG002 - what is missing, too
        """Look if the writer has changed anything; whether a look has ended since there were ``looks``, of any thread.

        A caller that has a reason waits for another thread's look, which may be past what this one wants.
        """
        if self._has_news():
            with self._looking:
                if self._has_news():
                    self.guard.check()
                    with suppress(StorageError):  # a miss is the truth about what can be read
                        self._look()
                    self._looks += 1  # now: who has missed a key meanwhile has to ask again
        return self._looks != looks

    def _has_news(self) -> bool:
        directory, there = self._directory, self.path.exists()
        if directory is None or (there and not directory.is_in_place()):
            return there
        return directory.changes(self._seen)[1] != []

    def _look(self) -> None:
        """Let go of what was dropped, read on in what is there. Held: looking (or not yet shared)."""
        if self._directory is None or not self._directory.is_in_place():
            with suppress(StorageError):  # it was moved, and no store is in its place
                directory = StoreDirectory.existing(self.path)
                with self.lock:
                    self.index, self._directory, self._seen = KeyIndex(), directory, None
        if self._directory is None:
            return
        seen, changes = self._directory.changes(self._seen)
        extents = {extent.shape.number: extent for extent in self.index.extents}
        news: dict[Extent, list[NDArray[np.int64]]] = {}
        for number, first, count in changes or ():
            if extent := extents.get(number):
                news.setdefault(extent, []).append(np.arange(first, min(first + count, extent.slots)))
        if changes is None or not all(count for *_, count in changes):
            opened = self._look_at_files(extents)
            whole = [*extents.values(), *opened] if changes is None else opened
            news.update((extent, [np.arange(extent.slots)]) for extent in whole)
        for extent, slots in news.items():
            try:
                for run in runs_of(np.unique(np.concatenate(slots))):
                    self._read_on(extent, *run)
            except OSError:
                seen = None  # what is new there is looked for again
        self._seen = seen

    def _look_at_files(self, known: dict[int, Extent]) -> list[Extent]:
        """Let go of extents that were dropped; those that have come, but for the first ones, which are read here."""
        assert self._directory is not None
        gone = [extent for extent in known.values() if not os.fstat(extent.fd).st_nlink]
        names = {extent.name for extent in known.values() if extent not in gone}  # a new one may have its name
        opened = open_extents(self._disk, self._directory, os.O_RDONLY, self.refused, names)
        for extent in () if known else opened:
            extent.load(self._disk)
        with self.lock:
            for extent in gone:
                self.index.leave(extent)
            for extent in opened:
                self.index.join(extent)
            self.index.fit() if known else self.index.load()
        return opened if known else []

    def _read_on(self, extent: Extent, first: int, count: int) -> None:
        """Serve what is new in slots, but for records of which there are newer ones."""
        heads = np.frombuffer(extent.read_heads(self._disk, first, count), np.uint8).reshape(count, -1)
        extent.clean(heads)
        ticks = heads[:, :8].view("<u8")[:, 0]
        with self.lock:
            if extent.ordinal < 0:
                return
            changed = np.flatnonzero(extent.ticks[first : first + count] != ticks)
            extent.heads[first + changed] = 0
            extent.uses[first + changed] = FREE
            for start, some in runs_of(changed[ticks[changed] > 0]):
                keys = [BlockKey(head.tobytes()) for head in heads[start : start + some, KEY_AT : KEY_AT + 32]]
                places = self.index.find_all(keys)
                extent.hold(first + start, heads[start : start + some])
                self.index.add_all(keys, extent, first + start)
                for local, place in enumerate(places, first + start):
                    if place:
                        newer = place[0].ticks[place[1]] > extent.ticks[local]
                        extent.forget(local) if newer else place[0].forget(place[1])

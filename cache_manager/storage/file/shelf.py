"""The open extents of a store and how records are found and read in them, for the writer and for readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError, StorageError, StoreFormatError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader
from cache_manager.storage.disk import IOV_MAX, Disk, Room, SystemDisk, read_all
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.extent import USES_MAX, Extent, open_extent
from cache_manager.storage.file.index import BITS, LOCAL, NOWHERE, KeyIndex
from cache_manager.storage.guard import ClosingStore, OpenCheck

EXTENTS_MAX: Final = 512
"""Each has a descriptor open."""
_RUN_MAX: Final = IOV_MAX // 2
_LOOKS_MAX: Final = 4

Wanted = tuple[Extent, int, list[int], list[Room], bytearray]
"""Neighbours that are read in one call: extent, first slot, positions in the call, room for bytes, and their heads."""


class Shelf(ClosingStore):
    """What the writer and a reader have in common. ``lock`` guards everything in memory and is never held over I/O."""

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
        self._suspects: set[int] = set()  # slots that the disk did not give back

    @contextmanager
    def looking(self) -> Iterator[None]:
        """With the lock, in an open store; ``StoreClosedError``."""
        self.guard.check()
        with self.lock:
            self.guard.check()
            yield

    def find_all(self, keys: Iterable[BlockKey]) -> list[int]:
        """The slots of records that are not too old, or ``NOWHERE``. Held: lock.

        As far in the future counts as too old: a clock that was set back says nothing about age.
        """
        slots = self.index.find_all(keys)
        if self._ttl_s is not None:
            now_ms, ttl_ms, extents = self._clock() * 1000, self._ttl_s * 1000, self.index.extents
            for i, slot in enumerate(slots):
                if slot != NOWHERE and abs(now_ms - extents[slot >> BITS].created_ms(slot & LOCAL)) >= ttl_ms:
                    slots[i] = NOWHERE
        return slots

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self.looking():
            return [slot != NOWHERE for slot in self.find_all(keys)]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Read records straight into the callers' buffers; neighbours that are asked for in their order in one call.

        A record whose head has changed while it was read is looked up again. One that the disk does not give back is a
        miss, counted in ``failed_reads``, and is asked for again the next time.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        numbers: Sequence[int] = range(len(keys))
        for _ in range(_LOOKS_MAX):
            changed: list[int] = []
            self.guard.check()
            with self.lock:  # looking(), without what a generator costs each read
                self.guard.check()
                runs = self._plan(numbers, self.find_all([keys[i] for i in numbers]), buffers, found)
            for run in runs:
                self._read(run, found, changed)
            if not changed:
                break
            self._look_again()
            numbers = changed
        return found

    def _plan(
        self,
        numbers: Sequence[int],
        slots: Sequence[int],
        buffers: Sequence[memoryview],
        found: list[RecordHeader | Absence],
    ) -> list[Wanted]:
        """What to read in which calls; ``found`` gets what no disk has to be asked. Held: lock."""
        self.calls += 1
        planned: list[tuple[Extent, int, list[int], list[Room]]] = []
        positions: list[int] = []
        vector: list[Room] = []
        after = ordinal = NOWHERE
        for i, slot in zip(numbers, slots, strict=True):
            if slot == NOWHERE:
                continue
            if slot >> BITS != ordinal:
                ordinal = slot >> BITS
                extent = self.index.extents[ordinal]
                extent.used_at = self.calls
                uses, nbytes = extent.uses, extent.shape.layout[1]
                pad = bytearray(extent.shape.step - nbytes)
            local = slot & LOCAL
            if (count := uses[local]) < USES_MAX:
                uses[local] = count + 1
            if buffers[i].nbytes != nbytes:
                found[i] = Absence.CORRUPT
                continue
            if slot != after or len(positions) == _RUN_MAX:
                positions, vector = [], []
                planned.append((extent, local, positions, vector))
            elif pad:
                vector.append(pad)
            positions.append(i)
            vector.append(buffers[i])
            after = slot + 1 if local + 1 < extent.slots else NOWHERE
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
            return
        slot = extent.ordinal << BITS | local
        if absence or self._suspects:
            with self.lock:
                self.failed_reads += absence is Absence.MISS
                (self._suspects.update if absence else self._suspects.difference_update)(range(slot, slot + count))
        if absence:
            found[positions[0]] = absence
            return
        for k, (i, header) in enumerate(zip(positions, extent.headers(heads), strict=True)):
            if now == heads or now[k * nbytes : (k + 1) * nbytes] == heads[k * nbytes : (k + 1) * nbytes]:
                found[i] = header
            else:
                changed.append(i)

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        """The heads of slots whose payloads have just been read."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """What was looked up has changed."""

    def _opened(self, directory: StoreDirectory, flags: int, known: Iterable[str] = ()) -> list[Extent]:
        """The extents of a directory that are not known yet; what is none is remembered as refused.

        :class:`StorageError` when the directory cannot be read.
        """
        found: list[Extent] = []
        try:
            names = directory.extents()
        except OSError as error:
            raise StorageError(f"{self.path}: cannot read the store: {error}") from error
        for name in sorted(set(names).difference(known)):
            try:
                if len(found) == EXTENTS_MAX:
                    raise StoreFormatError(str(self.path), "extents", f"{EXTENTS_MAX} at most", len(names))
                found.append(open_extent(self._disk, directory.open(name, flags), name, str(self.path / name)))
                self.refused.pop(name, None)
            except FileNotFoundError:
                continue
            except (StoreFormatError, OSError) as error:
                self.refused[name] = str(error)
        return found

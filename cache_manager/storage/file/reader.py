"""How records are found and read in the open extents of a store, for its writer and for readers beside it.

Many readers at once, in any process, beside the one writer or none. A reader takes no lock and writes no byte. **What a
writer's ``put`` has stored before a call, the call finds.** So when a key is missing, the reader asks in one small read
what the writer has changed since its last look, and reads the heads that have changed. A record whose head has changed
while its payload was read is looked up again, or a miss: its slot was used again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, StorageError, StoreMissingError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.disk import Disk, Room, read_all
from cache_manager.storage.file.directory import Seen, StoreDirectory
from cache_manager.storage.file.extent import Extent, Refusal, open_extents, runs_of
from cache_manager.storage.file.index import ANY_TAIL, Found, KeyIndex
from cache_manager.storage.guard import ClosingStore, StoreLock

_MISS: Final = Absence.MISS  # members' names take long to look up
_CORRUPT: Final = Absence.CORRUPT
_LOOKS_MAX: Final = 4
_AGAIN_S: Final = 1.0  # until an extent that the disk did not give is opened again


def all_have(rooms: Sequence[memoryview], nbytes: int) -> bool:
    """Whether each room takes so many bytes."""
    for room in rooms:  # noqa: SIM110 - a generator costs more than a short loop
        if room.nbytes != nbytes:
            return False
    return True


class ExtentFiles(ClosingStore):
    """The part that the writer and a reader share. ``lock`` guards everything in memory and is never held over I/O."""

    _quota_nbytes = 0  # a reader has none
    _looks = 0  # ended looks, of a reader

    def __init__(self, path: Path, disk: Disk | None, ttl_s: float | None, clock: Callable[[], float]) -> None:
        if ttl_s is not None and not 0 < ttl_s < float("inf"):
            raise ConfigError("ttl", "a positive number of seconds", ttl_s)
        self.path = path
        self.lock = StoreLock(path)
        self.index = KeyIndex(self.lock)
        self.calls = 0  # calls that used records
        self.failed_reads = 0
        self.refused: dict[str, Refusal] = {}
        """Files with an extent's name that are not extents, or that the disk did not give; they are left alone."""
        self._disk = disk or Disk()
        self._ttl_s = ttl_s
        self._clock = clock

    def usage(self) -> Mapping[str, int]:
        """The port's four, ``failed_reads`` of the disk, and ``refused_files``."""
        with self.lock:
            used_nbytes = sum(extent.shape.nbytes for extent in self.index.extents)
            capacity_nbytes = self._quota_nbytes or used_nbytes
            return {
                "records": sum(len(extent.served) for extent in self.index.extents),
                "used_nbytes": used_nbytes,
                "free_nbytes": capacity_nbytes - used_nbytes,
                "capacity_nbytes": capacity_nbytes,
                "failed_reads": self.failed_reads,
                "refused_files": len(self.refused),
            }

    def fresh(self, found: list[Found]) -> list[Found]:
        """Without records that are too old. Held: lock.

        A time as far in the future counts as too old: after a clock was set back, the age is unknown.
        """
        if self._ttl_s is None:
            return found
        now_ms = self._clock() * 1000
        ttl_ms = self._ttl_s * 1000
        return [
            (at + first, extent, local + first, some)
            for at, extent, local, count in found
            for first, some in runs_of(np.flatnonzero(abs(now_ms - extent.created_ms[local : local + count]) < ttl_ms))
        ]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        there = [False] * len(keys)
        with self.lock:
            for at, _, _, count in self.fresh(self.index.find(keys)):
                there[at : at + count] = [True] * count
        return there

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """Read records straight into the callers' buffers; neighbours asked for in order are read in one call.

        A record whose head has changed while it was read is looked up again. One that the disk cannot read is a miss,
        counted in ``failed_reads``, and read again the next time.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        if len(keys) == 1:
            header = self._one(keys, buffers[0])
            if header is not None:
                return [header]
        found: list[Any] = [None] * len(keys)
        wanted = keys
        left: Sequence[int] = range(len(keys))
        for look in range(_LOOKS_MAX):
            looks = self._looks
            with self.lock:
                self.calls += 1
                runs = self.fresh(self.index.find(wanted))
                heads: list[bytearray] = []
                for _, extent, local, count in runs:
                    heads.append(extent.packed(local, count))
                    extent.use(local, count, self.calls)
            changed = False
            n = 0
            for i, (at, extent, local, count) in enumerate(runs):
                read = self._read(extent, local, heads[i], left[at : at + count], buffers, found)
                changed |= read < count
                n += read
            if n == len(left):
                return found
            if (look and not changed) or not self._looked_again(changed, looks):
                break
            left = [i for i, header in enumerate(found) if header is None]
            wanted = [keys[i] for i in left]
        return [header or _MISS for header in found]

    def _one(self, keys: Sequence[BlockKey], buffer: memoryview) -> RecordHeader | None:
        """The record of one key, read into the buffer if it is there, fits, and stays the same meanwhile; for anything
        else ``None``: the way of a batch finds out. Without a batch's lists it takes four fifths of the time."""
        with self.lock:
            self.calls += 1
            runs = self.fresh(self.index.find(keys))
            if not runs:
                return None
            _, extent, local, _ = runs[0]
            heads = extent.packed(local, 1)
            extent.use(local, 1, self.calls)
        shape = extent.shape
        nbytes = buffer.nbytes
        try:
            if shape.payload_nbytes != nbytes:
                return None
            if read_all(self._disk, extent.fd, [buffer], shape.payloads_at + local * shape.step, nbytes) != nbytes:
                return None
            now = self._heads_now(extent, local, 1)
        except OSError:
            return None
        return extent.headers(heads)[0] if now == heads else None

    def _read(
        self,
        extent: Extent,
        local: int,
        heads: bytearray,
        wanted: Sequence[int],
        buffers: Sequence[memoryview],
        found: list[Any],
    ) -> int:
        """Read neighbours, whose heads were these, into the buffers that are ``wanted``, each alone where it must be.

        How many are ``found``, or found absent: the heads of the others have changed meanwhile.
        """
        count = len(wanted)
        shape = extent.shape
        nbytes = shape.payload_nbytes
        step = shape.step
        size = extent.head_nbytes
        rooms = [buffers[i] for i in wanted]
        vector: Sequence[Room] = rooms
        absence: Absence | None = _CORRUPT  # or the file was cut
        try:
            if all_have(rooms, nbytes):
                whole = count * step
                if pad := step - nbytes:
                    sink = bytearray(pad)
                    vector = [part for room in rooms for part in (room, sink)][:-1]
                    whole -= pad
                if read_all(self._disk, extent.fd, vector, shape.payloads_at + local * step, whole) == whole:
                    absence = None
            now = self._heads_now(extent, local, count)
        except OSError:
            absence = _MISS  # for now
        if absence is None:
            headers = extent.headers(heads)
            same = now == heads
            n = 0
            for k, i in enumerate(wanted):
                if same or now[k * size : (k + 1) * size] == heads[k * size : (k + 1) * size]:
                    found[i] = headers[k]
                    n += 1
            return n
        if count > 1:
            each = ((local + k, heads[k * size : (k + 1) * size], [i]) for k, i in enumerate(wanted))
            return sum(self._read(extent, *one, buffers, found) for one in each)
        if absence is _CORRUPT and now != heads:
            return 0  # the key may have a record of another size now
        found[wanted[0]] = absence
        if absence is _MISS:
            with self.lock:
                self.failed_reads += 1
        return 1

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        """The heads of slots whose payloads have just been read."""
        return extent.packed(local, count)

    def _looked_again(self, changed: bool, looks: int) -> bool:  # noqa: ARG002 - a reader's
        """Whether to look up again what was missing, or has ``changed`` while it was read, after so many ``looks``."""
        return changed


class FileReader(ExtentFiles):
    """A ``StorageBackend`` that only reads; ``put`` is :class:`StoreReadOnlyError`.

    ``delete``, which a quarantine calls, only hides a record from this reader. ``ttl_s`` is the reader's own: it serves
    no older record, whatever the writer keeps. A store that is made anew at the same path is read from the next look
    on; one that was only moved is read on in its new place. Room that the writer drops is free after the reader's next
    look.

    :class:`StoreMissingError` where there is no store, unless ``waits``: then every read is a miss until a writer makes
    one. :class:`StoreFormatError` for something else.
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
        self._looking = StoreLock(directory)  # one look at a time; taken before the other
        self._seen: Seen | None = None
        self._opened_at = 0.0  # when new files, and those that the disk had not given, were opened last
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
        replace: bool = False,  # noqa: ARG002 - part of the port
    ) -> list[RecordHeader | None]:
        self.lock.check()
        if headers or payloads:
            raise StoreReadOnlyError(f"{self.path}: opened with mode=read; nothing can be put here")
        return []

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.lock.check()  # before any lock: a forked child has its parent's
        self._looked_again(False, self._looks)  # what is known here may have been deleted there
        return super().contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Hide records from this reader, until it is opened anew or the writer stores them anew."""
        with self.lock:
            for _, extent, local, count in self.index.find(keys):
                extent.forget(local, count)

    def flush(self) -> None:
        self.lock.check()

    def close(self) -> None:
        """Close the files, those in use when their last call ends; idempotent."""
        if not self.lock.closable:
            return
        with self._looking:
            if self.lock.close():
                self.index = KeyIndex(self.lock)
                self._directory = None

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        heads = extent.read_heads(self._disk, local, count)
        return bytearray(len(heads)) if extent.is_dropped else heads

    def _looked_again(self, changed: bool, looks: int) -> bool:  # noqa: ARG002 - what is missing, too
        """Look if the writer has changed anything; whether a look has ended since there were ``looks``, of any thread.

        If there is news, a caller waits for a look of another thread, which may be past the heads that this one needs.
        """
        with self._looking:
            self.lock.check()
            with suppress(StorageError):  # a miss is the truth about what can be read
                self._looks += self._look()  # now: who has missed a key meanwhile has to ask again
        return self._looks != looks

    def _look(self) -> bool:
        """Let go of what was dropped, read on in what is there; whether there was anything. Held: looking."""
        if self._directory is None or not self._directory.is_in_place():
            with suppress(StorageError):  # it was moved, and no store is in its place
                directory = StoreDirectory.existing(self.path)
                with self.lock:
                    self.index = KeyIndex(self.lock)
                    self._directory = directory
                    self._seen = None
        if self._directory is None:
            return False
        seen, changes = self._directory.changes(self._seen)
        is_unread = any(refusal.is_unread for refusal in self.refused.values())
        is_due = is_unread and abs(self._clock() - self._opened_at) >= _AGAIN_S
        if changes == [] and not is_due:
            return False
        opened: list[Extent] = []
        if changes is None or is_due or not all(count for *_, count in changes):
            opened = self._look_at_files(self.index.extents)
        extents = {extent.shape.number: extent for extent in self.index.extents}
        if changes is None:
            changes = [(number, 0, extent.slots) for number, extent in extents.items()]
        runs = [(extent, first, count) for number, first, count in changes if (extent := extents.get(number))]
        news: dict[Extent, list[NDArray[np.int64]]] = {}
        for extent, first, count in runs:
            news.setdefault(extent, []).append(np.arange(first, min(first + count, extent.slots)))
        held: list[tuple[Extent, int, bytearray]] = []
        for extent, slots in news.items():
            changed = runs_of(np.unique(np.concatenate(slots)))
            try:
                held += [heads for run in changed for heads in self._read_on(extent, *run)]
            except OSError as error:
                self._refuse(extent, error)
        with self.lock:
            self.index.join(opened, [])
            for extent, start, heads in held:
                self.index.hold(extent, start, heads, ANY_TAIL, [])
        self._seen = seen
        return True

    def _look_at_files(self, known: Collection[Extent]) -> list[Extent]:
        """Close dropped extents; the new ones, with their heads."""
        assert self._directory is not None
        gone = [extent for extent in known if extent.is_dropped]
        names = {extent.name for extent in known if extent not in gone}  # a new one may have its name
        opened = open_extents(self._disk, self._directory, os.O_RDONLY, self.refused, names)
        self._opened_at = self._clock()
        with self.lock:
            for extent in gone:
                self.index.leave(extent)
        return opened

    def _refuse(self, extent: Extent, error: OSError) -> None:
        """Serve nothing of an extent whose heads the disk did not give, until it has been opened again."""
        with self.lock:
            self.index.leave(extent)
        self.refused[extent.name] = Refusal(f"{self.path / extent.name}: {error}", is_unread=True)
        self._opened_at = self._clock()

    def _read_on(self, extent: Extent, first: int, count: int) -> list[tuple[Extent, int, bytearray]]:
        """Let go of what is gone from slots; the heads that are new in them; ``OSError``.

        They are served when all is gone that is: a record that was deleted before its writer was opened anew may have a
        higher tick than the next one of its key. The writer takes an older copy's head away.
        """
        size = extent.head_nbytes
        raw = extent.read_heads(self._disk, first, count)
        extent.clean(raw)
        ticks = np.frombuffer(raw, np.uint8).reshape(count, -1)[:, :8].view("<u8")[:, 0]
        with self.lock:
            changed = np.flatnonzero(extent.ticks[first : first + count] != ticks)
            for at, some in runs_of(changed):
                self.index.release(extent, first + at, some)
        new = runs_of(changed[ticks[changed] > 0])
        return [(extent, first + at, raw[at * size : (at + some) * size]) for at, some in new]

"""The file store's writer: a slab of slots for each layout, in extents of one directory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from cache_manager.errors import RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, takes_the_place
from cache_manager.storage.disk import IOV_MAX, Disk, SystemDisk, write_all
from cache_manager.storage.slots.clock import Clock, Run, runs_of
from cache_manager.storage.slots.directory import FILE_MODE, TEMP_SUFFIX, LockedDirectory
from cache_manager.storage.slots.extent import (
    FREE,
    GROUP,
    PAGE_NBYTES,
    UNSURE,
    USES_MAX,
    Extent,
    Layout,
    Shape,
    extent_name,
)
from cache_manager.storage.slots.index import LOCAL, NOWHERE, ORDINAL_BITS
from cache_manager.storage.slots.limits import EXTENTS_MAX, QUOTA_NBYTES, Limits, default_extent_nbytes, is_older
from cache_manager.storage.slots.shelf import Shelf

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""
_BATCH_MAX: Final = IOV_MAX // 2
_ZEROS: Final = bytes(512)
_FULL_CALLS: Final = 64


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"
    """After ``flush`` or ``close``; a killed process loses nothing, a power cut what was not flushed."""
    BATCH = "batch"
    """When ``put`` returns."""


class FileStore(Shelf):
    """A ``StorageBackend`` in a directory, for one process at a time; others may read (:class:`FileReader`).

    Records of one layout have one size: they lie in the slots of extents of about ``extent_nbytes`` each, which
    together never take more than ``quota_nbytes``, nor leave the file system less than ``min_free_nbytes`` or
    ``min_free_percent`` of it, whichever is more. When there is no room for a new extent, records that were used least
    give their slots (:mod:`cache_manager.storage.slots.clock`), and an extent of another layout in which nothing was
    used for a whole turn of the clock gives its room. ``put`` answers ``None`` for a record that still has none; of a
    batch that does not fit, the first ones stay. With ``ttl_s`` no record is served that is older by ``clock``, a wall
    clock; what its jumps can do is in :mod:`cache_manager.storage.slots.limits`.

    Opening reads all heads and no payload. Payloads are checked by :class:`RecordStore`. :class:`StorageError` when the
    disk fails: what had been stored is still there, but for what gave its slot, and later calls are tried anew.
    """

    def __init__(
        self,
        directory: Path,
        *,
        quota_nbytes: int = QUOTA_NBYTES,
        extent_nbytes: int | None = None,
        sync: Sync = Sync.NONE,
        ttl_s: float | None = None,
        min_free_nbytes: int = 0,
        min_free_percent: int = 0,
        file_mode: int = FILE_MODE,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        extent_nbytes = extent_nbytes or default_extent_nbytes(quota_nbytes)
        self.limits = Limits(quota_nbytes, extent_nbytes, ttl_s, min_free_nbytes, min_free_percent)
        super().__init__(directory, disk or SystemDisk(), ttl_s, clock)
        self._sync = sync
        self._writing = threading.Lock()  # one put, delete or sweep at a time; taken before the other
        self._clocks: dict[Layout, Clock] = {}
        self._used_nbytes = self._tick = self._number = 0
        self._names_changed = True
        self._full_until = 0  # the disk had no room; it is asked again after so many calls
        self._swept_s = clock()
        self._evicted = self._expired = self._replaced = self._dropped = self._short = self._damaged = 0
        self._directory = LockedDirectory(directory, file_mode=file_mode)
        try:
            self._recover()
        except BaseException as error:
            self._directory.close()
            if isinstance(error, OSError):
                raise StorageError(f"{directory}: cannot read the store: {error}") from error
            raise

    @property
    def record_nbytes_max(self) -> int:
        """Of a payload: an extent of its own has to fit the quota."""
        return self.limits.quota_nbytes // PAGE_NBYTES * PAGE_NBYTES - 4 * PAGE_NBYTES

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        for header, payload in zip(headers, payloads, strict=True):
            if (found := payload.nbytes if isinstance(payload, memoryview) else len(payload)) != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, found)
        self.guard.check()
        with self._writing:
            held: dict[BlockKey, RecordHeader] = {}
            with self.looking():
                self.calls += 1
                places = self._held([header.key for header in headers], held)
            wanted: dict[BlockKey, int] = {}
            for i, header in enumerate(headers):
                key = header.key
                stored = headers[wanted[key]] if key in wanted else held.get(key)
                if stored is None or takes_the_place(header, stored, replace=replace):
                    wanted[key] = i
            groups: dict[Layout, list[int]] = {}
            for i in sorted(wanted.values()):
                header = headers[i]
                layout = header.fingerprint, header.payload_nbytes, len(header.valid)
                groups.setdefault(layout, []).append(i)
            try:
                self._sweep()
                for layout, numbers in groups.items():
                    some = [(headers[i], payloads[i]) for i in numbers]
                    self._store(layout, some, places, held)
            except OSError as error:
                raise StorageError(f"{self.path}: cannot write: {error}") from error
            finally:
                if groups:
                    self._directory.count(self._tick)
        return [held.get(header.key) for header in headers]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Gone from this process in any case; :class:`StorageError` when a record may be back after a restart."""
        self.guard.check()
        with self._writing:
            with self.looking():
                slots = [slot for slot in self.index.find_all(dict.fromkeys(keys)) if slot != NOWHERE]
            try:
                self._kill(slots)
            except OSError as error:
                raise StorageError(f"{self.path}: cannot delete a record: {error}") from error

    def flush(self) -> None:
        """Return when all that was put before is on stable storage.

        :class:`StorageError` when that cannot be: nothing is promised then of what was put before, not by a later flush
        either, because an operating system takes pages whose write has failed for written.
        """
        with self.looking():
            dirty = [extent for extent in self.index.extents.values() if extent.dirty]
        try:
            self._sync_all(dirty)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot flush: {error}") from error

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four ``extents``, and since opening what went and what was refused.

        ``evicted_records`` gave their slots to others, ``dropped_extents`` their room; ``expired_records`` were too
        old; ``replaced_records`` gave way to a newer one; ``failed_reads``, which the disk did not give back;
        ``short_of_free``, how often the file system's reserve left no room. What opening found: ``damaged_heads`` and
        ``refused_files``. ``moved`` is 1 when the directory is not at its path any more.
        """
        moved = not self._directory.is_in_place()
        with self.looking():
            extents = self.index.extents.values()
            return {
                "records": sum(extent.living for extent in extents),
                "used_nbytes": self._used_nbytes,
                "free_nbytes": self.limits.quota_nbytes - self._used_nbytes,
                "capacity_nbytes": self.limits.quota_nbytes,
                "extents": len(extents),
                "evicted_records": self._evicted,
                "dropped_extents": self._dropped,
                "expired_records": self._expired,
                "replaced_records": self._replaced,
                "failed_reads": self.failed_reads,
                "short_of_free": self._short,
                "damaged_heads": self._damaged,
                "refused_files": len(self.refused),
                "moved": int(moved),
            }

    def close(self) -> None:
        """Flush, then let the directory go; idempotent. :class:`StorageError`: closed, but not all was flushed."""
        if not self.guard.closable:
            return
        with self._writing:
            if not self.guard.close():
                return
            try:
                self._sync_all(list(self.index.extents.values()))
            except OSError as error:
                raise StorageError(f"{self.path}: cannot flush: {error}") from error
            finally:
                self.index.extents.clear()
                self._clocks.clear()
                self._directory.close()

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        nbytes = extent.shape.head_nbytes
        return extent.heads[local * nbytes : (local + count) * nbytes]

    def _held(self, keys: Sequence[BlockKey], held: dict[BlockKey, RecordHeader]) -> dict[BlockKey, int]:
        """The slots of these keys; ``held`` gets what is stored under them. Storing it again is a use. Held: lock."""
        places, now_s = {}, self._clock()
        for key, slot in zip(keys, self.index.find_all(keys), strict=True):
            if slot == NOWHERE:
                continue
            places[key] = slot
            extent, local = self.index.extents[slot >> ORDINAL_BITS], slot & LOCAL
            old = self._ttl_s is not None and is_older(extent.created_ms(local), now_s, self._ttl_s)
            if slot not in self._suspects and not old:
                held[key] = extent.header(extent.heads, local * extent.shape.head_nbytes)
                extent.uses[local] = min(extent.uses[local] + 1, USES_MAX)
                extent.used_at = self.calls
        return places

    def _store(
        self,
        layout: Layout,
        records: list[tuple[RecordHeader, Buffer]],
        places: dict[BlockKey, int],
        held: dict[BlockKey, RecordHeader],
    ) -> None:
        """Store records of one layout, as far as there is room. Held: writing."""
        runs, at, touched = self._take(layout, len(records)), 0, set[Extent]()
        try:
            while runs:
                extent, start, count = runs[-1]
                for key in self._forget(extent, start, count):
                    held.pop(key, None)  # it made room for a later record
                some = records[at : at + count]
                self._write(extent, start, some, places)
                held.update((header.key, header) for header, _ in some)
                runs.pop()
                at += count
                touched.add(extent)
            if self._sync is Sync.BATCH:
                self._sync_all(touched)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            for run in runs:
                self._clocks[layout].give_back(run)

    def _write(
        self, extent: Extent, start: int, records: list[tuple[RecordHeader, Buffer]], places: dict[BlockKey, int]
    ) -> None:
        """Payloads, then heads, then the groups' ticks; only then are the records found, and older ones go."""
        shape, count = extent.shape, len(records)
        headers = [header for header, _ in records]
        if extent.uses.count(FREE, start, start + count) < count:
            self._write_heads(extent, start, bytes(count * shape.head_nbytes))
            extent.uses[start : start + count] = bytes([FREE]) * count
        vector: list[Buffer] = [payload for _, payload in records]
        if pad := shape.step - shape.layout[1]:
            vector = [part for payload in vector for part in (payload, _ZEROS[:pad])]
        heads = extent.pack(headers, self._tick + 1, int(self._clock() * 1000))
        self._tick += count
        extent.dirty = True
        write_all(self._disk, extent.fd, vector, extent.payload_at(start), count * shape.step)
        try:
            self._write_heads(extent, start, heads)
            self._write_ticks(extent, start, count)
        except OSError:
            extent.uses[start : start + count] = bytes([UNSURE]) * count
            raise
        older, slot = [], extent.ordinal << ORDINAL_BITS | start
        with self.lock:
            extent.heads[start * shape.head_nbytes : (start + count) * shape.head_nbytes] = heads
            extent.uses[start : start + count] = b"\1" * count
            extent.living += count
            extent.used_at = self.calls
            add = self.index.add
            for at, header in enumerate(headers, slot):
                if (old := places.pop(header.key, NOWHERE)) != NOWHERE and self.index.find(header.key) == old:
                    self.index.remove(header.key, old)
                    older.append(old)
                add(header.key, at)
            extent.dirty = True
        if older:
            self._replaced += len(older)
            self._kill(older)

    def _write_heads(self, extent: Extent, start: int, heads: Buffer) -> None:
        write_all(self._disk, extent.fd, [heads], extent.heads_at(start), len(heads))

    def _write_ticks(self, extent: Extent, start: int, count: int) -> None:
        """Let readers know that heads of these slots have changed."""
        self._tick += 1
        first, last = start // GROUP, (start + count - 1) // GROUP
        ticks = self._tick.to_bytes(8, "little") * (last - first + 1)
        extent.ticks[8 * first : 8 * last + 8] = ticks
        write_all(self._disk, extent.fd, [ticks], PAGE_NBYTES + 8 * first, len(ticks))

    def _forget(self, extent: Extent, start: int, count: int) -> list[BlockKey]:
        """Find nothing in these slots any more; the keys of what was in them. Held: writing."""
        keys, nbytes, slot = [], extent.shape.head_nbytes, extent.ordinal << ORDINAL_BITS
        with self.lock:
            for local in range(start, start + count):
                if any(extent.heads[local * nbytes : local * nbytes + 8]):
                    keys.append(key := extent.key_of(local))
                    self.index.remove(key, slot | local)
            extent.heads[start * nbytes : (start + count) * nbytes] = bytes(count * nbytes)
            extent.living -= len(keys)
            if self._suspects:
                self._suspects.difference_update(range(slot | start, (slot | start) + count))
        return keys

    def _kill(self, slots: Sequence[int]) -> None:
        """Make slots free, in memory at once and on the disk; ``OSError`` when it did not take them. Held: writing."""
        failure: OSError | None = None
        by_extent: dict[int, list[int]] = {}
        for slot in sorted(slots):
            by_extent.setdefault(slot >> ORDINAL_BITS, []).append(slot & LOCAL)
        for ordinal, locals_ in by_extent.items():
            extent = self.index.extents[ordinal]
            for start, count in runs_of(locals_):
                self._forget(extent, start, count)
                extent.uses[start : start + count] = bytes([UNSURE]) * count
                extent.dirty = True
                try:
                    self._write_heads(extent, start, bytes(count * extent.shape.head_nbytes))
                    extent.uses[start : start + count] = bytes([FREE]) * count
                    self._write_ticks(extent, start, count)
                except OSError as error:
                    failure = error
                self._clocks[extent.shape.layout].give_back((extent, start, count))
        if slots:
            self._directory.count(self._tick)
        if failure is not None:
            raise failure

    def _take(self, layout: Layout, count: int) -> list[Run]:
        """Slots for records of a layout, the last run first; as many as there is room for. Held: writing."""
        clock = self._clocks.setdefault(layout, Clock())
        runs = clock.take_free(count)
        short = count - sum(run[2] for run in runs)
        while short and self._grow(layout, clock):
            runs += (more := clock.take_free(short))
            short -= sum(run[2] for run in more)
        if short and clock.extents:
            evicted = clock.take_unused(short)
            self._evicted += sum(run[2] for run in evicted)
            runs += evicted
        if not clock.extents:
            del self._clocks[layout]
        parts = [
            (extent, start + at, min(_BATCH_MAX, slots - at))
            for extent, start, slots in runs
            for at in range(0, slots, _BATCH_MAX)
        ]
        return parts[::-1]

    def _grow(self, layout: Layout, clock: Clock) -> bool:
        """Whether a layout has got one extent more. Held: writing."""
        wanted = self.limits.extent_nbytes
        if clock.turned:
            idle = min(self._others(clock), key=lambda extent: extent.used_at, default=None)
            if idle is not None and idle.used_at < clock.turned_at:
                self._drop(idle)
            clock.turned, clock.turned_at = False, self.calls
        room = self._room()
        if clock.extents and (room < wanted // 4 or self.calls < self._full_until):
            return False
        smallest = Shape(0, 1, layout).nbytes if Shape(0, 1, layout).slots_max else 1 << 62
        if not clock.extents:
            if smallest > self.limits.quota_nbytes:
                return False
            while room < max(wanted, smallest) and (others := self._others(clock)):
                self._drop(min(others, key=lambda extent: extent.used_at))
                room = self._room()
        nbytes = min(max(wanted, smallest), room)
        while nbytes >= smallest and len(self.index.extents) < EXTENTS_MAX:
            try:
                self._create(layout, nbytes)
            except OSError as error:
                if error.errno not in NO_ROOM and not clock.extents:
                    raise
                self._full_until = self.calls + _FULL_CALLS
                nbytes = nbytes // 2 if error.errno in NO_ROOM else 0
                if nbytes < smallest and not clock.extents and (others := self._others(clock)):
                    self._drop(min(others, key=lambda extent: extent.used_at))
                    nbytes = smallest
            else:
                return True
        return False

    def _others(self, clock: Clock) -> list[Extent]:
        return [extent for other in self._clocks.values() if other is not clock for extent in other.extents]

    def _room(self) -> int:
        """Bytes that may be allocated now; what the reserve of the file system lacks is given back first."""
        asks = self.limits.asks_for_space
        space = self._disk.space(self._directory.fd) if asks else None
        room = self.limits.room_nbytes(self._used_nbytes, space)
        if room < 0 and space is not None and room + self._used_nbytes < 0:
            self._short += 1
            return room
        while room < 0 and self.index.extents:
            oldest = min(self.index.extents.values(), key=lambda extent: extent.used_at)
            room += oldest.shape.nbytes
            self._drop(oldest)
        return room

    def _create(self, layout: Layout, nbytes: int) -> None:
        """One extent more of a layout, of ``nbytes`` at most; nothing is there when it fails."""
        self._number += 1
        shape = Shape.within(self._number, layout, nbytes)
        name = extent_name(shape.number)
        fd = self._directory.open(name + TEMP_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        extent = Extent(name, fd, shape)
        try:
            self._disk.allocate(fd, shape.nbytes)
            for at in (0, shape.nbytes - PAGE_NBYTES):
                write_all(self._disk, fd, [shape.pack()], at, PAGE_NBYTES)
            self._disk.sync(fd)  # so that no power cut leaves a file that does not say what it is
            self._directory.rename(name + TEMP_SUFFIX, name)
        except OSError:
            with suppress(OSError):  # the failure that is on its way out says more
                self._directory.unlink(name + TEMP_SUFFIX)
            raise
        self._names_changed = True
        self._join(extent)

    def _join(self, extent: Extent) -> None:
        with self.lock:
            self.index.join(extent)
            self._used_nbytes += extent.shape.nbytes
        self._clocks.setdefault(extent.shape.layout, Clock()).join(extent)

    def _drop(self, extent: Extent) -> None:
        """Give the room of an extent back, with all that is in it. Held: writing."""
        self._directory.unlink(extent.name)
        with self.lock:
            self.index.leave(extent)
            self._used_nbytes -= extent.shape.nbytes
            self._suspects = {slot for slot in self._suspects if slot >> ORDINAL_BITS != extent.ordinal}
        clock = self._clocks[extent.shape.layout]
        clock.leave(extent)
        self._dropped += 1

    def _sync_all(self, extents: Sequence[Extent] | set[Extent]) -> None:
        """Make names and bytes durable; an extent stays dirty when that fails."""
        if self._names_changed:
            self._names_changed = False
            try:
                self._disk.sync(self._directory.fd)
            except OSError:
                self._names_changed = True
                raise
        for extent in extents:
            extent.dirty = False
            try:
                self._disk.sync(extent.fd)
            except OSError:
                extent.dirty = True
                raise

    def _sweep(self) -> None:
        """Free the slots of records that are too old, every sixteenth of the time to live. Held: writing."""
        now_s = self._clock()
        if self._ttl_s is None or abs(now_s - self._swept_s) < self._ttl_s / 16:
            return
        self._swept_s = now_s
        for extent in list(self.index.extents.values()):
            ages = abs(now_s - extent.column("<i8", 8) / 1000)
            old = ((ages >= self._ttl_s) & (extent.column("<u8") > 0)).nonzero()[0]
            self._expired += len(old)
            self._kill([extent.ordinal << ORDINAL_BITS | local for local in old.tolist()])

    def _recover(self) -> None:
        """Find what is in the extents."""
        limits, opened = self.limits, []
        limits.check_space(self._disk.space(self._directory.fd) if limits.asks_for_space else None)
        for number, name in self._directory.extents().items():
            self._number = max(self._number, number)
            if (extent := self._open(self._directory, name, os.O_RDWR, limits.quota_nbytes)) is not None:
                opened.append((int(extent.column("<u8").max()), extent))
                self._damaged += extent.damaged
        opened.sort(key=lambda found: found[0], reverse=True)
        for place, (newest, extent) in enumerate(opened):
            extent.used_at = -place
            self._tick = max(self._tick, newest, *(t for t in memoryview(extent.ticks).cast("Q") if t < 1 << 62))
            self._join(extent)
        self._tick = max(self._tick, counted if (counted := self._directory.counter() or 0) < 1 << 62 else 0)
        while self._used_nbytes > limits.quota_nbytes or len(self.index.extents) > EXTENTS_MAX:
            self._drop(opened.pop()[1])
        with self.lock:
            older = self.index.load()
        self._kill(older)
        for clock in self._clocks.values():
            if clock.extents:
                clock.begin_after_newest()
        self._tick += 1
        self._directory.count(self._tick)
        self._swept_s -= self._ttl_s or 0
        self._sweep()

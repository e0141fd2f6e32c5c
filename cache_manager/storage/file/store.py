"""The file store's writer: records in the slots of extents, in one directory.

*Held: writing* is the lock of the one call that writes, *held: lock* the one that guards what is in memory.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np

from cache_manager.errors import ConfigError, RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, takes_the_place
from cache_manager.spec import align
from cache_manager.storage.disk import Disk
from cache_manager.storage.file.clock import Clock, Run
from cache_manager.storage.file.directory import LockedDirectory, extent_name, parse_name
from cache_manager.storage.file.extent import PAGE_NBYTES, Extent, Layout, Shape, make_extent, open_extents, runs_of
from cache_manager.storage.file.index import KeyIndex, Place
from cache_manager.storage.file.shelf import RUN_MAX, Shelf

QUOTA_NBYTES: Final = 4 << 30
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""
_QUOTA_NBYTES_MIN: Final = 8 * PAGE_NBYTES
_EXTENTS: Final = 32  # that a quota is divided into: whole ones change hands between layouts
_EXTENT_NBYTES_MIN: Final = 128 << 10  # where the quota has room for one


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"  # after flush or close; a killed process loses nothing, a power cut what was not flushed
    BATCH = "batch"  # when put returns


class FileStore(Shelf):
    """A ``StorageBackend`` in a directory, for one process at a time; others may read (:class:`FileReader`).

    Records of one layout have one size: they lie in the slots of extents of about ``extent_nbytes`` each, which
    together never take more than ``quota_nbytes``, nor leave the file system less than ``min_free_nbytes`` or
    ``min_free_percent`` of it, whichever is more. When there is no room for a new extent, records that were used least
    give their slots (:mod:`cache_manager.storage.file.clock`), and an extent of another layout in which nothing was
    used for a whole turn of the clock gives its room. ``put`` answers ``None`` for a record that still has none; of a
    batch that does not fit, the first ones stay. With ``ttl_s`` no record is served that is older by ``clock``, a wall
    clock; its slot is used again like that of a record that nobody asks for.

    Opening reads all heads and no payload; payloads are checked by :class:`RecordStore`. :class:`StorageError` when the
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
        file_mode: int = 0o600,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if quota_nbytes < _QUOTA_NBYTES_MIN:
            raise ConfigError("quota", f"{_QUOTA_NBYTES_MIN} bytes or more", f"{quota_nbytes} bytes")
        if min_free_nbytes < 0 or not 0 <= min_free_percent < 100:
            wanted = "0 bytes or more, 0 to 99 per cent"
            raise ConfigError("min_free", wanted, (min_free_nbytes, min_free_percent))
        super().__init__(directory, disk, ttl_s, clock)
        default = align(max(quota_nbytes // _EXTENTS, _EXTENT_NBYTES_MIN), PAGE_NBYTES)
        self._quota_nbytes, self._extent_nbytes = quota_nbytes, min(extent_nbytes or default, quota_nbytes)
        self._min_free_nbytes, self._min_free_percent, self._sync = min_free_nbytes, min_free_percent, sync
        self._writing = threading.Lock()  # one put or delete at a time; taken before the others
        self._flushing = threading.Lock()  # one sync at a time
        self._clocks: dict[Layout, Clock] = {}
        self._tick = self._number = self._evicted = self._damaged = 0
        self._directory = LockedDirectory(directory, file_mode)
        try:
            self._recover()
        except BaseException as error:
            self._directory.close()
            if isinstance(error, OSError):
                raise StorageError(f"{directory}: cannot open the store: {error}") from error
            raise

    @property
    def record_nbytes_max(self) -> int:
        """Of a payload: an extent of its own has to fit the quota."""
        return self._quota_nbytes // PAGE_NBYTES * PAGE_NBYTES - 4 * PAGE_NBYTES

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        for header, payload in zip(headers, payloads, strict=True):
            if (found := payload.nbytes if isinstance(payload, memoryview) else len(payload)) != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, found)
        self.guard.check()
        keys = [header.key for header in headers]
        with self._writing:
            with self.looking():
                again, held = self._held(keys)
            wanted = dict[BlockKey, int]()
            for i, key in enumerate(keys):
                stored = headers[wanted[key]] if key in wanted else held.get(key)
                if stored is None or takes_the_place(headers[i], stored, replace=replace):
                    wanted[key] = i
            groups: dict[Layout, list[int]] = {}
            for i in sorted(wanted.values()):
                header = headers[i]
                groups.setdefault((header.fingerprint, header.payload_nbytes, len(header.valid)), []).append(i)
            evicted, may_lose = self._evicted, bool(held) or len(groups) > 1
            try:
                for layout, numbers in groups.items():
                    some, theirs = [headers[i] for i in numbers], [payloads[i] for i in numbers]
                    self._store(layout, some, theirs, held, again=again)
                if self._evicted != evicted and may_lose:  # perhaps of these keys, for a later record
                    with self.lock:
                        there = self.index.find_all(held)
                    held = {key: held[key] for key, place in zip(held, there, strict=True) if place}
                if groups:
                    self._directory.tell(self._tick)
            except OSError as error:
                raise StorageError(f"{self.path}: cannot write: {error}") from error
        return list(map(held.get, keys))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Gone from this process in any case; :class:`StorageError` when a record may be back after a restart."""
        self.guard.check()
        with self._writing:
            with self.looking():
                places = [place for place in self.index.find_all(dict.fromkeys(keys)) if place]
            try:
                self._free(places)
                self._erase_unsure()
                self._directory.tell(self._tick)
            except OSError as error:
                raise StorageError(f"{self.path}: cannot delete a record: {error}") from error

    def flush(self) -> None:
        """Return when all that was put before is on stable storage.

        :class:`StorageError` when that cannot be: nothing is promised then of what was put before, not by a later flush
        either, because an operating system takes pages whose write has failed for written.
        """
        with self.looking():
            extents = self.index.extents
        try:
            self._sync_all(extents)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot flush: {error}") from error

    def usage(self) -> Mapping[str, int]:
        """And since opening ``evicted_records``, which gave their slots or the room of their extents to others, and
        ``damaged_heads``, which were found. ``moved`` is 1 when the directory is not at its path any more."""
        found, moved = super().usage(), int(not self._directory.is_in_place())
        return {**found, "evicted_records": self._evicted, "damaged_heads": self._damaged, "moved": moved}

    def close(self) -> None:
        """Flush, then let the directory go; idempotent. :class:`StorageError`: closed, but not all was flushed."""
        if self.guard.closable:
            with self._writing:
                if self.guard.close():
                    try:
                        self._sync_all(self.index.extents)
                    except OSError as error:
                        raise StorageError(f"{self.path}: cannot flush: {error}") from error
                    finally:
                        self._clocks, self.index = {}, KeyIndex()
                        self._directory.close()

    # What put and delete do.

    def _held(self, keys: Sequence[BlockKey]) -> tuple[bool, dict[BlockKey, RecordHeader]]:
        """Whether any of these keys has a slot, and what is stored under them, if it is not too old and the disk gives
        it back; storing it again is a use. Held: lock."""
        self.calls += 1
        held, again = dict[BlockKey, RecordHeader](), any(self.index.find_all(keys))
        for key, place in zip(keys, self.find_all(keys), strict=True) if again else ():
            if place and int(place[0].ticks[place[1]]) not in self._suspects:
                extent, local = place
                (held[key],) = extent.headers(extent.packed(local, 1))
                extent.use(local)
                extent.used_at = self.calls
        return again, held

    def _store(
        self,
        layout: Layout,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        held: dict[BlockKey, RecordHeader],
        *,
        again: bool,
    ) -> None:
        """Store records of one layout, as far as there is room. Held: writing."""
        runs, at, touched = self._take(layout, len(headers)), 0, list[Extent]()
        try:
            while runs:
                extent, start, count = runs[-1]
                some = headers[at : at + count]
                older = self._write(extent, start, some, payloads[at : at + count], again=again)
                held.update((header.key, header) for header in some)
                touched.append(extent)
                runs.pop()  # first: when this run's older records cannot be erased, it holds records all the same
                at += count
                if older:
                    self._free(older)
                    self._erase_unsure()
            if self._sync is Sync.BATCH:
                self._sync_all(touched)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            for run in runs:
                self._give_back(*run)

    def _write(
        self, extent: Extent, start: int, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, again: bool
    ) -> list[Place]:
        """Write records; only then are they found. The slots of older ones, if there may be some (``again``)."""
        count, keys = len(headers), [header.key for header in headers]
        heads = extent.pack(headers, self._tick + 1, int(self._clock() * 1000))
        self._tick += count + 1
        extent.write(self._disk, start, heads, payloads, self._tick)
        with self.lock:
            older = [place for place in self.index.find_all(keys) if place] if again else []
            for where, local in older:
                where.hide(local)
            extent.heads[start : start + count] = heads
            extent.uses[start : start + count] = 1
            extent.used_at = self.calls
            self.index.add_all(keys, extent, start)
        return older

    def _free(self, places: Sequence[Place]) -> None:
        """Find nothing in these slots any more, and let them be taken again. Held: writing."""
        for extent in {extent for extent, _ in places}:
            for run in runs_of(sorted(local for other, local in places if other is extent)):
                with self.lock:
                    extent.forget(*run)
                self._give_back(extent, *run)

    def _give_back(self, extent: Extent, start: int, count: int) -> None:
        """Let slots that hold nothing be taken again. Held: writing."""
        self._clocks[extent.shape.layout].free.append((extent, start, count))
        extent.unsure = True

    def _erase_unsure(self) -> None:
        """See to it that nothing comes back that is not found any more; ``OSError``. Held: writing."""
        for extent in self.index.extents:
            if extent.unsure:
                self._tick += 1
                extent.erase_unsure(self._disk, self._tick)

    def _sync_all(self, extents: Iterable[Extent]) -> None:
        """Make names and bytes durable; what cannot be synced stays dirty."""
        everything: list[Extent | LockedDirectory] = [self._directory, *extents]
        with self._flushing:
            for each in everything:
                if each.dirty:
                    each.dirty = False  # first: who writes meanwhile says so again
                    try:
                        self._disk.sync(each.fd)
                    except OSError:
                        each.dirty = True
                        raise

    # Room.

    @property
    def _used_nbytes(self) -> int:
        return sum(extent.shape.nbytes for extent in self.index.extents)

    def _take(self, layout: Layout, count: int) -> list[Run]:
        """Slots for records of a layout, the last run first; as many as there is room for. Held: writing."""
        clock = self._clocks.setdefault(layout, Clock())
        runs = clock.take_free(count)
        short = count - sum(run[2] for run in runs)
        while short and self._grow(layout, clock):
            runs += (more := clock.take_free(short))
            short -= sum(run[2] for run in more)
        if short and clock.extents:
            with self.lock:
                for extent, *run in (evicted := clock.take_unused(short)):
                    extent.forget(*run)
            self._evicted += sum(run[2] for run in evicted)
            runs += evicted
        if not clock.extents:
            del self._clocks[layout]
        parts = [(e, start + at, min(RUN_MAX, n - at)) for e, start, n in runs for at in range(0, n, RUN_MAX)]
        return [part for part in reversed(parts) if part[0].ordinal >= 0]  # what was dropped to make room is no room

    def _grow(self, layout: Layout, clock: Clock) -> bool:
        """Whether a layout has got one extent more; others' go for its first one. Held: writing."""
        others = [extent for other in self._clocks.values() if other is not clock for extent in other.extents]
        others.sort(key=lambda extent: extent.used_at)
        if clock.turned:
            if others and others[0].used_at < clock.turned_at:
                self._drop(others.pop(0))
            clock.turned, clock.turned_at = False, self.calls
        wanted, has = max(self._extent_nbytes, Shape(0, 1, layout).nbytes), bool(clock.extents)
        least = wanted // 4 if has else 0
        while self._quota_nbytes - self._used_nbytes >= least:
            room = self._room()
            shape = Shape.within(self._number + 1, layout, min(wanted, room))
            try:
                if shape.slots and shape.nbytes >= least and (has or room >= wanted or not others):
                    self._create(shape)
                    return True
            except OSError as error:
                if error.errno not in NO_ROOM and not has:
                    raise
            if has or not others or wanted > self._quota_nbytes:
                break
            self._drop(others.pop(0))
        return False

    def _room(self) -> int:
        """Bytes that may be allocated now; what the reserve of the file system lacks is given back first."""
        space = self._disk.space(self._directory.fd)
        spare = space.free_nbytes - self._reserve(space.total_nbytes)
        while spare < 0 <= spare + self._used_nbytes and self.index.extents:
            oldest = min(self.index.extents, key=lambda extent: extent.used_at)
            spare += oldest.shape.nbytes
            self._drop(oldest)
        return min(self._quota_nbytes - self._used_nbytes, spare)

    def _reserve(self, total_nbytes: int) -> int:
        """Bytes of a file system that are not for this store."""
        return max(self._min_free_nbytes, -(-total_nbytes * self._min_free_percent // 100))

    def _create(self, shape: Shape) -> None:
        """One extent more; nothing is there when it fails."""
        self._number += 1
        while (name := extent_name(shape.number)) in self._directory.names():  # a stranger's
            shape.number = self._number = self._number + 1
        extent = make_extent(self._disk, self._directory, name, shape)
        self._directory.dirty = True
        self._join(extent)
        with self.lock:
            self.index.fit()

    def _join(self, extent: Extent) -> None:
        with self.lock:
            self.index.join(extent)
        self._clocks.setdefault(extent.shape.layout, Clock()).join(extent)

    def _drop(self, extent: Extent) -> None:
        """Give the room of an extent back, with all that is in it. Held: writing."""
        self._directory.unlink(extent.name)
        with self.lock:
            self._evicted += extent.living
            self.index.leave(extent)
        self._clocks[extent.shape.layout].leave(extent)

    def _recover(self) -> None:
        """Find what is in the extents."""
        if self._min_free_nbytes or self._min_free_percent:
            total_nbytes = self._disk.space(self._directory.fd).total_nbytes
            if (reserve := self._reserve(total_nbytes)) > total_nbytes - self._extent_nbytes:
                wanted = f"less than a file system of {total_nbytes} bytes by an extent of {self._extent_nbytes}"
                raise ConfigError("min_free", wanted, reserve)
        opened = open_extents(self._disk, self._directory, os.O_RDWR, self.refused)
        for extent in opened:
            extent.load(self._disk)
            if self._disk.size(extent.fd) != extent.shape.nbytes:  # was cut, or what lies behind is no part of it
                self._disk.truncate(extent.fd, extent.shape.nbytes)
            self._damaged += extent.damaged
        opened.sort(key=lambda extent: extent.newest)
        self._tick = max(self._directory.read_lock()[1] or 0, *(extent.newest for extent in opened), 0) + 1
        for place, extent in enumerate(opened, -len(opened)):
            extent.tell_late(self._disk, self._tick)
            extent.used_at = place
            self._join(extent)
        self._number = max((parse_name(name) or 0 for name in self._directory.names()), default=0)
        while self._used_nbytes > self._quota_nbytes:
            self._drop(opened.pop(0))
        self._free(self.index.load())
        self._erase_unsure()
        for clock in self._clocks.values():  # its hand begins behind what was written last
            if clock.extents:
                clock.hand = (len(clock.extents) - 1, int(np.argmax(clock.extents[-1].ticks)) + 1)
        self._directory.tell(self._tick)

"""The file store's writer: records in the slots of extents, in one directory.

*Held: writing* is the lock of the one call that writes, *held: lock* the one that guards what is in memory.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np

from cache_manager.errors import ConfigError, RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, takes_the_place
from cache_manager.spec import align
from cache_manager.storage.disk import Disk
from cache_manager.storage.file.clock import Clock, Run
from cache_manager.storage.file.directory import LockedDirectory, parse_name
from cache_manager.storage.file.extent import PAGE_NBYTES, Extent, Layout, Shape, make_extent, open_extents, runs_of
from cache_manager.storage.file.index import KeyIndex, Place
from cache_manager.storage.file.reader import Shelf

QUOTA_NBYTES: Final = 4 << 30
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""
_QUOTA_NBYTES_MIN: Final = 8 * PAGE_NBYTES
_EXTENTS: Final = 16  # that a quota is divided into: whole ones change hands between layouts
_EXTENT_NBYTES_MIN: Final = 128 << 10  # where the quota has room for one


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"  # after flush or close; a killed process loses nothing, a power cut what was not flushed
    BATCH = "batch"  # when put returns


class FileStore(Shelf):
    """A ``StorageBackend`` in a directory, for one process at a time; others may read (:class:`FileReader`).

    Records of one layout have one size: they lie in the slots of extents of about ``extent_nbytes`` each, which
    together never take more than ``quota_nbytes``, nor leave the file system less than ``min_free_nbytes``. Without
    room for a new extent, records that were used least give their slots (:mod:`cache_manager.storage.file.clock`), and
    an extent of another layout in which nothing was used for a whole turn of the clock gives its room. ``put`` answers
    ``None`` for a record that still has none; of a batch that does not fit, the first ones stay. With ``ttl_s`` no
    record is served that is older by ``clock``, a wall clock.

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
        file_mode: int = 0o600,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if quota_nbytes < _QUOTA_NBYTES_MIN:
            raise ConfigError("quota", f"{_QUOTA_NBYTES_MIN} bytes or more", f"{quota_nbytes} bytes")
        super().__init__(directory, disk, ttl_s, clock)
        default = align(max(quota_nbytes // _EXTENTS, _EXTENT_NBYTES_MIN), PAGE_NBYTES)
        self._quota_nbytes, self._extent_nbytes = quota_nbytes, min(extent_nbytes or default, quota_nbytes)
        self._min_free_nbytes, self._sync = min_free_nbytes, sync
        self._writing = threading.Lock()  # one put or delete at a time; taken before the others
        self._flushing = threading.Lock()  # one sync at a time
        self._clocks: dict[Layout, Clock] = {}
        self._unsure: list[Run] = []  # slots that hold nothing, but may have heads on the disk
        self._tick = self._evicted = self._used_nbytes = 0
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
        sizes = [payload.nbytes if isinstance(payload, memoryview) else len(payload) for payload in payloads]
        layouts = [(header.fingerprint, header.payload_nbytes, len(header.valid)) for header in headers]
        for size, layout in zip(sizes, layouts, strict=True):
            if size != layout[1]:
                raise RecordError("payload size", layout[1], size)
        self.guard.check()
        keys = [header.key for header in headers]
        with self._writing:
            with self.guard:
                self.calls += 1
                places = self.index.find_all(keys)
                held = self._held(keys, places) if any(places) else {}
            groups = self._wanted(headers, layouts, held, replace)
            evicted, may_lose = self._evicted, bool(held) or len(groups) > 1
            try:
                for layout, numbers in groups:
                    some, theirs = headers, payloads
                    if len(numbers) < len(headers):
                        some, theirs = [headers[i] for i in numbers], [payloads[i] for i in numbers]
                    self._store(layout, some, theirs, held, again=any(places))
            except OSError as error:
                raise StorageError(f"{self.path}: cannot write: {error}") from error
            if may_lose and self._evicted != evicted:  # perhaps of these keys, for a later record
                with self.lock:
                    there = self.index.find_all(held)
                held = {key: held[key] for key, place in zip(held, there, strict=True) if place}
        return list(map(held.get, keys))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Gone from this process in any case; :class:`StorageError` when a record may be back after a restart."""
        self.guard.check()
        with self._writing:
            with self.guard:
                self._forget([place for place in self.index.find_all(dict.fromkeys(keys)) if place])
            try:
                self._erase()
            except OSError as error:
                raise StorageError(f"{self.path}: cannot delete a record: {error}") from error

    def flush(self) -> None:
        """Return when all that was put before is on stable storage.

        :class:`StorageError` when that cannot be: nothing is promised then of what was put before, not by a later flush
        either, because an operating system takes pages whose write has failed for written.
        """
        with self.guard:
            extents = self.index.extents
        try:
            self._sync_all(extents)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot flush: {error}") from error

    def usage(self) -> Mapping[str, int]:
        """And ``evicted_records``, which gave their slots or the room of their extents to others since opening."""
        return {**super().usage(), "evicted_records": self._evicted}

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
                        self._clocks, self._unsure, self.index = {}, [], KeyIndex()
                        self._directory.close()

    # What put and delete do.

    def _held(self, keys: Sequence[BlockKey], places: list[Place | None]) -> dict[BlockKey, RecordHeader]:
        """What is stored in these places, if it is not too old and the disk gives it back; storing it again is a use.
        Held: lock."""
        held: dict[BlockKey, RecordHeader] = {}
        for key, place in zip(keys, self.fresh(places), strict=True):
            if place and int(place[0].ticks[place[1]]) not in self._suspects:
                extent, local = place
                (held[key],) = extent.headers(extent.packed(local, 1))
                extent.use(local, 1)
                extent.used_at = self.calls
        return held

    def _wanted(
        self,
        headers: Sequence[RecordHeader],
        layouts: Sequence[Layout],
        held: Mapping[BlockKey, RecordHeader],
        replace: bool,
    ) -> list[tuple[Layout, Sequence[int]]]:
        """Which records are to be stored, in groups of one layout."""
        if not held and len({header.key for header in headers}) == len(headers) and len({*layouts}) == 1:
            return [(layouts[0], range(len(headers)))]  # nearly always
        wanted: dict[BlockKey, int] = {}
        for i, header in enumerate(headers):
            key = header.key
            stored = headers[wanted[key]] if key in wanted else held.get(key)
            if stored is None or takes_the_place(header, stored, replace=replace):
                wanted[key] = i
        return [(layout, list(some)) for layout, some in groupby(sorted(wanted.values()), layouts.__getitem__)]

    def _store(
        self,
        layout: Layout,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        held: dict[BlockKey, RecordHeader],
        *,
        again: bool,
    ) -> None:
        """Store records of one layout, as far as there is room; ``again``: there may be older ones. Held: writing."""
        if self._unsure:
            with suppress(OSError):  # their slots stay taken
                self._erase()
        runs, at = self._take(layout, len(headers)), 0
        extents = {extent for extent, *_ in runs}
        try:
            while runs:
                extent, start, count = runs[0]
                some = headers[at : at + count]
                heads = extent.pack(some, self._tick + 1, int(self._clock() * 1000))
                self._tick += count
                extent.write(self._disk, start, heads, payloads[at : at + count])
                keys = [header.key for header in some]
                with self.lock:
                    older = [place for place in self.index.find_all(keys) if place] if again else ()
                    extent.hold(start, heads)
                    extent.used_at = self.calls
                    self.index.add_all(keys, extent, start)
                    self._forget(older)
                runs.pop(0)
                at += count
                held.update(zip(keys, some, strict=True))
                self._directory.tell(extent.shape.number, start, count)
                if older:
                    self._erase()
            if self._sync is Sync.BATCH:
                self._sync_all(extents)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            self._unsure += runs

    def _forget(self, places: Iterable[Place]) -> None:
        """Find nothing in these slots any more. Held: writing, lock."""
        by_extent: dict[Extent, list[int]] = {}
        for extent, local in places:
            by_extent.setdefault(extent, []).append(local)
        for extent, locals_ in by_extent.items():
            for run in runs_of(sorted(locals_)):
                extent.forget(*run)
                self._unsure.append((extent, *run))

    def _erase(self) -> None:
        """See to it that nothing comes back that is not found any more; ``OSError``. Held: writing."""
        while self._unsure:
            extent, start, count = self._unsure[-1]
            extent.write_heads(self._disk, start, np.zeros((count, extent.head_nbytes), np.uint8))
            self._directory.tell(extent.shape.number, start, count)
            self._unsure.pop()
            extent.release(start, count)

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

    def _take(self, layout: Layout, count: int) -> list[Run]:
        """Slots for records of a layout, as many as there is room for. Held: writing."""
        clock = self._clocks.setdefault(layout, Clock())
        runs = clock.take_free(count)
        try:
            while (short := count - sum(run[2] for run in runs)) and self._grow(layout, clock):
                runs += clock.take_free(short)
        except BaseException:
            self._unsure += runs
            raise
        if short and clock.extents:
            with self.lock:
                runs += (evicted := clock.take_unused(short))
            self._evicted += sum(run[2] for run in evicted)
        if not clock.extents:
            del self._clocks[layout]
        return [run for run in runs if run[0].ordinal >= 0]  # what was dropped to make room is no room

    def _grow(self, layout: Layout, clock: Clock) -> bool:
        """Whether a layout has got one extent more; others' go for its first one. Held: writing."""
        if clock.turned:
            idle = self._oldest(clock)
            if idle and idle.used_at < clock.turned_at:
                self._drop(idle)
            clock.turned, clock.turned_at = False, self.calls
        wanted, has = max(self._extent_nbytes, Shape(0, 1, layout).nbytes), bool(clock.extents)
        least = wanted // 4 if has else 0
        while self._quota_nbytes - self._used_nbytes >= least:
            room, other = self._room(), self._oldest(clock)
            shape = Shape.within(0, layout, min(wanted, room))
            if shape.slots and shape.nbytes >= least and (has or room >= wanted or not other):
                try:
                    shape.number = max((parse_name(name) or 0 for name in self._directory.names()), default=0) + 1
                    self._join(make_extent(self._disk, self._directory, shape))
                    with self.lock:
                        self.index.fit()
                    self._directory.tell(shape.number)
                    return True
                except OSError as error:
                    if error.errno not in NO_ROOM and not has:
                        raise
            if has or not other or wanted > self._quota_nbytes:
                break
            self._drop(other)
        return False

    def _oldest(self, clock: Clock | None = None) -> Extent | None:
        """The extent that was used least recently, of other layouts than a clock's."""
        others = [extent for each in self._clocks.values() if each is not clock for extent in each.extents]
        return min(others, key=lambda extent: extent.used_at, default=None)

    def _room(self) -> int:
        """Bytes that may be allocated now; what the reserve of the file system lacks is given back first."""
        spare = self._disk.space(self._directory.fd).free_nbytes - self._min_free_nbytes
        while spare < 0 <= spare + self._used_nbytes and (oldest := self._oldest()):
            spare += oldest.shape.nbytes
            self._drop(oldest)
        return min(self._quota_nbytes - self._used_nbytes, spare)

    def _join(self, extent: Extent) -> None:
        with self.lock:
            self.index.join(extent)
        self._used_nbytes += extent.shape.nbytes
        self._clocks.setdefault(extent.shape.layout, Clock()).extents.append(extent)

    def _drop(self, extent: Extent) -> None:
        """Give the room of an extent back, with all that is in it. Held: writing."""
        self._directory.unlink(extent.name)
        with self.lock:
            self._evicted += len(extent.served)
            self.index.leave(extent)
        self._used_nbytes -= extent.shape.nbytes
        self._clocks[extent.shape.layout].leave(extent)
        self._unsure = [run for run in self._unsure if run[0] is not extent]
        self._directory.tell(extent.shape.number)

    def _recover(self) -> None:
        """Find what is in the extents."""
        most = self._disk.space(self._directory.fd).total_nbytes - self._extent_nbytes
        if self._min_free_nbytes > max(most, 0):
            raise ConfigError("min_free", f"{most} bytes at most, on this file system", self._min_free_nbytes)
        opened = open_extents(self._disk, self._directory, os.O_RDWR, self.refused)
        for extent in opened:
            extent.load(self._disk)
            if self._disk.size(extent.fd) != extent.shape.nbytes:  # was cut, or what lies behind is no part of it
                self._disk.truncate(extent.fd, extent.shape.nbytes)
        opened.sort(key=lambda extent: int(extent.ticks.max()))
        for place, extent in enumerate(opened, -len(opened)):
            extent.used_at = place
            self._join(extent)
        # Records that were deleted may have had higher ones, which readers remember.
        self._tick = (int(opened[-1].ticks.max()) if opened else 0) + int.from_bytes(os.urandom(4), "little")
        while self._used_nbytes > self._quota_nbytes:
            self._drop(opened.pop(0))
        self._unsure += [(extent, local, 1) for extent, local in self.index.load()]
        with suppress(OSError):
            self._erase()
        for clock in self._clocks.values():  # its hand begins behind what was written last
            if clock.extents:
                clock.hand = (len(clock.extents) - 1, int(np.argmax(clock.extents[-1].ticks)) + 1)

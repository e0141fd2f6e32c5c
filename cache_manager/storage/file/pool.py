"""The extents that this process writes: how they are found, made, given slots of, dropped and synced.

*Held: writing* is the lock of the one call that writes, *held: lock* the one that guards what is in memory.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError, StorageError
from cache_manager.record import Buffer
from cache_manager.spec import align
from cache_manager.storage.disk import IOV_MAX, Disk, write_all
from cache_manager.storage.file.clock import Clock, Run, runs_of
from cache_manager.storage.file.directory import TEMP_SUFFIX, LockedDirectory
from cache_manager.storage.file.extent import (
    FREE,
    GROUP,
    PAGE_NBYTES,
    TICK_MAX,
    UNSURE,
    Extent,
    Layout,
    Shape,
    extent_name,
    parse_name,
)
from cache_manager.storage.file.index import BITS, LOCAL
from cache_manager.storage.file.shelf import EXTENTS_MAX, Shelf

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when a disk, a disk quota or a process may take no more bytes."""
_QUOTA_NBYTES_MIN: Final = 8 * PAGE_NBYTES
_EXTENTS: Final = 32  # that a quota is divided into: whole ones change hands between layouts
_EXTENT_NBYTES_MIN: Final = 128 << 10  # where the quota has room for one
_RUN_MAX: Final = IOV_MAX // 2
_FULL_CALLS: Final = 64


class Pool(Shelf):
    """The writer's extents, with a clock for each layout; ``OSError`` when they cannot be read at opening."""

    def __init__(
        self,
        path: Path,
        quota_nbytes: int,
        extent_nbytes: int | None,
        min_free: tuple[int, int],  # bytes, per cent
        ttl_s: float | None,
        file_mode: int,
        disk: Disk | None,
        clock: Callable[[], float],
    ) -> None:
        if quota_nbytes < _QUOTA_NBYTES_MIN:
            raise ConfigError("quota", f"{_QUOTA_NBYTES_MIN} bytes or more", f"{quota_nbytes} bytes")
        if min_free[0] < 0 or not 0 <= min_free[1] < 100:
            raise ConfigError("min_free", "0 bytes or more, 0 to 99 per cent", min_free)
        super().__init__(path, disk, ttl_s, clock)
        wanted = align(max(quota_nbytes // _EXTENTS, _EXTENT_NBYTES_MIN), PAGE_NBYTES)
        self._quota_nbytes, self._extent_nbytes = quota_nbytes, min(extent_nbytes or wanted, quota_nbytes)
        self._min_free = min_free
        self._writing = threading.Lock()  # one put or delete at a time; taken before the others
        self._flushing = threading.Lock()  # one sync at a time
        self._clocks: dict[Layout, Clock] = {}
        self._used_nbytes = self._tick = self._number = self._evicted = self._damaged = 0
        self._names_changed = True
        self._unsure: list[Run] = []  # with heads on the disk that it did not take back
        self._full_until = 0  # the disk had no room; it is asked again after so many calls
        self._directory = LockedDirectory(path, file_mode=file_mode)
        try:
            self._recover()
        except BaseException as error:
            self._directory.close()
            if isinstance(error, OSError):
                raise StorageError(f"{path}: cannot open the store: {error}") from error
            raise

    def _erase(self, extent: Extent, start: int, count: int) -> None:
        """Make heads on the disk zeros, so that nobody takes what is written next for what was there."""
        extent.dirty = True
        self._write_heads(extent, start, count, bytes(count * extent.head_nbytes))
        extent.uses[start : start + count] = bytes([FREE]) * count

    def _write_heads(self, extent: Extent, start: int, count: int, heads: Buffer) -> None:
        """Heads, and then the ticks that let readers know."""
        write_all(self._disk, extent.fd, [heads], extent.head_at(start), len(heads))
        self._tick += 1
        first, groups = start // GROUP, (start + count - 1) // GROUP - start // GROUP + 1
        ticks = self._tick.to_bytes(8, "little") * groups
        write_all(self._disk, extent.fd, [ticks], PAGE_NBYTES + 8 * first, len(ticks))

    def _forget(self, extent: Extent, start: int, count: int) -> int:
        """Find nothing in these slots any more; how many records were in them. Held: lock."""
        gone, base = 0, extent.ordinal << BITS
        for local in range(start, start + count):
            if extent.tick(local):
                gone += 1
                self.index.remove(extent.key_of(local), base | local)
        extent.set(start, bytes(count * extent.head_nbytes))
        extent.uses[start : start + count] = bytes([UNSURE]) * count
        extent.living -= gone
        self._suspects.difference_update(range(base | start, (base | start) + count) if self._suspects else ())
        return gone

    def _kill(self, slots: Sequence[int]) -> None:
        """Make slots free, in memory at once and on the disk; ``OSError`` when it did not take them. Held: writing."""
        if not slots:
            return
        for ordinal, extent in self.index.extents.items():
            for start, count in runs_of(sorted(slot & LOCAL for slot in slots if slot >> BITS == ordinal)):
                with self.lock:
                    self._forget(extent, start, count)
                self._give_back((extent, start, count))
        self._erase_unsure()
        self._directory.tell(self._tick)

    def _give_back(self, run: Run) -> None:
        """Let slots that hold nothing be taken again. Held: writing."""
        self._clocks[run[0].shape.layout].free.append(run)
        self._unsure.append(run)

    def _erase_unsure(self) -> None:
        """See to it that nothing comes back that is not found any more; ``OSError``. Held: writing."""
        while self._unsure:
            extent, start, count = self._unsure[-1]
            unsure = [local for local in range(start, start + count) if extent.uses[local] == UNSURE]
            for run in runs_of(unsure):
                self._erase(extent, *run)
            self._unsure.pop()

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
                evicted = clock.take_unused(short)
                for run in evicted:
                    self._evicted += self._forget(*run)
            runs += evicted
        if not clock.extents:
            del self._clocks[layout]
        parts = [(e, start + at, min(_RUN_MAX, n - at)) for e, start, n in runs for at in range(0, n, _RUN_MAX)]
        return parts[::-1]

    def _grow(self, layout: Layout, clock: Clock) -> bool:
        """Whether a layout has got one extent more. Held: writing."""
        others = sorted(
            [extent for other in self._clocks.values() if other is not clock for extent in other.extents],
            key=lambda extent: extent.used_at,
        )
        if clock.turned:
            if others and others[0].used_at < clock.turned_at:
                self._drop(others.pop(0))
            clock.turned, clock.turned_at = False, self.calls
        wanted = max(self._extent_nbytes, Shape(0, 1, layout).nbytes)
        if clock.extents and (
            self._quota_nbytes - self._used_nbytes < wanted // 4
            or len(self.index.extents) >= EXTENTS_MAX
            or self.calls < self._full_until
        ):
            return False
        while True:
            room = self._room()
            shape = Shape.within(self._number + 1, layout, min(wanted, room))
            enough = shape.slots and (not clock.extents or shape.nbytes >= wanted // 4)
            try:
                if enough and (clock.extents or room >= wanted or not others):
                    self._create(shape)
                    return True
            except OSError as error:
                if error.errno not in NO_ROOM and not clock.extents:
                    raise
                enough = 0
            if clock.extents or not others or wanted > self._quota_nbytes:
                self._full_until = self.calls + _FULL_CALLS
                return False
            self._drop(others.pop(0))

    def _room(self) -> int:
        """Bytes that may be allocated now; what the reserve of the file system lacks is given back first."""
        space = self._disk.space(self._directory.fd)
        least, percent = self._min_free
        spare = space.free_nbytes - max(least, -(-space.total_nbytes * percent // 100))
        while spare < 0 <= spare + self._used_nbytes and self.index.extents:
            oldest = min(self.index.extents.values(), key=lambda extent: extent.used_at)
            spare += oldest.shape.nbytes
            self._drop(oldest)
        return min(self._quota_nbytes - self._used_nbytes, spare)

    def _create(self, shape: Shape) -> None:
        """One extent more; nothing is there when it fails."""
        self._number += 1
        while (name := extent_name(shape.number)) in self._directory.names():  # a stranger's
            shape.number = self._number = self._number + 1
        fd = self._directory.open(name + TEMP_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        extent = Extent(name, fd, shape)
        try:
            self._disk.allocate(fd, shape.nbytes)
            for at in (0, shape.nbytes - PAGE_NBYTES):
                write_all(self._disk, fd, [shape.pack()], at, PAGE_NBYTES)
            self._disk.sync(fd)  # so that no power cut leaves a file that does not say what it is
            self._directory.finish(name)
        except OSError:
            with suppress(OSError):  # the failure that is on its way out says more
                self._directory.unlink(name + TEMP_SUFFIX)
            raise
        self._names_changed = True
        self._join(extent)
        with self.lock:
            self.index.fit()

    def _join(self, extent: Extent) -> None:
        with self.lock:
            self.index.join(extent)
            self._used_nbytes += extent.shape.nbytes
        self._clocks.setdefault(extent.shape.layout, Clock()).join(extent)

    def _drop(self, extent: Extent) -> None:
        """Give the room of an extent back, with all that is in it. Held: writing."""
        self._directory.unlink(extent.name)
        with self.lock:
            self._evicted += self._forget(extent, 0, extent.slots)
            del self.index.extents[extent.ordinal]
            self._used_nbytes -= extent.shape.nbytes
        self._clocks[extent.shape.layout].leave(extent)

    def _sync_all(self, extents: Iterable[Extent]) -> None:
        """Make names and bytes durable; an extent stays dirty when that fails."""
        with self._flushing:
            if self._names_changed:
                self._names_changed = False
                try:
                    self._disk.sync(self._directory.fd)
                except OSError:
                    self._names_changed = True
                    raise
            for extent in extents:
                if extent.dirty:
                    extent.dirty = False
                    try:
                        self._disk.sync(extent.fd)
                    except OSError:
                        extent.dirty = True
                        raise

    def _recover(self) -> None:
        """Find what is in the extents."""
        if any(self._min_free):
            space = self._disk.space(self._directory.fd)
            most = space.total_nbytes - self._extent_nbytes
            reserve = max(self._min_free[0], -(-space.total_nbytes * self._min_free[1] // 100))
            if reserve > most:
                wanted = f"at most {max(most, 0)} bytes, so that an extent of {self._extent_nbytes} bytes fits"
                raise ConfigError("min_free", f"{wanted}; lower min_free or use a larger file system", reserve)
        opened = self._opened(self._directory, os.O_RDWR)
        opened.sort(key=lambda extent: int(extent.all_ticks().max()))
        for place, extent in enumerate(opened, -len(opened)):
            size, wanted_nbytes = self._disk.size(extent.fd), extent.shape.nbytes
            if size < wanted_nbytes:
                self._disk.allocate(extent.fd, wanted_nbytes)
            elif size > wanted_nbytes:  # what lies behind is no part of it
                self._disk.truncate(extent.fd, wanted_nbytes)
            self._join(extent)
            extent.used_at = place
            self._damaged += extent.damaged
        ticks = [int(extent.all_ticks().max()) for extent in opened]
        ticks += [tick for extent in opened for tick in memoryview(extent.ticks).cast("Q")]
        ticks.append(self._directory.read_lock()[1] or 0)
        self._tick = max((tick for tick in ticks if tick < TICK_MAX), default=0) + 1
        self._number = max((parse_name(name) or 0 for name in self._directory.extents()), default=0)
        while self._used_nbytes > self._quota_nbytes:
            self._drop(opened.pop(0))
        self._kill(self.index.load())
        for clock in self._clocks.values():
            if clock.extents:
                clock.begin_after_newest()
        self._directory.tell(self._tick)

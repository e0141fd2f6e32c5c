"""The room of a file store: which extents there are within its quota, and which slots in them new records get.

The slots are free ones, else those that a clock's hand finds unused. A record has up to three uses, of which being put
is the first. The hand goes from slot to slot, takes one use from each record that it passes, and takes the slot of a
record that has none left. So a record that is never read stays for one turn, and one that was read for up to two more.
Neighbours go together, so that a batch lies side by side.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

import numpy as np

from cache_manager.errors import ConfigError
from cache_manager.storage.disk import Disk
from cache_manager.storage.file.directory import LockedDirectory, parse_name
from cache_manager.storage.file.extent import (
    EXTENTS_MAX,
    USES_MAX,
    Extent,
    Layout,
    Run,
    Shape,
    make_extent,
)
from cache_manager.storage.file.index import KeyIndex

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the operating system for a full disk, disk quota or file size limit."""


class Clock:
    """The extents of one layout, of ``extent_nbytes`` or less; no I/O. ``turned``: the hand has begun a turn;
    ``turned_at``: when the turn before began."""

    def __init__(self, extent_nbytes: int) -> None:
        self.extent_nbytes = extent_nbytes
        self.extents: list[Extent] = []
        self.turned = False
        self.turned_at = 0  # in calls
        self.hand = (0, 0)  # the place of an extent, and a slot in it

    def leave(self, extent: Extent) -> None:
        """Take no slot of an extent any more."""
        self.hand = (0, 0)
        self.extents.remove(extent)

    def take_free(self, count: int, taken: list[Run]) -> None:
        """Add ``count`` slots that hold nothing to those ``taken``, or as many as there are."""
        for extent in self.extents:
            while count and extent.free_at < extent.slots:
                run = extent.take_free(count)
                if run is None:
                    break
                taken.append((extent, *run))
                count -= run[1]

    def take_unused(self, count: int, taken: list[Run]) -> None:
        """As :meth:`take_free`, slots of the least used records; the records are served no more."""
        place, at = self.hand
        for _ in range((USES_MAX + 1) * len(self.extents) + 1):
            if place >= len(self.extents):
                place = 0
                at = 0
                self.turned = True
            extent = self.extents[place]
            while count:
                run = extent.find_unused(at, count)
                if run is None:
                    break
                extent.forget(*run)
                taken.append((extent, *run))
                count -= run[1]
                at = sum(run)
            if not count:
                break
            place = place + 1
            at = 0
        self.hand = (place, at)


class Quota:
    """The extents of a store, which together take at most ``nbytes``, and leave the file system ``min_free_nbytes``.

    What it does to ``index`` it does under that one's lock; its callers hold the lock of the one call that writes.
    ``OSError`` where the disk fails. ``to_erase`` are slots that hold nothing, but may have heads on the disk.
    """

    def __init__(
        self,
        disk: Disk,
        directory: LockedDirectory,
        index: KeyIndex,
        *,
        nbytes: int,
        extent_nbytes: int,
        min_free_nbytes: int,
    ) -> None:
        self.nbytes = nbytes
        self.used_nbytes = 0
        self.evicted = 0
        """Records that gave their slots, or their extents' room, to others."""
        self.to_erase: list[Run] = []
        self._disk = disk
        self._directory = directory
        self._index = index
        self._extent_nbytes = extent_nbytes
        self._min_free_nbytes = min_free_nbytes
        self._clocks: dict[Layout, Clock] = {}

    def forget(self, index: KeyIndex) -> None:
        """The store is closed: no extent stays open for it. ``index`` is an empty one."""
        self._index = index
        self._clocks = {}
        self.to_erase = []

    def check_reserve(self) -> None:
        """:class:`ConfigError` if the file system is too small for the bytes that are to stay free."""
        most = self._disk.space(self._directory.fd).total_nbytes - self._extent_nbytes
        if self._min_free_nbytes > max(most, 0):
            raise ConfigError("min_free", f"{most} bytes at most, on this file system", self._min_free_nbytes)

    def serve(self, opened: list[Extent]) -> None:
        """Serve what is in the extents that were found; those beyond a smaller quota go, the oldest first."""
        opened.sort(key=lambda extent: int(extent.ticks.max()))
        for place, extent in enumerate(opened, -len(opened)):
            extent.used_at = place
        self._join(opened)
        for oldest in opened:
            if self.used_nbytes <= self.nbytes:
                break
            self._drop(oldest)
        for clock in self._clocks.values():  # the hand begins after the newest record
            if clock.extents:
                newest = int(np.argmax(clock.extents[-1].ticks))
                clock.hand = (len(clock.extents) - 1, newest + 1)

    def take(self, layout: Layout, count: int, runs: list[Run], calls: int) -> None:
        """Add slots for records of a layout to ``runs``, as many as there is room for. ``calls`` have used the store so
        far."""
        clock = self._clocks.get(layout) or self._new_clock(layout)
        if clock.turned:
            idle = self._oldest(clock)
            turned_at = clock.turned_at
            clock.turned = False  # first: what cannot go may stay a turn
            clock.turned_at = calls
            if idle and idle.used_at < turned_at:
                self._drop(idle)
        clock.take_free(count, runs)
        short = count - slots_in(runs)
        while short and self._grow(layout, clock):
            clock.take_free(short, runs)
            short = count - slots_in(runs)
        if short and clock.extents:
            before = slots_in(runs)
            with self._index.lock:
                clock.take_unused(short, runs)
            self.evicted += slots_in(runs) - before
        if not clock.extents:
            del self._clocks[layout]
        runs[:] = [run for run in runs if run[0].ordinal]  # without slots of extents dropped meanwhile

    def erase(self) -> None:
        """Erase the heads of forgotten records, so that none comes back."""
        while self.to_erase:
            extent, start, count = self.to_erase[-1]
            extent.write_heads(self._disk, start, bytes(count * extent.head_nbytes))
            self._directory.tell(extent.shape.number, start, count)
            with self._index.lock:
                self._index.release(extent, start, count)
            self.to_erase.pop()

    def _new_clock(self, layout: Layout) -> Clock:
        least = Shape(0, 1, layout).nbytes
        clock = Clock(max(self._extent_nbytes, least))
        self._clocks[layout] = clock
        return clock

    def _grow(self, layout: Layout, clock: Clock) -> bool:
        """Whether a layout got another extent; for its first, other layouts' extents go. ``OSError``: it has none."""
        wanted = clock.extent_nbytes
        has = bool(clock.extents)
        least = wanted // 4 if has else 0
        while self.nbytes - self.used_nbytes >= least:
            try:
                room = self._room()
                shape = Shape.within(0, layout, min(wanted, room))
                fits = shape.slots and shape.nbytes >= least and len(self._index.extents) < EXTENTS_MAX
                is_enough = has or room >= wanted or not self._oldest(clock)
                if fits and is_enough:
                    self._add(shape)
                    return True
            except OSError as error:
                if error.errno not in NO_ROOM and not has:
                    raise
            other = self._oldest(clock)
            if has or wanted > self.nbytes or other is None:
                break
            self._drop(other)
        return False

    def _add(self, shape: Shape) -> None:
        """Make another extent, and serve it."""
        numbers = [parse_name(name) or 0 for name in self._directory.names()]
        shape.number = max(numbers, default=0) + 1
        extent = make_extent(self._disk, self._directory, shape)
        self._join([extent])
        self._directory.tell(shape.number)

    def _oldest(self, clock: Clock | None = None) -> Extent | None:
        """The extent that was used least recently, of other layouts than a clock's."""
        others: list[Extent] = []
        for other in self._clocks.values():
            if other is not clock:
                others += other.extents
        return min(others, key=lambda extent: extent.used_at, default=None)

    def _room(self) -> int:
        """Bytes that may be allocated now; extents go first until the file system has its reserve."""
        spare = self._disk.space(self._directory.fd).free_nbytes - self._min_free_nbytes
        while spare < 0 <= spare + self.used_nbytes:
            oldest = self._oldest()
            if oldest is None:
                break
            spare += oldest.shape.nbytes
            self._drop(oldest)
        return min(self.nbytes - self.used_nbytes, spare)

    def _join(self, extents: Sequence[Extent]) -> None:
        """Serve what is in extents."""
        for extent in extents:
            self.used_nbytes += extent.shape.nbytes
            layout = extent.shape.layout
            clock = self._clocks.get(layout) or self._new_clock(layout)
            clock.extents.append(extent)
        with self._index.lock:
            self._index.join(extents, self.to_erase)

    def _drop(self, extent: Extent) -> None:
        """Remove an extent with its records."""
        self._directory.unlink(extent.name)
        with self._index.lock:
            self.evicted += len(extent.served)
            self._index.leave(extent)
        self.used_nbytes -= extent.shape.nbytes
        self._clocks[extent.shape.layout].leave(extent)
        self.to_erase = [run for run in self.to_erase if run[0] is not extent]
        self._directory.tell(extent.shape.number)


def slots_in(runs: Sequence[Run]) -> int:
    return sum(count for _, _, count in runs)

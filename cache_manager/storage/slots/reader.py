"""A file store opened for reading: many at once, in any process, beside the one writer or none.

A reader takes no lock and writes no byte. **What a writer's ``put`` has stored before a call, the call finds.** For
that a key that is missing makes the reader ask, in one small read, whether the writer has changed anything since it
looked last; if so it reads the ticks of the groups of heads, and the heads of the groups whose ticks have changed.
Besides it looks at opening, at every :meth:`FileReader.refresh`, and for a missing key at most every ``refresh_s``
seconds without any sign. A record whose head is not the same after its payload was read is a miss: its slot was used
again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from cache_manager.errors import StorageError, StoreClosedError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.disk import Disk, SystemDisk, read_all
from cache_manager.storage.slots.clock import runs_of
from cache_manager.storage.slots.directory import StoreDirectory
from cache_manager.storage.slots.extent import GROUP, PAGE_NBYTES, UNSURE, Extent
from cache_manager.storage.slots.index import LOCAL, NOWHERE, ORDINAL_BITS
from cache_manager.storage.slots.limits import check_ttl
from cache_manager.storage.slots.shelf import Found, Shelf

REFRESH_S: Final = 0.05
KEEP_S: Final = 10.0
"""A reader in use looks at least this often, so that what the writer dropped takes no space for longer."""


class FileReader(Shelf):
    """A ``StorageBackend`` that only reads; ``put`` is :class:`StoreReadOnlyError`.

    ``delete``, which is what a quarantine does, hides a record from this reader; its bytes are the writer's to judge.
    ``ttl_s`` is the reader's own: no record that is older is served, whatever the writer keeps. ``clock`` is a wall
    clock, ``ticks`` a monotonic one. A store that is made anew at the same path is read from the next look on; one that
    was only moved is read on where it is.

    :class:`StoreMissingError` where there is no store, unless ``waits`` says that nothing is there until a writer makes
    one; :class:`StoreFormatError` for something else.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ttl_s: float | None = None,
        waits: bool = False,
        refresh_s: float = REFRESH_S,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        check_ttl(ttl_s)
        super().__init__(directory, disk or SystemDisk(), ttl_s, clock)
        self._directory = StoreDirectory.existing(directory, required=not waits)
        self._ticks = ticks
        self._refresh_s = refresh_s
        self._looking = threading.Lock()  # one look at a time; taken before the other
        self._seen: int | None = None  # the writer's counter before the last look
        self._refreshes = self._refresh_failures = 0
        try:
            self._look()
        except BaseException:
            self._directory.close()
            raise

    def put(
        self,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        *,
        replace: bool = False,  # noqa: ARG002 - the port's
    ) -> list[RecordHeader | None]:
        self.guard.check()
        if not headers and not payloads:
            return []
        raise StoreReadOnlyError(f"{self.path}: opened with mode=read; nothing can be put here")

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> Found:
        """As the writer's; a key that is missing is looked for once more if the writer has changed anything."""
        found = super().get_into(keys, buffers)
        missing = [i for i, answer in enumerate(found) if answer is Absence.MISS]
        if self._has_looked(missing=bool(missing)) and missing:
            again = super().get_into([keys[i] for i in missing], [buffers[i] for i in missing])
            for i, answer in zip(missing, again, strict=True):
                found[i] = answer
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = super().contains(keys)
        return found if all(found) or not self._has_looked(missing=True) else super().contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Hide records from this reader, until it is opened anew or the writer stores them anew."""
        with self.looking():
            for key, slot in zip(keys, self.index.find_all(keys), strict=True):
                if slot != NOWHERE:
                    self._hide(key, slot)

    def flush(self) -> None:
        self.guard.check()

    def refresh(self) -> None:
        """See what the writer has stored and dropped since the last look.

        Costs a listing of the directory, the ticks of every extent, and the heads of groups that have changed.
        :class:`StorageError` when the directory cannot be read; what was there is still served.
        """
        self.guard.check()
        with self._looking:
            self._look()

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four, where used is all there is: ``extents``, ``failed_reads`` and ``refused_files``.

        And the looks at the directory: ``refreshes``, and ``refresh_failures`` of those that a miss caused.
        """
        with self.looking():
            extents = self.index.extents.values()
            used_nbytes = sum(extent.shape.nbytes for extent in extents)
            return {
                "records": sum(extent.living for extent in extents),
                "used_nbytes": used_nbytes,
                "free_nbytes": 0,
                "capacity_nbytes": used_nbytes,
                "extents": len(extents),
                "failed_reads": self.failed_reads,
                "refused_files": len(self.refused),
                "refreshes": self._refreshes,
                "refresh_failures": self._refresh_failures,
            }

    def close(self) -> None:
        """Close the files, those in use when their last call ends; idempotent."""
        if not self.guard.closable:
            return
        with self._looking:
            if self.guard.close():
                self.index.extents.clear()
                self._directory.close()

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        heads = bytearray(count * extent.shape.head_nbytes)
        read_all(self._disk, extent.fd, [heads], extent.heads_at(local), len(heads))
        return heads

    def _look_again(self) -> None:
        self._has_looked(missing=True, changed=True)

    def _has_looked(self, *, missing: bool, changed: bool = False) -> bool:
        """Look if that is due, or if a key is missing and the writer has changed anything since the last look.

        Who has a reason waits for another thread's look, which may be past what this one wants.
        """
        looks, due = self._refreshes, self._ticks() - self._looked_at >= (self._refresh_s if missing else KEEP_S)
        more = missing and (changed or self._has_news())
        if (due or more) and self._looking.acquire(blocking=more):
            try:
                if due or changed or self._has_news():
                    self._look()
            except StoreClosedError:
                raise
            except StorageError:  # a miss is the truth about what can be read; refresh() says what is wrong
                self._refresh_failures += 1
                return False
            finally:
                self._looking.release()
        return self._refreshes != looks

    def _has_news(self) -> bool:
        if not (self._directory.opened and self._directory.is_in_place()):
            return self.path.exists()
        counter = self._directory.counter()
        return counter is None or counter != self._seen

    def _look(self) -> None:
        """Let go of what was dropped, read on in what is there. Held: looking (or not yet shared)."""
        self.guard.check()
        self._looked_at = self._ticks()
        self._refreshes += 1
        self._follow()
        if not self._directory.opened:
            return
        counter = self._directory.counter()
        try:
            names = self._directory.extents()
        except OSError as error:
            raise StorageError(f"{self.path}: cannot read the store: {error}") from error
        for extent in list(self.index.extents.values()):
            try:
                gone = extent.shape.number not in names or not os.fstat(extent.fd).st_nlink
                if not gone:
                    self._read_on(extent)
            except OSError:  # costs what is new in this one
                self._refresh_failures += 1
            else:
                if gone:
                    with self.lock:
                        self.index.leave(extent)
        known = {extent.name for extent in self.index.extents.values()}
        opened = [
            self._open(self._directory, name, os.O_RDONLY, float("inf")) for name in names.values() if name not in known
        ]
        with self.lock:
            first = not self.index.extents
            for found in opened:
                if found is not None:
                    self.index.join(found)
                    if not first:
                        self._serve(found, np.flatnonzero(found.column("<u8")).tolist())
            if first:
                for slot in self.index.load():
                    self._hide(None, slot)
        self._seen = counter

    def _follow(self) -> None:
        """Read the store that is at the path now, if there is another one than that which is open."""
        if self._directory.opened and self._directory.is_in_place():
            return
        try:
            directory = StoreDirectory.existing(self.path)
        except StorageError:
            return  # moved away or not there yet, and nothing is in its place
        with self.lock:
            self.index.extents.clear()
        self._directory.close()
        self._directory = directory

    def _read_on(self, extent: Extent) -> None:
        """Read the heads of the groups whose ticks have changed."""
        ticks = bytearray(len(extent.ticks))
        read_all(self._disk, extent.fd, [ticks], PAGE_NBYTES, len(ticks))
        if ticks == extent.ticks:
            return
        changed = np.frombuffer(ticks, "<u8") != np.frombuffer(extent.ticks, "<u8")
        for group, groups in runs_of(changed.nonzero()[0]):
            start, stop = group * GROUP, min((group + groups) * GROUP, extent.shape.slots)
            heads = self._heads_now(extent, start, stop - start)
            extent.clean(heads)
            with self.lock:
                before, now = extent.rows(start, stop), np.frombuffer(heads, np.uint8).reshape(stop - start, -1)
                others = ((before != now).any(axis=1).nonzero()[0] + start).tolist()
                for local in others:
                    self._hide(extent.key_of(local), extent.ordinal << ORDINAL_BITS | local)
                before[:] = now
                self._serve(extent, others)
        extent.ticks = ticks

    def _hide(self, key: BlockKey | None, slot: int) -> None:
        """Serve what is in a slot no more; nothing happens if it was not served. Held: lock."""
        extent, local = self.index.extents[slot >> ORDINAL_BITS], slot & LOCAL
        if extent.uses[local] < UNSURE:
            extent.uses[local] = UNSURE
            extent.living -= 1
            if key is not None:
                self.index.remove(key, slot)

    def _serve(self, extent: Extent, locals_: Sequence[int]) -> None:
        """Serve what is in slots, but for records of which there are newer ones. Held: lock."""
        for local in locals_:
            tick, key = extent.tick(local), extent.key_of(local)
            slot, fresh = extent.ordinal << ORDINAL_BITS | local, extent.uses[local] < UNSURE
            extent.living -= fresh
            extent.uses[local] = UNSURE
            if not tick:
                continue
            known = self.index.find(key)
            if known not in (NOWHERE, slot):
                if self.index.extents[known >> ORDINAL_BITS].tick(known & LOCAL) > tick:
                    continue
                self._hide(key, known)
            extent.uses[local] = 1
            extent.living += 1
            self.index.add(key, slot)

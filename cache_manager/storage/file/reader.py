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

import numpy as np

from cache_manager.errors import StorageError, StoreClosedError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.disk import Disk, read_all
from cache_manager.storage.file.clock import runs_of
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.extent import FREE, GROUP, PAGE_NBYTES, UNSURE, Extent
from cache_manager.storage.file.index import BITS, LOCAL, NOWHERE, KeyIndex
from cache_manager.storage.file.shelf import Shelf


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
        refresh_s: float = 0.05,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(directory, disk, ttl_s, clock)
        self._directory = StoreDirectory.existing(directory, required=not waits)
        self._refresh_s = refresh_s
        self._looking = threading.Lock()  # one look at a time; taken before the other
        self._seen: int | None = None  # the writer's counter before the last look
        self._looks = self._failed_looks = 0
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
        if headers or payloads:
            raise StoreReadOnlyError(f"{self.path}: opened with mode=read; nothing can be put here")
        return []

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """As the writer's; a key that is missing is looked for once more if the writer has changed anything."""
        found = super().get_into(keys, buffers)
        missing = [i for i, answer in enumerate(found) if answer is Absence.MISS]
        if missing and self._has_looked():
            again = super().get_into([keys[i] for i in missing], [buffers[i] for i in missing])
            for i, answer in zip(missing, again, strict=True):
                found[i] = answer
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = super().contains(keys)
        return found if all(found) or not self._has_looked() else super().contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Hide records from this reader, until it is opened anew or the writer stores them anew."""
        with self.looking():
            for slot in self.index.find_all(dict.fromkeys(keys)):
                if slot != NOWHERE:
                    self._hide(slot)

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

        And ``refreshes``, the looks so far, and ``refresh_failures`` of those that a miss caused.
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
                "refreshes": self._looks,
                "refresh_failures": self._failed_looks,
            }

    def close(self) -> None:
        """Close the files, those in use when their last call ends; idempotent."""
        if not self.guard.closable:
            return
        with self._looking:
            if self.guard.close():
                self.index = KeyIndex()
                self._directory.close()

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        heads = bytearray(count * extent.head_nbytes)
        read_all(self._disk, extent.fd, [heads], extent.head_at(local), len(heads))
        return heads

    def _look_again(self) -> None:
        self._has_looked()

    def _has_looked(self) -> bool:
        """Look if the writer has changed anything since the last look, or if that is long ago.

        Who has a reason waits for another thread's look, which may be past what this one wants.
        """
        looks, news = self._looks, self._has_news()
        due = time.monotonic() - self._looked_at >= self._refresh_s
        if (due or news) and self._looking.acquire(blocking=news):
            try:
                if due or self._has_news():
                    self._look()
            except StoreClosedError:
                raise
            except StorageError:  # a miss is the truth about what can be read; refresh() says what is wrong
                self._failed_looks += 1
                return False
            finally:
                self._looking.release()
        return self._looks != looks

    def _has_news(self) -> bool:
        if not self._directory.is_in_place():
            return self.path.exists()
        counter = self._directory.read_lock()[1]
        return counter is None or counter != self._seen

    def _look(self) -> None:
        """Let go of what was dropped, read on in what is there. Held: looking (or not yet shared)."""
        self.guard.check()
        self._looked_at = time.monotonic()
        self._looks += 1
        self._follow()
        if not self._directory.opened:
            return
        counter = self._directory.read_lock()[1]
        for extent in list(self.index.extents.values()):
            try:
                if os.fstat(extent.fd).st_nlink:
                    self._read_on(extent)
                    continue
            except OSError:  # costs what is new in this one
                self._failed_looks += 1
                continue
            with self.lock:
                self._replace(extent, 0, bytes(len(extent.heads)))
                del self.index.extents[extent.ordinal]
        known = [extent.name for extent in self.index.extents.values()]
        opened = self._opened(self._directory, os.O_RDONLY, known)
        if not known:
            with self.lock:
                for extent in opened:
                    self.index.join(extent)
                for slot in self.index.load():
                    self._hide(slot)
        for extent in opened if known else ():
            heads = bytes(extent.heads)
            extent.uses[:] = bytes([FREE]) * extent.slots
            extent.heads[:], extent.living = bytes(len(heads)), 0
            with self.lock:
                self.index.join(extent)
                self.index.fit()
                self._replace(extent, 0, heads)
        self._seen = counter

    def _follow(self) -> None:
        """Read the store that is at the path now, if there is another one than that which is open."""
        if self._directory.is_in_place():
            return
        try:
            directory = StoreDirectory.existing(self.path)
        except StorageError:
            return  # moved away or not there yet, and nothing is in its place
        with self.lock:
            self.index = KeyIndex()
        self._directory.close()
        self._directory = directory

    def _read_on(self, extent: Extent) -> None:
        """Read the heads of the groups whose ticks have changed."""
        ticks = bytearray(len(extent.ticks))
        read_all(self._disk, extent.fd, [ticks], PAGE_NBYTES, len(ticks))
        changed = np.frombuffer(ticks, "<u8") != np.frombuffer(extent.ticks, "<u8")
        for group, groups in runs_of(changed.nonzero()[0]) if ticks != extent.ticks else ():
            start, stop = group * GROUP, min((group + groups) * GROUP, extent.slots)
            heads = self._heads_now(extent, start, stop - start)
            extent.clean(heads)
            with self.lock:
                self._replace(extent, start, heads)
        extent.ticks = ticks

    def _replace(self, extent: Extent, start: int, heads: bytes | bytearray) -> None:
        """Serve what new heads say, but for records of which there are newer ones. Held: lock."""
        now = np.frombuffer(heads, np.uint8).reshape(-1, extent.head_nbytes)
        changed = (extent.rows(start, start + len(now)) != now).any(axis=1).nonzero()[0] + start
        for local in changed.tolist():
            self._hide(extent.ordinal << BITS | local)
        extent.set(start, heads)
        for local in changed.tolist():
            tick, key, slot = extent.tick(local), extent.key_of(local), extent.ordinal << BITS | local
            known = self.index.find(key) if tick else slot
            if known == slot:
                continue
            if known != NOWHERE:
                if self.index.extents[known >> BITS].tick(known & LOCAL) > tick:
                    continue
                self._hide(known)
            extent.uses[local] = 1
            extent.living += 1
            self.index.add(key, slot)

    def _hide(self, slot: int) -> None:
        """Serve what is in a slot no more; nothing happens if it was not served. Held: lock."""
        extent, local = self.index.extents[slot >> BITS], slot & LOCAL
        if extent.uses[local] < UNSURE:
            extent.uses[local] = UNSURE
            extent.living -= 1
            self.index.remove(extent.key_of(local), slot)

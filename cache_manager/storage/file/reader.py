"""A file store opened for reading: many at once, in any process, beside the one writer or none.

A reader takes no lock and writes no byte. **What a writer's ``put`` has stored before a call, the call finds.** For
that a key that is missing makes the reader ask, in one small read, whether the writer has changed anything since it
looked last; if so it reads the ticks of the groups of heads, and the heads of the groups whose ticks have changed. A
record whose head is not the same after its payload was read is looked up again, or a miss: its slot was used again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from cache_manager.errors import StorageError, StoreMissingError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.disk import Disk, read_all
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.extent import FREE, GROUP, KEY_AT, PAGE_NBYTES, Extent, Heads, open_extents, runs_of
from cache_manager.storage.file.index import KeyIndex
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
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(directory, disk, ttl_s, clock)
        self._directory: StoreDirectory | None = None
        self._looking = threading.Lock()  # one look at a time; taken before the other
        self._seen: int | None = None  # the writer's counter before the last look
        self._looks = 0
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
        found = super().contains(keys)
        return found if all(found) or not self._looked_again(()) else super().contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Hide records from this reader, until it is opened anew or the writer stores them anew."""
        with self.looking():
            for place in self.index.find_all(keys):
                if place:
                    place[0].hide(place[1])

    def flush(self) -> None:
        self.guard.check()

    def usage(self) -> Mapping[str, int]:
        """Used is all there is; ``refreshes`` are the looks so far."""
        return {**super().usage(), "refreshes": self._looks}

    def close(self) -> None:
        """Close the files, those in use when their last call ends; idempotent."""
        if not self.guard.closable:
            return
        with self._looking:
            if self.guard.close():
                self.index, self._directory = KeyIndex(), None

    def _heads_now(self, extent: Extent, local: int, count: int) -> bytearray:
        return extent.read_heads(self._disk, local, count)

    def _looked_again(self, changed: Sequence[int]) -> bool:  # noqa: ARG002 - what is missing is looked for, too
        """Look if the writer has changed anything since the last look; whether that was so, here or in another thread.

        A caller that has a reason waits for another thread's look, which may be past what this one wants.
        """
        looks = self._looks
        if self._has_news():
            with self._looking:
                if self._has_news():
                    self.guard.check()
                    with suppress(StorageError):  # a miss is the truth about what can be read
                        self._look()
        return self._looks != looks

    def _has_news(self) -> bool:
        if self._directory is None:
            return self.path.exists()
        if not self._directory.is_in_place() and self.path.exists():
            return True
        counter = self._directory.read_lock()[1]
        return counter is None or counter != self._seen

    def _look(self) -> None:
        """Let go of what was dropped, read on in what is there. Held: looking (or not yet shared)."""
        self._looks += 1
        if self._directory is None or not self._directory.is_in_place():
            with suppress(StorageError):  # it was moved, and no store is in its place
                directory = StoreDirectory.existing(self.path)
                with self.lock:
                    self.index, self._directory = KeyIndex(), directory
        if self._directory is None:
            return
        counter = self._directory.read_lock()[1]
        known = {extent.name: extent for extent in self.index.extents}
        opened = open_extents(self._disk, self._directory, os.O_RDONLY, self.refused, known)
        with self.lock:
            for extent in known.values():
                if not os.fstat(extent.fd).st_nlink:
                    self.index.leave(extent)
            for extent in opened:
                if not known:
                    extent.load(self._disk)
                self.index.join(extent)
            self.index.fit() if known else self.index.load()
        for extent in self.index.extents if known else ():
            with suppress(OSError):  # costs what is new in this one
                self._read_on(extent)
        self._seen = counter

    def _read_on(self, extent: Extent) -> None:
        """Serve what is new in the groups whose ticks have changed, but for records of which there are newer ones."""
        ticks, nbytes = bytearray(len(extent.group_ticks)), extent.head_nbytes
        read_all(self._disk, extent.fd, [ticks], PAGE_NBYTES, len(ticks))
        changed = np.frombuffer(ticks, "<u8") != np.frombuffer(extent.group_ticks, "<u8")
        for group, groups in runs_of(changed.nonzero()[0]) if ticks != extent.group_ticks else ():
            start, stop = group * GROUP, min((group + groups) * GROUP, extent.slots)
            heads = np.frombuffer(extent.read_heads(self._disk, start, stop - start), np.uint8).reshape(-1, nbytes)
            extent.clean(heads)
            with self.lock:
                self._replace(extent, start, heads)
        extent.group_ticks = ticks

    def _replace(self, extent: Extent, start: int, heads: Heads) -> None:
        """Hold new heads, the newest last. Held: lock."""
        ticks = heads[:, :8].view("<u8")[:, 0]
        changed = np.flatnonzero(extent.ticks[start : start + len(heads)] != ticks)
        extent.heads[start + changed] = 0
        extent.uses[start + changed] = FREE
        there = changed[ticks[changed] > 0]
        for at in there[np.argsort(ticks[there])].tolist():
            key = BlockKey(heads[at, KEY_AT : KEY_AT + 32].tobytes())
            (known,) = self.index.find_all((key,))
            if known:
                if known[0].ticks[known[1]] > ticks[at]:
                    continue
                known[0].hide(known[1])
            extent.heads[start + at] = heads[at]
            extent.uses[start + at] = 1
            self.index.add_all((key,), extent, start + at)

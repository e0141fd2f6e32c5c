"""A file store opened for reading: many at once, in any process, beside the one writer or none.

A reader takes no lock and writes no byte. It sees what was written when it last looked: at opening, at every
:meth:`FileReader.refresh`, and when a key is missing, then at most every ``refresh_s`` seconds. What it opened stays
readable when the writer drops it, because the descriptor keeps the bytes, until the reader looks again.

What it must not trust is that a file grows only at its end: a writer that failed or was killed cuts its newest
segment, and the next one writes other records there. So before it reads on in a segment it looks whether the record
that it read last is still where it was, byte for byte; if not, it reads the segment anew, because what it takes for
the start of a record may be the middle of a payload by now. And in the newest segment it takes a record only when its
payload is whole, because the writer may be in the middle of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError, StoreClosedError, StoreFormatError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import MAGIC, Buffer, RecordHeader, pack_header
from cache_manager.storage.directory import existing_store, segment_sequences
from cache_manager.storage.disk import Disk, SystemDisk, open_regular, read_all
from cache_manager.storage.limits import check_ttl
from cache_manager.storage.segment import (
    DEAD_MAGIC,
    PAGE_NBYTES,
    page_is_missing,
    read_segment_page,
    scan,
    segment_name,
)
from cache_manager.storage.segment_index import Segment, SegmentIndex

REFRESH_S: Final = 0.05
KEEP_S: Final = 10.0
"""A reader in use looks at least this often, so that what the writer dropped takes no space for longer."""


class FileReader:
    """A ``StorageBackend`` that only reads; ``put`` is :class:`StoreReadOnlyError`.

    ``delete``, which is what a quarantine does, hides a record from this reader; its bytes are the writer's to judge.
    ``ttl_s`` is the reader's own: no record of a segment that is older is served, whatever the writer keeps. ``clock``
    is a wall clock, ``ticks`` a monotonic one. A record that the writer took back, because the rest of its batch could
    not be written, is found corrupt by a reader that had seen it.

    :class:`StoreMissingError` where there is no store, :class:`StoreFormatError` for something else or another
    version of the format.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ttl_s: float | None = None,
        refresh_s: float = REFRESH_S,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        check_ttl(ttl_s)
        self._path = directory
        self._store_id = existing_store(directory)
        self._disk: Disk = disk or SystemDisk()
        self._clock, self._ticks = clock, ticks
        self._refresh_s = refresh_s
        self._refresh = threading.Lock()  # one look at a time; taken before the index lock
        self._shelf = SegmentIndex(self._disk, ttl_s)
        self._last: dict[Segment, tuple[int, RecordHeader]] = {}  # the record that ends where reading goes on
        self._complete: set[Segment] = set()  # retired by the writer and read to their end
        self._damaged: set[Segment] = set()
        self._refreshes = self._refresh_failures = 0
        self._looked_at = ticks()
        self._closed = False
        try:
            self._look()
        except BaseException:
            self._shelf.release()
            raise

    def put(
        self,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        *,
        replace: bool = False,  # noqa: ARG002 - the port's
    ) -> list[RecordHeader | None]:
        self._check_open()
        if not headers and not payloads:
            return []
        raise StoreReadOnlyError(f"{self._path}: opened with mode=read; nothing can be put here")

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """As the writer's; a key that is missing is looked for once more after a refresh, if one is due."""
        found = self._get(keys, buffers)
        missing = [i for i, answer in enumerate(found) if answer is Absence.MISS]
        due_s = self._refresh_s if missing else KEEP_S
        if self._refresh_if_due(due_s) and missing:
            again = self._get([keys[i] for i in missing], [buffers[i] for i in missing])
            for i, answer in zip(missing, again, strict=True):
                found[i] = answer
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = self._contains(keys)
        return found if all(found) or not self._refresh_if_due(self._refresh_s) else self._contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Hide records from this reader, until it is opened anew or the writer stores them anew."""
        with self._shelf.index_lock:
            self._check_open()
            for key in keys:
                self._shelf.index.pop(key, None)

    def flush(self) -> None:
        self._check_open()

    def refresh(self) -> None:
        """See what the writer has stored and dropped since the last look.

        Costs a listing of the directory, the headers of new segments and the new payloads of the newest.
        :class:`StorageError` when the directory or a segment in it cannot be read; what was there is still served.
        """
        with self._refresh:
            self._check_open()
            self._looked_at = self._ticks()
            self._look()

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four, where used is all there is: ``segments``, what expired, ``damaged_segments``.

        And the looks at the directory: ``refreshes``, and ``refresh_failures`` of those that a miss caused.
        """
        shelf, now_s = self._shelf, self._clock()
        with shelf.index_lock:
            self._check_open()
            shelf.expire(now_s)
            return {
                "records": len(shelf.index),
                "used_nbytes": shelf.used_nbytes,
                "free_nbytes": 0,
                "capacity_nbytes": shelf.used_nbytes,
                "segments": len(shelf.segments),
                "expired_segments": shelf.expired_segments,
                "expired_records": shelf.expired_records,
                "damaged_segments": len(self._damaged),
                "refreshes": self._refreshes,
                "refresh_failures": self._refresh_failures,
            }

    def close(self) -> None:
        """Close the files, those in use when their last call ends; idempotent."""
        with self._refresh:
            with self._shelf.index_lock:
                if self._closed:
                    return
                self._closed = True
            self._shelf.release()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._path}: the store is closed")

    def _get(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        return self._shelf.get_into(keys, buffers, self._clock(), self._check_open)

    def _contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        now_s = self._clock()
        with self._shelf.index_lock:
            self._check_open()
            self._shelf.expire(now_s)
            return [key in self._shelf.index for key in keys]

    def _refresh_if_due(self, due_s: float) -> bool:
        """Refresh unless that was done less than ``due_s`` ago or is being done; whether it was done now."""
        if self._ticks() - self._looked_at < due_s or not self._refresh.acquire(blocking=False):
            return False
        try:
            self._check_open()
            self._looked_at = self._ticks()
            self._look()
        except StoreClosedError:
            raise
        except StorageError:  # a miss is the truth about what can be read; refresh() says what is wrong
            self._refresh_failures += 1
            return False
        finally:
            self._refresh.release()
        return True

    def _look(self) -> None:
        """Let go of what was dropped, read on in what is there. Held: refresh (or not yet shared)."""
        self._refreshes += 1
        shelf = self._shelf
        try:
            sequences = segment_sequences(self._path)
            gone = [segment for segment in shelf.segments.values() if os.fstat(segment.fd).st_nlink == 0]
            for segment in gone:
                self._let_go(segment)
            if gone and shelf.segments:  # a writer that finds no later one when it opens goes on in this
                self._complete.discard(shelf.segments[max(shelf.segments)])
            for sequence in sequences:
                newest = sequence == sequences[-1]
                known = shelf.segments.get(sequence) or self._open(sequence)
                if known is not None and not known.expired and (newest or known not in self._complete):
                    self._read_on(known, newest=newest)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot read the store: {error}") from error

    def _let_go(self, segment: Segment) -> None:
        self._shelf.let_go(segment)
        self._last.pop(segment, None)
        self._complete.discard(segment)
        self._damaged.discard(segment)

    def _open(self, sequence: int) -> Segment | None:
        """A segment that was not open yet; ``None`` when it is gone already or nothing can be in it."""
        path = self._path / segment_name(sequence)
        try:
            fd = open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            raw = bytearray(PAGE_NBYTES)
            found = read_all(self._disk, fd, [memoryview(raw)], 0, PAGE_NBYTES)
            if page_is_missing(raw, found):
                os.close(fd)
                return None
            page = read_segment_page(bytes(raw), str(path), sequence, self._store_id)
        except (OSError, StoreFormatError):
            os.close(fd)
            raise
        segment = Segment(sequence, path, fd, 0, PAGE_NBYTES, 0, page.created_s)
        if not page.sound:
            self._damaged.add(segment)
        with self._shelf.index_lock:
            self._shelf.add(segment)
        return segment

    def _read_on(self, segment: Segment, *, newest: bool) -> None:
        shelf, last = self._shelf, self._last.get(segment)
        if not self._is_in_place(segment, last):
            last = None
            self._last.pop(segment, None)
            with shelf.index_lock:
                shelf.forget(segment)
            segment.end = PAGE_NBYTES
        size = os.fstat(segment.fd).st_size
        content = scan(self._disk, segment.fd, size, payloads=newest, start=segment.end)
        if not self._is_in_place(segment, last):  # changed while it was read: the next look begins anew
            return
        segment.end = content.end
        if content.last is not None:
            self._last[segment] = content.last
        if content.damaged and not newest:
            self._damaged.add(segment)
        with shelf.index_lock:
            if not segment.expired:
                shelf.take(segment, content.records, content.dead)
            shelf.used_nbytes += size - segment.size
            segment.size = size
        (self._complete.discard if newest else self._complete.add)(segment)

    def _is_in_place(self, segment: Segment, last: tuple[int, RecordHeader] | None) -> bool:
        """Whether the record that was read last is where it was, alive or dead, so that another may begin behind it."""
        if last is None:
            return True  # reading begins behind the page
        offset, header = last
        raw = bytearray(header.nbytes)
        if read_all(self._disk, segment.fd, [memoryview(raw)], offset, len(raw)) < len(raw):
            return False
        magic, rest = bytes(raw[: len(MAGIC)]), raw[len(MAGIC) :]
        return magic in (MAGIC, DEAD_MAGIC) and rest == pack_header(header)[len(MAGIC) :]

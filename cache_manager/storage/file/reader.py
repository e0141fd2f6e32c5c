"""A file store opened for reading: many at once, in any process, beside the one writer or none.

A reader takes no lock and writes no byte. **What a writer's ``put`` has stored before a call, the call finds**: one
reader never misses what another has just found. For that a key that is missing makes the reader ask, in a few system
calls, whether anything lies behind what it has read, and look again if so; a stream of keys that nobody has stored
reads nothing. What stays there unread, a record that a killed writer left torn, is a reason for ``UNREAD_S`` seconds.
Besides it looks at opening, at every :meth:`FileReader.refresh`, and for a missing key at most every ``refresh_s``
seconds without any sign. What it opened stays readable when the writer drops it, because the descriptor keeps the
bytes, until the reader looks again.

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

from cache_manager.errors import StorageError, StoreClosedError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import HEADER_NBYTES_MIN, Buffer, RecordHeader
from cache_manager.storage.disk import Disk, SystemDisk, read_all
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.index import SegmentIndex
from cache_manager.storage.file.limits import check_ttl
from cache_manager.storage.file.recovery import Content, read_on, read_segment
from cache_manager.storage.file.segment import INDEX_MAGIC, PAGE_NBYTES, UNSOUND, Entry, read_header
from cache_manager.storage.file.table import Segment
from cache_manager.storage.guard import ClosingStore

REFRESH_S: Final = 0.05
UNREAD_S: Final = 1.0
KEEP_S: Final = 10.0
"""A reader in use looks at least this often, so that what the writer dropped takes no space for longer."""


class FileReader(ClosingStore):
    """A ``StorageBackend`` that only reads; ``put`` is :class:`StoreReadOnlyError`.

    ``delete``, which is what a quarantine does, hides a record from this reader; its bytes are the writer's to judge.
    ``ttl_s`` is the reader's own: no record of a segment that is older is served, whatever the writer keeps. ``clock``
    is a wall clock, ``ticks`` a monotonic one. A record that the writer took back, because the rest of its batch could
    not be written, is found corrupt by a reader that had seen it. A store that is made anew at the same path is read
    from the next look on; one that was only moved is read on where it is.

    :class:`StoreMissingError` where there is no store, unless ``waits`` says that nothing is there until a writer makes
    one; :class:`StoreFormatError` for something else or another version of the format.
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
        self._path = directory
        self._directory = StoreDirectory.existing(directory, required=not waits)
        self._disk: Disk = disk or SystemDisk()
        self._ticks = ticks
        self._refresh_s = refresh_s
        self._refresh = threading.Lock()  # one look at a time; taken before the index lock
        self._shelf = SegmentIndex(self._disk, ttl_s, directory, clock)
        self._refreshes = self._refresh_failures = 0
        self._found = 0  # how often records were found; guarded by the index lock
        self._unread: tuple[object, float] = (None, 0.0)  # what lay behind what was read, and since when it was seen
        try:
            self._look()
        except BaseException:
            self._shelf.release()
            self._directory.close()
            raise

    def put(
        self,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        *,
        replace: bool = False,  # noqa: ARG002 - the port's
    ) -> list[RecordHeader | None]:
        self._shelf.guard.check()
        if not headers and not payloads:
            return []
        raise StoreReadOnlyError(f"{self._path}: opened with mode=read; nothing can be put here")

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        """As the writer's; a key that is missing is looked for once more if there is more to read than was read."""
        before = self._found
        found = self._shelf.get_into(keys, buffers)
        missing = [i for i, answer in enumerate(found) if answer is Absence.MISS]
        if self._has_looked(before, missing=bool(missing)) and missing:
            again = self._shelf.get_into([keys[i] for i in missing], [buffers[i] for i in missing])
            for i, answer in zip(missing, again, strict=True):
                found[i] = answer
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        before = self._found
        found = self._shelf.contains(keys)
        return found if all(found) or not self._has_looked(before, missing=True) else self._shelf.contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Hide records from this reader, until it is opened anew or the writer stores them anew."""
        self._shelf.unpin(segment for segment, _ in self._shelf.hide(keys))

    def flush(self) -> None:
        self._shelf.guard.check()

    def refresh(self) -> None:
        """See what the writer has stored and dropped since the last look.

        Costs a listing of the directory, the indexes of new segments and the new records of the newest, payloads
        included. :class:`StorageError` when the directory or a segment in it cannot be read; what was there is still
        served.
        """
        self._shelf.guard.check()
        with self._refresh:
            self._look()

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four, where used is all there is: ``segments``, what expired, ``damaged_segments``.

        ``failed_reads`` as the writer's. And the looks at the directory: ``refreshes``, and ``refresh_failures`` of
        those that a miss caused.
        """
        shelf = self._shelf
        with shelf.looking():
            return {
                "records": shelf.table.records,
                "used_nbytes": shelf.used_nbytes,
                "free_nbytes": 0,
                "capacity_nbytes": shelf.used_nbytes,
                "segments": len(shelf.segments),
                "expired_segments": shelf.expired_segments,
                "expired_records": shelf.expired_records,
                "damaged_segments": sum(segment.damaged for segment in shelf.segments.values()),
                "failed_reads": shelf.failed_reads,
                "refreshes": self._refreshes,
                "refresh_failures": self._refresh_failures,
            }

    def close(self) -> None:
        """Close the files, those in use when their last call ends; idempotent."""
        if not self._shelf.guard.closable:
            return
        with self._refresh:
            if not self._shelf.guard.close():
                return
            self._shelf.release()
            self._directory.close()

    def _has_looked(self, before: int, *, missing: bool) -> bool:
        """Look if that is due, or if a key is missing and there is more; whether records were found since ``before``.

        Who has a reason waits for another thread's look, which may be past what this one wants.
        """
        due = self._ticks() - self._looked_at >= (self._refresh_s if missing else KEEP_S)
        more = missing and self._has_more()
        if (due or more) and self._refresh.acquire(blocking=more):
            try:
                if due or self._has_more():
                    self._look()
            except StoreClosedError:
                raise
            except StorageError:  # a miss is the truth about what can be read; refresh() says what is wrong
                self._refresh_failures += 1
                return False
            finally:
                self._refresh.release()
        return self._found != before

    def _has_more(self) -> bool:
        """Whether something lies behind what was read that was not there, as it is now, ``UNREAD_S`` ago."""
        found, now_s = self._behind(), self._ticks()
        if found != self._unread[0]:
            self._unread = found, now_s
        return found is not None and now_s - self._unread[1] < UNREAD_S

    def _behind(self) -> object:
        """A sign of what the newest segment has behind what was read of it, or of a newer one; ``None``: nothing."""
        shelf, start = self._shelf, bytearray(HEADER_NBYTES_MIN)
        with shelf.looking():
            newest = shelf.segments.get(max(shelf.segments, default=0))
            if newest is not None:
                newest.pins += 1
                end, last = newest.end, newest.last
        try:
            if not self._directory.is_in_place():
                there = self._path.stat()
                return there.st_dev, there.st_ino, there.st_mtime_ns
            if newest is not None and not newest.expired:
                if os.fstat(newest.fd).st_nlink == 0 or not self._is_in_place(newest, last):
                    return newest.sequence
                nbytes = read_all(self._disk, newest.fd, [start], end, len(start))
                if not start.startswith(INDEX_MAGIC) and (any(start) or nbytes == len(start)):
                    return (newest.sequence, end, bytes(start)) if any(start) else None
            names = self._directory.files()
            return max(names) if names and (newest is None or max(names) > newest.sequence) else None
        except OSError:
            return None
        finally:
            shelf.unpin([] if newest is None else [newest])

    def _look(self) -> None:
        """Let go of what was dropped, read on in what is there. Held: refresh (or not yet shared)."""
        self._shelf.guard.check()
        self._looked_at = self._ticks()
        self._refreshes += 1
        self._follow()
        shelf = self._shelf
        try:
            files = self._directory.files() if self._directory.opened else {}
            gone = [segment for segment in shelf.segments.values() if os.fstat(segment.fd).st_nlink == 0]
            for segment in gone:
                shelf.let_go(segment)
            if gone and shelf.segments:  # a writer that finds no later one when it opens goes on in this
                shelf.segments[max(shelf.segments)].complete = False
            newest, opened = max(files, default=0), list[tuple[Segment, Content]]()
            for sequence, name in files.items():
                known = shelf.segments.get(sequence)
                if known is None:
                    opened += self._open(sequence, name, newest=sequence == newest)
                elif not known.expired and (sequence == newest or not known.complete):
                    self._read_on(known, newest=sequence == newest)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot read the store: {error}") from error
        with shelf.index_lock:
            shelf.failed_reads += sum(content.failed_reads for _, content in opened)
            shelf.serve(opened)
            self._found += len(opened)

    def _follow(self) -> None:
        """Read the store that is at the path now, if there is another one than that which is open."""
        if self._directory.is_in_place():
            return
        try:
            directory = StoreDirectory.existing(self._path)
        except StorageError:
            return  # moved away or not there yet, and nothing is in its place
        for segment in list(self._shelf.segments.values()):
            self._shelf.let_go(segment)
        self._directory.close()
        self._directory = directory

    def _open(self, sequence: int, name: str, *, newest: bool) -> list[tuple[Segment, Content]]:
        """Read a segment that was not open yet; nothing where it is gone already, or nothing is in it."""
        try:
            segment, content = read_segment(self._directory, self._disk, sequence, name, payloads=newest)
        except FileNotFoundError:
            return []
        if content.empty:
            return []
        segment.last = content.cut_torn()  # what is at the end may be in the middle of its write
        segment.end = content.end
        segment.complete = not newest
        segment.damaged = not content.page_sound or (content.damaged and not newest)
        return [(segment, content)]

    def _read_on(self, segment: Segment, *, newest: bool) -> None:
        shelf = self._shelf
        if not self._is_in_place(segment, segment.last):
            with shelf.index_lock:
                shelf.table.leave(segment)
                segment.count, segment.last, segment.end = 0, None, PAGE_NBYTES
                shelf.table.join(segment)
        size = os.fstat(segment.fd).st_size
        content = read_on(self._disk, segment.fd, size, segment.end, payloads=newest)
        last = content.cut_torn() or segment.last
        if not self._is_in_place(segment, segment.last):  # changed while it was read: the next look begins anew
            return
        with shelf.index_lock:
            if not segment.expired:
                shelf.take(segment, content.rows, content.states)
            segment.last, segment.end = last, content.end
            self._found += 1
            shelf.used_nbytes += size - segment.size
            segment.size = size
        segment.complete = not newest

    def _is_in_place(self, segment: Segment, last: Entry | None) -> bool:
        """Whether the record that was read last is where it was, alive or dead, so that another may begin behind it."""
        if last is None:
            return True  # reading begins behind the page
        state, _ = read_header(self._disk, segment.fd, last)
        return state != UNSOUND

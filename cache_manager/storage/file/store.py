"""The file store's writer: records in the slots of extents, in one directory.

*Held: writing* means the lock of the one call that writes, *held: lock* the lock that guards memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError, RecordError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, RecordHeader, nbytes_of, takes_the_place
from cache_manager.spec import align
from cache_manager.storage.disk import Disk
from cache_manager.storage.file.directory import LockedDirectory
from cache_manager.storage.file.extent import (
    PAGE_NBYTES,
    Extent,
    Layout,
    Run,
    open_extents,
)
from cache_manager.storage.file.index import ANY_TAIL, Found, KeyIndex
from cache_manager.storage.file.quota import NO_ROOM, Quota
from cache_manager.storage.file.reader import ExtentFiles
from cache_manager.storage.guard import StoreLock

QUOTA_NBYTES: Final = 4 << 30
_QUOTA_NBYTES_MIN: Final = 8 * PAGE_NBYTES
_EXTENTS: Final = 16  # parts of a quota: layouts give them to each other as a whole
_EXTENT_NBYTES_MIN: Final = 128 << 10  # where the quota has room for one


class Sync(StrEnum):
    """When a record that was put is on stable storage."""

    NONE = "none"  # after flush or close: a killed process loses nothing, a power cut the records not flushed
    BATCH = "batch"  # when put returns


class FileStore(ExtentFiles):
    """A ``StorageBackend`` in a directory, for one process at a time; others may read (:class:`FileReader`).

    Records of one layout have one size: they lie in the slots of extents of about ``extent_nbytes`` each, which
    together never take more than ``quota_nbytes``, nor leave the file system less than ``min_free_nbytes``. Without
    room for a new extent, records that were used least give their slots (:mod:`cache_manager.storage.file.quota`), and
    an extent of another layout in which nothing was used for a whole turn of the clock gives its room. ``put`` answers
    ``None`` for a record that still has none; of a batch that does not fit, the first ones stay. With ``ttl_s`` no
    record is served that is older by ``clock``, a wall clock.

    Opening reads all heads and no payload; payloads are checked by :class:`RecordStore`. :class:`StorageError` when the
    disk fails: stored records are still there, except those that gave their slots, and later calls try again.
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
        self._quota_nbytes = quota_nbytes
        self._sync = sync
        self._writing = StoreLock(directory)  # one put or delete at a time; taken before the others
        self._flushing = StoreLock(directory)  # one sync at a time
        self._tick = 0
        self._directory = LockedDirectory(directory, file_mode)
        self._quota = Quota(
            self._disk,
            self._directory,
            self.index,
            nbytes=quota_nbytes,
            extent_nbytes=min(extent_nbytes or default, quota_nbytes),
            min_free_nbytes=min_free_nbytes,
        )
        try:
            with self._as_storage_error("open the store"):
                self._recover()
        except BaseException:
            self._directory.close()
            raise

    @property
    def record_nbytes_max(self) -> int:
        """Bytes of the largest payload: an extent of its own has to fit the quota."""
        return self._quota_nbytes // PAGE_NBYTES * PAGE_NBYTES - 4 * PAGE_NBYTES

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        for header, payload in zip(headers, payloads, strict=True):
            size = nbytes_of(payload)
            if size != header.payload_nbytes:
                raise RecordError("payload size", header.payload_nbytes, size)
        self.lock.check()
        keys = [header.key for header in headers]
        with self._writing:
            with self.lock:
                self.calls += 1
                older = self.index.find(keys)
                stored = self._headers_at(older)
            groups = self._wanted(headers, payloads, stored, replace)
            evicted = self._quota.evicted
            may_lose = bool(stored) or len(groups) > 1  # a later record may get the slot of one of these keys
            with suppress(OSError):  # their slots stay taken
                self._quota.erase()
            with self._as_storage_error("write"):
                for group in groups:
                    self._store(*group, stored, ANY_TAIL if older else ())
                if self._sync is Sync.BATCH:  # what was stored before, too: it may not be synced yet
                    self._sync_all(self.index.extents)
            if may_lose and self._quota.evicted != evicted:
                there = self.contains(keys)
                return [stored.get(key) if here else None for key, here in zip(keys, there, strict=True)]
        return list(map(stored.get, keys))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Gone from this process in any case; :class:`StorageError` if a record may come back after a restart."""
        self.lock.check()
        wanted = list(dict.fromkeys(keys))
        with self._writing:
            with self.lock:
                found = self.index.find(wanted)
                for _, extent, start, count in found:
                    extent.forget(start, count)
                    self._quota.to_erase.append((extent, start, count))
            with self._as_storage_error("delete a record"):
                self._quota.erase()
        unread = [refusal.why for refusal in self.refused.values() if refusal.is_unread]
        if unread and sum(count for *_, count in found) < len(wanted):
            raise StorageError(f"a record may be in an extent that was not read at opening: {', '.join(unread)}")

    def flush(self) -> None:
        """Return when every record put before is on stable storage.

        :class:`StorageError` if that fails: then records put before may be lost, even after a later flush that
        succeeds, because an operating system counts pages whose write has failed as written.
        """
        with self.lock:
            extents = self.index.extents
        with self._as_storage_error("flush"):
            self._sync_all(extents)

    def usage(self) -> Mapping[str, int]:
        """And ``evicted_records``: those that gave their slots or their extents' room to others since opening."""
        return {**super().usage(), "evicted_records": self._quota.evicted}

    def close(self) -> None:
        """Erase what failed puts and deletes may have left, flush, then close the directory; idempotent.

        :class:`StorageError`: closed, but not all was erased and flushed.
        """
        if not self.lock.closable:
            return
        with self._writing:
            if not self.lock.closable:  # by another thread meanwhile
                return
            try:
                with self._as_storage_error("erase and flush"):
                    try:
                        self._quota.erase()
                    finally:
                        self._sync_all(self.index.extents)
            finally:
                self.lock.close()
                self.index = KeyIndex(self.lock)
                self._quota.forget(self.index)
                self._directory.close()

    @contextmanager
    def _as_storage_error(self, what: str) -> Iterator[None]:
        """A failure of the disk within the block as :class:`StorageError`."""
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self.path}: cannot {what}: {error}") from error

    # What put and delete do.

    def _headers_at(self, found: list[Found]) -> dict[BlockKey, RecordHeader]:
        """By key, what is stored in these slots, if it is not too old; storing it again is a use. Held: lock."""
        stored: dict[BlockKey, RecordHeader] = {}
        for _, extent, local, count in self.fresh(found):
            headers = extent.headers(extent.packed(local, count))
            stored |= {header.key: header for header in headers}
            extent.use(local, count, self.calls)
        return stored

    def _wanted(
        self,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        stored: Mapping[BlockKey, RecordHeader],
        replace: bool,
    ) -> list[tuple[Layout, Sequence[RecordHeader], Sequence[Buffer]]]:
        """Which records are to be stored, in groups of one layout."""
        layouts = [(header.fingerprint, header.payload_nbytes, len(header.valid)) for header in headers]
        if headers and not stored and len({each.key for each in headers}) == len(headers) == layouts.count(layouts[0]):
            return [(layouts[0], headers, payloads)]  # nearly always
        wanted: dict[BlockKey, int] = {}
        for i, header in enumerate(headers):
            key = header.key
            present = headers[wanted[key]] if key in wanted else stored.get(key)
            if present is None or takes_the_place(header, present, replace=replace):
                wanted[key] = i
        groups: list[tuple[Layout, Sequence[RecordHeader], Sequence[Buffer]]] = []
        for layout, places in groupby(sorted(wanted.values()), layouts.__getitem__):
            some = list(places)
            groups.append((layout, [headers[i] for i in some], [payloads[i] for i in some]))
        return groups

    def _store(
        self,
        layout: Layout,
        headers: Sequence[RecordHeader],
        payloads: Sequence[Buffer],
        stored: dict[BlockKey, RecordHeader],
        repeats: Container[int],
    ) -> None:
        """Store records of one layout while there is room; ``stored`` gets their headers.

        Of keys with a tail in ``repeats`` there may be older records. Held: writing.
        """
        runs: list[Run] = []
        at = 0
        try:
            self._quota.take(layout, len(headers), runs, self.calls)
            while runs:
                extent, start, count = runs[0]
                some = headers[at : at + count]
                now_ms = int(self._clock() * 1000)
                heads = extent.pack(some, self._tick + 1, now_ms)
                self._tick += count
                extent.write(self._disk, start, heads, payloads[at : at + count])
                with self.lock:
                    extent.used_at = self.calls
                    self.index.hold(extent, start, heads, repeats, self._quota.to_erase)
                self._directory.tell(extent.shape.number, start, count)
                runs.pop(0)
                at += count
                stored |= {header.key: header for header in some}
                if repeats and self._quota.to_erase:
                    self._quota.erase()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            self._quota.to_erase += runs

    def _sync_all(self, extents: Iterable[Extent]) -> None:
        """Make names and bytes durable; a file that cannot be synced stays dirty."""
        everything: list[Extent | LockedDirectory] = [self._directory, *extents]
        with self._flushing:
            for each in everything:
                if each.dirty:
                    each.dirty = False  # before the sync: a write meanwhile sets it again
                    try:
                        self._disk.sync(each.fd)
                    except BaseException:
                        each.dirty = True
                        raise

    def _recover(self) -> None:
        """Serve the records in the extents that are there."""
        self._quota.check_reserve()
        opened = open_extents(self._disk, self._directory, os.O_RDWR, self.refused)
        for extent in opened:
            if self._disk.size(extent.fd) != extent.shape.nbytes:  # was cut, or what lies behind is no part of it
                self._disk.truncate(extent.fd, extent.shape.nbytes)
        # Deleted records may have had higher ticks, which readers remember.
        ticks = [int(extent.ticks.max()) for extent in opened]
        self._tick = max(ticks, default=0) + int.from_bytes(os.urandom(4), "little")
        self._quota.serve(opened)
        with suppress(OSError):
            self._quota.erase()

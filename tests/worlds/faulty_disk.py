"""The file store's own port, wrapped so that it fails the way disks fail."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from cache_manager.record import Buffer
from cache_manager.storage.disk import Disk, Room, Space


class FaultyDisk(Disk):
    """The calls of a file store with a limit on what may be written, short transfers, and errors by call.

    When ``write_budget_nbytes`` is used up a write writes what is left of it, and the next one calls ``at_limit`` (to
    kill the process, say) and fails with ``write_errno``, as a disk does that fills up in the middle of a batch.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk or Disk()
        self.write_budget_nbytes: int | None = None
        self.write_errno = errno.ENOSPC
        self.at_limit: Callable[[], None] | None = None
        self.call_nbytes_max: int | None = None  # every transfer is cut to this
        self.read_errno: int | None = None
        self.bad = range(0)  # bytes of files that cannot be read
        self.bad_file = ""  # the end of the name of the one that has them; every file, if empty
        self.on_read: Callable[[], object] = lambda: None  # called before each read
        self.on_written: Callable[[bytes], object] = lambda _: None  # called behind each write
        self.on_allocate: Callable[[], object] = lambda: None
        self.reads = 0
        self.sync_errno: int | None = None
        self.space_now: Space | None = None  # what the file system is reported to have
        self.syncs = 0

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        if self.call_nbytes_max is not None:
            nbytes = min(nbytes, self.call_nbytes_max)
        if self.write_budget_nbytes is not None:
            if self.write_budget_nbytes == 0:
                if self.at_limit:
                    self.at_limit()
                raise OSError(self.write_errno, os.strerror(self.write_errno))
            nbytes = min(nbytes, self.write_budget_nbytes)
            self.write_budget_nbytes -= nbytes
        written = self.disk.pwritev(fd, [raw := b"".join(buffers)[:nbytes]], offset)
        self.on_written(raw)
        return written

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        self.reads += 1
        self.on_read()
        _raise(self.read_errno)
        stop = offset + sum(memoryview(buffer).nbytes for buffer in buffers)
        is_bad = max(self.bad.start, offset) < min(self.bad.stop, stop)
        if is_bad and os.readlink(f"/proc/self/fd/{fd}").endswith(self.bad_file):
            _raise(errno.EIO)
        if self.call_nbytes_max is not None:
            buffers = [memoryview(buffers[0]).cast("B")[: self.call_nbytes_max]]
        return self.disk.preadv(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self.on_allocate()
        self.disk.allocate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self.disk.truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        _raise(self.sync_errno)
        self.syncs += 1
        self.disk.sync(fd)

    def size(self, fd: int) -> int:
        return self.disk.size(fd)

    def space(self, fd: int) -> Space:
        return self.space_now or self.disk.space(fd)


def _raise(number: int | None) -> None:
    if number is not None:
        raise OSError(number, os.strerror(number))


class VolatileDisk(FaultyDisk):
    """Remembers what a power cut could undo: earlier contents of sectors since their file was synced, and new names."""

    SECTOR_NBYTES = 512

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.versions: dict[int, dict[int, list[bytes]]] = {}  # by inode and offset, the oldest first
        self.named: set[str] = set()

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        nbytes, size = sum(memoryview(buffer).nbytes for buffer in buffers), self.SECTOR_NBYTES
        sectors = range(offset // size * size, offset + nbytes, size)
        of_file = self.versions.setdefault(os.fstat(fd).st_ino, {})
        for at in sectors:
            of_file.setdefault(at, [os.pread(fd, size, at).ljust(size, b"\0")])
        written = super().pwritev(fd, buffers, offset)
        for at in sectors:
            of_file[at].append(os.pread(fd, size, at).ljust(size, b"\0"))
        return written

    def sync(self, fd: int) -> None:
        super().sync(fd)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self.named = set(os.listdir(self.directory))
        else:
            self.versions.pop(found.st_ino, None)

    def cut_power(self, target: Path, rng: np.random.Generator) -> None:
        """Leave in ``target`` what could be on the disk: each sector as it was at some time since the last sync."""
        shutil.copytree(self.directory, target)
        for path in self.directory.iterdir():
            if path.name not in self.named and rng.random() < 0.5:
                (target / path.name).unlink()
                continue
            with (target / path.name).open("r+b") as file:
                for offset, contents in self.versions.get(path.stat().st_ino, {}).items():
                    file.seek(offset)
                    file.write(contents[int(rng.integers(len(contents)))])

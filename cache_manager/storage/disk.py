"""What stores of files ask of the operating system.

Every method of :class:`Disk` is one system call and raises ``OSError`` as that call does; :func:`write_all` and
:func:`read_all` deal with short ones.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from cache_manager.record import Buffer

IOV_MAX: Final[int] = os.sysconf("SC_IOV_MAX")

Room = memoryview | bytearray
"""Where bytes can be read to."""


class Space(NamedTuple):
    """Room of a file system: bytes that this user may still take, and all bytes."""

    free_nbytes: int
    total_nbytes: int


class Disk:
    """The calls that write and read the files of a store; tests use others, which fail."""

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, backed by space; what is there stays, the rest reads as zeros."""
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Return when a file's bytes, or a directory's entries, are on stable storage."""
        os.fdatasync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def space(self, fd: int) -> Space:
        """The room of the file system that the file is on, now."""
        found = os.fstatvfs(fd)
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def open_regular(path: Path | str, flags: int, *, mode: int = 0o644, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file, created with ``mode`` if ``flags`` say so; ``OSError`` for anything else.

    A store's directory may be another user's: links are not followed, and pipes, which could block, are refused.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int, nbytes: int) -> None:
    """Write every byte of ``buffers`` (``nbytes`` in all), in as many calls as it takes; ``OSError`` if that fails."""
    if _moved(disk.pwritev, fd, buffers, offset, nbytes) < nbytes:
        raise OSError(errno.EIO, "a write moved nothing")


def read_all(disk: Disk, fd: int, buffers: Sequence[Room], offset: int, nbytes: int) -> int:
    """Fill ``buffers`` (``nbytes`` in all), in as many calls as it takes; fewer bytes only where the file ends."""
    if len(buffers) > IOV_MAX:
        return _moved(disk.preadv, fd, buffers, offset, nbytes)
    moved = disk.preadv(fd, buffers, offset)
    if moved <= 0:
        return 0
    if moved == nbytes:  # nearly always
        return moved
    return moved + _moved(disk.preadv, fd, _after(buffers, moved), offset + moved, nbytes - moved)


def _moved(call: Callable[[int, Sequence[Any], int], int], fd: int, rest: Sequence[Any], at: int, nbytes: int) -> int:
    """How many bytes the calls have moved, until all or none."""
    left = nbytes
    while left:
        moved = call(fd, rest if len(rest) <= IOV_MAX else rest[:IOV_MAX], at + nbytes - left)
        if moved <= 0:
            break
        left -= moved
        if left:
            rest = _after(rest, moved)
    return nbytes - left


def _after(buffers: Sequence[Buffer], nbytes: int) -> list[memoryview]:
    """What is left of ``buffers`` without their first ``nbytes``."""
    rest: list[memoryview] = []
    for buffer in buffers:
        flat = memoryview(buffer)
        if nbytes >= flat.nbytes:
            nbytes -= flat.nbytes
        else:
            rest.append(flat.cast("B")[nbytes:])
            nbytes = 0
    return rest

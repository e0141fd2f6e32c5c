"""Whether memory is there before it is touched: a tmpfs or a cgroup that is too small answers a touch with a signal."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cache_manager.errors import NoSpaceError, RegionError

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name them yet
_MADV_POPULATE_WRITE = 23
_POPULATE_CHUNK_NBYTES = 256 << 20  # madvise holds the interpreter lock: let other threads run in between


def memory_free_nbytes(root: Path = Path("/")) -> tuple[str, int]:
    """The tightest bound on memory that this process can still touch, and what sets it.

    The machine's available memory, and for every cgroup above this process its limit less what it uses, where file
    pages that the kernel would give back first count as free.
    """
    available = re.search(r"^MemAvailable: +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    bounds = [("memory of this machine", int(available[1]) << 10 if available else 1 << 62)]
    bounds += [(f"memory limit of cgroup {name}", nbytes) for name, nbytes in _cgroup_free_nbytes(root)]
    return min(bounds, key=lambda bound: bound[1])


def require_memory(nbytes: int) -> None:
    """Raise :class:`NoSpaceError` when ``nbytes`` more cannot be touched without being killed for it."""
    where, free = memory_free_nbytes()
    if nbytes > free:
        raise NoSpaceError(where, nbytes, free, f"raise the limit by {nbytes - free} bytes or ask for fewer blocks")


def require_tmpfs(directory: Path, nbytes: int) -> None:
    """Raise :class:`NoSpaceError` when the file system of ``directory`` has no room for ``nbytes`` more."""
    if nbytes > (error := no_tmpfs_space(directory, nbytes)).free_nbytes:
        raise error


def no_tmpfs_space(directory: Path, nbytes: int) -> NoSpaceError:
    """The error for a ``directory`` that has no room for ``nbytes``, with the size that would have been enough."""
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    needed_mib = -(-(stat.f_blocks * stat.f_frsize - free + nbytes) // (1 << 20))
    remedy = f"start the container with --shm-size={needed_mib}m (or remount with size={needed_mib}m), or ask for fewer"
    return NoSpaceError(str(directory), nbytes, free, f"{remedy} blocks")


def map_memory(fd: int, nbytes: int, *, flags: int = mmap.MAP_SHARED, writable: bool = True) -> mmap.mmap:
    """A mapping of ``nbytes`` of ``fd`` (-1: anonymous), which keeps a duplicate of ``fd`` until it is closed."""
    try:
        return mmap.mmap(fd, nbytes, flags, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except OSError as error:
        raise RegionError(f"map {nbytes} bytes: {error.strerror}; is there a limit (ulimit -v)?") from error


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages for the part of ``memory`` that is not there yet; without them small pages do."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def populate(memory: mmap.mmap, *, write: bool, start: int = 0, stop: int | None = None) -> None:
    """Have every page of ``memory[start:stop]`` mapped now: no later access waits for the kernel. Contents stay.

    ``start`` is a multiple of the page size.
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    end = len(memory) if stop is None else stop
    try:
        for place in range(start, end, _POPULATE_CHUNK_NBYTES):
            memory.madvise(advice, place, min(_POPULATE_CHUNK_NBYTES, end - place))
    except OSError as error:
        if error.errno in (errno.EFAULT, errno.ENOMEM):
            where, free = memory_free_nbytes()
            raise NoSpaceError(where, end - start, free, "ask for fewer blocks") from error
        raise


def populate_present(memory: mmap.mmap, fd: int, *, write: bool) -> None:
    """As :func:`populate`, but for what the file ``fd`` has no memory for: that would give it some."""
    size = len(memory)
    start = 0
    while start < size:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind it
                return
            raise
        stop = os.lseek(fd, start, os.SEEK_HOLE)
        populate(memory, write=write, start=start, stop=min(stop, size))
        start = stop


def _cgroup_free_nbytes(root: Path) -> Iterator[tuple[str, int]]:
    """Every cgroup (v2) that limits this process, with what is free in it."""
    path = next((line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/")
    # Inside a container the path may be that of the host: then only the root of the hierarchy is there to read.
    for at in (Path(path), *Path(path).parents):
        group = root / "sys/fs/cgroup" / at.relative_to("/")
        try:
            most = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        except FileNotFoundError:
            continue
        if most != "max":
            yield str(at), max(0, int(most) - max(0, used - (int(cached[1]) if cached else 0)))

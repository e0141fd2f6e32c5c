"""Whether memory is there before it is touched: a tmpfs or a cgroup that is too small answers a touch with a signal."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cache_manager.errors import NoSpaceError, RegionError

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name them yet
_MADV_POPULATE_WRITE = 23
_POPULATE_CHUNK_NBYTES = 256 << 20  # madvise holds the interpreter lock: let other threads run in between


def memory_free_nbytes(root: Path = Path("/")) -> tuple[str, int]:
    """The tightest bound on memory that this process can still touch, and what sets it.

    The machine's available memory, and for every cgroup (v1 or v2) above this process its limit less what it uses,
    where file pages that the kernel would give back first count as free.
    """
    bounds = [("memory of this machine", nbytes) for nbytes in _meminfo(root)]
    bounds += [(f"memory limit of cgroup {name}", nbytes) for name, nbytes in _cgroups(root)]
    return min(bounds, key=lambda bound: bound[1], default=("memory", 1 << 62))


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
    """A mapping of ``nbytes`` of ``fd`` (-1: of nothing), which keeps a duplicate of ``fd`` until it goes.

    Raises :class:`NoSpaceError` when the process may not have as much address space.
    """
    try:
        return mmap.mmap(fd, nbytes, flags, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise RegionError(f"map {nbytes} bytes: {error.strerror}") from error
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        free = memory_free_nbytes()[1] if limit == resource.RLIM_INFINITY else max(0, limit - used)
        remedy = "raise the limit (ulimit -v) or ask for fewer blocks"
        raise NoSpaceError("address space of this process", nbytes, free, remedy) from error


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Let the pages of ``memory`` that are not there yet be huge, where the kernel has any: small ones do."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def populate(memory: mmap.mmap, *, write: bool) -> None:
    """Have every page of ``memory`` mapped now, so that no later access waits for the kernel; contents stay."""
    advice, size = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ, len(memory)
    try:
        for start in range(0, size, _POPULATE_CHUNK_NBYTES):
            memory.madvise(advice, start, min(_POPULATE_CHUNK_NBYTES, size - start))
    except OSError as error:
        if error.errno in (errno.EFAULT, errno.ENOMEM):
            where, free = memory_free_nbytes()
            raise NoSpaceError(where, len(memory), free, "ask for fewer blocks") from error
        if error.errno != errno.EINVAL:
            raise
        if write:  # a kernel before 5.14; the pages of a new region hold zeros
            np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0


def _meminfo(root: Path) -> Iterator[int]:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10


def _cgroups(root: Path) -> Iterator[tuple[str, int]]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        # Inside a container the path may be that of the host: then only the root of the hierarchy is there to read.
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            group = "/".join(parts[:depth])
            free = _cgroup_free_nbytes(base / group, *names)
            if free is not None:
                yield "/" + group, free


def _cgroup_free_nbytes(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = (group / "memory.stat").read_text()
    except FileNotFoundError:
        return None
    if most == "max":
        return None
    cache = sum(int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == reclaimable)
    return max(0, int(most) - max(0, used - cache))

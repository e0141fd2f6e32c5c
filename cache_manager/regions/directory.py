"""Names, locks and orphans of shared regions.

Every process that uses a region holds ``flock(LOCK_SH)`` on its file for as long as it has it mapped; the kernel drops
the lock when the process ends, however it ends. So ``LOCK_EX`` can be had exactly when nobody uses the region, whatever
became of pids. Two rules make removal free of races, also against a creator that has its file but not yet its lock:

* only the owner and a holder of ``LOCK_EX`` unlink a region;
* whoever gets ``LOCK_SH`` then looks whether the file still has its name, and starts over (creator) or reports the
  region missing (attacher) when it has not.

A creator killed halfway leaves a file without its magic: nobody attaches to it and the next reaper removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cache_manager.errors import InvalidInputError, RegionError, RegionMismatchError
from cache_manager.regions.header import HEADER_NBYTES, PURPOSES, Purpose, RegionHeader, unpack_header

DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - names are random, files 0600, opened O_EXCL or O_NOFOLLOW
_NAME = re.compile(rf"kvroute-(\d+)-([0-9a-f]{{32}})-({'|'.join(PURPOSES)})")
_CREATE_TRIES_MAX = 16
_LOCK_TRIES_MAX = 200
_LOCK_PAUSE_MS = 1


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """A region of this user as :func:`list_regions` found it.

    ``header`` is None while the region is being made, or when it is not sound. ``in_use`` is whether any process has
    it mapped; ``owner_alive`` whether the very process that made it still runs (it cannot tell across pid namespaces).
    """

    name: str
    purpose: Purpose
    nbytes: int
    header: RegionHeader | None
    owner_alive: bool
    in_use: bool


def new_file(purpose: Purpose) -> tuple[str, bytes, int]:
    """Name, uuid and descriptor of a new, empty, locked file that no other process can have made or removed."""
    for _ in range(_CREATE_TRIES_MAX):
        unique = uuid.uuid4()
        name = f"kvroute-{os.geteuid()}-{unique.hex}-{purpose}"
        try:
            fd = os.open(DIRECTORY / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise RegionError(f"region {name}: {DIRECTORY}: {error.strerror}") from error
        if lock_shared(fd):
            return name, unique.bytes, fd
        os.close(fd)
    raise RegionError(f"no region could be made in {DIRECTORY} in {_CREATE_TRIES_MAX} tries")


def lock_shared(fd: int) -> bool:
    """Whether ``fd`` is now locked by this process and still has a name; False when a reaper was first."""
    for _ in range(_LOCK_TRIES_MAX):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody is looking whether the region is an orphan: that takes microseconds
            time.sleep(_LOCK_PAUSE_MS / 1000)
            continue
        except OSError as error:
            raise RegionError(f"{DIRECTORY}: flock: {error.strerror}") from error
        return os.fstat(fd).st_nlink > 0
    return False


def unlink_same(path: Path, device: int, inode: int) -> bool:
    """Remove ``path`` if it still names that file; whether it did."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if (found.st_dev, found.st_ino) != (device, inode):
        return False
    path.unlink(missing_ok=True)
    return True


def reap_orphans() -> list[str]:
    """Remove this user's regions that no process uses any more, and name them.

    Safe to call at any time, from several processes at once. A region with a live user, the owner or not, stays.
    """
    reaped = []
    for name, fd in _candidates():
        with _exclusive(fd) as alone:
            found = os.fstat(fd)
            if alone and unlink_same(DIRECTORY / name, found.st_dev, found.st_ino):
                reaped.append(name)
    return reaped


def list_regions() -> list[RegionInfo]:
    """This user's regions, by name. Changes nothing; what it reports may have changed when it returns."""
    found = []
    for name, fd in _candidates():
        with _exclusive(fd) as alone:
            in_use = not alone
        try:
            header = unpack_header(name, os.pread(fd, HEADER_NBYTES, 0))
        except RegionMismatchError:
            header = None
        alive = header is not None and (header.boot_id, header.owner_start) == (
            boot_id(),
            process_start(header.owner_pid),
        )
        purpose: Purpose = "host" if name.endswith("-host") else "swap"
        found.append(RegionInfo(name, purpose, os.fstat(fd).st_size, header, alive, in_use))
    return sorted(found, key=lambda info: info.name)


def region_path(name: str) -> Path:
    """Where the region called ``name`` is; :class:`InvalidInputError` for what cannot be a region's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError("region name", "kvroute-<uid>-<32 hex digits>-<purpose>", repr(name))
    return DIRECTORY / name


def boot_id() -> bytes:
    """16 random bytes that the kernel drew when it started."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def process_start(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(line.rpartition(")")[2].split()[19])  # field 22; the name before it may hold spaces and brackets


def _candidates() -> Iterator[tuple[str, int]]:
    """This user's region files, each open while the caller looks at it."""
    uid = os.geteuid()
    for name in sorted(os.listdir(DIRECTORY)) if DIRECTORY.is_dir() else ():
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != uid:
            continue
        try:
            fd = os.open(DIRECTORY / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # gone since, a link, another user's: not a region of ours
            continue
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_uid == uid:
                yield name, fd
        finally:
            os.close(fd)


@contextmanager
def _exclusive(fd: int) -> Iterator[bool]:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)

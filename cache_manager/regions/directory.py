"""Names, locks and orphans of shared regions.

Every process that uses a region holds ``flock(LOCK_SH)`` on its file for as long as it has it mapped; the kernel drops
the lock when the process ends, however it ends. So ``LOCK_EX`` can be taken exactly when no process uses the region,
whatever happened to pids. Three rules make removal free of races:

* a region gets its name when it is whole and locked; a creator that is killed before leaves nothing;
* only the owner and a holder of ``LOCK_EX`` unlink a region;
* a process that attaches gets ``LOCK_SH`` first, then looks whether the file still has its name.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from cache_manager.errors import InvalidInputError, RegionError
from cache_manager.ports import TierName

DIRECTORY: Final = Path(os.environ.get("KVROUTE_SHM", "/dev/shm"))  # noqa: S108 - names are random, files 0600, O_NOFOLLOW
"""A tmpfs, read from the environment when this module is imported. Processes that share regions have the same one;
processes with another neither see nor reap those regions."""
TIERS: Final[tuple[TierName, ...]] = get_args(TierName)
"""A region is named after the tier whose KV blocks it mirrors. All regions are in CPU memory."""
_NAME = re.compile(rf"kvroute-(\d+)-([0-9a-f]{{32}})-({'|'.join(TIERS)})")
_LOCK_TRIES_MAX = 200
_LOCK_PAUSE_MS = 1


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """A region of this user as :func:`list_regions` found it; ``in_use`` is whether any process has it mapped."""

    name: str
    nbytes: int
    in_use: bool

    @property
    def tier(self) -> TierName:
        """Whose blocks it mirrors."""
        return next(tier for tier in TIERS if self.name.endswith(f"-{tier}"))


def unnamed_file() -> int:
    """A descriptor of a new, empty, locked file, which vanishes with its last use until it gets a name."""
    try:
        fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # no other process can have it open
    except OSError as error:
        raise RegionError(f"no region could be made in {DIRECTORY}: {error.strerror}") from error
    return fd


def name_of(unique: bytes, tier: TierName) -> str:
    """The name of this user's region with these random 16 bytes."""
    return f"kvroute-{os.geteuid()}-{unique.hex()}-{tier}"


def give_name(fd: int, name: str) -> None:
    """Make the file, which is whole, visible: others may attach from here on."""
    try:
        directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(directory)
    except OSError as error:
        raise RegionError(f"region {name}: {DIRECTORY}: {error.strerror}") from error


def lock_shared(fd: int) -> bool:
    """Whether ``fd`` is now locked by this process and still has a name; False if it was removed first."""
    for _ in range(_LOCK_TRIES_MAX):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # another process checks whether the region is an orphan: microseconds
            time.sleep(_LOCK_PAUSE_MS / 1000)
            continue
        except OSError as error:
            raise RegionError(f"{DIRECTORY}: flock: {error.strerror}") from error
        return os.fstat(fd).st_nlink > 0
    return False


def unlink_same(path: Path, file: os.stat_result) -> bool:
    """Remove ``path`` if it still names that file; whether it did."""
    try:
        same = os.path.samestat(os.stat(path, follow_symlinks=False), file)
    except FileNotFoundError:
        return False
    if same:
        path.unlink(missing_ok=True)
    return same


def reap_orphans() -> list[str]:
    """Remove this user's regions that no process uses any more, and name them.

    Safe to call at any time, from several processes at once. A region with a live user, the owner or not, stays.
    """
    reaped = []
    for name, fd in _candidates():
        with _exclusive(fd) as alone:
            if alone and unlink_same(DIRECTORY / name, os.fstat(fd)):
                reaped.append(name)
    return reaped


def list_regions() -> list[RegionInfo]:
    """This user's regions, by name. Changes nothing; what it reports may have changed when it returns."""
    found = []
    for name, fd in _candidates():
        with _exclusive(fd) as alone:
            found.append(RegionInfo(name, os.fstat(fd).st_size, in_use=not alone))
    return sorted(found, key=lambda info: info.name)


def region_path(name: str) -> Path:
    """Where the region called ``name`` is; :class:`InvalidInputError` for what cannot be a region's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = f"kvroute-<uid>-<32 hex digits>-<{'|'.join(TIERS)}>"
        raise InvalidInputError("region name", wanted, repr(name))
    return DIRECTORY / name


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

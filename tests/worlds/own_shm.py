"""A directory for the SharedMemory regions of one run: runs beside each other, and the workers of one, neither see nor
reap each other's regions.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108 - the file system itself
PREFIX = "kvroute-tests-"


def take_own_shm() -> Path | None:
    """Make the directory and name it to this process and its children; None where there is no shared memory.

    It stays locked while this process lives, whatever ends it. Those of killed runs are removed.
    """
    if not SHM.is_dir():
        return None
    for left in SHM.glob(f"{PREFIX}*"):
        if (fd := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(fd)
    while True:
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
        if _locked(own) is not None and own.is_dir():  # another run may have been faster, and removed it
            os.environ["KVROUTE_SHM"] = str(own)  # read when cache_manager.regions is first imported
            return own


def _locked(directory: Path) -> int | None:
    """The descriptor that keeps ``directory`` locked; None where another process has it locked or it is gone."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd

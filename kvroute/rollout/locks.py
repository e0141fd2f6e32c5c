"""Advisory locks, and ``OSError`` made a store's error in one place."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_manager.errors import StorageError


class GoneError(StorageError):
    """A file is not there."""


@contextmanager
def lock(path: Path, flags: int, *, wait: bool = True) -> Iterator[None]:
    """Holds an advisory lock; ``BlockingIOError`` when somebody else does and there is no waiting."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """``OSError`` becomes :class:`StorageError`."""
    try:
        yield
    except OSError as error:
        kind = GoneError if isinstance(error, FileNotFoundError) else StorageError
        raise kind(f"rollouts at {path}: {error}") from error


__all__ = ["GoneError", "lock", "translated"]

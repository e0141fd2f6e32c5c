"""A store's directory: one writer at a time, a marker that says what it is, and no leftovers of a crash."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError
from cache_manager.storage.segment import (
    LOCK_NAME,
    MARKER_NAME,
    TEMP_SUFFIX,
    pack_marker,
    segment_sequence,
    unpack_marker,
)

_IGNORED: Final = frozenset({"lost+found"})


class StoreDirectory:
    """The locked directory of one store.

    Holding it means being the only writer: the lock is ``flock``, so it ends with the process, however that ends.
    Opening creates the directory where there is none, and refuses one that holds anything else than a store
    (:class:`StoreFormatError`, nothing is changed) or that another store object writes (:class:`StoreLockedError`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock_fds = [self._open(LOCK_NAME)]
        except OSError as error:
            raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
        try:
            self._lock()
            self.store_id = self._marker()
            self._lock_fds.append(self._open(MARKER_NAME))  # who removes the lock file does not let another writer in
            self._lock()
            self._sweep()
        except OSError as error:
            self.close()
            raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
        except BaseException:
            self.close()
            raise

    def segments(self) -> list[int]:
        """The sequence numbers of the segments that are there, oldest first."""
        return sorted(n for name in os.listdir(self.path) if (n := segment_sequence(name)) is not None)

    def open_entries(self) -> int:
        """A new descriptor of the directory, to make its entries durable; the caller closes it."""
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let the next writer in."""
        for fd in self._lock_fds:
            os.close(fd)

    def _open(self, name: str) -> int:
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def _refuse_foreign(self) -> None:
        names = sorted(set(os.listdir(self.path)) - _IGNORED)
        if MARKER_NAME in names:
            return
        ours = (LOCK_NAME, MARKER_NAME + TEMP_SUFFIX)
        if foreign := [name for name in names if name not in ours]:
            got = f"{len(foreign)} other entries, such as {foreign[0]!r}"
            raise StoreFormatError(str(self.path), "directory", "a kvroute store or an empty directory", got)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lock_fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(self._lock_fds[0], 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreLockedError(f"{self.path}: process {pid} writes this store; one writer at a time") from error
        os.ftruncate(self._lock_fds[0], 0)
        os.pwrite(self._lock_fds[0], f"{os.getpid()}\n".encode(), 0)

    def _marker(self) -> bytes:
        path = self.path / MARKER_NAME
        try:
            return unpack_marker(path.read_bytes(), str(path))
        except FileNotFoundError:
            store_id = secrets.token_bytes(16)
        temp = self.path / (MARKER_NAME + TEMP_SUFFIX)
        with temp.open("wb") as file:
            file.write(pack_marker(store_id))
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
        return store_id

    def _sweep(self) -> None:
        for name in os.listdir(self.path):
            stem = name.removesuffix(TEMP_SUFFIX)
            if stem != name and (stem == MARKER_NAME or segment_sequence(stem) is not None):
                (self.path / name).unlink()

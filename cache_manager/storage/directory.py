"""A store's directory: one writer at a time, a marker that says what it is, and no leftovers of a crash."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError, StoreMissingError
from cache_manager.storage.disk import open_regular
from cache_manager.storage.segment import (
    LOCK_NAME,
    MARKER_NAME,
    PAGE_NBYTES,
    TEMP_SUFFIX,
    pack_marker,
    segment_sequence,
    unpack_marker,
)

_IGNORED: Final = frozenset({"lost+found"})


class StoreLock:
    """``flock`` on a store's lock file and on its marker: it ends with the process, however that ends.

    A writer holds it alone. A check holds it ``shared``, so that no writer changes under it what it looks at. Who
    removes the lock file lets no second writer in: the marker, without which there is no store, is locked too.
    :class:`StoreLockedError` names who is in the way; ``OSError`` when a file cannot be opened.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self._path = path
        self._shared = shared
        flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
        self._fds = [open_regular(path / LOCK_NAME, flags)]
        try:
            self._lock(self._fds[0])
            if (path / MARKER_NAME).exists():
                self.take_marker()
            if not shared:
                os.ftruncate(self.fd, 0)
                os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The lock file's."""
        return self._fds[0]

    def take_marker(self) -> None:
        """Lock the marker too, unless that is so; a new store has it only when its directory is locked."""
        if len(self._fds) == 1:
            self._fds.append(open_regular(self._path / MARKER_NAME, os.O_RDONLY))
            self._lock(self._fds[1])

    def close(self) -> None:
        """Let the next one in."""
        for fd in self._fds:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLockedError(f"{self._path}: {self._holder(fd)}") from error

    def _holder(self, fd: int) -> str:
        if not self._shared:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                return "a check (kvroute fsck) reads this store; it can be written when that has ended"
        pid = os.pread(self.fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        return f"process {pid} writes this store; one writer at a time"


def existing_store(path: Path) -> bytes:
    """The id of the store at ``path``; nothing is created or locked.

    :class:`StoreMissingError` where there is none, :class:`StoreFormatError` where there is something else.
    """
    marker = path / MARKER_NAME
    try:
        return _read_marker(marker)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
    if path.is_dir():
        refuse_foreign(path)
    raise StoreMissingError(f"{path}: there is no store; a writer makes one when it opens file://{path}")


def _read_marker(path: Path) -> bytes:
    """The store's id; of a larger file no more is read than shows that it is one."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return unpack_marker(file.read(PAGE_NBYTES), str(path))


def refuse_foreign(path: Path) -> None:
    """:class:`StoreFormatError` for a directory that holds anything else than a store; nothing is changed."""
    names = sorted(set(os.listdir(path)) - _IGNORED)
    if MARKER_NAME in names:
        return
    ours = (LOCK_NAME, MARKER_NAME + TEMP_SUFFIX)
    if foreign := [name for name in names if name not in ours]:
        got = f"{len(foreign)} other entries, such as {foreign[0]!r}"
        raise StoreFormatError(str(path), "directory", "a kvroute store or an empty directory", got)


def segment_sequences(path: Path) -> list[int]:
    """The sequence numbers of the segments that are there, oldest first."""
    return sorted(n for name in os.listdir(path) if (n := segment_sequence(name)) is not None)


def leftovers(path: Path) -> list[str]:
    """Names of files that a crash left unfinished; a live writer has some for a moment."""
    found = []
    for name in sorted(os.listdir(path)):
        stem = name.removesuffix(TEMP_SUFFIX)
        if stem != name and (stem == MARKER_NAME or segment_sequence(stem) is not None):
            found.append(name)
    return found


class StoreDirectory:
    """The locked directory of one store; holding it means being the only writer.

    Opening creates the directory where there is none, and refuses one that holds anything else than a store
    (:class:`StoreFormatError`, nothing is changed) or that another store object writes (:class:`StoreLockedError`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            refuse_foreign(path)
            self._lock = StoreLock(path)
        except OSError as error:
            raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
        try:
            self.store_id = self._marker()
            self._lock.take_marker()
            for name in leftovers(path):
                (path / name).unlink()
        except OSError as error:
            self._lock.close()
            raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
        except BaseException:
            self._lock.close()
            raise

    @property
    def lock_fd(self) -> int:
        """A descriptor on the store's file system, as long as the directory is held."""
        return self._lock.fd

    def segments(self) -> list[int]:
        """The sequence numbers of the segments that are there, oldest first."""
        return segment_sequences(self.path)

    def open_entries(self) -> int:
        """A new descriptor of the directory, to make its entries durable; the caller closes it."""
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let the next writer in."""
        self._lock.close()

    def _marker(self) -> bytes:
        path = self.path / MARKER_NAME
        try:
            return _read_marker(path)
        except FileNotFoundError:
            store_id = secrets.token_bytes(16)
        temp = self.path / (MARKER_NAME + TEMP_SUFFIX)
        temp.unlink(missing_ok=True)
        with open(open_regular(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(pack_marker(store_id))
            file.flush()
            os.fsync(file.fileno())
        temp.rename(path)
        return store_id

"""A store's directory, held by its descriptor: one writer at a time, and a counter of what it has changed.

Everything is opened, renamed and removed through the descriptor. So a directory that is moved keeps its writer and its
readers, and nobody who holds it ever touches what was made under its old name. A directory is a store when it holds an
extent or the lock file; neither is needed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError, StoreMissingError
from cache_manager.storage.disk import open_regular
from cache_manager.storage.file.extent import parse_name

FILE_MODE: Final = 0o600
LOCK_NAME: Final = "kvroute.lock"
TEMP_SUFFIX: Final = ".tmp"
_IGNORED: Final = frozenset({"lost+found"})
_LOCK = struct.Struct("<32sQ")  # process id in ASCII, counter


class StoreDirectory:
    """The directory of a store, for reading. ``OSError`` when there is none at ``path``."""

    fd = _lock_fd = -1

    def __init__(self, path: Path, *, file_mode: int = FILE_MODE) -> None:
        self.path, self._file_mode = path, file_mode
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @classmethod
    def existing(cls, path: Path, *, required: bool = True) -> Self:
        """The directory of the store at ``path``; nothing is created or locked.

        :class:`StoreMissingError` where there is none, :class:`StoreFormatError` where there is something else. One
        that is not ``required`` and not there is not :attr:`opened`, and never in its place.
        """
        try:
            directory = cls(path)
            if directory.is_store():
                return directory
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
        if required:
            raise StoreMissingError(f"{path}: there is no store; a writer makes one when it opens file://{path}")
        directory = cls.__new__(cls)
        directory.path = path
        return directory

    @property
    def opened(self) -> bool:
        return self.fd >= 0

    def open(self, name: str, flags: int) -> int:
        """A descriptor of the regular file ``name``; ``OSError`` for anything else."""
        return open_regular(name, flags, mode=self._file_mode, dir_fd=self.fd)

    def names(self) -> list[str]:
        # of a descriptor of its own: threads that list by one share its place in the directory, and each sees a part
        listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return sorted(name for name in os.listdir(listing) if name not in _IGNORED)
        finally:
            os.close(listing)

    def extents(self) -> list[str]:
        """The names of the extents that are there."""
        return [name for name in self.names() if parse_name(name) is not None]

    def unlink(self, name: str) -> None:
        """Remove a file, or nothing; ``OSError`` for a directory of that name."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def finish(self, name: str) -> None:
        """Give an unfinished file its name."""
        os.rename(name + TEMP_SUFFIX, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def is_in_place(self) -> bool:
        """Whether the directory is still the one at its path; else it was moved, removed or made anew."""
        try:
            return self.opened and os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except OSError:
            return False

    def is_store(self) -> bool:
        """Whether there is a store, else the directory is empty; :class:`StoreFormatError` for anything else."""
        names = self.names()
        if any(name == LOCK_NAME or is_ours(name) for name in names):
            return True
        if names:
            got = f"{len(names)} other entries, such as {names[0]!r}"
            raise StoreFormatError(str(self.path), "directory", "a kvroute store or an empty directory", got)
        return False

    def read_lock(self) -> tuple[bytes, int | None]:
        """Who has written last, and a number that changes whenever a writer has changed anything; ``None``: unknown."""
        try:
            if self._lock_fd < 0 or not os.fstat(self._lock_fd).st_nlink:
                self._close_lock()
                self._lock_fd = self.open(LOCK_NAME, os.O_RDONLY)
            pid, counter = _LOCK.unpack(os.pread(self._lock_fd, _LOCK.size, 0))
        except (OSError, struct.error):
            return b"", None
        return pid.rstrip(b"\0"), counter

    def close(self) -> None:
        """Idempotent."""
        self._close_lock()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()

    def _close_lock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class StoreLock:
    """``flock`` on the directory itself: it ends with the process, however that ends, and no file of it can be removed.

    A writer holds it alone. A check holds it ``shared``, so that no writer changes under it what it looks at. A forked
    child lets go of it at once, so that it does not outlive the writer in a child. :class:`StoreLockedError` names who
    is in the way.
    """

    def __init__(self, directory: StoreDirectory, *, shared: bool = False) -> None:
        self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory.fd)
        _LOCKS.add(self)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = directory.read_lock()[0].decode("ascii", "replace")
            who = f"process {pid} writes this store" if pid else "a process writes this store"
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                who = "a check (kvroute fsck) reads this store"
            self.drop()
            raise StoreLockedError(f"{directory.path}: {who}; one writer at a time") from error

    def close(self) -> None:
        """Let the next one in, also where somebody else still has our descriptor; idempotent."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.drop()

    def drop(self) -> None:
        """Close the descriptor; the lock stays with those who share it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.drop()


_LOCKS: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_LOCKS):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)


class LockedDirectory(StoreDirectory):
    """The locked directory of one store; holding it means being the only writer.

    Opening creates the directory where there is none, and refuses one that holds anything else than a store
    (:class:`StoreFormatError`, nothing is changed) or that another store object writes (:class:`StoreLockedError`).
    New files have ``file_mode``; a new directory may also be searched by whoever may read its files.
    """

    _lock: StoreLock | None = None

    def __init__(self, path: Path, *, file_mode: int = FILE_MODE) -> None:
        try:
            path.mkdir(mode=file_mode | (file_mode & 0o444) >> 2, parents=True, exist_ok=True)
            super().__init__(path, file_mode=file_mode)
            self.is_store()
            self._lock = StoreLock(self)
            self._lock_fd = self.open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
            for name in self.names():
                if name.endswith(TEMP_SUFFIX) and is_ours(name):
                    self.unlink(name)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
            raise

    def tell(self, counter: int) -> None:
        """Tell readers that something has changed."""
        with suppress(OSError):  # they look on their own, a little later
            os.pwrite(self._lock_fd, _LOCK.pack(str(os.getpid()).encode(), counter), 0)

    def close(self) -> None:
        """Let the next writer in."""
        if self._lock is not None:
            self._lock.close()
        super().close()


def is_ours(name: str) -> bool:
    """Whether a name is an extent's, finished or not."""
    return parse_name(name.removesuffix(TEMP_SUFFIX)) is not None

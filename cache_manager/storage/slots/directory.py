"""A store's directory, held by its descriptor: one writer at a time, and a counter of what it has changed.

Everything is opened, renamed and removed through the descriptor. So a directory that is moved keeps its writer and its
readers, and nobody who holds it ever touches what was made under its old name. A directory is a store when it holds an
extent or the lock file; neither of them is needed.
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
from cache_manager.storage.slots.extent import parse_name

FILE_MODE: Final = 0o600
LOCK_NAME: Final = "kvroute.lock"
TEMP_SUFFIX: Final = ".tmp"
_IGNORED: Final = frozenset({"lost+found"})
_PID_NBYTES: Final = 32
_COUNTER = struct.Struct("<Q")


class StoreLock:
    """``flock`` on the directory itself: it ends with the process, however that ends, and no file of it can be removed.

    A writer holds it alone. A check holds it ``shared``, so that no writer changes under it what it looks at. A forked
    child lets go of it at once, so that it does not outlive the writer in a child. :class:`StoreLockedError` names who
    is in the way.
    """

    def __init__(self, directory: StoreDirectory, *, shared: bool = False) -> None:
        self._path = directory.path
        self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory.fd)
        _LOCKS.add(self)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = "a process" if shared else self._holder(directory)
            self.drop()
            raise StoreLockedError(f"{self._path}: {who}") from error

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

    def _holder(self, directory: StoreDirectory) -> str:
        with suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return "a check (kvroute fsck) reads this store; it can be written when that has ended"
        pid = directory.read_lock()[:_PID_NBYTES].decode("ascii", "replace").strip(" \n\0")
        if not pid.isdecimal():
            return "an unknown process writes this store; one writer at a time"
        with suppress(PermissionError):
            try:
                os.kill(int(pid), 0)
            except (ProcessLookupError, OverflowError):
                return f"process {pid} wrote this store and has ended, but a child that it left behind holds its lock"
        return f"process {pid} writes this store; one writer at a time"


_LOCKS: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_LOCKS):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)


class StoreDirectory:
    """The directory of a store, for reading. ``OSError`` when there is none at ``path``."""

    fd = -1
    _lock_fd = -1

    def __init__(self, path: Path, *, file_mode: int = FILE_MODE) -> None:
        self.path = path
        self._file_mode = file_mode
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @classmethod
    def existing(cls, path: Path, *, required: bool = True) -> Self:
        """The directory of the store at ``path``; nothing is created or locked.

        :class:`StoreMissingError` where there is none, :class:`StoreFormatError` where there is something else. One
        that is not ``required`` and not there is not :attr:`opened`, and never in its place.
        """
        try:
            directory = cls(path)
            directory.refuse_foreign()
            if set(directory.names()) - _IGNORED:
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
            return sorted(os.listdir(listing))
        finally:
            os.close(listing)

    def extents(self) -> dict[int, str]:
        """The names of the extents that are there, by their numbers."""
        parsed = [(parse_name(name), name) for name in self.names()]
        return {number: name for number, name in parsed if number is not None}

    def unlink(self, name: str) -> None:
        """Remove a file, or nothing; ``OSError`` for a directory of that name."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def rename(self, name: str, new: str) -> None:
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def is_in_place(self) -> bool:
        """Whether the directory is still the one at its path; else it was moved, removed or made anew."""
        try:
            there, ours = os.stat(self.path), os.fstat(self.fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def refuse_foreign(self) -> None:
        """:class:`StoreFormatError` for a directory that holds anything else and no store; nothing is changed."""
        names = [name for name in self.names() if name not in _IGNORED]
        if names and not any(name == LOCK_NAME or is_ours(name) for name in names):
            got = f"{len(names)} other entries, such as {names[0]!r}"
            raise StoreFormatError(str(self.path), "directory", "a kvroute store or an empty directory", got)

    def read_lock(self) -> bytes:
        """The writer's process id in ASCII, and what :meth:`counter` says; empty where there is no lock file."""
        try:
            if self._lock_fd < 0 or not os.fstat(self._lock_fd).st_nlink:
                self._close_lock()
                self._lock_fd = self.open(LOCK_NAME, os.O_RDONLY)
            return os.pread(self._lock_fd, _PID_NBYTES + _COUNTER.size, 0)
        except OSError:
            return b""

    def counter(self) -> int | None:
        """What changes whenever a writer has changed anything; ``None`` where nobody can say."""
        raw = self.read_lock()
        return _COUNTER.unpack_from(raw, _PID_NBYTES)[0] if len(raw) == _PID_NBYTES + _COUNTER.size else None

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
            self.refuse_foreign()
            self._lock = StoreLock(self)
            self._lock_fd = self.open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode().ljust(_PID_NBYTES, b"\0"), 0)
            for name in self.names():
                if name.endswith(TEMP_SUFFIX) and is_ours(name):
                    self.unlink(name)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
            raise

    def count(self, counter: int) -> None:
        """Tell readers that something has changed; one that cannot be told looks on its own, a little later."""
        with suppress(OSError):
            os.pwrite(self._lock_fd, _COUNTER.pack(counter), _PID_NBYTES)

    def close(self) -> None:
        """Let the next writer in."""
        if self._lock is not None:
            self._lock.close()
        super().close()


def is_ours(name: str) -> bool:
    """Whether a name is an extent's, finished or not."""
    return parse_name(name.removesuffix(TEMP_SUFFIX)) is not None

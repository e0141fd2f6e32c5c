"""A store's directory, held by its descriptor: one writer at a time, and a marker that says what it is.

Everything is opened, renamed and removed through the descriptor. So a directory that is moved keeps its writer and its
readers, and nobody who holds it ever touches what was made under its old name.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError, StoreMissingError
from cache_manager.storage.disk import open_regular
from cache_manager.storage.file.segment import (
    LOCK_NAME,
    MARKER_NAME,
    PAGE_NBYTES,
    TEMP_SUFFIX,
    pack_marker,
    parse_name,
    unpack_marker,
)

FILE_MODE: Final = 0o600
_IGNORED: Final = frozenset({"lost+found"})
_TEMP_MARKER: Final = MARKER_NAME + TEMP_SUFFIX


class StoreLock:
    """``flock`` on a store's lock file and on its marker: it ends with the process, however that ends.

    A writer holds it alone. A check holds it ``shared``, so that no writer changes under it what it looks at. Who
    removes the lock file lets no second writer in: the marker, without which there is no store, is locked too. A
    forked child lets go of it at once, so that it does not outlive the writer in a child.
    :class:`StoreLockedError` names who is in the way; ``OSError`` when a file cannot be opened.
    """

    def __init__(self, directory: StoreDirectory, *, shared: bool = False) -> None:
        self._path = directory.path
        self._shared = shared
        self._fds: list[int] = []
        _LOCKS.add(self)
        self._fds.append(directory.open(LOCK_NAME, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT))
        try:
            self._lock(self._fds[0])
            if MARKER_NAME in directory.names():
                self.take_marker(directory)
            if not shared:
                os.ftruncate(self._fds[0], 0)
                os.pwrite(self._fds[0], f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.close()
            raise

    def take_marker(self, directory: StoreDirectory) -> None:
        """Lock the marker too, unless that is so; a new store has it only when its directory is locked."""
        if len(self._fds) == 1:
            self._fds.append(directory.open(MARKER_NAME, os.O_RDONLY))
            self._lock(self._fds[1])

    def close(self) -> None:
        """Let the next one in, also where somebody else still has our descriptors; idempotent."""
        for fd in self._fds:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        self.drop()

    def drop(self) -> None:
        """Close the descriptors; the lock stays with those who share them."""
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        self.drop()

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
        pid = os.pread(self._fds[0], 32, 0).decode("ascii", "replace").strip()
        if not pid.isdigit():
            return "an unknown process writes this store; one writer at a time"
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return f"process {pid} wrote this store and has ended, but a child that it left behind holds its lock"
        except OSError:
            pass
        return f"process {pid} writes this store; one writer at a time"


_LOCKS: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_LOCKS):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)


class StoreDirectory:
    """The directory of a store, for reading. ``OSError`` when there is none at ``path``."""

    fd = -1
    store_id = b""  # 16 bytes

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
            if (store_id := directory.read_marker()) is not None:
                directory.store_id = store_id
                return directory
            directory.refuse_foreign()
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

    def unlink(self, name: str) -> None:
        """Remove a file, or nothing; ``OSError`` for a directory of that name."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def rename(self, name: str, new: str) -> None:
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def files(self) -> dict[int, str]:
        """The names of the segments that are there, whole and set aside, by their sequence, oldest first."""
        parsed = [(parse_name(name), name) for name in self.names()]
        return {found[0]: name for found, name in parsed if found is not None and found[1] != "journal"}

    def journals(self) -> set[int]:
        """The sequences of the segments that have a journal: of those that were not finished."""
        parsed = map(parse_name, self.names())
        return {found[0] for found in parsed if found is not None and found[1] == "journal"}

    def is_in_place(self) -> bool:
        """Whether the directory is still the one at its path; else it was moved, removed or made anew."""
        try:
            there, ours = os.stat(self.path), os.fstat(self.fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def read_marker(self) -> bytes | None:
        """The store's id, ``None`` where there is no marker; of a larger file no more is read than shows that it is."""
        try:
            fd = self.open(MARKER_NAME, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return unpack_marker(file.read(PAGE_NBYTES), str(self.path / MARKER_NAME))

    def refuse_foreign(self) -> None:
        """:class:`StoreFormatError` for a directory that holds anything else than a store; nothing is changed."""
        names = sorted(set(self.names()) - _IGNORED)
        if MARKER_NAME in names:
            return
        if foreign := [name for name in names if name not in (LOCK_NAME, _TEMP_MARKER)]:
            got = f"{len(foreign)} other entries, such as {foreign[0]!r}"
            raise StoreFormatError(str(self.path), "directory", "a kvroute store or an empty directory", got)

    def leftovers(self) -> list[str]:
        """Names of files that a crash left unfinished; a live writer has some for a moment."""
        found, whole = [], self.files()
        for name in self.names():
            stem = name.removesuffix(TEMP_SUFFIX)
            sequence, kind = parse_name(stem) or (0, "")
            orphan = name == stem and kind == "journal" and sequence not in whole
            unfinished = name != stem and (stem == MARKER_NAME or kind == "kvr")
            if (orphan or unfinished) and not stat.S_ISDIR(os.lstat(name, dir_fd=self.fd).st_mode):
                found.append(name)
        return found

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


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
            self.store_id = self._marker()
            self._lock.take_marker(self)
            for name in self.leftovers():
                self.unlink(name)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
            raise

    def close(self) -> None:
        """Let the next writer in."""
        if self._lock is not None:
            self._lock.close()
        super().close()

    def _marker(self) -> bytes:
        if (found := self.read_marker()) is not None:
            return found
        store_id = secrets.token_bytes(16)
        self.unlink(_TEMP_MARKER)
        with open(self.open(_TEMP_MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(pack_marker(store_id))
            file.flush()
            os.fsync(file.fileno())
        self.rename(_TEMP_MARKER, MARKER_NAME)
        return store_id

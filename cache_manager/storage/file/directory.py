"""A store's directory, held by its descriptor: its one writer's lock, and a list of the latest changes.

Everything is opened, renamed and removed through the descriptor. So a directory that is moved keeps its writer and its
readers, and they never touch a directory made under the old name. A directory is a store if it holds an extent or the
lock file; an empty directory may become one.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import numpy as np

from cache_manager.errors import StorageError, StoreFormatError, StoreLockedError, StoreMissingError
from cache_manager.storage.disk import open_regular

LOCK_NAME: Final = "kvroute.lock"
TEMP_SUFFIX: Final = ".tmp"
CHANGES_MAX: Final = 500
"""Changes in the lock file; a reader that is further behind reads all heads."""
_PID_NBYTES = 32
_CHANGES_AT = 40
_CHANGE = struct.Struct("<4Q")  # its number, the extent's, first slot << 32 | slots, and all three xored
_NAME = re.compile(r"extent-([0-9a-f]{8})\.kvr")
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Seen = tuple[bytes, int]
"""The last change that a reader knows: which opening of the store, and the change's number."""
Change = tuple[int, int, int]
"""Slots whose heads have changed: an extent's number, the first, how many; none, if extents have come or gone."""


def extent_name(number: int) -> str:
    """
    >>> extent_name(26), parse_name("extent-0000001a.kvr"), parse_name("notes.txt")
    ('extent-0000001a.kvr', 26, None)
    """
    return f"extent-{number:08x}.kvr"


def parse_name(name: str) -> int | None:
    """The number in an extent's name; ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


class StoreDirectory:
    """The directory of a store, for reading. ``OSError`` when there is none at ``path``."""

    fd = lock_fd = -1
    file_mode = 0o600

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, _OPEN)

    @classmethod
    def existing(cls, path: Path) -> Self:
        """The directory of the store at ``path``; nothing is created or locked.

        :class:`StoreMissingError` if there is none, :class:`StoreFormatError` if there is something else.
        """
        try:
            directory = cls(path)
            if directory.is_store():
                return directory
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"{path}: cannot open the store's directory: {error}") from error
        raise StoreMissingError(f"{path}: there is no store; a writer makes one when it opens file://{path}")

    def open(self, name: str, flags: int) -> int:
        """A descriptor of the regular file ``name``; ``OSError`` for anything else."""
        return open_regular(name, flags, mode=self.file_mode, dir_fd=self.fd)

    def names(self) -> list[str]:
        return os.listdir(f"/proc/self/fd/{self.fd}")  # listdir(fd) would share one position among threads

    def is_in_place(self) -> bool:
        """Whether the directory is still the one at its path; else it was moved, removed or made anew."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except OSError:
            return False

    def is_store(self) -> bool:
        """Whether there is a store, else the directory is empty; :class:`StoreFormatError` for anything else."""
        names = [name for name in self.names() if name != "lost+found"]
        if any(name == LOCK_NAME or parse_name(name.removesuffix(TEMP_SUFFIX)) is not None for name in names):
            return True
        if names:
            got = f"{len(names)} other entries, such as {names[0]!r}"
            raise StoreFormatError(str(self.path), "directory", "a kvroute store or an empty directory", got)
        return False

    def read_lock(self) -> bytes:
        """What is in the lock file; nothing where there is none."""
        with suppress(OSError):
            fd = self.open(LOCK_NAME, os.O_RDONLY)
            try:
                return os.pread(fd, _CHANGES_AT + CHANGES_MAX * _CHANGE.size, 0)
            finally:
                os.close(fd)
        return b""

    def changes(self, seen: Seen | None) -> tuple[Seen | None, list[Change] | None]:
        """The last change now, and the changes since ``seen``; ``None``: unknown."""
        raw = self.read_lock()
        if len(raw) < _CHANGES_AT:
            return None, None
        opening = raw[_PID_NBYTES:_CHANGES_AT]
        count = (len(raw) - _CHANGES_AT) // _CHANGE.size
        found = np.frombuffer(raw, "<u8", 4 * count, _CHANGES_AT).reshape(-1, 4)
        found = found[np.bitwise_xor.reduce(found, axis=1) == 0]  # the others are being written
        last = int(found[:, 0].max(initial=0))
        if seen is None or seen[0] != opening:
            return (opening, last), None
        found = found[found[:, 0] > seen[1]]
        known = len(found) == last - seen[1]
        if not known:
            return (opening, last), None
        ordered = found[np.argsort(found[:, 0])]
        changes = [(number, run >> 32, run & 0xFFFFFFFF) for _, number, run, _ in ordered.tolist()]
        return (opening, last), changes

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        for fd in {self.fd, self.lock_fd} - {-1}:
            os.close(fd)
        self.fd = self.lock_fd = -1

    def __del__(self) -> None:
        self.close()


class LockedDirectory(StoreDirectory):
    """The locked directory of one store; holding it means being the only writer.

    Opening creates the directory where there is none, and refuses one that holds anything else than a store
    (:class:`StoreFormatError`, nothing is changed) or that another store object writes (:class:`StoreLockedError`, with
    its process id). New files have ``file_mode``; a new directory may also be searched by users who may read its files.

    The lock is ``flock`` on the directory itself: it ends with the process, however that ends, and no file of it can be
    removed. A forked child closes it at once, so that the lock does not outlive the writer in a child.
    """

    dirty = True  # names have changed since it was synced
    _changes = 0  # since opening

    def __init__(self, path: Path, file_mode: int) -> None:
        self.file_mode = file_mode
        try:
            path.mkdir(mode=file_mode | (file_mode & 0o444) >> 2, parents=True, exist_ok=True)
            super().__init__(path)
            _WRITERS.add(self)
            self.is_store()
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.lock_fd = self.open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
            pid = str(os.getpid()).encode().ljust(_PID_NBYTES, b"\0")
            opening = os.urandom(_CHANGES_AT - _PID_NBYTES)
            no_changes = bytes(CHANGES_MAX * _CHANGE.size)
            os.pwrite(self.lock_fd, pid + opening + no_changes, 0)
            for name in self.names():
                if name.endswith(TEMP_SUFFIX) and parse_name(name.removesuffix(TEMP_SUFFIX)) is not None:
                    self.unlink(name)
        except BlockingIOError as error:
            writer = self.read_lock()[:_PID_NBYTES].rstrip(b"\0").decode("ascii", "replace")
            who = f"process {writer or 'unknown'} writes this store"
            raise StoreLockedError(f"{path}: {who}; one writer at a time") from error
        except OSError as error:
            raise StorageError(f"{path}: cannot open the store's directory: {error}") from error

    def tell(self, number: int, first: int = 0, count: int = 0) -> None:
        """Record a :data:`Change` for readers; ``OSError``."""
        self._changes += 1
        run = first << 32 | count
        at = _CHANGES_AT + self._changes % CHANGES_MAX * _CHANGE.size
        change = _CHANGE.pack(self._changes, number, run, self._changes ^ number ^ run)
        os.pwrite(self.lock_fd, change, at)

    def unlink(self, name: str) -> None:
        """Remove a file, or nothing; ``OSError`` if something of that name is left, such as a directory."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:  # there was none, or it was removed and the answer was lost
            if name in self.names():
                raise

    def finish(self, name: str) -> None:
        """Give an unfinished file its name."""
        os.rename(name + TEMP_SUFFIX, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.dirty = True

    def close(self) -> None:
        """Let the next writer in, even if another process still has our descriptor."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        super().close()


_WRITERS: weakref.WeakSet[LockedDirectory] = weakref.WeakSet()


def _let_go() -> None:
    for directory in list(_WRITERS):
        StoreDirectory.close(directory)  # the lock stays with those who share it


os.register_at_fork(after_in_child=_let_go)

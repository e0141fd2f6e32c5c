"""Rollouts in a directory, which trainers on this machine, or on a shared file system, read.

::

    DIR/<rollout id, percent-encoded>.routes      the record of the last whole put
    DIR/.<rollout id, percent-encoded>.partial    what a running or killed writer has so far

A put is written into the second file and renamed to the first when it is whole. The second one is also the lock:
its holder (``flock``) may change what the rollout's name stands for. What a killed writer has left is overwritten
by the next put of that rollout, or removed with it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cache_manager.errors import InvalidInputError, StorageError
from cache_manager.record import Buffer
from cache_manager.storage.disk import Disk, open_regular, read_all, write_all
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.handle import CutSettings, RolloutHandle
from kvroute.rollout.ids import file_name
from kvroute.rollout.parts import GoneError, Parts, PartStore, Read, header_of, parts_behind_header

LOCK_S: Final = 30.0
"""How long a writer waits for another one of the same rollout."""
LOCK_POLL_S: Final = 0.002
UNSYNCED_MAX: Final = 1024
"""Puts that wait for a flush; one more flushes first."""


class LocalRollouts(PartStore):
    """A ``RolloutStore`` in a directory, which is made if it is not there.

    ``sync`` says that a put returns when it is on the disk; without it :meth:`flush` and :meth:`close` see to that.
    Safe from several threads, and from several processes that share the directory.
    """

    scheme = "file"

    def __init__(
        self, directory: Path, cut: CutSettings | None = None, *, sync: bool = False, disk: Disk | None = None
    ) -> None:
        self.directory = directory.absolute()
        super().__init__(f"the rollout store at {self.directory}", cut)
        self._sync = sync
        self._disk = disk or Disk()
        self._lock = threading.Lock()
        self._unsynced: dict[str, None] = {}
        with _translated(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    def _write(self, handle: RolloutHandle, record: Sequence[Buffer]) -> RolloutHandle:
        place = self._place(handle.rollout_id)
        with _translated(place), self._alone(place) as (fd, partial):
            write_all(self._disk, fd, record, 0, sum(map(len, record)))
            if self._sync:
                self._disk.sync(fd)
            os.replace(partial, place)
            if self._sync:
                self._sync_path(self.directory)
        if not self._sync:
            with self._lock:
                self._unsynced[place] = None
                full = len(self._unsynced) > UNSYNCED_MAX
            if full:
                self._flush()
        return handle

    @contextmanager
    def _opened(self, handle: RolloutHandle) -> Iterator[tuple[Read, Parts]]:
        with self._reading(self._place(handle.rollout_id)) as read:
            yield read, parts_behind_header(handle, lambda ranges: [read(*each) for each in ranges])

    def _find(self, rollout_id: str) -> RolloutHandle:
        with self._reading(self._place(rollout_id)) as read:
            return RolloutHandle.of(self.scheme, *header_of(read))

    def _delete(self, handle: RolloutHandle) -> None:
        place = self._place(handle.rollout_id)
        with _translated(place), self._alone(place), suppress(GoneError, InvalidInputError):
            with self._reading(place) as read:
                header, _ = header_of(read)  # a damaged one may be of another put, and stays
            if header.name == handle.name:
                os.unlink(place)

    @contextmanager
    def _alone(self, place: str) -> Iterator[tuple[int, str]]:
        """The empty file that may become ``place``, while nobody else changes that name; who fails leaves none."""
        directory, name = os.path.split(place)
        partial = f"{directory}/.{name.removesuffix('.routes')}.partial"
        while True:
            fd = open_regular(partial, os.O_WRONLY | os.O_CREAT)
            try:
                _lock(fd)
                if _is_called(fd, partial):  # else it was renamed or removed while this one waited
                    os.ftruncate(fd, 0)
                    try:
                        yield fd, partial
                    finally:
                        if _is_called(fd, partial):
                            os.unlink(partial)
                    return
            finally:
                os.close(fd)

    @contextmanager
    def _reading(self, place: str) -> Iterator[Read]:
        """Reads a file, which stays the same whatever becomes of its name."""
        with _translated(place):
            fd = open_regular(place, os.O_RDONLY)
            try:
                size = os.fstat(fd).st_size

                def read(offset: int, nbytes: int) -> Buffer:
                    room = bytearray(max(min(nbytes, size - offset), 0))
                    came = read_all(self._disk, fd, [room], offset, len(room))
                    return room if came == nbytes else room[:came]

                yield read
            finally:
                os.close(fd)

    def _place(self, rollout_id: str) -> str:
        return f"{self.directory}/{file_name(rollout_id)}.routes"

    # ---------------------------------------------------------------- durability

    def _flush(self) -> None:
        with self._lock:
            places, self._unsynced = list(self._unsynced), {}
        try:
            with _translated(self.directory):
                for place in places:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        self._sync_path(place)
                self._sync_path(self.directory)
        except BaseException:
            with self._lock:
                self._unsynced |= dict.fromkeys(places)
            raise

    def _sync_path(self, path: str | Path) -> None:
        """Of a directory its entries, of a file its bytes."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._disk.sync(fd)
        finally:
            os.close(fd)


def _lock(fd: int) -> None:
    """Hold the lock of an open file; ``TimeoutError`` when another writer has it for too long."""
    give_up_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"another writer has had it for {LOCK_S} s") from error
            time.sleep(LOCK_POLL_S)


def _is_called(fd: int, path: str) -> bool:
    """Whether ``path`` is the name of this open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


@contextmanager
def _translated(path: str | Path) -> Iterator[None]:
    """``OSError`` becomes :class:`StorageError`, and :class:`GoneError` where there is no such file."""
    try:
        yield
    except OSError as error:
        kind = GoneError if isinstance(error, FileNotFoundError) else StorageError
        raise kind(f"rollouts at {path}: {error}") from error


def open_local_rollouts(url: StoreUrl) -> LocalRollouts:
    """``file:///dir?layers=1&part=64KiB&sync=put``."""
    url.allow("sync", *CutSettings.PARAMETERS)
    sync = url.choice("sync", ("none", "put"), "none") == "put"
    return LocalRollouts(Path(url.path), CutSettings.from_url(url), sync=sync)

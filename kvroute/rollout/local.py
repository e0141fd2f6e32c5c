"""Rollouts in a directory, which trainers on this machine, or on a shared file system, read.

::

    DIR/<rollout id, percent-encoded>.routes      the record of the last whole put
    DIR/.<rollout id, percent-encoded>.partial the unfinished record of a running or killed writer

A put is written into the second file and renamed to the first when it is whole. The second one is also the lock: only
its holder (``flock``) may change the first. The next put of the rollout overwrites what a killed writer has left; a
delete removes it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError, InvalidInputError, StorageError
from cache_manager.record import Buffer
from cache_manager.storage.disk import Disk, open_regular, read_all, write_all
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.ids import file_name
from kvroute.rollout.parts import HEADER, GoneError, PartStore, ReadParts, Record, file_places, layers_option
from kvroute.routes.wire import FIXED_NBYTES, header_nbytes, unpacked_header

LOCK_S: Final = 30.0
"""How long a writer waits for another one of the same rollout."""
LOCK_POLL_S: Final = 0.002


class LocalRollouts(PartStore):
    """A ``RolloutStore`` in a directory, which is made if it is not there.

    With ``sync`` a put returns when it is on the disk; without it the system writes it some time later, and a power cut
    may cost it. Safe from several threads, and from several processes that share the directory.
    """

    scheme = "file"

    def __init__(
        self,
        directory: Path,
        layers: int = 1,
        *,
        sync: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self.directory = directory.absolute()
        super().__init__(f"the rollout store at {self.directory}", layers)
        self._sync = sync
        self._disk = disk or Disk()
        with _translated(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    def _write(self, handle: RolloutHandle, record: Record) -> RolloutHandle:
        place = self._place(handle.rollout_id)
        with _translated(place), self._alone(place, becomes=True) as fd:
            write_all(self._disk, fd, record, 0, sum(map(len, record)))
            if self._sync:
                self._disk.sync(fd)
        if self._sync:
            try:
                with _translated(self.directory):
                    self._sync_names()
            except StorageError:
                self._delete(handle)
                raise
        return handle

    @contextmanager
    def _opened(self, handle: RolloutHandle) -> Iterator[ReadParts]:
        with self._reading(self._place(handle.rollout_id)) as (head, read):
            yield lambda parts: [
                head if run == HEADER else read(*place)
                for run, place in zip(parts, file_places(handle, parts), strict=True)
            ]

    def _find(self, rollout_id: str) -> RolloutHandle:
        with self._reading(self._place(rollout_id)) as (head, _):
            return RolloutHandle.of(self.scheme, unpacked_header(head), len(head))

    def _delete(self, handle: RolloutHandle) -> None:
        place = self._place(handle.rollout_id)
        with _translated(place), self._alone(place), suppress(GoneError, InvalidInputError):
            with self._reading(place) as (head, _):
                name = unpacked_header(head).name  # a damaged record may be of another put, and stays
            if name == handle.name:
                os.unlink(place)

    @contextmanager
    def _alone(self, place: str, *, becomes: bool = False) -> Iterator[int]:
        """The empty partial file, which then ``becomes`` the file at ``place``, or is removed, as after a failure.

        No other writer changes ``place`` meanwhile.
        """
        directory, name = os.path.split(place)
        partial = f"{directory}/.{name.removesuffix('.routes')}.partial"
        while True:
            fd = open_regular(partial, os.O_WRONLY | os.O_CREAT)
            try:
                _lock(fd)
                status = _called(fd, partial)
                if status is None:  # it was renamed or removed during the wait
                    continue
                try:
                    if status.st_size:  # a truncation makes ext4 write the file at its close
                        os.ftruncate(fd, 0)
                    yield fd
                    if becomes:
                        os.replace(partial, place)
                except BaseException:
                    with suppress(FileNotFoundError):
                        os.unlink(partial)
                    raise
                if not becomes:
                    os.unlink(partial)
                return
            finally:
                os.close(fd)

    @contextmanager
    def _reading(self, place: str) -> Iterator[tuple[Buffer, Callable[[int, int], bytearray]]]:
        """The bytes before a record's parts, and what reads its file, which stays the same even if its name changes:
        so many bytes at an offset, fewer at the file's end."""
        with _translated(place):
            fd = open_regular(place, os.O_RDONLY)
            try:
                size = os.fstat(fd).st_size

                def read(offset: int, nbytes: int) -> bytearray:
                    room = bytearray(max(min(nbytes, size - offset), 0))
                    nbytes_read = read_all(self._disk, fd, [room], offset, len(room))
                    return room if nbytes_read == nbytes else room[:nbytes_read]

                fixed = read(0, FIXED_NBYTES)
                yield bytes(fixed) + read(FIXED_NBYTES, header_nbytes(fixed)), read
            finally:
                os.close(fd)

    def _sync_names(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._disk.sync(fd)
        finally:
            os.close(fd)

    def _place(self, rollout_id: str) -> str:
        return f"{self.directory}/{file_name(rollout_id)}.routes"


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


def _called(fd: int, path: str) -> os.stat_result | None:
    """The status of this open file, if ``path`` is still its name."""
    try:
        return status if os.path.samestat(status := os.fstat(fd), os.lstat(path)) else None
    except FileNotFoundError:
        return None


@contextmanager
def _translated(path: str | Path) -> Iterator[None]:
    """``OSError`` becomes :class:`StorageError`, or :class:`GoneError` if there is no such file."""
    try:
        yield
    except OSError as error:
        kind = GoneError if isinstance(error, FileNotFoundError) else StorageError
        raise kind(f"rollouts at {path}: {error}") from error


def open_local_rollouts(url: StoreUrl) -> LocalRollouts:
    """``file:///dir?layers=1&sync=put``, or ``file:dir`` in the working directory."""
    url.allow("sync", "layers")
    if url.host or not url.path or "\0" in url.path:  # file://data/dir would be /dir
        wanted = "file:///absolute/path or file:relative/path"
        raise ConfigError("file: rollout store path", wanted, repr(url.text))
    sync = url.choice("sync", ("none", "put"), "none") == "put"
    return LocalRollouts(Path(url.path), layers_option(url), sync=sync)

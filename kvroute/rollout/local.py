"""Rollouts in a directory, which trainers on this machine, or on a shared file system, read.

::

    DIR/<rollout id, percent-encoded>/current                       the handle of the last whole put, with its sum
                                      <put id>/layer_00003.routes   one file a layer (fused: routes.routes)
                                      <put id>.partial/             what a running or killed writer has so far
    DIR/.locks/<2 hex digits>                                       taken while the names of some rollouts change

A put is written into a ``.partial`` directory, which gets its name in one step when every file is whole; then
``current`` is replaced in one step. What a killed writer has left is removed by the next put of that rollout, or by
:meth:`LocalRollouts.reap`: nobody holds the lock of its directory, or it is not the current put.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError, StorageError
from cache_manager.ports import Absence
from cache_manager.record import Buffer, checksum
from cache_manager.storage.disk import Disk, SystemDisk, open_regular, read_all, write_all
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.files import FIXED_NBYTES, FileHeader, header_nbytes, sums_of, unpack
from kvroute.rollout.grid import Grid, Range, Selection, cells_of
from kvroute.rollout.handle import PUT_ID_NBYTES, Manifest, RolloutHandle
from kvroute.rollout.ids import checked_id, file_name
from kvroute.rollout.locks import GoneError, lock, translated
from kvroute.rollout.port import CountingStore
from kvroute.rollout.settings import CutSettings
from kvroute.routes import Routes

SCHEME: Final = "file"
CURRENT_NBYTES_MAX: Final = 1 << 20
UNSYNCED_MAX: Final = 1024
"""Puts that wait for a flush; one more flushes first."""


class LocalRollouts(CountingStore):
    """A ``RolloutStore`` in a directory, which is made if it is not there.

    ``sync`` says that a put returns when it is on the disk; without it :meth:`flush` and :meth:`close` see to that.
    Safe from several threads, and from several processes that share the directory.
    """

    def __init__(
        self, directory: Path, cut: CutSettings | None = None, *, sync: bool = False, disk: Disk | None = None
    ) -> None:
        self.directory = directory.absolute()
        super().__init__(f"the rollout store at {self.directory}")
        self._cut = cut or CutSettings()
        self._sync = sync
        self._disk: Disk = disk or SystemDisk()
        self._lock = threading.Lock()
        self._unsynced: dict[Path, None] = {}
        with translated(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._locks = self.directory / ".locks"
            self._locks.mkdir(exist_ok=True)

    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        self._check_open()
        home = self._home(rollout_id)
        put_id = os.urandom(PUT_ID_NBYTES)
        grid = self._cut.grid(routes)
        handle = RolloutHandle.of(SCHEME, rollout_id, put_id, routes, grid)
        partial = home / f"{handle.put_id}.partial"
        try:
            with translated(home), ExitStack() as held:
                with self._locked(home):
                    home.mkdir(exist_ok=True)
                    self._reap(home)
                    partial.mkdir()
                    held.enter_context(lock(partial, os.O_RDONLY))
                try:
                    self._write(partial, handle, routes, grid)
                    self._publish(home, partial, handle)
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
        except BaseException:
            self._count(put_failures=1)
            raise
        self._count(puts=1, put_nbytes=routes.ids.nbytes)
        return handle

    def find(self, rollout_id: str) -> RolloutHandle | None:
        self._check_open()
        home = self._home(rollout_id)
        try:
            return self._current(home)
        except InvalidInputError:
            self._count(corrupt=1)
            return None

    def get(
        self, handle: RolloutHandle, layers: Sequence[int] | None = None, spans: Sequence[Range] | None = None
    ) -> list[Routes] | Absence:
        self._check_open()
        wanted = Selection.of(handle.layer_ids, (handle.start, handle.stop), layers, spans)
        grid, place = handle.grid, self._home(handle.rollout_id) / handle.put_id
        ids: list[NDArray[Any]] = []
        cells: list[NDArray[Any]] = []
        manifest: Manifest | None = None
        parts = grid.needed(wanted.layers, wanted.rows)
        groups = sorted({layer // grid.part_layers for layer in wanted.layers})
        nbytes = 0
        try:
            with translated(place):
                for group in groups:
                    with self._opened(place / _file_of(handle, group)) as fd:
                        header, at = self._header(fd, handle, group)
                        if manifest is None:  # the handle is one that was put: make room for what it claims
                            manifest = header.manifest
                            ids = wanted.room(handle.top_k, handle.dtype)
                            cells = [cells_of(part) for part in ids]
                        for part in (p for p in parts if grid.group_of(p) == group):
                            content = self._read(fd, at, grid, part, header)
                            grid.paste(part, content, cells, wanted.layers, wanted.rows)
                            nbytes += len(content)
            assert manifest is not None
            found = handle.routes(ids, manifest, wanted)
        except GoneError:
            return self._absent(Absence.MISS)
        except InvalidInputError:
            return self._absent(Absence.CORRUPT)
        self._count(hits=1, get_nbytes=nbytes)
        return found

    def delete(self, handle: RolloutHandle) -> None:
        self._check_open()
        home = self._home(handle.rollout_id)
        with translated(home), self._locked(home):
            with suppress(InvalidInputError):  # a damaged one may be of another put, and stays
                current = self._current(home)
                if current is not None and current.put_id == handle.put_id:
                    (home / "current").unlink()
            self._remove(home / handle.put_id)
            with suppress(OSError):  # other puts, or there is no such rollout
                home.rmdir()
        self._count(deletes=1)

    def flush(self) -> None:
        self._check_open()
        self._flush()

    def close(self) -> None:
        """:meth:`flush`, then close; a failure to flush is raised, and the store is closed all the same."""
        if not self._closed:
            self._closed = True
            self._flush()

    def reap(self) -> int:
        """Remove what killed writers have left, in the whole store; how many puts that was."""
        self._check_open()
        with translated(self.directory):
            found = 0
            for home in self.directory.iterdir():
                if not home.name.startswith("."):
                    with self._locked(home):
                        found += self._reap(home)
            return found

    # ---------------------------------------------------------------- writing

    def _write(self, partial: Path, handle: RolloutHandle, routes: Routes, grid: Grid) -> None:
        cells, manifest = cells_of(routes.ids.astype(handle.dtype, copy=False)), Manifest.of(routes)
        for group in range(grid.groups):
            bands = range(group * grid.bands, (group + 1) * grid.bands)
            parts: list[Buffer] = [grid.cut(cells, part).data for part in bands]
            first = group * grid.part_layers
            header = FileHeader(handle, handle.layer_ids[first : first + grid.part_layers], manifest, sums_of(parts))
            self._write_file(partial / _file_of(handle, group), [header.pack(), *parts])
        if self._sync:
            self._sync_directory(partial)

    def _write_file(self, path: Path, buffers: Sequence[Buffer]) -> None:
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(self._disk, fd, buffers, 0, sum(memoryview(b).nbytes for b in buffers))
            if self._sync:
                self._disk.sync(fd)
        finally:
            os.close(fd)

    def _publish(self, home: Path, partial: Path, handle: RolloutHandle) -> None:
        """The whole put gets its name, then it is the current one, then the one before goes."""
        place = home / handle.put_id
        with self._locked(home):
            before = None
            with suppress(InvalidInputError):  # a damaged one is replaced
                before = self._current(home)
            partial.rename(place)
            try:
                self._replace_current(home, handle)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            if before is not None:
                self._remove(home / before.put_id)
        if self._sync:
            self._sync_directory(home)
            self._sync_directory(self.directory)
            return
        with self._lock:
            self._unsynced[place] = None
            full = len(self._unsynced) > UNSYNCED_MAX
        if full:
            self._flush()

    def _replace_current(self, home: Path, handle: RolloutHandle) -> None:
        body = handle.to_json().encode()
        text = f"{checksum(body):016x} ".encode() + body + b"\n"
        new = home / f"{handle.put_id}.current"
        try:
            self._write_file(new, [text])
            new.replace(home / "current")
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def _remove(self, place: Path) -> None:
        """Out of every reader's way in one step, then file by file."""
        gone = place.with_name(f"{place.name}.partial")
        with suppress(FileNotFoundError):
            place.rename(gone)
            shutil.rmtree(gone)
        with self._lock:
            self._unsynced.pop(place, None)

    def _reap(self, home: Path) -> int:
        """Remove what is no put and what nobody writes any more. Held: the lock of ``home``."""
        try:
            current = self._current(home)
        except InvalidInputError:  # nobody knows which put is the current one
            return 0
        found = 0
        for place in home.iterdir():
            if place.name.endswith(".partial"):
                with suppress(BlockingIOError), lock(place, os.O_RDONLY | os.O_DIRECTORY, wait=False):
                    shutil.rmtree(place)
                    found += 1
            elif place.name.endswith(".current"):
                place.unlink()
            elif place.name != "current" and (current is None or place.name != current.put_id):
                self._remove(place)
                found += 1
        return found

    # ---------------------------------------------------------------- reading

    def _current(self, home: Path) -> RolloutHandle | None:
        """The handle of the last whole put; :class:`InvalidInputError` for a file that is damaged."""
        try:
            with self._opened(home / "current") as fd:
                text = bytearray(min(os.fstat(fd).st_size, CURRENT_NBYTES_MAX))
                read = read_all(self._disk, fd, [text], 0, len(text))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"rollouts at {home}: {error}") from error
        head, _, body = bytes(text[:read]).rstrip(b"\n").partition(b" ")
        if head != f"{checksum(body):016x}".encode():
            raise InvalidInputError("current", f"{checksum(body):016x}", head[:32])
        return RolloutHandle.from_json(body)

    def _header(self, fd: int, handle: RolloutHandle, group: int) -> tuple[FileHeader, int]:
        """The header of a file, and where its parts begin; :class:`InvalidInputError` if it is not of this handle."""
        fixed = bytearray(FIXED_NBYTES)
        read = read_all(self._disk, fd, [fixed], 0, FIXED_NBYTES)
        nbytes = header_nbytes(fixed[:read])
        if os.fstat(fd).st_size < FIXED_NBYTES + nbytes:
            raise InvalidInputError("routes file", f"{FIXED_NBYTES + nbytes} bytes or more", os.fstat(fd).st_size)
        text = bytearray(nbytes)
        read = read_all(self._disk, fd, [text], FIXED_NBYTES, nbytes)
        header = unpack(fixed, text[:read])
        first = group * handle.part_layers
        if header.handle != handle or header.layer_ids != handle.layer_ids[first : first + handle.part_layers]:
            raise InvalidInputError("routes file", f"{handle.rollout_id} {handle.put_id}", header.handle.put_id)
        return header, FIXED_NBYTES + nbytes

    def _read(self, fd: int, at: int, grid: Grid, part: int, header: FileHeader) -> memoryview:
        band, nbytes = part % grid.bands, grid.nbytes_of(part)
        content = bytearray(nbytes)
        # Every band of a file but the last has the same size.
        read = read_all(self._disk, fd, [content], at + band * grid.nbytes_of(part - band), nbytes)
        if read != nbytes or (found := checksum(content)) != header.sum_of(band):
            raise InvalidInputError(f"part {part}", header.sum_of(band), found if read == nbytes else f"{read} bytes")
        return memoryview(content)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        fd = open_regular(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)

    # ---------------------------------------------------------------- durability

    def _flush(self) -> None:
        with self._lock:
            places, self._unsynced = list(self._unsynced), {}
        try:
            with translated(self.directory):
                homes = dict.fromkeys(place.parent for place in places)
                for place in places:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        for path in (*place.iterdir(), place):
                            self._sync_directory(path)
                for home in homes:
                    with suppress(FileNotFoundError):
                        self._sync_directory(home / "current")
                        self._sync_directory(home)
                self._sync_directory(self.directory)
        except BaseException:
            with self._lock:
                self._unsynced |= dict.fromkeys(places)
            raise

    def _sync_directory(self, path: Path) -> None:
        """Of a directory its entries, of a file its bytes."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._disk.sync(fd)
        finally:
            os.close(fd)

    def _locked(self, home: Path) -> AbstractContextManager[None]:
        """The lock that names in ``home`` are changed under; some rollouts share one."""
        return lock(self._locks / f"{checksum(home.name.encode()) & 0xFF:02x}", os.O_RDWR | os.O_CREAT)

    def _home(self, rollout_id: str) -> Path:
        return self.directory / file_name(checked_id(rollout_id))


def _file_of(handle: RolloutHandle, group: int) -> str:
    """The name of the file of a group of layers: that of its first layer, as a trainer of FastDeploy looks for it."""
    if handle.part_layers == len(handle.layer_ids):
        return "routes.routes"
    return f"layer_{handle.layer_ids[group * handle.part_layers]:05d}.routes"


def open_local_rollouts(url: StoreUrl) -> LocalRollouts:
    """``file:///dir?fused=true&part=64KiB&sync=put``."""
    url.allow("sync", *CutSettings.PARAMETERS)
    sync = url.choice("sync", ("none", "put"), "none") == "put"
    return LocalRollouts(Path(url.path), CutSettings.from_url(url), sync=sync)


__all__ = ["LocalRollouts", "open_local_rollouts"]

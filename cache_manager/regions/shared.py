"""Rows in memory that other processes of the same user can map: the host buffer and the swap buffer.

Not ``multiprocessing.shared_memory``: its resource tracker removes a region when any process that attached to it exits,
and its ``close`` unmaps memory that numpy still points to. Here a region is a file in ``/dev/shm`` that is opened,
checked, locked and mapped with the system's own calls; liveness is a lock (see :mod:`cache_manager.regions.directory`).
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError, RegionError, RegionMismatchError, RegionMissingError
from cache_manager.regions import directory, room
from cache_manager.regions.extent import Extent
from cache_manager.regions.header import (
    FINGERPRINT_NBYTES,
    HEADER_NBYTES,
    MAGIC,
    PURPOSES,
    SCOPE_NBYTES,
    SCOPE_OFFSET,
    Purpose,
    RegionHeader,
    pack_header,
    pack_scope,
    unpack_header,
    unpack_scope,
)
from cache_manager.spec import RecordLayout

_SCOPE_TRIES_MAX: Final = 1000
_EPOCH_MAX: Final = (1 << 64) - 1


class SharedRegion:
    """A :class:`~cache_manager.ports.Region` in shared memory, made by its owner or attached to by name.

    The owner's :meth:`close`, its collection and its normal exit remove the region's name; processes that have it
    mapped keep their memory. A killed owner's region is removed by the next :meth:`create` of the same user, once its
    last user is gone. A forked child shares the memory, counts as a user, and never removes the name.

    Size, fields and identity are checked once, at attach. A process of the same user that cuts the file short later
    kills its users with SIGBUS: the file system offers no defence against that.
    """

    __slots__ = (
        "__weakref__",
        "_extent",
        "_memory",
        "_remove",
        "blocks",
        "header",
        "layout",
        "name",
        "rows",
        "valid",
        "words",
        "writable",
    )

    name: str
    header: RegionHeader
    layout: RecordLayout
    blocks: int
    writable: bool
    rows: NDArray[np.uint8]
    words: NDArray[np.uint64]
    valid: NDArray[np.uint64]

    def __init__(self, name: str, header: RegionHeader, extent: Extent, memory: mmap.mmap, *, writable: bool) -> None:
        """Not for callers: :meth:`create` or :meth:`attach`. Takes over ``memory``."""
        self.name = name
        self.header = header
        self.layout = extent.layout
        self.blocks = extent.blocks
        self.writable = writable
        self._extent = extent
        self._memory: mmap.mmap | None = memory
        self._remove: weakref.finalize[[Path, int, int, int], SharedRegion] | None = None
        self._view(memory)

    @classmethod
    def create(
        cls, layout: RecordLayout, blocks: int, *, purpose: Purpose, namespace: bytes, epoch: int = 1
    ) -> SharedRegion:
        """A new region under a name nobody else can have, zero, and backed by memory to the last page.

        ``namespace`` is :attr:`Namespace.fingerprint`; it and ``epoch`` change with :meth:`renew`. Removes orphans
        first. Raises :class:`~cache_manager.errors.NoSpaceError` with the numbers when ``/dev/shm``, a cgroup or the
        machine has no room; nothing is left behind then.
        """
        extent = Extent(layout, blocks, HEADER_NBYTES)
        if purpose not in PURPOSES:
            raise InvalidInputError("region purpose", " or ".join(PURPOSES), repr(purpose))
        scope = pack_scope(*_scope(epoch, namespace))
        if not directory.DIRECTORY.is_dir():
            raise RegionError(f"{directory.DIRECTORY}: not there: this system has no POSIX shared memory")
        directory.reap_orphans()
        room.require_tmpfs(directory.DIRECTORY, extent.nbytes)
        room.require_memory(extent.nbytes)
        name, unique, fd = directory.new_file(purpose)
        path = directory.DIRECTORY / name
        try:
            try:
                os.posix_fallocate(fd, 0, extent.nbytes)  # a touch of what is not there would be a SIGBUS
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise RegionError(f"region {name}: allocate {extent.nbytes} bytes: {error.strerror}") from error
                os.ftruncate(fd, 0)
                raise room.no_tmpfs_space(directory.DIRECTORY, extent.nbytes) from error
            start = directory.process_start(os.getpid())
            header = RegionHeader.of(
                extent,
                purpose=purpose,
                uid=os.geteuid(),
                uuid=unique,
                boot_id=directory.boot_id(),
                pid=os.getpid(),
                start=start or 0,
            )
            memory = _map(fd, extent.nbytes, writable=True)
            packed = pack_header(header)
            memory[len(MAGIC) : len(packed)] = packed[len(MAGIC) :]
            memory[SCOPE_OFFSET : SCOPE_OFFSET + SCOPE_NBYTES] = scope
            memory[: len(MAGIC)] = MAGIC  # last: what has its magic is whole
            found = os.fstat(fd)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        region = cls(name, header, extent, memory, writable=True)
        region._remove = weakref.finalize(region, _remove, path, found.st_dev, found.st_ino, os.getpid())
        return region

    @classmethod
    def attach(
        cls,
        name: str,
        layout: RecordLayout,
        *,
        purpose: Purpose | None = None,
        blocks: int | None = None,
        namespace: bytes | None = None,
        writable: bool = False,
    ) -> SharedRegion:
        """The region called ``name``, mapped only after everything about it was found right.

        Checked are the file (regular, not a link, this user's, 0600), its size, the header and its sum, the layout
        and, where given, ``purpose``, ``blocks`` and ``namespace``. Raises
        :class:`~cache_manager.errors.RegionMissingError` when there is none, else
        :class:`~cache_manager.errors.RegionMismatchError` naming the first field that differs. Without ``writable``
        the arrays refuse writes.
        """
        fd = _open(name, writable=writable)
        try:
            header, extent = _check(name, fd, layout, purpose=purpose, blocks=blocks, namespace=namespace)
            memory = _map(fd, header.nbytes, writable=writable)
        finally:
            os.close(fd)
        return cls(name, header, extent, memory, writable=writable)

    @property
    def purpose(self) -> Purpose:
        """Whose blocks these mirror: the device's ("host") or the CPU's ("swap")."""
        return self.header.purpose

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that the region takes."""
        return self._extent.nbytes

    @property
    def is_owner(self) -> bool:
        """Whether this process made the region, so that its close removes the name."""
        return self._remove is not None and self._remove.alive and self.header.owner_pid == os.getpid()

    @property
    def epoch(self) -> int:
        """How often the owner has begun anew; read from the region at each call."""
        return self._read_scope()[0]

    @property
    def namespace(self) -> bytes:
        """Fingerprint of the namespace that the rows belong to now; read from the region at each call."""
        return self._read_scope()[1]

    def renew(self, namespace: bytes) -> None:
        """Owner only: begin the next epoch, in which rows belong to ``namespace``.

        Retract every block first: readers tell old rows from new ones by the words, not by the epoch.
        """
        if not self.is_owner:
            raise AssertionError(f"region {self.name}: renew by a process that does not own it")
        scope = pack_scope(*_scope(self.epoch + 1, namespace))
        self._mapped()[SCOPE_OFFSET : SCOPE_OFFSET + SCOPE_NBYTES] = scope

    def close(self) -> None:
        """Unmap; the owner also removes the name. A second call does nothing.

        Raises ``BufferError`` while a view of an array is alive: the region then is as it was, and close may be called
        again. After close the arrays are gone (``AttributeError``).
        """
        if self._memory is None:
            return
        del self.rows, self.words, self.valid
        try:
            self._memory.close()  # its own descriptor goes too, and with it this process's lock
        except BufferError as error:
            self._view(self._memory)
            raise BufferError(f"region {self.name}: close: a view of its arrays is still alive") from error
        self._memory = None
        if self._remove is not None:
            self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else "owner" if self.is_owner else "attached"
        return f"<SharedRegion {self.name} blocks={self.blocks} {state}>"

    def _view(self, memory: mmap.mmap) -> None:
        self.rows = self._extent.rows(memory)
        self.words = self._extent.words(memory)
        self.valid = self._extent.valid(memory)

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            raise AssertionError(f"region {self.name}: used after close")
        return self._memory

    def _read_scope(self) -> tuple[int, bytes]:
        memory = self._mapped()
        for _ in range(_SCOPE_TRIES_MAX):
            scope = unpack_scope(memory[SCOPE_OFFSET : SCOPE_OFFSET + SCOPE_NBYTES])
            if scope is not None:
                return scope
        raise RegionMismatchError(self.name, "epoch crc", "a sound one", "none")


def _scope(epoch: int, namespace: bytes) -> tuple[int, bytes]:
    if not isinstance(namespace, bytes) or len(namespace) != FINGERPRINT_NBYTES:
        raise InvalidInputError("region namespace", f"a fingerprint of {FINGERPRINT_NBYTES} bytes", repr(namespace))
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= _EPOCH_MAX:
        raise InvalidInputError("region epoch", f"an integer in [0, {_EPOCH_MAX}]", repr(epoch))
    return epoch, namespace


def _map(fd: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    """The whole file, mapped and present. The mapping holds a duplicate of ``fd``, and so the lock, until it goes."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection)
    room.populate(memory, write=writable)
    return memory


def _remove(path: Path, device: int, inode: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        directory.unlink_same(path, device, inode)


def _open(name: str, *, writable: bool) -> int:
    path = directory.region_path(name)
    mode = os.O_RDWR if writable else os.O_RDONLY
    try:
        return os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise RegionMissingError(f"region {name}: none in {directory.DIRECTORY}") from error
    except PermissionError as error:
        raise RegionMismatchError(name, "access", "a file that this user may open", error.strerror) from error
    except OSError as error:
        got = {errno.ELOOP: "a symbolic link", errno.EISDIR: "a directory", errno.ENXIO: "a pipe or socket"}
        raise RegionMismatchError(name, "file type", "a regular file", got.get(error.errno or 0, str(error))) from error


def _check(
    name: str,
    fd: int,
    layout: RecordLayout,
    *,
    purpose: Purpose | None,
    blocks: int | None,
    namespace: bytes | None,
) -> tuple[RegionHeader, Extent]:
    """Lock ``fd`` and find out whether it is the region that was wanted."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise RegionMismatchError(name, "file type", "a regular file", stat.filemode(found.st_mode))
    if found.st_uid != os.geteuid():
        raise RegionMismatchError(name, "owner uid", os.geteuid(), found.st_uid)
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise RegionMismatchError(name, "mode", "0600", f"{stat.S_IMODE(found.st_mode):04o}")
    if not directory.lock_shared(fd):
        raise RegionMissingError(f"region {name}: it was being removed")
    found = os.fstat(fd)  # under the lock: the owner has its final size once there is a magic
    page = os.pread(fd, HEADER_NBYTES, 0)
    header = unpack_header(name, page)
    extent = header.extent(name, layout)
    if found.st_size != header.nbytes:
        raise RegionMismatchError(name, "file size", header.nbytes, found.st_size)
    if header.uuid.hex() != name.split("-")[2]:
        raise RegionMismatchError(name, "uuid", name.split("-")[2], header.uuid.hex())
    if purpose is not None and header.purpose != purpose:
        raise RegionMismatchError(name, "purpose", purpose, header.purpose)
    if blocks is not None and header.blocks != blocks:
        raise RegionMismatchError(name, "blocks", blocks, header.blocks)
    for _ in range(_SCOPE_TRIES_MAX):
        scope = unpack_scope(page[SCOPE_OFFSET : SCOPE_OFFSET + SCOPE_NBYTES])
        if scope is not None:
            break
        page = os.pread(fd, HEADER_NBYTES, 0)
    else:
        raise RegionMismatchError(name, "epoch crc", "a sound one", "none")
    if namespace is not None and scope[1] != namespace:
        raise RegionMismatchError(name, "namespace", namespace.hex(), scope[1].hex())
    return header, extent

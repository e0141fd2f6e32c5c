"""Rows in memory that other processes of the same user can map: of the device tier and of the host tier.

Not ``multiprocessing.shared_memory``: its resource tracker removes a region when any process that attached to it exits,
and its ``close`` unmaps memory that numpy still points to. Here a region is a file in ``/dev/shm`` that is opened,
checked, locked and mapped with the system's own calls; liveness is a lock (see :mod:`cache_manager.regions.directory`).

A *sparse* region is as long, but rows of blocks that nobody holds have no memory. Its owner has a block's memory before
it writes there, so that a file system that is full is an error and no signal. Readers look at a block's bits first and
read no rows where none is readable: a read would bring the memory back.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError, RegionError, RegionMismatchError, RegionMissingError
from cache_manager.ports import TierName
from cache_manager.regions import directory, room
from cache_manager.regions.header import (
    HEADER_NBYTES_MAX,
    NAMESPACE_NBYTES,
    NAMESPACE_OFFSET,
    RegionHeader,
    extent_of,
    pack_header,
    pack_namespace,
    unpack_header,
    unpack_namespace,
)
from cache_manager.regions.region import PAGE_NBYTES, MappedRegion
from cache_manager.spec import RecordLayout

_NAMESPACE_TRIES_MAX: Final = 1000
_NAMESPACE: Final = slice(NAMESPACE_OFFSET, NAMESPACE_OFFSET + NAMESPACE_NBYTES)


class SharedRegion(MappedRegion):
    """A :class:`~cache_manager.ports.Region` in shared memory, made by its owner or attached to by name.

    The owner's :meth:`close`, its collection and its normal exit remove the region's name; processes that have it
    mapped keep their memory. A killed owner's region is removed by the next :meth:`create` of the same user, once its
    last user is gone. A forked child shares the memory, counts as a user, and never removes the name.

    Size, fields and identity are checked once, at attach. A process of the same user that cuts the file short later
    kills its users with SIGBUS: the file system offers no defence against that.
    """

    __slots__ = ("__weakref__", "_owner_pid", "_remove", "_sparse", "name")

    def __init__(
        self,
        name: str,
        header: RegionHeader,
        memory: mmap.mmap,
        own_file: os.stat_result | None = None,
        *,
        sparse: bool = False,
    ) -> None:
        """Not for callers: :meth:`create` or :meth:`attach`. Takes over ``memory``, a mapping of the region's file.

        ``own_file`` is that file if this process owns the region, and removes its name.
        """
        super().__init__(header.extent, memory)
        self.name: str = name
        self._sparse = sparse
        self._owner_pid = 0
        self._remove: weakref.finalize[[Path, os.stat_result, int], SharedRegion] | None = None
        if own_file is not None:
            self._owner_pid = os.getpid()
            path = directory.region_path(name)
            self._remove = weakref.finalize(self, _remove, path, own_file, self._owner_pid)

    @classmethod
    def create(
        cls, layout: RecordLayout, blocks: int, *, tier: TierName, namespace: bytes, sparse: bool = False
    ) -> SharedRegion:
        """A new region of zeros under a name of its own, backed by memory to the last page; if ``sparse``, up to the
        rows.

        ``tier`` says whose blocks it mirrors; ``namespace`` is :attr:`Namespace.fingerprint`, and changes with
        :meth:`enter`. Removes orphans first. Raises :class:`NoSpaceError` with the numbers when ``/dev/shm``, a cgroup,
        the machine or the process's address space has no room for all rows; nothing is left behind then.
        """
        extent = extent_of(layout, blocks)
        if tier not in directory.TIERS:
            raise InvalidInputError("region tier", " or ".join(map(repr, directory.TIERS)), repr(tier))
        owner = pack_namespace(namespace)
        if not directory.DIRECTORY.is_dir():
            raise RegionError(f"{directory.DIRECTORY}: not there: this system has no POSIX shared memory")
        directory.reap_orphans()
        room.require_tmpfs(directory.DIRECTORY, extent.nbytes)
        room.require_memory(extent.nbytes)
        header = RegionHeader(uuid.uuid4().bytes, extent)
        name = directory.name_of(header.uuid, tier)
        fd = directory.unnamed_file()
        try:
            memory = _allocate(name, fd, extent.nbytes, extent.rows_offset if sparse else extent.nbytes)
            memory[: extent.header_nbytes] = pack_header(header)
            memory[_NAMESPACE] = owner
            region = cls(name, header, memory, os.fstat(fd), sparse=sparse)
            directory.give_name(fd, name)  # last: what has a name is whole
        finally:
            os.close(fd)
        return region

    @classmethod
    def attach(cls, name: str, *, writable: bool = False) -> SharedRegion:
        """The region called ``name``, mapped only after everything about it was found right.

        Checked are the file (regular, not a link, this user's, 0600), its size, the header and its sum. Raises
        :class:`RegionMissingError` when there is none, else :class:`RegionMismatchError` naming the first field that
        differs. Without ``writable`` the arrays refuse writes.
        """
        fd = _open(name, writable=writable)
        try:
            header = _check(name, fd)
            memory = room.map_memory(fd, header.extent.nbytes, writable=writable)
            room.populate_present(memory, fd, write=writable)
            return cls(name, header, memory)
        finally:
            os.close(fd)

    @property
    def is_sparse(self) -> bool:
        """See :class:`~cache_manager.ports.Region`; the owner knows."""
        return self._sparse

    def hold(self, ids: NDArray[np.int64]) -> None:
        """See :class:`~cache_manager.ports.Region`."""
        if not self._sparse:
            return
        memory = self._mapped()
        for first, last in _neighbours(ids):
            start, stop = self._extent_of(first, last)
            room.populate(memory, write=True, start=start - start % PAGE_NBYTES, stop=stop)

    def give_back(self, ids: NDArray[np.int64], held: NDArray[np.bool_]) -> None:
        """See :class:`~cache_manager.ports.Region`."""
        if not self._sparse:
            return
        memory = self._mapped()
        offset = self._extent.rows_offset
        nbytes = self.layout.nbytes
        for first, last in _neighbours(ids):
            start, stop = self._extent_of(first, last)
            start -= start % PAGE_NBYTES
            stop += -stop % PAGE_NBYTES
            if held[(start - offset) // nbytes : first].any():  # another block's rows begin, or end, in the page
                start += PAGE_NBYTES
            if held[last + 1 : -(-(stop - offset) // nbytes)].any():
                stop -= PAGE_NBYTES
            if start < stop:
                memory.madvise(mmap.MADV_REMOVE, start, stop - start)

    def _extent_of(self, first: int, last: int) -> tuple[int, int]:
        """Where in the mapping the records of the blocks from ``first`` to ``last`` begin and end."""
        nbytes = self.layout.nbytes
        offset = self._extent.rows_offset
        return offset + first * nbytes, offset + (last + 1) * nbytes

    @property
    def namespace(self) -> bytes | None:
        """Fingerprint of the namespace that the rows belong to now, read from the region at each call.

        None if the owner died while changing it.
        """
        memory = self._mapped()
        for _ in range(_NAMESPACE_TRIES_MAX):
            namespace = unpack_namespace(memory[_NAMESPACE])
            if namespace is not None:
                return namespace
        return None

    def enter(self, namespace: bytes) -> None:
        """Owner only: rows belong to ``namespace`` from here on. First clear every block's bits and change its word."""
        if self._owner_pid != os.getpid():
            raise AssertionError(f"region {self.name}: enter by a process that does not own it")
        self._mapped()[_NAMESPACE] = pack_namespace(namespace)

    def close(self) -> None:
        """Unmap; the owner also removes the name. See :meth:`MappedRegion.close`."""
        super().close()  # the mapping's own descriptor goes too, and with it this process's lock
        if self._remove is not None:
            self._remove()

    def __repr__(self) -> str:
        return f"<SharedRegion {self.name} blocks={self.blocks}{' closed' if self._memory is None else ''}>"

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            raise AssertionError(f"region {self.name}: used after close")
        return self._memory


def _neighbours(ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The first and the last one of each run of successive block ids."""
    ordered = np.sort(ids)
    cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
    for run in np.split(ordered, cuts) if ordered.size else ():
        yield int(run[0]), int(run[-1])


def _allocate(name: str, fd: int, nbytes: int, present_nbytes: int) -> mmap.mmap:
    """``fd`` with its final size, every page of its first ``present_nbytes`` there and mapped."""
    try:
        os.ftruncate(fd, nbytes)
        memory = room.map_memory(fd, nbytes)
        os.posix_fallocate(fd, 0, present_nbytes)  # a touch of a page that is not there would be a SIGBUS
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise RegionError(f"region {name}: allocate {nbytes} bytes: {error.strerror}") from error
        os.ftruncate(fd, 0)
        raise room.no_tmpfs_space(directory.DIRECTORY, nbytes) from error
    room.populate(memory, write=True, stop=present_nbytes)
    return memory


def _remove(path: Path, made: os.stat_result, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        directory.unlink_same(path, made)


def _open(name: str, *, writable: bool) -> int:
    mode = os.O_RDWR if writable else os.O_RDONLY
    try:
        return os.open(directory.region_path(name), mode | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise RegionMissingError(f"region {name}: none in {directory.DIRECTORY}") from error
    except OSError as error:
        raise RegionMismatchError(name, "file", "a regular one that this user may open", error.strerror) from error


def _check(name: str, fd: int) -> RegionHeader:
    """Lock ``fd`` and find out whether it is a region."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        got = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise RegionMismatchError(name, "file", f"a regular one, 0600, of user {os.geteuid()}", got)
    if not directory.lock_shared(fd):
        raise RegionMissingError(f"region {name}: it was being removed")
    header = unpack_header(name, os.pread(fd, HEADER_NBYTES_MAX, 0))
    if found.st_size != header.extent.nbytes:
        raise RegionMismatchError(name, "file size", header.extent.nbytes, found.st_size)
    if header.uuid.hex() != name.split("-")[2]:
        raise RegionMismatchError(name, "uuid", name.split("-")[2], header.uuid.hex())
    return header

"""Rows in this process's own memory."""

from __future__ import annotations

import mmap

from cache_manager.regions import room
from cache_manager.regions.extent import Extent
from cache_manager.regions.mapping import MappedRegion
from cache_manager.spec import RecordLayout


class HeapRegion(MappedRegion):
    """A :class:`~cache_manager.ports.Region` that no other process sees.

    The arrays are zero at first, page-backed already (in huge pages where there are any), and each record is 64-byte
    aligned. Raises :class:`~cache_manager.errors.NoSpaceError` when the machine, a cgroup or the process's address
    space has no room for it.

    Forked children inherit a copy, not the region.
    """

    __slots__ = ()

    def __init__(self, layout: RecordLayout, blocks: int) -> None:
        extent = Extent(layout, blocks, header_nbytes=0)
        room.require_memory(extent.nbytes)
        # An anonymous mapping rather than np.zeros: it is page-aligned and refuses to go while a view of it is alive.
        memory = room.map_memory(-1, extent.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.ask_for_huge_pages(memory)
        room.populate(memory, write=True)
        super().__init__(extent, memory)

    def renew(self, namespace: bytes) -> None:
        """See :class:`~cache_manager.ports.Region`; nobody else can look, so there is nothing to tell."""

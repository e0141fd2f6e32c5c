"""Rows in this process's own memory."""

from __future__ import annotations

import contextlib
import mmap
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.regions.extent import Extent
from cache_manager.regions.room import populate, require_memory
from cache_manager.spec import RecordLayout


class HeapRegion:
    """A :class:`~cache_manager.ports.Region` that no other process sees.

    The arrays are zero at first, page-backed already, and each record is 64-byte aligned. Raises
    :class:`~cache_manager.errors.NoSpaceError` when the machine or a cgroup has no room for it.

    Forked children inherit a copy, not the region.
    """

    __slots__ = ("_extent", "_memory", "blocks", "layout", "rows", "valid", "words")

    layout: RecordLayout
    blocks: int
    rows: NDArray[np.uint8]
    words: NDArray[np.uint64]
    valid: NDArray[np.uint64]

    def __init__(self, layout: RecordLayout, blocks: int) -> None:
        self._extent = Extent(layout, blocks, header_nbytes=0)
        self.layout = layout
        self.blocks = blocks
        require_memory(self._extent.nbytes)
        # An anonymous mapping rather than np.zeros: it is page-aligned and refuses to go while a view of it is alive.
        self._memory: mmap.mmap | None = mmap.mmap(-1, self._extent.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        populate(self._memory, write=True)
        self._view(self._memory)

    def renew(self, namespace: bytes) -> None:
        """See :class:`~cache_manager.ports.Region`; nobody else can look, so there is nothing to tell."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the region takes."""
        return self._extent.nbytes

    def close(self) -> None:
        """Give the memory back; a second call does nothing.

        Raises ``BufferError`` while a view of an array is alive: the region then is as it was, and close may be called
        again. After close the arrays are gone (``AttributeError``).
        """
        if self._memory is None:
            return
        del self.rows, self.words, self.valid
        try:
            self._memory.close()
        except BufferError as error:
            self._view(self._memory)
            raise BufferError("region: close: a view of its arrays is still alive") from error
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _view(self, memory: mmap.mmap) -> None:
        self.rows = self._extent.rows(memory)
        self.words = self._extent.words(memory)
        self.valid = self._extent.valid(memory)

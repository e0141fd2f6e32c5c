"""What regions of both kinds are: three arrays in one mapping, and an end that pulls no memory from under a view."""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.regions import room
from cache_manager.regions.extent import Extent
from cache_manager.spec import RecordLayout


class MappedRegion:
    """A :class:`~cache_manager.ports.Region` in a mapping that it takes over."""

    __slots__ = ("_extent", "_memory", "blocks", "layout", "rows", "valid", "words")

    layout: RecordLayout
    blocks: int
    rows: NDArray[np.uint8]  # [blocks, layout.nbytes]
    words: NDArray[np.uint64]  # [blocks]
    valid: NDArray[np.uint64]  # [blocks, specs, valid_words]

    def __init__(self, extent: Extent, memory: mmap.mmap) -> None:
        self._extent = extent
        self._memory: mmap.mmap | None = memory
        self.layout = extent.layout
        self.blocks = extent.blocks
        self._view(memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the region takes."""
        return self._extent.nbytes

    @property
    def huge_nbytes(self) -> int:
        """Bytes of it that this process has mapped as huge pages now; reads ``/proc/self/smaps`` at each call."""
        first = self.rows.ctypes.data - self._extent.rows_offset
        return room.huge_nbytes(first, self.nbytes)

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
            raise BufferError(f"{self!r}: close: a view of its arrays is still alive") from error
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} blocks={self.blocks}{' closed' if self._memory is None else ''}>"

    def _view(self, memory: mmap.mmap) -> None:
        self.rows = self._extent.rows(memory)
        self.words = self._extent.words(memory)
        self.valid = self._extent.valid(memory)

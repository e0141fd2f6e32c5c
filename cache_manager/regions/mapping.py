"""What regions of both kinds are: three arrays in one mapping, and an end that pulls no memory from under a view."""

from __future__ import annotations

import math
import mmap
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

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
        extent, blocks, nbytes = self._extent, self.blocks, self.layout.nbytes
        shape = blocks, len(self.layout.specs), self.layout.valid_words
        self.rows = np.frombuffer(memory, np.uint8, blocks * nbytes, extent.rows_offset).reshape(blocks, nbytes)
        self.words = np.frombuffer(memory, np.uint64, blocks, extent.words_offset)
        self.valid = np.frombuffer(memory, np.uint64, math.prod(shape), extent.valid_offset).reshape(shape)

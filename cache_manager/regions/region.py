"""What regions of both kinds share: three arrays in one mapping, and a close that takes no memory from a view.

The byte layout is described in ``docs/format.md``, section "region".
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError
from cache_manager.regions import room
from cache_manager.spec import RecordLayout, align

PAGE_NBYTES: Final = 4096
BLOCKS_MAX: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Extent:
    """Offsets of the arrays of ``blocks`` blocks that follow ``header_nbytes`` bytes of header.

    ``words`` and ``valid`` start on a cache line, ``rows`` on a page, so that every record is 64-byte aligned.

    >>> from cache_manager.spec import AuxBlockDataSpec
    >>> layout = RecordLayout((AuxBlockDataSpec("r", row_shape=(3,), dtype="uint8", block_tokens=100),))
    >>> extent = Extent(layout, blocks=10, header_nbytes=4096)
    >>> extent.words_offset, extent.valid_offset, extent.rows_offset, extent.nbytes
    (4096, 4224, 8192, 12288)
    """

    layout: RecordLayout
    blocks: int
    header_nbytes: int
    words_offset: int = field(init=False)
    valid_offset: int = field(init=False)
    rows_offset: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.blocks, bool) or not isinstance(self.blocks, int) or not 1 <= self.blocks <= BLOCKS_MAX:
            raise InvalidInputError("region blocks", f"an integer in [1, {BLOCKS_MAX}]", repr(self.blocks))
        words = align(self.header_nbytes)
        valid = align(words + 8 * self.blocks)
        rows = align(valid + self.layout.valid_nbytes * self.blocks, PAGE_NBYTES)
        end = align(rows + self.blocks * self.layout.nbytes, PAGE_NBYTES)
        for name, at in (("words_offset", words), ("valid_offset", valid), ("rows_offset", rows), ("nbytes", end)):
            object.__setattr__(self, name, at)


class MappedRegion:
    """A :class:`~cache_manager.ports.Region` in a mapping that it takes over."""

    __slots__ = ("_extent", "_memory", "blocks", "layout", "rows", "valid", "words")

    rows: NDArray[np.uint8]  # [blocks, layout.nbytes]
    words: NDArray[np.uint64]  # [blocks]
    valid: NDArray[np.uint64]  # [blocks, specs, valid_words]

    def __init__(self, extent: Extent, memory: mmap.mmap) -> None:
        self._extent = extent
        self._memory: mmap.mmap | None = memory
        self.layout: RecordLayout = extent.layout
        self.blocks: int = extent.blocks
        self._view(memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the region takes; a sparse one at most."""
        return self._extent.nbytes

    @property
    def is_sparse(self) -> bool:
        """See :class:`~cache_manager.ports.Region`."""
        return False

    def hold(self, ids: NDArray[np.int64]) -> None:
        """See :class:`~cache_manager.ports.Region`: all rows have memory here."""

    def give_back(self, ids: NDArray[np.int64], held: NDArray[np.bool_]) -> None:
        """See :class:`~cache_manager.ports.Region`: all rows keep their memory here."""

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
        extent = self._extent
        blocks = self.blocks
        nbytes = self.layout.nbytes
        shape = blocks, len(self.layout.specs), self.layout.valid_words
        self.rows = np.frombuffer(memory, np.uint8, blocks * nbytes, extent.rows_offset).reshape(blocks, nbytes)
        self.words = np.frombuffer(memory, np.uint64, blocks, extent.words_offset)
        self.valid = np.frombuffer(memory, np.uint64, math.prod(shape), extent.valid_offset).reshape(shape)


class HeapRegion(MappedRegion):
    """A region that no other process sees; forked children inherit a copy.

    The arrays start as zeros, with every page present, in huge pages if there are any. Raises :class:`NoSpaceError`
    when the machine, a cgroup or the process's address space has no room.
    """

    __slots__ = ()

    def __init__(self, layout: RecordLayout, blocks: int) -> None:
        extent = Extent(layout, blocks, header_nbytes=0)
        room.require_memory(extent.nbytes)
        # An anonymous mapping rather than np.zeros: it is page-aligned and refuses to close while a view is alive.
        memory = room.map_memory(-1, extent.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.ask_for_huge_pages(memory)
        room.populate(memory, write=True)
        super().__init__(extent, memory)

    def enter(self, namespace: bytes) -> None:
        """See :class:`~cache_manager.ports.Region`; nothing to do, because no other process can look."""

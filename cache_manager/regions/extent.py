"""Where a region's three arrays lie in its memory. Pure arithmetic.

The byte layout is described in ``docs/format.md``, section "region".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_manager.errors import InvalidInputError
from cache_manager.spec import RecordLayout, align

PAGE_NBYTES = 4096
BLOCKS_MAX = 1 << 32


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
        valid_nbytes = 8 * self.layout.valid_words * len(self.layout.specs) * self.blocks
        rows = align(valid + valid_nbytes, PAGE_NBYTES)
        object.__setattr__(self, "words_offset", words)
        object.__setattr__(self, "valid_offset", valid)
        object.__setattr__(self, "rows_offset", rows)
        object.__setattr__(self, "nbytes", align(rows + self.blocks * self.layout.nbytes, PAGE_NBYTES))

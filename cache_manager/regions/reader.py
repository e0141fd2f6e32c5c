"""One writer, many readers, no lock: how a block of a region changes, and how a reader proves what it read.

The writer of a block that readers may be reading

1. clears the block's validity bits,
2. changes its word (a new generation, or the next sequence number of the same one),
3. writes row bytes,
4. sets the bits of the rows it wrote.

The order of 1 and 2 matters: a reader that saw the new word beside the old bits would take the old rows for the new
owner's. :class:`~cache_manager.tier.Tier` is the writer of this package. A reader takes word, bits, bytes and word
again; bits seen set under an unchanged word prove that their rows' bytes were in place all along.

This needs stores to become visible in the order in which they are made, which x86-64 promises between processes and
other machines do not; :func:`snapshot` refuses to run where it cannot be right.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError, RegionError
from cache_manager.ports import Region

SEQUENCE_BITS = 16
_ORDERED = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True, slots=True, eq=False)
class BlockSnapshot:
    """A block's rows at one moment, in memory of its own.

    Only rows whose bit is set in ``valid`` mean anything. ``word`` is that of the region:
    ``generation << 16 | sequence``.
    """

    word: int
    valid: NDArray[np.uint64]  # [specs, valid_words]
    payload: NDArray[np.uint8]  # [layout.nbytes]

    @property
    def generation(self) -> int:
        """Which of the block's owners these rows were written for."""
        return self.word >> SEQUENCE_BITS


def snapshot(
    region: Region, block: int, *, generation: int | None = None, retries_max: int = 100
) -> BlockSnapshot | None:
    """The rows of ``block``, whole and of one generation, while its writer may be at work in another process.

    None when the block is of another ``generation`` than the one asked for, or kept changing for ``retries_max`` tries
    after the first. Writes nothing and takes no lock.
    """
    if not _ORDERED:
        raise RegionError(f"snapshot: wanted a machine that orders stores (x86-64), got {platform.machine()}")
    if not 0 <= block < region.blocks:
        raise InvalidInputError("block", f"0 to {region.blocks - 1}", block)
    words, payload = region.words, np.empty(region.layout.nbytes, np.uint8)
    for _ in range(retries_max + 1):
        word = int(words[block])
        if generation is not None and word >> SEQUENCE_BITS != generation:
            return None
        valid = region.valid[block].copy()
        np.copyto(payload, region.rows[block])
        if int(words[block]) == word:
            return BlockSnapshot(word, valid, payload)
    return None

"""Rows as bits: row ``t`` of a block is bit ``t % 64`` of validity word ``t // 64``, as a record's header has it.

A block of ``T`` tokens has ``W = ceil(T / 64)`` words for each spec; the bits behind the last row are 0.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WORD_BITS: Final = 64
_ALL: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_BITS: Final = np.uint64(WORD_BITS)


def words_of(block_tokens: int) -> int:
    """Validity words ``W`` that a block of ``block_tokens`` rows has for each spec."""
    return -(-block_tokens // WORD_BITS)


def full_bits(block_tokens: int) -> NDArray[np.uint64]:
    """Validity words ``[W]`` of a block whose rows are all valid."""
    full: NDArray[np.uint64] = prefix_bits(np.array([block_tokens]), block_tokens)[0, 0]
    return full


def prefix_bits(counts: NDArray[np.int64], block_tokens: int) -> NDArray[np.uint64]:
    """Validity words ``[n, 1, W]`` with the first ``counts[i]`` bits set; a count outside the block is cut to it."""
    first = np.arange(words_of(block_tokens)) * WORD_BITS
    left = np.clip(np.clip(counts, 0, block_tokens)[:, None, None] - first, 0, WORD_BITS).astype(np.uint64)
    return np.where(left > 0, _ALL >> (_BITS - left), np.uint64(0))


def unpack_bits(words: NDArray[np.uint64], block_tokens: int) -> NDArray[np.bool_]:
    """Validity words ``[n, W]`` as a mask ``[n, block_tokens]``."""
    as_bytes = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little", count=block_tokens)
    return bits.view(np.bool_)


__all__ = ["WORD_BITS", "full_bits", "prefix_bits", "unpack_bits", "words_of"]

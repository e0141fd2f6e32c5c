"""Rows as bits: row ``t`` of a block is bit ``t % 64`` of validity word ``t // 64``, as a record's header has it.

A block of ``T`` tokens has ``W = ceil(T / 64)`` words for each spec; the bits behind the last row are 0.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WORD_BITS: Final = 64
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bits = NDArray[np.uint64]
_EACH: Final = np.uint64(1) << np.arange(WORD_BITS, dtype=np.uint64)  # taken: a view and a shift touch twice the code
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


def rows_in(words: NDArray[np.uint64]) -> int:
    """How many rows are valid in some spec, of blocks' validity words ``[..., specs, W]``."""
    merged = words if words.shape[-2] == 1 else np.bitwise_or.reduce(words, axis=-2)
    return int(np.bitwise_count(merged).sum())


class Cells:
    """Where slots are among the validity words of blocks of ``block_tokens`` rows.

    A *cell* is one validity word of a block for every spec: ``block * W + word``. Where a block has at most 64 rows
    the cells are the blocks.
    """

    __slots__ = ("_mask", "_shift", "_tokens", "_words")

    def __init__(self, block_tokens: int) -> None:
        self._tokens, self._words = block_tokens, words_of(block_tokens)
        # Where a slot says its cell by a shift: one word a block, or whole words.
        unit = WORD_BITS if block_tokens % WORD_BITS == 0 else block_tokens
        plain = unit & (unit - 1) == 0 and (self._words == 1 or unit == WORD_BITS)
        self._shift, self._mask = (unit.bit_length() - 1, unit - 1) if plain else (-1, 0)

    def bit_by_bit(self, slots: Ints) -> tuple[Ints, Bits]:
        """The cell of each slot, and its one bit there."""
        if self._shift >= 0:
            return slots >> self._shift, _EACH.take(slots & self._mask)
        blocks, offsets = np.divmod(slots, self._tokens)
        return blocks * self._words + (offsets >> 6), _EACH.take(offsets & 63)

    def run_by_run(self, slots: Ints, cells: Ints) -> tuple[Ints, Bits]:
        """A cell, and the bits there, for each run of slots next to each other in one of their ``cells``; not none."""
        edge = np.ones(slots.size + 1, np.bool_)
        np.not_equal(slots[1:], slots[:-1] + 1, out=edge[1:-1])
        edge[1:-1] |= cells[1:] != cells[:-1]
        edges = np.flatnonzero(edge)
        length = np.diff(edges).view(np.uint64)
        first, bits = self.bit_by_bit(slots[edges[:-1]])
        return first, (_ALL >> (_BITS - length)) * bits

    def of_ordered(self, slots: Ints) -> tuple[Ints, Bits]:
        """The cells of ``slots`` in order, each once, and the bits in each."""
        cells, bits = self.bit_by_bit(slots)
        if not slots.size:
            return cells, bits
        start = np.flatnonzero(np.concatenate(([True], cells[1:] != cells[:-1])))
        return cells[start], np.bitwise_or.reduceat(bits, start)

    def blocks(self, cells: Ints) -> Ints:
        """The blocks of cells, each once."""
        return cells if self._words == 1 else np.unique(cells // self._words)

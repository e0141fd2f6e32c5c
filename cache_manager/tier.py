"""One tier: the life cycle of its blocks, the region their rows lie in, and the words that let a reader check.

The order of stores is what makes a lock-free reader safe (:class:`cache_manager.ports.Region`): to start a new life,
validity bits are cleared, then the block's word changes, then bytes may change; bits are set after the bytes.

Not thread-safe by itself: :class:`cache_manager.aux_blocks.AuxBlocks` calls it under its lock, except :meth:`gather`.
"""

from __future__ import annotations

import gc
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import BlockBusyError, BlockStateError
from cache_manager.lifecycle import BlockLifecycle, State
from cache_manager.ports import Region

GENERATION_SHIFT: Final = 16
_SEQUENCE_MASK: Final = np.uint64((1 << GENERATION_SHIFT) - 1)
READ_RETRIES_MAX: Final = 8


Runs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]
"""Rows as bits: block, word and the bits in it, each (block, word) once."""


class Tier:
    """Blocks of one kind (device or host), their rows and who may touch them."""

    __slots__ = ("_blocks_of", "_tokens_of", "full", "layout", "life", "pending", "region")

    def __init__(self, name: str, region: Region) -> None:
        self.region = region
        self.layout = region.layout
        self.life = BlockLifecycle(name, region.blocks)
        self.pending: NDArray[np.int32] = np.zeros(region.blocks, dtype=np.int32)
        self.full = full_bits(self.layout.block_tokens)
        self._blocks_of: list[NDArray[Any]] = []
        self._tokens_of: list[NDArray[np.uint8]] = []
        self._view()

    def begin_life(self, ids: NDArray[np.int64]) -> None:
        """Publish the generation that the life cycle gave to ``ids``; their rows are unreadable from here on."""
        self.pending[ids] = 0  # what a step writes for an older life will be dropped
        self.region.valid[ids] = 0
        self.region.words[ids] = self.life.generations[ids].astype(np.uint64) << np.uint64(GENERATION_SHIFT)

    def invalidate(self, runs: Runs) -> None:
        """Make the rows of ``runs`` unreadable in every spec, before somebody writes them."""
        blocks, words, bits = runs
        valid = self.region.valid[blocks, :, words]  # [runs, specs]
        hit = (valid & bits[:, None]).any(axis=1)
        if hit.any():
            self.region.valid[blocks, :, words] = valid & ~bits[:, None]
            changed = np.unique(blocks[hit])
            word = self.region.words[changed]
            self.region.words[changed] = (word & ~_SEQUENCE_MASK) | ((word + np.uint64(1)) & _SEQUENCE_MASK)

    def store(
        self, spec: int, blocks: NDArray[np.int64], offsets: NDArray[np.int64], rows: NDArray[np.uint8], runs: Runs
    ) -> None:
        """Put rows ``[n, row_nbytes]`` in place and make them, which are those of ``runs``, readable."""
        self._tokens_of[spec][blocks, offsets] = rows
        blocks, words, bits = runs
        self.region.valid[blocks, spec, words] |= bits

    def rows_of(self, spec: int, block: int) -> NDArray[np.uint8]:
        """The memory of one block's rows ``[block_tokens, row_nbytes]``."""
        rows: NDArray[np.uint8] = self._tokens_of[spec][block]
        return rows

    def gather(
        self, spec: int, ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint64]]:
        """Rows ``[n, block_nbytes]``, validity words ``[n, words]`` and block words ``[n]``, without a lock.

        The rows and bits of a block are those of the life that its word names. A block that keeps changing under the
        copy comes back without a valid row.
        """
        words, source = self.region.words, self._blocks_of[spec]
        before, valid = words[ids], self.region.valid[ids, spec]
        rows = source[ids]
        for _ in range(READ_RETRIES_MAX):
            torn = np.flatnonzero(words[ids] != before)
            if not torn.size:
                return rows, valid, before
            again = ids[torn]
            before[torn], valid[torn] = words[again], self.region.valid[again, spec]
            rows[torn] = source[again]
        valid[words[ids] != before] = 0
        return rows, valid, before

    def complete(self, ids: NDArray[np.int64], specs: tuple[int, ...]) -> NDArray[np.bool_]:
        """Which blocks have every row of every one of ``specs``."""
        complete: NDArray[np.bool_] = (self.region.valid[ids][:, specs, :] == self.full).all(axis=(1, 2))
        return complete

    def empty(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which blocks have no readable row at all."""
        empty: NDArray[np.bool_] = (self.region.valid[ids] == 0).all(axis=(1, 2))
        return empty

    def valid_rows(self, ids: NDArray[np.int64]) -> int:
        """Rows in ``ids`` that are readable in some spec."""
        return int(np.bitwise_count(np.bitwise_or.reduce(self.region.valid[ids], axis=1)).sum())

    def check_no_step(self, ids: NDArray[np.int64], why: str) -> None:
        """Raise :class:`BlockBusyError` if a forward step that writes one of ``ids`` is in flight."""
        busy = ids[self.pending[ids] > 0]
        if busy.size:
            raise BlockBusyError(f"{self.life.tier} block {int(busy[0])}", f"no step in flight to {why}", "a step")

    def check_unheld(self, ids: NDArray[np.int64]) -> None:
        """Raise :class:`BlockStateError` if somebody holds one of ``ids``."""
        held, _ = self.life.leases.split(ids.tolist())
        if held:
            raise BlockStateError(f"{self.life.tier} block {held[0]}", "FREE or CACHED to copy into", "HELD")

    def check_empty(self, ids: NDArray[np.int64]) -> None:
        """Raise :class:`BlockStateError` if a held one of ``ids`` has a readable row."""
        for block, empty in zip(ids.tolist(), self.empty(ids).tolist(), strict=True):
            if not empty and self.life.leases.count(block):
                raise BlockStateError(f"{self.life.tier} block {block}", "no readable row to fill it", "readable rows")

    def reset(self) -> None:
        """Make every row unreadable."""
        self.life.reset()
        self.begin_life(np.arange(self.region.blocks))

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless the life cycle and what the region shows of it agree."""
        self.life.assert_consistent()
        free = np.flatnonzero(self.life.states == State.FREE)
        assert self.empty(free).all(), f"a free {self.life.tier} block has readable rows"
        published = self.region.words >> np.uint64(GENERATION_SHIFT)
        assert (published == self.life.generations.astype(np.uint64)).all(), "published generations differ"

    def close(self) -> None:
        """Give the region back. ``BufferError`` while somebody else sees its memory; the tier then works as before."""
        self._drop_views()
        try:
            self.region.close()
        except BufferError:
            # A store that failed leaves its frames, and their views of the rows, in a cycle with the exception.
            gc.collect()
            try:
                self.region.close()
            except BufferError:
                self._view()
                raise

    def _view(self) -> None:
        base, stride = self.region.rows, self.region.rows.strides[0]
        for spec, offset in zip(self.layout.specs, self.layout.offsets, strict=True):
            rows = base[:, offset : offset + spec.block_nbytes]
            self._blocks_of.append(np.lib.stride_tricks.as_strided(rows, (self.region.blocks, spec.block_nbytes)))
            shape, strides = (self.region.blocks, spec.block_tokens, spec.row_nbytes), (stride, spec.row_nbytes, 1)
            self._tokens_of.append(np.lib.stride_tricks.as_strided(rows, shape, strides))

    def _drop_views(self) -> None:
        self._blocks_of.clear()
        self._tokens_of.clear()


def full_bits(block_tokens: int) -> NDArray[np.uint64]:
    """The validity words of a block whose rows are all valid."""
    words = -(-block_tokens // 64)
    full = np.full(words, np.uint64(0xFFFF_FFFF_FFFF_FFFF))
    if block_tokens % 64:
        full[-1] = np.uint64((1 << block_tokens % 64) - 1)
    return full


def unpack_bits(words: NDArray[np.uint64], block_tokens: int) -> NDArray[np.bool_]:
    """Validity words ``[n, words]`` as a mask ``[n, block_tokens]``."""
    as_bytes = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little", count=block_tokens)
    return bits.view(np.bool_)


def runs_of(ordered: NDArray[np.int64], block_tokens: int) -> Runs:
    """The rows at slots in ascending order, as bits."""
    if not ordered.size:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64)
    blocks = ordered // block_tokens
    offsets = ordered - blocks * block_tokens
    words = offsets >> 6
    first = np.ones(ordered.size, dtype=np.bool_)
    first[1:] = (blocks[1:] != blocks[:-1]) | (words[1:] != words[:-1])
    at = np.flatnonzero(first)
    bits = np.bitwise_or.reduceat(np.uint64(1) << (offsets & 63).astype(np.uint64), at)
    return blocks[at], words[at], bits


def prefix_bits(counts: NDArray[np.int64], tier: Tier) -> NDArray[np.uint64]:
    """Validity words ``[n, 1, words]`` with the first ``counts[i]`` bits set."""
    tokens, words = tier.layout.block_tokens, tier.layout.valid_words
    mask = np.zeros((counts.size, words * 64), dtype=np.bool_)
    mask[:, :tokens] = np.arange(tokens) < counts[:, None]
    return np.packbits(mask, axis=1, bitorder="little").view("<u8").astype(np.uint64).reshape(counts.size, 1, words)

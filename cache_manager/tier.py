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
from cache_manager.lifecycle import BlockLifecycle
from cache_manager.ports import Region

GENERATION_SHIFT: Final = 16
_SEQUENCE_MASK: Final = np.uint64((1 << GENERATION_SHIFT) - 1)
READ_RETRIES_MAX: Final = 8


class Tier:
    """Blocks of one kind (device or host), their rows and who may touch them."""

    __slots__ = ("_blocks_of", "_tokens_of", "full", "layout", "life", "pending", "region")

    def __init__(self, name: str, region: Region) -> None:
        self.region = region
        self.layout = region.layout
        self.life = BlockLifecycle(name, region.blocks)
        self.pending: NDArray[np.int32] = np.zeros(region.blocks, dtype=np.int32)
        self.full = full_bits(self.layout.block_tokens)
        base, stride = region.rows, region.rows.strides[0]
        self._blocks_of: list[NDArray[Any]] = []
        self._tokens_of: list[NDArray[np.uint8]] = []
        for spec, offset in zip(self.layout.specs, self.layout.offsets, strict=True):
            rows = base[:, offset : offset + spec.block_nbytes]
            self._blocks_of.append(np.lib.stride_tricks.as_strided(rows, (region.blocks, spec.block_nbytes)))
            shape, strides = (region.blocks, spec.block_tokens, spec.row_nbytes), (stride, spec.row_nbytes, 1)
            self._tokens_of.append(np.lib.stride_tricks.as_strided(rows, shape, strides))

    def begin_life(self, ids: NDArray[np.int64]) -> None:
        """Publish the generation that the life cycle gave to ``ids``; their rows are unreadable from here on."""
        self.region.valid[ids] = 0
        self.region.words[ids] = self.life.generations[ids].astype(np.uint64) << np.uint64(GENERATION_SHIFT)

    def invalidate(self, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        """Make the given rows unreadable in every spec, before somebody writes them."""
        words, bits = offsets >> 6, np.uint64(1) << (offsets & 63).astype(np.uint64)
        hit = (self.region.valid[blocks, :, words] & bits[:, None]).any(axis=1)
        if hit.any():
            blocks, words, bits = blocks[hit], words[hit], bits[hit]
            for spec in range(len(self.layout.specs)):
                np.bitwise_and.at(self.region.valid[:, spec], (blocks, words), ~bits)
            changed = np.unique(blocks)
            word = self.region.words[changed]
            self.region.words[changed] = (word & ~_SEQUENCE_MASK) | ((word + np.uint64(1)) & _SEQUENCE_MASK)

    def store(self, spec: int, blocks: NDArray[np.int64], offsets: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Put rows ``[n, row_nbytes]`` in place and make them readable."""
        self._tokens_of[spec][blocks, offsets] = rows
        bits = np.uint64(1) << (offsets & 63).astype(np.uint64)
        np.bitwise_or.at(self.region.valid[:, spec], (blocks, offsets >> 6), bits)

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
        return rows, valid

    def complete(self, ids: NDArray[np.int64], specs: tuple[int, ...]) -> NDArray[np.bool_]:
        """Which blocks have every row of every one of ``specs``."""
        complete: NDArray[np.bool_] = (self.region.valid[ids][:, specs, :] == self.full).all(axis=(1, 2))
        return complete

    def empty(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which blocks have no readable row at all."""
        empty: NDArray[np.bool_] = (self.region.valid[ids] == 0).all(axis=(1, 2))
        return empty

    def valid_rows(self, ids: NDArray[np.int64]) -> int:
        """Readable rows of the first spec in ``ids``."""
        return int(np.bitwise_count(self.region.valid[ids, 0]).sum())

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

    def reset(self, namespace: bytes) -> None:
        """Make every row unreadable; rows belong to ``namespace`` from here on."""
        self.life.reset()
        self.begin_life(np.arange(self.region.blocks))
        self.region.renew(namespace)

    def close(self) -> None:
        self._blocks_of.clear()
        self._tokens_of.clear()
        try:
            self.region.close()
        except BufferError:
            # A store that failed leaves its frames, and their views of the rows, in a cycle with the exception.
            gc.collect()
            self.region.close()


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

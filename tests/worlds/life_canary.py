"""Rows that say which life of which block they were written for, a writer of them, and a judge.

A row is ``words`` 64-bit numbers. The first is the round in which it was written, the others mix block, generation,
token, round and place. So a row of another block, life or token shows itself, and a row that is half of one round and
half of another too. The writer uses the primitives of :mod:`cache_manager.publish` as a table does under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cache_manager.ports import Region
from cache_manager.publish import GENERATION_SHIFT, add_bits, clear_bits, put_generations, rows_by_spec
from cache_manager.slots import unpack_bits
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

_MIX = tuple(np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5))


def layout_of(tokens: int, words: int, *, specs: int = 2) -> RecordLayout:
    """Two specs, so that one spec's place is not the other's: rows of ``words`` numbers (even), and of two."""
    long, short = (AuxBlockDataSpec(name, (n,), "uint64", tokens) for name, n in (("long", words), ("short", 2)))
    return RecordLayout((long, short)[:specs])


def written(
    blocks: NDArray[np.int64], generations: NDArray[np.int64], tokens: int, words: int, rounds: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The rows ``[n, tokens, words]`` of ``blocks [n]`` in ``generations [n]``; ``rounds [n, tokens]``."""
    who = blocks.astype(np.uint64) * _MIX[0] ^ generations.astype(np.uint64) * _MIX[1]
    row = who[:, None] ^ np.arange(1, tokens + 1, dtype=np.uint64) * _MIX[2] ^ rounds * _MIX[3]
    rows: NDArray[np.uint64] = (row[:, :, None] + np.arange(words, dtype=np.uint64)) * _MIX[0]
    rows[:, :, 0] = rounds
    return rows


def wrong(
    region: Region,
    spec: int,
    ids: NDArray[np.int64],
    rows: NDArray[np.uint8],
    bits: NDArray[np.uint64],
    words: NDArray[np.uint64],
) -> tuple[int, int]:
    """How many rows that were gathered from blocks ``ids`` are valid, and how many of them are not the row that was
    written for their block and token in the generation that the block's word names."""
    one = region.layout.specs[spec]
    valid = unpack_bits(bits, one.block_tokens)
    got = rows.reshape(-1).view(np.uint64).reshape(len(ids), one.block_tokens, one.row_shape[0])
    generations = (words >> np.uint64(GENERATION_SHIFT)).astype(np.int64)
    expected = written(ids, generations, one.block_tokens, one.row_shape[0], got[:, :, 0])
    return int(np.count_nonzero(valid)), int(np.count_nonzero(valid & (got != expected).any(axis=2)))


@dataclass
class Writer:
    """The owner of a region's blocks. Each step of its work is a method, so that a test can read between any two."""

    region: Region
    generations: NDArray[np.int64] = field(init=False)
    round: int = 0

    def __post_init__(self) -> None:
        self.generations = np.array(self.region.words >> np.uint64(GENERATION_SHIFT), np.int64)
        self._places = [place.view(np.uint64) for place in rows_by_spec(self.region)]

    def begin_lives(self, ids: NDArray[np.int64]) -> None:
        self.generations[ids] += 1
        put_generations(self.region, ids, self.generations[ids])

    def clear(self, ids: NDArray[np.int64], rows: NDArray[np.bool_]) -> None:
        """``rows [block_tokens]`` of each block will be written."""
        clear_bits(self.region, *self._cells(ids, rows))

    def write(self, ids: NDArray[np.int64], rows: NDArray[np.bool_], parts: Sequence[Literal[0, 1]] = (0, 1)) -> None:
        """The bytes of a new round, the first and then the second half of each row, or one of them."""
        self.round += 1
        tokens = self.region.layout.block_tokens
        rounds = np.full((len(ids), tokens), self.round, np.uint64)
        for part in parts:
            for place in self._places:
                half = place.shape[2] // 2
                new = written(ids, self.generations[ids], tokens, 2 * half, rounds)
                at = slice(part * half, part * half + half)
                place[ids[:, None], np.flatnonzero(rows), at] = new[:, rows, at]

    def add(self, ids: NDArray[np.int64], rows: NDArray[np.bool_]) -> None:
        for spec in range(len(self._places)):
            add_bits(self.region, spec, *self._cells(ids, rows))

    def rewrite(self, ids: NDArray[np.int64], rows: NDArray[np.bool_]) -> None:
        """A step of the same life, from its begin to its commit."""
        self.clear(ids, rows)
        self.write(ids, rows)
        self.add(ids, rows)

    def _cells(self, ids: NDArray[np.int64], rows: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        words = self.region.layout.valid_words
        padded = np.zeros(words * 64, np.bool_)
        padded[: len(rows)] = rows
        bits = np.packbits(padded, bitorder="little").view("<u8").astype(np.uint64)
        return (ids[:, None] * words + np.arange(words)).reshape(-1), np.tile(bits, len(ids))

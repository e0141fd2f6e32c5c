"""An identity of a block's computation from its KV, for KV that is kept without an origin.

Another project's store keeps KV but no eight bytes beside it: so these bytes are computed from the KV itself. The
*fold* of a block is a number over all of K and V of the last layer; the *witness* of a block chains its fold to the
witness of the block before, so that it stands for the whole prefix. It is taken when rows are stored, and is the origin
under which they are stored; it is taken again from KV that was loaded, and rows of another origin do not land.

A change of one word of KV is always seen: each word goes through a permutation of the 64-bit numbers that depends on
its place, and the results are added up, also over the heads of all tensor-parallel ranks. Two changes cancel with a
chance of about one in 2^48: a change in a word's upper bits alone, for example of its last bfloat16, spreads over 48
bits before the sum. No witness shows the last router's choice: K and V of its layer are computed before. Pure: numbers
in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError

UNKNOWN_WITNESS: Final = 0
"""The witness of a block whose KV, or the KV before it, was not seen. No row has this origin."""
ROOT: Final = 1
"""The predecessor's witness for the first block of a sequence."""
WORD_NBYTES: Final = 8

_GOLDEN: Final = 0x9E3779B97F4A7C15
_SECOND: Final = 1 << 63  # where the keys of the second multiplication begin


def fold_keys(first: int, words: int) -> NDArray[np.uint64]:
    """Odd numbers ``[2, words]`` for the words number ``first`` and on: SplitMix64 of the number, its lowest bit set.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014).

    >>> [hex(key) for key in fold_keys(0, 2)[0].tolist()]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f5']
    """
    numbers = np.arange(first, first + words, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.stack([numbers, numbers + np.uint64(_SECOND)]) * np.uint64(_GOLDEN) + np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return keys


def fold_reference(blocks: NDArray[Any], first_word: int = 0) -> NDArray[np.uint64]:
    """The folds ``[n]`` of blocks ``[n, ...]`` of K and V, in their logical order; a block has whole 8-byte words.

    ``first_word`` is the number of a block's first word in the layer: above 0 if other ranks have earlier heads.
    """
    values = math.prod(blocks.shape[1:])
    flat = np.ascontiguousarray(blocks).reshape(len(blocks), values)
    rows = flat.view(np.uint8)
    if rows.shape[1] % WORD_NBYTES:
        wanted = "whole words of 8 bytes"
        raise InvalidInputError("KV of a block", wanted, f"{rows.shape[1]} bytes")
    words = rows.view(np.uint64)
    return folded(words, fold_keys(first_word, words.shape[1]))


def folded(words: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The folds ``[n]`` of ``words [n, w]`` with the ``keys [2, w]`` of their places; in numpy."""
    mixed = words * keys[0]  # arrays wrap around without a warning
    mixed ^= mixed >> np.uint64(32)
    mixed *= keys[1]
    folds: NDArray[np.uint64] = mixed.sum(1, dtype=np.uint64)
    return folds


def chained(before: int, fold: int) -> int:
    """The witness of a block whose predecessor has the witness ``before``: XXH3-64 of both, little-endian.

    :data:`UNKNOWN_WITNESS` stays unknown, and a known witness never becomes unknown.

    >>> hex(chained(ROOT, 5)), chained(UNKNOWN_WITNESS, 5)
    ('0x8ab1ee8ed781d41e', 0)
    """
    if before == UNKNOWN_WITNESS:
        return UNKNOWN_WITNESS
    return xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + fold.to_bytes(8, "little")) or ROOT


@dataclass(frozen=True, slots=True)
class Run:
    """Successive blocks of one sequence, and the block before them, -1 for none.

    ``tokens`` is the number of their tokens whose KV has come, if the last block may be partial; 0: all are full. The
    first of these tokens has position ``start``.
    """

    before: int
    blocks: Sequence[int]
    tokens: int = 0
    start: int = 0


__all__ = ["ROOT", "UNKNOWN_WITNESS", "Run", "chained", "fold_keys", "fold_reference", "folded"]

"""Checks the ids, slots and counts that callers pass; turns rows into validity bits and back.

Row ``t`` of a block is bit ``t % 64`` of validity word ``t // 64``, as a record's header has it. A block of ``T``
tokens has ``W = ceil(T / 64)`` words for each spec; the bits behind the last row are 0. A *mask word* holds the bits of
64 rows of one block, for every spec at the same index: ``block * W + word``. Where a block has at most 64 rows the mask
words are the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, InvalidInputError

WORD_BITS: Final = 64
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bits = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Values = NDArray[Any]
"""Of a spec's dtype."""
Blocks = Sequence[int] | Ints
_EACH: Final = np.uint64(1) << np.arange(WORD_BITS, dtype=np.uint64)  # for take(): a shift runs twice the code
_ALL: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_BITS: Final = np.uint64(WORD_BITS)


def words_of(block_tokens: int) -> int:
    """Validity words ``W`` that a block of ``block_tokens`` rows has for each spec."""
    return -(-block_tokens // WORD_BITS)


def full_bits(block_tokens: int) -> Bits:
    """Validity words ``[W]`` of a block whose rows are all valid."""
    counts = np.array([block_tokens])
    full: Bits = prefix_bits(counts, block_tokens)[0, 0]
    return full


def prefix_bits(counts: Ints, block_tokens: int) -> Bits:
    """Validity words ``[n, 1, W]`` with the first ``counts[i]`` bits set; a count outside the block is cut to it."""
    first = np.arange(words_of(block_tokens)) * WORD_BITS
    wanted = np.clip(counts, 0, block_tokens)
    left = wanted[:, None, None] - first
    in_word = np.clip(left, 0, WORD_BITS).astype(np.uint64)
    masks = _ALL >> (_BITS - in_word)
    return np.where(in_word > 0, masks, np.uint64(0))


def unpack_bits(words: Bits, block_tokens: int) -> Flags:
    """Validity words ``[n, W]`` as a mask ``[n, block_tokens]``."""
    ordered = np.ascontiguousarray(words.astype("<u8", copy=False))
    as_bytes = ordered.view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little", count=block_tokens)
    return bits.view(np.bool_)


def rows_in(words: Bits) -> int:
    """How many rows are valid in some spec, of blocks' validity words ``[..., specs, W]``."""
    specs = words.shape[-2]
    if specs > 1:
        words = np.bitwise_or.reduce(words, axis=-2)
    counts = np.bitwise_count(words)
    return int(counts.sum())


COUNT_END: Final = 1 << 31
_INT64: Final = np.dtype(np.int64)
REFUSALS: Final = (TypeError, ValueError, RuntimeError)
"""What numpy raises for values that it makes no array of: a ragged sequence; a tensor on a device, of bfloat16, or with
a gradient. Others, which a signal handler may raise amid a conversion, are the caller's."""


def integers(
    values: Any,
    field: str,
    wanted: str,
    *,
    ndim: int = 1,
    n: int | None = None,
    error: type[InvalidInputError] = InvalidInputError,
) -> Ints:
    """``values`` as a new int64 array of ``ndim`` dimensions, with ``n`` elements if given; ``error`` for other values,
    shapes or numbers of elements.

    New, because engines reuse one buffer for the slots of every step, and a step outlives the call. An empty sequence
    is an empty array whatever its type.
    """
    try:
        array = np.asarray(values)
    except REFUSALS as refusal:
        raise error(field, wanted, unreadable(values, refusal)) from refusal
    if array.dtype == _INT64 and array.ndim == ndim:  # nearly always; a third of astype() with caches cold
        found = array.copy()
    elif array.size == 0 and array.ndim >= 1:
        found = np.empty((0,) * ndim, np.int64)
    elif array.ndim != ndim or array.dtype.kind not in "iu":
        raise error(field, wanted, f"{array.dtype} of shape {array.shape}")
    else:
        largest = int(array.max())
        if largest >= 1 << 63:
            raise error(field, wanted, largest)
        found = array.astype(np.int64)
    if n is not None and found.size != n:
        raise error(field, f"{n}, {wanted}", found.size)
    return found


def unreadable(values: Any, refusal: Exception) -> str:
    """What came, where numpy makes no array of it."""
    return f"{type(values).__name__} ({type(refusal).__name__}: {refusal})"


def unsigned(values: Any, field: str, wanted: str, *, n: int) -> Bits:
    """``n`` integers as uint64 ``[n]``, or :class:`InvalidInputError`."""
    array: NDArray[Any] = values
    if not isinstance(values, np.ndarray) or values.dtype != np.uint64:
        array = integers(values, field, wanted)
    is_negative = array.dtype != np.uint64 and count(array < 0)
    if array.ndim != 1 or array.size != n or is_negative:
        raise InvalidInputError(field, f"{n}, {wanted}", f"{array.dtype} of shape {array.shape}")
    return array.astype(np.uint64)


def readable(given: Any) -> tuple[Ints | None, int]:
    """The integers ``[n]`` in ``given``, or ``None`` if it has other values; and how many values it has."""
    try:
        array = np.asarray(given).reshape(-1)
        with np.errstate(invalid="ignore"):
            numbers = array.astype(np.int64)
    except Exception:  # noqa: BLE001 - whatever it is: which integers it has is unknown
        return None, 1
    if array.dtype.kind not in "iuf":  # first: a comparison with others may raise
        return None, array.size
    is_same = numbers == array
    return (numbers if is_same.all() else None), array.size


def is_integer(value: object, low: int, end: int) -> bool:
    """Whether it is an integer in ``[low, end)``; a flag is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end


def count_in_range(value: int, field: str, low: int) -> int:
    """``value``, or :class:`ConfigError` unless it is an integer in ``[low, COUNT_END)``."""
    if not is_integer(value, low, COUNT_END):
        raise ConfigError(field, f"an integer in [{low}, {COUNT_END})", repr(value))
    return value


class SlotSpace:
    """The ``blocks`` blocks of one tier and their slots, ``tokens`` each, as callers number them."""

    def __init__(self, name: str, blocks: int, tokens: int) -> None:
        self._name = name
        self.blocks = blocks
        self.tokens = tokens
        self.end = blocks * tokens
        self.words_per_block = words_of(tokens)
        # A shift turns a slot into its mask word if a block has one word, or only whole words.
        unit = WORD_BITS if tokens % WORD_BITS == 0 else tokens
        is_power = unit & (unit - 1) == 0
        is_plain = is_power and (self.words_per_block == 1 or unit == WORD_BITS)
        self._shift = unit.bit_length() - 1 if is_plain else -1
        self._mask = unit - 1
        self._order: Ints = np.arange(blocks * self.words_per_block)
        self._seen: Ints = np.zeros(self._order.size, np.int64)  # scratch, as the next: no meaning between calls
        self._mark: Flags = np.zeros(self.end, np.bool_)

    def ids(self, blocks: Blocks, field: str = "blocks") -> Ints:
        """``blocks`` of this tier, with repetitions, as a new array; :class:`InvalidInputError` for others."""
        ids = integers(blocks, field, "a flat sequence of block ids")
        if not ids.size:
            return ids
        outlier = extreme(ids)
        if not 0 <= outlier < self.blocks:
            raise InvalidInputError(field, f"{self._name} block ids in [0, {self.blocks})", outlier)
        return ids

    def known(self, blocks: Blocks) -> tuple[Ints, Flags]:
        """``blocks`` as an array, and a mask: inside the tier, and no repetition. Lock held."""
        ids = integers(blocks, "blocks", "a flat sequence of block ids")
        good: Flags = np.ones(ids.size, np.bool_)
        is_inside = not ids.size or 0 <= extreme(ids) < self.blocks
        if not is_inside or not self.differ(ids):
            good[:] = False
            good[np.unique(ids, return_index=True)[1]] = True
            good &= ids.view(np.uint64) < np.uint64(self.blocks)
        return ids, good

    def differ(self, numbers: Ints) -> bool:
        """Whether no two of ``numbers``, of blocks or of mask words, are the same. The lock is held.

        Writes i at ``_seen[numbers[i]]`` and reads back: of two equal numbers the first reads the second's position.
        """
        if numbers.size > self._order.size:
            return False
        order = self._order[: numbers.size]
        self._seen[numbers] = order
        return self._seen.take(numbers).tobytes() == order.tobytes()  # as bytes: == touches more code

    def among(self, ids: Ints, others: Ints) -> Flags:
        """Which of ``ids``, of blocks or slots, are in ``others``: a tenth of what ``np.isin`` costs. Lock held."""
        self._mark[others] = True
        try:
            return self._mark.take(ids)
        finally:
            self._mark[others] = False

    def without(self, mine: Flags | None, of: Ints, those: Ints) -> Flags:
        """``mine [n]`` (``None``: all) of blocks or slots ``of [n]``, without ``those``. The lock is held."""
        kept = ~self.among(of, those)
        return kept if mine is None else mine & kept

    def mask_words_of(self, slots: Ints) -> tuple[Ints, Bits] | None:
        """The mask words of ``slots``, each once, and their bits; ``None`` if a slot is given twice. Lock held."""
        mask_words, bits = self.bit_by_bit(slots)
        runs = slots.size > 1 and slots[1] == slots[0] + 1  # a prefill, if any, comes first
        if not runs and self.differ(mask_words):  # one row of each sequence, as decode has them
            return mask_words, bits
        mask_words, bits = self.merged(mask_words, bits)
        if not self.differ(mask_words):
            mask_words, bits = self.mask_words_of_ordered(np.sort(slots))
        different = int(np.bitwise_count(bits).sum())
        return (mask_words, bits) if different == slots.size else None

    def bit_by_bit(self, slots: Ints) -> tuple[Ints, Bits]:
        """The mask word of each slot, and its one bit there."""
        if self._shift >= 0:
            return slots >> self._shift, _EACH.take(slots & self._mask)
        blocks, offsets = np.divmod(slots, self.tokens)
        mask_words = blocks * self.words_per_block + (offsets >> 6)
        bits = _EACH.take(offsets & 63)
        return mask_words, bits

    def mask_words_of_ordered(self, slots: Ints) -> tuple[Ints, Bits]:
        """The mask words of ``slots`` in order, each once, and the bits in each."""
        return self.merged(*self.bit_by_bit(slots))

    def merged(self, mask_words: Ints, bits: Bits) -> tuple[Ints, Bits]:
        """Runs of equal neighbours in ``mask_words``, merged to one each, with their bits or'ed."""
        if not mask_words.size:
            return mask_words, bits
        differs = mask_words[1:] != mask_words[:-1]
        is_first = np.concatenate(([True], differs))
        firsts = np.flatnonzero(is_first)
        return mask_words[firsts], np.bitwise_or.reduceat(bits, firsts)

    def blocks_of(self, mask_words: Ints) -> Ints:
        """The blocks of mask words, each once."""
        if self.words_per_block == 1:
            return mask_words
        blocks = mask_words // self.words_per_block
        return np.unique(blocks)


def extreme(ids: Ints) -> int:
    """The lowest of ``ids`` if it is negative, else the largest."""
    lowest: int = ids.item(ids.argmin())
    return lowest if lowest < 0 else ids.item(ids.argmax())

"""How rows are published in a region and read back without a lock: the only place that knows this order.

A block's word is ``generation << 16 | sequence``. One writer at a time (a table, under its lock) changes a block:

1. it clears validity bits (:func:`clear_bits`, :func:`put_generations`),
2. it changes the word: another sequence of the same generation, or a new generation with sequence 0,
3. it writes row bytes (through :func:`rows_by_spec`),
4. it sets the bits of the rows that it wrote (:func:`add_bits`).

A reader in any thread or process takes the word, the bits, the bytes and the word again (:func:`gather`). Say both
looks see the same word. A bit seen in between was set after its row's bytes were complete. Had those bytes changed
again before the second look, the word would have changed before them. So the bytes are those of the word's generation.
Were 1 and 2 in the other order, a reader between them would take the old rows for those of the new generation.

The proof needs stores to become visible in the order in which they are made. x86-64 promises that between processors;
elsewhere a reader without the writer's lock is refused, and one in the writer's process takes the lock
(:data:`STORES_ARE_ORDERED`). It also needs a copy to see fewer than 65,536 changes within one generation: the sequence
has 16 bits.

*Mask words* are those of :mod:`cache_manager.slots`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from cache_manager.errors import InvalidInputError, RegionError
from cache_manager.ports import Region
from cache_manager.slots import Bits, Bytes, Flags, Ints, Values, full_bits, unpack_bits
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

GENERATION_SHIFT: Final = 16
GENERATION_END: Final = 1 << 47
"""Generations are below this; a word has room for one bit more."""
SEQUENCE_MASK: Final = np.uint64((1 << GENERATION_SHIFT) - 1)
READ_RETRIES_MAX: Final = 8
_SHIFT: Final = np.uint64(GENERATION_SHIFT)
_ONE: Final = np.uint64(1)
STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine promises that order; looked up at every read, because a test may change it."""


@dataclass(slots=True)
class Copies:
    """Copies of some blocks' records, one after the other."""

    layout: RecordLayout
    rows: Bytes  # [n, layout.nbytes]


RowMemory = Region | Copies
Places = slice | Ints


# ---- the writer's side: one thread at a time, under the table's lock -----------------------------------------------


def rows_by_spec(memory: RowMemory) -> tuple[Bytes, ...]:
    """By spec, views ``[n, block_tokens, row_nbytes]`` of ``n`` blocks' rows. Drop a region's before its close."""
    layout = memory.layout
    rows = memory.rows
    views: list[Bytes] = []
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        of_spec = rows[:, offset : offset + spec.block_nbytes]
        views.append(of_spec.reshape(len(rows), spec.block_tokens, spec.row_nbytes))
    return tuple(views)


class Items:
    """The rows of a region as the hot paths index them, one item a row; dropped before the region is closed.

    ``views`` are by spec: ``[blocks, block_tokens]``, or a flat array by slot where one spec fills the records. The
    layout decides, for all specs: strides do not, because that of an axis of length 1 means nothing.
    """

    __slots__ = ("_flat", "_layout", "_types", "views")

    def __init__(self, region: Region) -> None:
        views: list[Values] = []
        for rows in rows_by_spec(region):
            row_nbytes = rows.shape[2]
            views.append(rows.view(f"V{row_nbytes}")[..., 0])
        self._layout = region.layout
        self._types = tuple(each.dtype for each in views)
        self._flat = region.layout.specs[0].block_nbytes == region.layout.nbytes
        if self._flat:
            views = [views[0].reshape(-1)]
        self.views: tuple[Values, ...] = tuple(views)

    def of(self, spec: int, rows: Values, tokens: int, kept: Ints | None) -> Values:
        """Of ``rows [tokens, *row_shape]`` those at ``kept [n]`` (``None``: all), as one item each, or a
        :class:`RowError`."""
        aux_spec = self._layout.specs[spec]
        values = aux_spec.rows(rows, tokens=tokens, kept=kept, copy=False)
        flat = np.ascontiguousarray(values).reshape(-1)
        return flat.view(self._types[spec])

    def at(self, slots: Ints) -> Any:
        """The index of ``slots [n]`` in each of the views."""
        return slots if self._flat else np.divmod(slots, self._layout.block_tokens)

    def drop(self) -> None:
        """Make the region closable."""
        self.views = ()


def copies_of(region: Region, ids: Ints, bits: Bits) -> Bytes:
    """Records ``[n, layout.nbytes]`` of blocks ``ids [n]``, with their rows ``bits [n, specs, W]``: other bytes are 0.

    What else lies in a block is of another life, perhaps of another tenant: it does not leave with a copy.
    """
    layout = region.layout
    tokens = layout.block_tokens
    full = full_bits(tokens)
    copies = Copies(layout, region.rows[ids])
    ends = (*layout.offsets[1:], layout.nbytes)
    for index, rows in enumerate(rows_by_spec(copies)):
        spec = layout.specs[index]
        padding = layout.offsets[index] + spec.block_nbytes
        end = ends[index]
        copies.rows[:, padding:end] = 0
        of_spec = bits[:, index]
        is_partial = (of_spec != full).any(axis=1)
        partial = np.flatnonzero(is_partial)
        if partial.size:
            keep = unpack_bits(of_spec[partial], tokens)
            rows[partial] *= keep[..., None]
    return copies.rows


def copy_rows(source: RowMemory, at: int, target: RowMemory, to: int, bits: Bits) -> None:
    """Copy rows ``bits [specs, W]`` of block ``at`` of ``source`` to block ``to`` of ``target``, and no other byte."""
    targets = rows_by_spec(target)
    keep = unpack_bits(bits, source.layout.block_tokens)
    for spec, rows in enumerate(rows_by_spec(source)):
        wanted = keep[spec]
        targets[spec][to][wanted] = rows[at][wanted]


def put_generations(region: Region, ids: Ints, generations: Ints) -> None:
    """Begin a new life of blocks ``ids [n]``, each once: no row is readable, the word names ``generations [n]``."""
    upper = generations.astype(np.uint64)
    words = upper << _SHIFT
    bits = _by_block(region)
    bits[ids] = np.zeros(1, bits.dtype)
    region.words[ids] = words


def put_all_generations(region: Region, generations: Ints) -> None:
    """No row of any block is readable, every word changes and names ``generations [blocks]``, whatever was there."""
    region.valid[:] = 0
    sequences = (region.words + _ONE) & SEQUENCE_MASK
    upper = generations.astype(np.uint64) << _SHIFT
    region.words[:] = upper | sequences


def generations_in(region: Region) -> Ints:
    """The generation ``[blocks]`` that each block's word names."""
    return (region.words >> _SHIFT).astype(np.int64)


def clear_bits(region: Region, mask_words: Ints, bits: Bits) -> None:
    """Make rows ``bits [n]`` of ``mask_words [n]``, each once, unreadable in every spec; then their bytes may change.

    A block that had none of them readable keeps its word, because no reader can have such a row.
    """
    had = None
    specs = region.valid.shape[1]
    for spec in range(specs):
        words, at = _words_at(region, spec, mask_words)
        now = words[at]
        hit = now & bits
        if hit.tobytes() != bytes(hit.nbytes):  # some readable; count_nonzero() touches more code
            words[at] = now & ~bits
            had = hit if had is None else had | hit
    if had is None:
        return
    changed = mask_words[had != 0]
    blocks = changed // region.valid.shape[2]  # a block that is there twice changes once
    words = region.words[blocks]
    sequences = (words + _ONE) & SEQUENCE_MASK
    generations = words & ~SEQUENCE_MASK
    region.words[blocks] = generations | sequences


def add_bits(region: Region, spec: int, mask_words: Ints, bits: Bits) -> None:
    """Make the rows ``bits [n]`` of ``mask_words [n]``, each once, readable in ``spec``; their bytes are in place."""
    words, at = _words_at(region, spec, mask_words)
    words[at] |= bits


def bits_of(region: Region, ids: Ints) -> Bits:
    """The validity words ``[n, specs, W]`` of blocks ``ids [n]``: a copy, for the holder of the writer's lock."""
    return region.valid.take(ids, axis=0)


def have_all(region: Region, ids: Ints, specs: Sequence[int]) -> Flags:
    """Which of blocks ``ids [n]`` have every row of every one of ``specs``; for the holder of the writer's lock."""
    full = full_bits(region.layout.block_tokens)
    bits = bits_of(region, ids)
    required = bits[:, specs, :]
    is_full = required == full
    complete: Flags = is_full.all(axis=(1, 2))
    return complete


def have_none(region: Region, ids: Ints) -> Flags:
    """Which of blocks ``ids [n]`` have no readable row at all; for the holder of the writer's lock."""
    bits = bits_of(region, ids)
    empty: Flags = (bits == 0).all(axis=(1, 2))
    return empty


def bits_in(valid: bytes, region: Region) -> Bits:
    """The validity words ``[specs, W]`` of the region's specs in those of a record, which may have more specs."""
    specs, words = region.valid.shape[1:]
    bits = np.frombuffer(valid, "<u8", specs * words)
    return bits.reshape(specs, words)


def put_bits(region: Region, ids: Ints, bits: Bits) -> None:
    """Make ``bits [n, specs, W]`` the validity words of blocks ``ids [n]``."""
    items = _by_block(region)
    flat = np.ascontiguousarray(bits).reshape(-1)
    items[ids] = flat.view(items.dtype)


def _by_block(region: Region) -> Values:
    """Each block's validity words as one item: an index of rows of words costs five times as much."""
    _, specs, words = region.valid.shape
    nbytes = 8 * specs * words
    flat = region.valid.reshape(-1)
    return flat if nbytes == 8 else flat.view(f"V{nbytes}")


def _words_at(region: Region, spec: int, mask_words: Ints) -> tuple[Bits, Any]:
    """A spec's validity words, and where in them those of ``mask_words [n]`` are."""
    words = region.valid.shape[2]
    if words == 1:
        return region.valid[:, spec, 0], mask_words
    return region.valid[:, spec], np.divmod(mask_words, words)


# ---- the reader's side: no lock, any thread or process -------------------------------------------------------------


def require_ordered_stores(reader: str) -> None:
    """Raise :class:`RegionError` on a machine where ``reader`` could see stores in another order than made."""
    if not STORES_ARE_ORDERED:
        wanted = "a machine that orders stores (x86-64)"
        raise RegionError(f"{reader}: wanted {wanted} to read without a lock, got {platform.machine()}")


def gather(region: Region, spec: int, ids: Ints, *, locked: bool = False) -> tuple[Bytes, Bits, Bits]:
    """Rows ``[n, block_nbytes]``, validity words ``[n, W]`` and block words ``[n]`` of blocks ``ids [n]``, copied.

    The rows and bits of a block are those of the generation that its word names. A block that changes under each of
    ``READ_RETRIES_MAX`` copies comes back without a valid row. A block may be asked for twice. Raises
    :class:`RegionError` where stores are not ordered and the writer's lock is not held: ``locked``.
    """
    if not locked:
        require_ordered_stores("gather")
    of_spec = _bytes_of(region, spec)
    nbytes = of_spec.shape[1]
    source = of_spec.view(f"V{nbytes}")[:, 0]  # one item a block: numpy copies items faster than rows of bytes
    valid = region.valid[:, spec]

    def copied(places: Places) -> tuple[Bits, Values]:
        blocks = ids[places]
        bits = valid[blocks]
        have_rows = bits.any(axis=1)
        return bits, _present(source, have_rows, blocks)

    bits, rows, words = _unchanged(region, ids, copied)
    as_bytes = rows.view(np.uint8)
    return as_bytes.reshape(len(ids), nbytes), bits, words


def gather_slots(region: Region, spec: int, blocks: Ints, offsets: Ints) -> tuple[Bytes, Flags, Bits]:
    """Rows ``[n, row_nbytes]``, their validity ``[n]`` and block words ``[n]`` of single rows, copied.

    Row ``offsets[i]`` of block ``blocks[i]``, by the protocol of :func:`gather`: a row whose block changes under each
    copy comes back without validity. A step's newest rows are one row of each of many blocks: this copies no others.
    """
    require_ordered_stores("gather_slots")
    row_nbytes = region.layout.specs[spec].row_nbytes
    source = _bytes_of(region, spec).view(f"V{row_nbytes}")  # one item a row
    valid = region.valid[:, spec]
    mask_words = offsets >> 6
    shifts = (offsets & 63).astype(np.uint64)

    def copied(places: Places) -> tuple[Bits, Values]:
        of = blocks[places]
        bits = valid[of, mask_words[places]]
        return bits, _present(source, bits != 0, of, offsets[places])

    bits, rows, words = _unchanged(region, blocks, copied)
    readable = ((bits >> shifts) & _ONE).astype(np.bool_)
    as_bytes = rows.view(np.uint8)
    return as_bytes.reshape(len(blocks), row_nbytes), readable, words


def _unchanged(
    region: Region, blocks: Ints, copied: Callable[[Places], tuple[Bits, Values]]
) -> tuple[Bits, Values, Bits]:
    """The reader's protocol. ``copied`` takes bits and then rows of the blocks at some places of ``blocks [n]``; the
    bits are 0 where a block changed under each of ``READ_RETRIES_MAX`` copies. And the blocks' words ``[n]``."""
    words = region.words[blocks]
    bits, rows = copied(slice(None))
    changed = np.flatnonzero(region.words[blocks] != words)
    for _ in range(READ_RETRIES_MAX - 1):
        if not changed.size:
            break
        again = blocks[changed]
        words[changed] = region.words[again]
        bits[changed], rows[changed] = copied(changed)
        is_other = region.words[again] != words[changed]
        changed = changed[is_other]
    bits[changed] = 0
    return bits, rows, words


def _bytes_of(region: Region, spec: int) -> Bytes:
    """The bytes ``[blocks, block_nbytes]`` of a spec in each record."""
    layout = region.layout
    offset = layout.offsets[spec]
    nbytes = layout.specs[spec].block_nbytes
    return region.rows[:, offset : offset + nbytes]


def _present(source: Values, have_rows: Any, *at: Ints) -> Values:
    """The items of ``source`` at these places ``[n]``, bool ``have_rows [n]``; zeros where there are no rows, and so
    perhaps no memory: a read would bring it back."""
    if have_rows.all():
        return source[at] if len(at) > 1 else source[at[0]]
    items = np.zeros(have_rows.size, source.dtype)
    some = (places[have_rows] for places in at)
    items[have_rows] = _present(source, np.ones(1, np.bool_), *some)
    return items


# ---- rows that were read: the reader's own copy, in which nothing but valid rows means anything ----------------------

MISSING_BYTE: Final = 0xFF


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were read: ``values`` ``[n, *row_shape]`` and ``valid`` ``[n]``; both are the caller's own.

    The bytes of a row that is not valid are all 0xFF.
    """

    values: Values
    valid: Flags

    @classmethod
    def of(cls, spec: AuxBlockDataSpec, copied: Bytes, bits: Bits, window: slice) -> Self:
        """The rows ``window`` of blocks copied one after the other, ``[n, block_nbytes]``; takes ``copied`` over.

        ``bits`` are the blocks' validity words ``[n, W]``.
        """
        valid = unpack_bits(bits, spec.block_tokens).reshape(-1)
        rows = copied.reshape(-1, spec.row_nbytes)
        return cls.of_mask(spec, rows[window], valid[window])

    @classmethod
    def of_mask(cls, spec: AuxBlockDataSpec, rows: Bytes, valid: Flags) -> Self:
        """Copied ``rows [n, row_nbytes]``, of which those in ``valid [n]`` mean anything; takes both over."""
        if np.count_nonzero(valid) != valid.size:
            rows[~valid] = MISSING_BYTE
        values = rows.reshape(-1).view(spec.numpy_dtype)
        return cls(values.reshape(valid.size, *spec.row_shape), valid)


def window_of(ids: int, start: int, stop: int | None, block_tokens: int) -> tuple[slice, slice]:
    """For rows ``[start, stop)`` of a sequence that lies in ``ids`` blocks: the blocks that hold them, and where
    the rows are among those blocks' rows.

    Without ``stop``: to the end of the last block. Raises :class:`InvalidInputError` for rows outside the blocks.

    >>> window_of(10, 70, 130, block_tokens=64)
    (slice(1, 3, None), slice(6, 66, None))
    """
    tokens = ids * block_tokens
    end = tokens if stop is None else stop
    integer = (int, np.integer)
    are_integers = isinstance(start, integer) and isinstance(end, integer)
    if not are_integers or not 0 <= start <= end <= tokens:
        raise InvalidInputError("start, stop", f"0 <= start <= stop <= {tokens}, integers", f"{start!r}, {end!r}")
    n = int(end) - int(start)
    first = int(start) // block_tokens
    if not n:
        return slice(first, first), slice(0, 0)
    last = -(-int(end) // block_tokens)
    offset = int(start) - first * block_tokens
    return slice(first, last), slice(offset, offset + n)

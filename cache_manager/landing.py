"""Where KV and rows of another process land in device blocks.

A block's rows may come in while steps write its later rows: a record's row lands only where no row is readable and no
step in flight will put one, and only beside KV of its own origin. So the rows of the KV that is really used win, and a
row lands at most once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from cache_manager.bits import prefix_bits, rows_in, unpack_bits
from cache_manager.books import Books
from cache_manager.errors import BlockBusyError, InvalidInputError, RecordError
from cache_manager.lifecycle import IN_MOTION, State
from cache_manager.memory import Copies, places
from cache_manager.record import Buffer, RecordHeader
from cache_manager.spec import RecordLayout
from cache_manager.table import BlockTable


class Landing(ABC):
    """The part of a set of blocks that takes in what comes, whether blocks have owners or an engine owns them."""

    layout: RecordLayout
    _books: Books

    @property
    @abstractmethod
    def _device(self) -> BlockTable: ...

    def bind_origin(self, block: int, generation: int, origin: int, tokens: int) -> bool:
        """The KV of the block's first ``tokens`` tokens has come from elsewhere, where it had this ``origin``.

        Rows of another origin that had come before are dropped. ``False``: the block is in another life than
        ``generation``, or nobody holds it. Raises ``BlockBusyError`` while it is in motion.
        """
        if not isinstance(origin, int) or not 0 < origin < 1 << 64:
            raise InvalidInputError("origin", "an integer in [1, 2**64)", repr(origin))
        table = self._device
        (index,) = table.ids_often([block]).tolist()
        with self._books.guard:
            if not _may_install(table, index, generation):
                self._books.count("late_installs_dropped")
                return False
            came, rows_tokens = table.installed.get(index, (0, 0))
            named = int(table.origin[index])
            if came == origin != named and tokens <= rows_tokens:
                return True  # rows of this KV had come, and a step has gone on behind them
            if named not in (0, origin) or table.own[index]:
                table.forget(np.array([index]))
            table.carry_origin(np.array([index]), np.array([origin], np.uint64))
            table.installed[index] = (origin, tokens)
            return True

    def install(self, block: int, generation: int, header: RecordHeader, payload: Buffer) -> int:
        """Put the rows of a record into a held device block, where no row is readable and no step will write one.

        How many rows landed. The record's sum and key were verified by the caller. A row lands beside KV of its own
        origin only: KV that was computed here, or came under another origin (:meth:`bind_origin`), gets none of it, nor
        does a block in another life than ``generation``, one that nobody holds, or a record of another namespace; all
        that is counted. Steps may write other rows meanwhile. Raises ``BlockBusyError`` while the block is in motion
        and ``RecordError`` for a record that does not fit the layout.
        """
        table, books = self._device, self._books
        bits = _bits_in(self.layout, table.full, header, payload)
        (index,) = table.ids_often([block]).tolist()
        with self._books.guard:
            if not books.keys.owns(header.key) or not _may_install(table, index, generation):
                books.count("late_installs_dropped")
                return 0
            tokens = _beside_its_kv(table, index, header.origin, bits)
            if not tokens:
                books.count("installs_of_another_origin_dropped")
                return 0
            came = prefix_bits(np.array([tokens]), table.tokens)[0]
            landed = bits & came & ~table.region.valid[index] & ~_owed(table, index)
            keep = unpack_bits(landed, table.tokens)
            source = places(Copies(self.layout, np.frombuffer(payload, np.uint8)[None]))
            for i, rows in enumerate(places(table.region)):
                rows[index][keep[i]] = source[i][0][keep[i]]
            table.region.valid[index] |= landed
            books.count("rows_installed", n := rows_in(landed))
            return n


def _may_install(table: BlockTable, block: int, generation: int) -> bool:
    """Whether the block is held in that life; ``BlockBusyError`` while it is in motion or a device writes it."""
    state = State(int(table.states[block]))
    if int(table.generations[block]) != generation:
        return False
    if state in IN_MOTION:
        raise BlockBusyError(f"{table.tier} block {block}", "HELD to install into it", state.name)
    return state is State.HELD


def _beside_its_kv(table: BlockTable, block: int, origin: int, bits: NDArray[np.uint64]) -> int:
    """To how many of the block's first tokens rows of ``origin`` belong; 0: to none of its KV.

    A block whose KV nobody has named takes the origin of the first rows ``bits`` that come, as far as these go.
    """
    came, tokens = table.installed.get(block, (0, 0))
    if origin and not int(table.origin[block]):
        table.carry_origin(np.array([block]), np.array([origin], np.uint64))
        came = origin
    if not origin or came != origin:
        return 0
    if int(table.origin[block]) == came:  # no step has gone on behind them
        rows = np.bitwise_or.reduce(bits, axis=0)
        tokens = max(tokens, int(np.flatnonzero(unpack_bits(rows[None], table.tokens)[0]).max(initial=-1)) + 1)
        table.installed[block] = (origin, tokens)
    return tokens


def _bits_in(
    layout: RecordLayout, full: NDArray[np.uint64], header: RecordHeader, payload: Buffer
) -> NDArray[np.uint64]:
    """The record's validity words ``[specs, words]``; :class:`RecordError` unless it is one of this layout."""
    if header.fingerprint != layout.fingerprint:
        raise RecordError("fingerprint", layout.fingerprint.hex(), header.fingerprint.hex())
    nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if nbytes != layout.nbytes:
        raise RecordError("payload size", layout.nbytes, nbytes)
    if len(header.valid) != 8 * layout.valid_words * len(layout.specs):
        raise RecordError("bitmap size", 8 * layout.valid_words * len(layout.specs), len(header.valid))
    bits = np.frombuffer(header.valid, "<u8").astype(np.uint64).reshape(len(layout.specs), layout.valid_words)
    if (bits & ~full).any():
        raise RecordError("bitmap", f"bits for {layout.block_tokens} rows of each spec", "others")
    return bits


def _owed(table: BlockTable, block: int) -> NDArray[np.uint64]:
    """Rows ``[words]`` of the block that steps in flight will write; the lock is held."""
    bits = np.zeros(table.words_per_block, np.uint64)
    if table.steps:
        first = block * table.tokens
        numbers = table.writer[first : first + table.tokens]
        owed = np.isin(numbers, list(table.steps))
        for step in table.steps.values():
            if step.in_place:
                slots = step.reach[(step.reach >= first) & (step.reach < first + table.tokens)]
                owed[slots - first] = True
        cells, marks = table.cells.of_ordered(first + np.flatnonzero(owed))
        bits[cells - block * table.words_per_block] = marks
    return bits

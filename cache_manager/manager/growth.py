"""What a forward pass asks of a block manager: room for the next tokens, their slots, and that they can be found.

Each of the three comes in two forms: for one sequence and any number of tokens, and for one more token of each of many
sequences. The second is what a decode step does; its arrays are one element a sequence, and only the sequences that
need a block, or have filled one, cost Python. The two forms differ in which block they take, and in nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.checks import count_in_range, integers
from cache_manager.errors import BlockStateError, InvalidInputError, TransferProcessError
from cache_manager.keys import Tokens
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequences import Ints, Sequences

logger = logging.getLogger(__name__)

FEW: Final = 4
"""Fewer sequences than this are cheaper one by one."""


class GrowingSequences:
    """The sequences of a block manager and the blocks that they have; its calls that a forward pass makes."""

    def __init__(self, aux: AuxBlocks, *, caching: bool, sequences_max: int) -> None:
        self.aux, self._caching, self._tokens = aux, caching, aux.block_tokens
        self._counts: Counter[str] = Counter()
        self._pool = BlockPool(aux, self._counts)
        self._sequences = Sequences(aux.block_tokens, rows_max=count_in_range(sequences_max, "sequences_max", 1))

    # ---------------------------------------------------------------- room

    def append(self, owner: str, total_tokens: int) -> bool:
        """Make room so that the sequence can hold ``total_tokens``; ``False`` when there is none, nothing changed.

        A block that would be written and that another owner holds too is copied first (copy-on-write).
        """
        return self._append(self._sequences.ready(owner), total_tokens)

    def _append(self, row: int, total: int) -> bool:
        s, pool = self._sequences, self._pool
        have, wanted, first = s.length_at[row], -(-total // self._tokens), s.computed_at[row] // self._tokens
        if wanted <= have and wanted - first == 1 and not pool.others_use(s.block_at[row * s.width + first]):
            return True
        shared = np.flatnonzero(pool.used_by_others(s.blocks[row, first : min(wanted, have)])) + first
        columns = [*shared.tolist(), *range(have, wanted)]
        if not columns:
            return True
        return self._give([(row, i) for i in columns], whole=True) > 0

    def append_batch(self, seqs: Any) -> NDArray[np.bool_]:
        """:meth:`append` of one token to each of ``seqs`` ``[n]``: ``[n]``, in their order.

        ``False`` where there was no room, and then that sequence is as it was. Raises before anything is changed if one
        is not on the device, waits for the store, or is given twice.
        """
        s, pool, rows = self._sequences, self._pool, self._sequences.ready_rows(seqs)
        if rows.size < FEW:
            return np.array([self._append(row, s.computed_at[row] + 1) for row in rows.tolist()], np.bool_)
        column, tail = self._tails(rows)
        new = column >= s.length.take(rows)
        needs = new | pool.used_by_others(tail)
        room: NDArray[np.bool_] = np.ones(rows.size, np.bool_)
        if not count(needs):  # most often: one sequence in block_tokens needs a block, and one after a fork
            return room
        chosen = np.flatnonzero(needs)
        copies = count(new.take(chosen)) < chosen.size
        if copies:
            chosen = self._leaving(chosen, tail, new)
        places = list(zip(rows.take(chosen).tolist(), column.take(chosen).tolist(), strict=True))
        given = self._give(places)
        if copies:  # who was to keep a block cannot where another could not leave it
            column, tail = self._tails(rows)
            room &= (column < s.length.take(rows)) & ~pool.used_by_others(tail)
        elif given < len(places):
            room[chosen[given:]] = False
        return room

    def _leaving(self, chosen: Ints, tail: Ints, new: NDArray[np.bool_]) -> Ints:
        """Those of ``chosen`` that get a block: of all who share one that nobody finds by key, the last keeps it."""
        pool, others = self._pool, dict[int, int]()
        leaving = []
        for i, block, is_new in zip(chosen.tolist(), tail[chosen].tolist(), new[chosen].tolist(), strict=True):
            if not is_new:
                others[block] = others.get(block, pool.readers(block)) - 1
                if others[block] == 0 and not pool.index.indexed[block]:
                    continue
            leaving.append(i)
        return np.array(leaving, np.int64)

    def _give(self, places: list[tuple[int, int]], *, whole: bool = False) -> int:
        """A block of its own for each of ``places``, row and column: a copy of what the row has there, or a new one.

        For the first of them when there are fewer, with ``whole`` for all or none; how many. Sequences whose blocks
        could not be copied are as they were.
        """
        s = self._sequences
        fresh = self._pool.take([s.record(row).owner for row, _ in places], whole=whole)
        got = list(zip(places, fresh, strict=False))
        copied = [each for each in got if each[0][1] < s.length_at[each[0][0]]]
        if copied:
            try:
                self._copy(copied)
            except TransferProcessError as error:
                self._give_back(got if whole else copied)
                not_moved(self._counts, error)
                got = [] if whole else [each for each in got if each not in copied]
            except BaseException:
                self._give_back(got)
                raise
        for (row, i), block in got:
            if i >= s.length_at[row]:
                s.make_wide(i + 1)
                s.block_at[row * s.width + i] = block
                s.length_at[row] = i + 1
        return len(got)

    def _copy(self, copies: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Copy-on-write: the blocks at places, row and column, give way to copies."""
        s, tokens = self._sequences, self._tokens
        pairs = [(int(s.blocks[place]), block) for place, block in copies]
        rows = [min(tokens, max(0, s.computed_at[row] - i * tokens)) for (row, i), _ in copies]
        self.aux.copy(pairs, rows)
        for (place, copy), (source, _) in zip(copies, pairs, strict=True):
            s.blocks[place] = copy
            self._give_back([(place, source)])
        self._counts["cow_blocks"] += len(copies)
        self._counts["cow_tokens"] += sum(rows)

    def _give_back(self, blocks: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Blocks that sequences, by row and column, have no more."""
        for (row, _), block in blocks:
            self.aux.free(self._sequences.record(row).owner, [block])
            self._pool.let_go(np.array([block]))

    # ---------------------------------------------------------------- slots

    def slots(self, owner: str, start: int, stop: int) -> NDArray[np.int64]:
        """Device slots of the tokens ``[start, stop)``, to be written.

        Raises :class:`BlockStateError` if one of their blocks is shared, or can be found by key, whoever has computed
        it: what is only to be read is in :meth:`table`.
        """
        s, tokens, row = self._sequences, self._tokens, self._sequences.ready(owner)
        room = s.length_at[row] * tokens
        if not 0 <= start <= stop <= room:
            raise InvalidInputError("start, stop", f"0 <= start <= stop <= {room}", f"{start}, {stop}")
        if stop - start == 1:
            return np.array([self._slot(row, start)], np.int64)
        first = start // tokens
        blocks = s.blocks[row, first : -(-stop // tokens) if stop > start else first]
        self._check_alone(blocks)
        slots: Ints = (blocks[:, None] * tokens + np.arange(tokens)).reshape(-1)
        return slots[start - first * tokens : stop - first * tokens]

    def slots_batch(self, seqs: Any) -> NDArray[np.int64]:
        """The slot ``[n]`` of the next token of each of ``seqs`` ``[n]``, which :meth:`append_batch` made room for."""
        s, rows = self._sequences, self._sequences.ready_rows(seqs)
        if rows.size < FEW:
            few: list[int] = rows.tolist()
            for row in few:
                if s.computed_at[row] >= s.length_at[row] * self._tokens:
                    raise self._no_room(row)
            return np.array([self._slot(row, s.computed_at[row]) for row in few], np.int64)
        column, tail = self._tails(rows)
        if count(short := column >= s.length.take(rows)):
            raise self._no_room(int(rows[int(np.argmax(short))]))
        self._check_alone(tail)
        slots: Ints = (tail - column) * self._tokens + s.computed.take(rows)
        return slots

    def _slot(self, row: int, position: int) -> int:
        s, column = self._sequences, position // self._tokens
        block: int = s.block_at[row * s.width + column]
        if self._pool.others_use(block):
            raise _used(block)
        return block * self._tokens + position - column * self._tokens

    def _check_alone(self, blocks: Ints) -> None:
        if count(used := self._pool.used_by_others(blocks)):
            raise _used(int(blocks[int(np.argmax(used))]))

    def _no_room(self, row: int) -> BlockStateError:
        owner = f"owner {self._sequences.record(row).owner!r}"
        return BlockStateError(owner, "append() before it is written", "no room for a further token")

    def _tails(self, rows: Ints) -> tuple[Ints, Ints]:
        """For the next token of each row: which of the row's blocks it is in, and that block; of a block that the row
        does not have yet, any."""
        s = self._sequences
        column = s.computed.take(rows) // self._tokens
        return column, s.flat.take(rows * s.width + column, mode="clip")

    # ---------------------------------------------------------------- what can be found

    def publish(self, owner: str, tokens: Tokens) -> None:
        """The KV and the committed rows of ``tokens``, all that the sequence has computed so far, are in place.

        Full blocks among them can be found by later sequences from here on.
        """
        s, size, row = self._sequences, self._tokens, self._sequences.ready(owner)
        done, total, room = s.computed_at[row], len(tokens), s.length_at[row] * size
        if not done <= total <= room:
            raise InvalidInputError("tokens", f"{done} to {room} tokens", total)
        first = done - done % size
        if total == done + 1:
            try:
                self._publish_next(row, tokens[done])
            except (TypeError, ValueError):  # not a token id
                integers(tokens[done:], "tokens", "a flat sequence of integers")
                raise
            return
        ids = integers(tokens[first:], "tokens", "a flat sequence of integers").astype("<i8", copy=False)
        full = (total - first) // size
        s.filling[row, : total - first - full * size] = ids[full * size :]
        s.computed_at[row] = total
        if full:
            columns = range(first // size, first // size + full)
            self._find([row] * full, columns, ids[: full * size].tobytes())

    def _publish_next(self, row: int, token: int) -> None:
        """One more token; the sequence has room for it."""
        s, size, done = self._sequences, self._tokens, self._sequences.computed_at[row]
        column = done // size
        start = row * size
        s.filling_at[start + done - column * size] = token
        s.computed_at[row] = done + 1
        if done + 1 == (column + 1) * size:
            self._find([row], [column], s.flat_filling[start : start + size].tobytes())

    def publish_batch(self, seqs: Any, tokens: Any) -> None:
        """:meth:`publish` of one more token of each of ``seqs``; ``tokens`` ``[n]`` are these."""
        s, size, rows = self._sequences, self._tokens, self._sequences.ready_rows(seqs)
        ids = integers(tokens, "tokens", "one integer for each sequence", n=rows.size)
        done = s.computed.take(rows)
        column = done // size
        if count(short := column >= s.length.take(rows)):
            raise self._no_room(int(rows[int(np.argmax(short))]))
        if rows.size < FEW:
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                self._publish_next(row, token)
            return
        at = done - column * size
        s.flat_filling[rows * size + at] = ids
        s.computed[rows] = done + 1
        if count(full := at == size - 1):
            filled = rows[full]
            self._find(filled.tolist(), column[full].tolist(), s.filling[filled].tobytes())

    def _find(self, rows: Sequence[int], columns: Sequence[int], ids: bytes) -> None:
        """The blocks at ``columns`` of ``rows`` are full of ``ids``, one block after the other: they are found by key.

        Not those of a sequence from before a reset: their KV is of other weights than the keys would say.
        """
        if not self._caching:
            return
        s, current, step, publish = self._sequences, self.aux.keys, 8 * self._tokens, self._pool.publish
        records, block_at, width, at = s.records, s.block_at, s.width, 0
        for row, column in zip(rows, columns, strict=True):
            record = records[row]
            assert record is not None, f"row {row} has ended"
            if record.base is current:
                publish(record.add(column, ids[at : at + step]), block_at[row * width + column])
            at += step


def _used(block: int) -> BlockStateError:
    return BlockStateError(f"device block {block}", "append() before it is written", "one that others use too")


def not_moved(counts: Counter[str], error: TransferProcessError) -> None:
    """A process that moves blocks for this one is lost: there is no room for now, and nothing has changed."""
    counts["moves_failed"] += 1
    logger.warning("blocks were not moved, going on without that: %s", str(error))

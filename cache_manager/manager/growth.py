"""What a forward pass asks of a block manager: room for the next tokens, their slots, and that they can be found.

Each of the three comes in two forms: for one sequence and any number of tokens, and for one more token of each of many
sequences. The second is what a decode step does; its arrays are one element a sequence, and only the sequences that
need a block, or have filled one, cost Python. The two forms differ in which block they take, and in nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.checks import integers
from cache_manager.errors import BlockStateError, InvalidInputError, TransferProcessError
from cache_manager.keys import Tokens
from cache_manager.manager.counters import ManagerCounts
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequences import Ints, Sequences

logger = logging.getLogger(__name__)

FEW: Final = 4
"""Fewer sequences than this are cheaper one by one."""


class Growth:
    """Appends to the rows of ``sequences``; every row that is named is READY, which the caller has checked."""

    def __init__(
        self, aux: AuxBlocks, sequences: Sequences, pool: BlockPool, counts: ManagerCounts, *, caching: bool
    ) -> None:
        self._aux, self._sequences, self._pool, self._counts = aux, sequences, pool, counts
        self._caching, self._tokens = caching, aux.block_tokens

    # ---------------------------------------------------------------- room

    def append(self, row: int, total: int) -> bool:
        """See :meth:`BlockManager.append`."""
        s, pool = self._sequences, self._pool
        have, wanted, first = s.length_at[row], -(-total // self._tokens), s.computed_at[row] // self._tokens
        if wanted <= have and wanted - first == 1 and not pool.others_use(s.block_at[row * s.width + first]):
            return True
        written = s.blocks[row, first : min(wanted, have)]
        shared: list[int] = (np.flatnonzero(pool.used_by_others(written)) + first).tolist()
        if not shared and wanted <= have:
            return True
        return wanted <= s.width_max and self._make_room(row, shared, wanted)

    def _make_room(self, row: int, shared: list[int], wanted: int) -> bool:
        """Copies of the blocks ``shared`` of the sequence and fresh ones up to ``wanted``: all of that or nothing."""
        s = self._sequences
        have, owner = s.length_at[row], s.record(row).owner
        fresh = self._pool.take([owner] * (len(shared) + max(0, wanted - have)), whole=True)
        if not fresh:
            return False
        copies = fresh[: len(shared)]
        if copies and not self._copy([(row, i) for i in shared], copies, fresh):
            return False
        if more := len(fresh) - len(copies):
            s.make_wide(have + more)
            s.blocks[row, have : have + more] = fresh[len(copies) :]
            s.length[row] = have + more
        return True

    def append_batch(self, rows: Ints) -> NDArray[np.bool_]:
        """See :meth:`BlockManager.append_batch`."""
        s, pool = self._sequences, self._pool
        if rows.size < FEW:
            return np.array([self.append(row, s.computed_at[row] + 1) for row in rows.tolist()], np.bool_)
        column, tail = self._tails(rows)
        new = column >= s.length.take(rows)
        shared = pool.used_by_others(tail)
        needs = new | shared
        room: NDArray[np.bool_] = np.ones(rows.size, np.bool_)
        if not count(needs):  # most often: one sequence in block_tokens needs a block, and one after a fork
            return room
        chosen = np.flatnonzero(needs)
        columns: list[int] = column.take(chosen).tolist()
        if (widest := max(columns)) >= s.width:
            s.make_wide(min(widest + 1, s.width_max))
            if widest >= s.width_max:
                room &= column < s.width_max
                chosen = np.flatnonzero(needs & room)
                columns = column.take(chosen).tolist()
        if count(new.take(chosen)) == chosen.size:
            self._extend(rows, chosen, columns, room)
        else:
            self._extend_and_copy(rows, column, tail, new, chosen, room)
        return room

    def _extend(self, rows: Ints, chosen: Ints, columns: list[int], room: NDArray[np.bool_]) -> None:
        """A new block for each of ``rows[chosen]``, for the first of them where there are fewer."""
        s = self._sequences
        grown: list[int] = rows.take(chosen).tolist()
        fresh = self._pool.take([s.record(row).owner for row in grown])
        if len(fresh) < len(grown):
            room[chosen[len(fresh) :]] = False
        block_at, length_at, width = s.block_at, s.length_at, s.width
        for row, i, block in zip(grown, columns, fresh, strict=False):
            block_at[row * width + i] = block
            length_at[row] = i + 1

    def _extend_and_copy(
        self, rows: Ints, column: Ints, tail: Ints, new: NDArray[np.bool_], chosen: Ints, room: NDArray[np.bool_]
    ) -> None:
        """As :meth:`_extend`, where some need a copy of their last block; of all who share one, the last keeps it."""
        s, pool = self._sequences, self._pool
        others = {b: pool.readers(b) - 1 for b in tail[chosen[~new.take(chosen)]].tolist()}
        wants = []  # places in ``rows``
        for i in chosen.tolist():
            block = int(tail[i])
            if new[i]:
                wants.append(i)
            elif others[block] > 0 or pool.index.indexed[block]:
                others[block] -= 1
                wants.append(i)
        fresh = pool.take([s.record(int(rows[i])).owner for i in wants])
        got = list(zip(wants[: len(fresh)], fresh, strict=True))
        copied = [(i, block) for i, block in got if not new[i]]
        if copied:
            places, blocks = [(int(rows[i]), int(column[i])) for i, _ in copied], [block for _, block in copied]
            try:
                self._copy(places, blocks, blocks)
            except BaseException:
                self._give_back([(int(rows[i]), block) for i, block in got if new[i]])
                raise
        for i, block in got:
            if new[i]:
                row = int(rows[i])
                s.blocks[row, int(column[i])] = block
                s.length[row] += 1
        # Who was to keep a block cannot where another could not leave it.
        _, tail = self._tails(rows)
        room &= (column < s.length.take(rows)) & ~pool.used_by_others(tail)

    def _copy(self, places: Sequence[tuple[int, int]], copies: list[int], taken: list[int]) -> bool:
        """Copy-on-write: the blocks at ``places`` (row and column) give way to ``copies``; if it fails, back to before.

        ``taken`` are the blocks that go back then; each is of the owner at its place, or all are of the only one.
        """
        s, pool = self._sequences, self._pool
        sources = [int(s.blocks[row, i]) for row, i in places]
        rows = [min(self._tokens, max(0, s.computed_at[row] - i * self._tokens)) for row, i in places]
        owners = [row for row, _ in places]
        owners += owners[-1:] * (len(taken) - len(owners))
        try:
            self._aux.copy(list(zip(sources, copies, strict=True)), rows)
        except TransferProcessError as error:
            self._give_back(list(zip(owners, taken, strict=True)))
            not_moved(self._counts, error)
            return False
        except BaseException:
            self._give_back(list(zip(owners, taken, strict=True)))
            raise
        for (row, i), source, copy in zip(places, sources, copies, strict=True):
            s.blocks[row, i] = copy
            self._aux.free(s.record(row).owner, [source])
            pool.let_go(np.array([source]))
        self._counts.count("cow_blocks", len(copies))
        self._counts.count("cow_tokens", sum(rows))
        return True

    def _give_back(self, taken: list[tuple[int, int]]) -> None:
        """Blocks that sequences (by row) were given and did not come to use."""
        for row, block in taken:
            self._aux.free(self._sequences.record(row).owner, [block])
            self._pool.let_go(np.array([block]))

    # ---------------------------------------------------------------- slots

    def slots(self, row: int, start: int, stop: int) -> Ints:
        """See :meth:`BlockManager.slots`."""
        s, tokens = self._sequences, self._tokens
        room = s.length_at[row] * tokens
        if not 0 <= start <= stop <= room:
            raise InvalidInputError("start, stop", f"0 <= start <= stop <= {room}", f"{start}, {stop}")
        if stop - start == 1:
            block = s.block_at[row * s.width + start // tokens]
            if self._pool.others_use(block):
                raise _used(block)
            return np.array([block * tokens + start % tokens])
        first = start // tokens
        blocks = s.blocks[row, first : -(-stop // tokens) if stop > start else first]
        self._check_alone(blocks)
        slots: Ints = (blocks[:, None] * tokens + np.arange(tokens)).reshape(-1)
        return slots[start - first * tokens : stop - first * tokens]

    def slots_batch(self, rows: Ints) -> Ints:
        """See :meth:`BlockManager.slots_batch`."""
        s = self._sequences
        if rows.size < FEW:
            return np.array([self._next_slot(row) for row in rows.tolist()], np.int64)
        column, tail = self._tails(rows)
        if count(short := column >= s.length.take(rows)):
            raise self._no_room(int(rows[int(np.argmax(short))]))
        self._check_alone(tail)
        slots: Ints = (tail - column) * self._tokens + s.computed.take(rows)
        return slots

    def _next_slot(self, row: int) -> int:
        s, done = self._sequences, self._sequences.computed_at[row]
        column = done // self._tokens
        if column >= s.length_at[row]:
            raise self._no_room(row)
        block: int = s.block_at[row * s.width + column]
        if self._pool.others_use(block):
            raise _used(block)
        return block * self._tokens + done - column * self._tokens

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

    def publish(self, row: int, tokens: Tokens) -> None:
        """See :meth:`BlockManager.publish`."""
        s, size = self._sequences, self._tokens
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

    def publish_batch(self, rows: Ints, tokens: Any) -> None:
        """See :meth:`BlockManager.publish_batch`."""
        s, size = self._sequences, self._tokens
        ids = integers(tokens, "tokens", "a flat sequence of integers")
        if ids.size != rows.size:
            raise InvalidInputError("tokens", f"{rows.size}, one for each sequence", ids.size)
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
        s, current, step, publish = self._sequences, self._aux.keys, 8 * self._tokens, self._pool.publish
        at = 0
        for row, column in zip(rows, columns, strict=True):
            record = s.record(row)
            if record.base is current:
                publish(record.key_of(column, ids[at : at + step]), s.block_at[row * s.width + column])
            at += step


def _used(block: int) -> BlockStateError:
    return BlockStateError(f"device block {block}", "append() before it is written", "one that others use too")


def not_moved(counts: ManagerCounts, error: TransferProcessError) -> None:
    """A process that moves blocks for this one is lost: there is no room for now, and nothing has changed."""
    counts.count("moves_failed")
    logger.warning("blocks were not moved, going on without that: %s", str(error))


__all__ = ["FEW", "Growth", "not_moved"]

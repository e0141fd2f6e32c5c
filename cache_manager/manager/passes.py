"""What a forward pass asks of a block manager: room for the next tokens, their slots, and their publication.

For one sequence and any number of tokens, or (``..._batch``) for one more token of each of many, as a decode step does:
its arrays have one element a sequence, and only the sequences that need a block, or have filled one, cost Python.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, KVRouteError, TransferProcessError
from cache_manager.keys import Tokens
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequence import UNKNOWN, Ints, Phase, Sequence, Sequences
from cache_manager.numbers import integers
from cache_manager.step import PADDING

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def whole(method: F) -> F:
    """Mark a method that changes what a manager knows: if an exception ends it in the middle, as from a signal handler,
    the next one begins with :meth:`Passes._rebuild`.

    That needs each sequence to be right at every moment, with its blocks, phase, keys and tokens: they change together,
    in statements without a call, between which no signal handler runs.
    """

    @wraps(method)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._torn:
            self._mend()
        self._torn = self._inside = True
        try:
            answer = method(self, *args, **kwargs)
        except KVRouteError:
            self._torn = False  # it was refused, or undone
            raise
        finally:
            self._inside = False
        self._torn = False
        return answer

    return cast("F", marked)


class Passes:
    """The sequences of a block manager, the blocks that they have, and its calls around a forward pass."""

    def __init__(self, aux: AuxBlocks, *, caching: bool, sequences_max: int) -> None:
        self.aux, self._caching, self._tokens = aux, caching, aux.block_tokens
        self._counts: Counter[str] = Counter()
        self._pool = BlockPool(aux, self._counts)
        self._sequences = Sequences(aux.block_tokens, sequences_max)
        self._torn = self._inside = False  # whether a call has begun and not come to its end; whether one runs

    def _mend(self) -> None:
        """Put in order what an interrupted call has left; ``BlockBusyError`` in the middle of a call."""
        if self._inside:
            raise BlockBusyError("manager", "a call from outside its own calls", "a finaliser or a signal handler")
        self._rebuild()
        self._torn = False

    def _rebuild(self) -> None:
        """Make anew what follows from the sequences."""
        self._sequences.rebuild()
        tables = [s.blocks for s in self._sequences if s.phase is not Phase.SWAPPED]
        self._pool.rebuild(block for table in tables for block in table)

    @whole
    def append(self, owner: str, total_tokens: int) -> bool:
        """Make room so that the sequence can hold ``total_tokens``; ``False`` when there is none: nothing changed.

        A shared block that would be written is copied first (copy-on-write).
        """
        return self._append(self._sequences.ready(owner), total_tokens)

    def _append(self, s: Sequence, total: int) -> bool:
        size, pool, done = self._tokens, self._pool, self._sequences.computed(s)
        have, wanted = len(s.blocks), -(-total // size)
        shared = [i for i in range(done // size, min(wanted, have)) if pool.others_use(s.blocks[i])]
        if not (n := len(shared) + max(0, wanted - have)):
            return True
        if not (fresh := pool.choose(n)):
            return False
        pool.take(fresh)
        if shared:
            sources, rows = [s.blocks[i] for i in shared], [min(size, max(0, done - i * size)) for i in shared]
            if not self._moved(fresh, self.aux.copy, list(zip(sources, fresh, strict=False)), rows):
                return False
            for i, block in zip(shared, fresh, strict=False):
                s.blocks[i] = block
            pool.let_go(sources)
            self._counts.update(cow_blocks=len(shared), cow_tokens=sum(rows))
        s.blocks += fresh[len(shared) :]
        return True

    def append_batch(self, seqs: Any) -> Ints:
        """:meth:`append` of one token to each of ``seqs`` ``[n]``, in their order: its slot ``[n]``, -1 for no room.

        Raises before anything is changed if one is not on the device, waits for the store, or is given twice. If a copy
        raises, the sequences before it keep their room.
        """
        if self._torn:
            self._mend()
        all_ = self._sequences
        rows, _ = all_.ready_rows(seqs)
        slots: Ints = all_.next.take(rows)
        if rows.size and slots.item(slots.argmin()) < 0:  # one in block_tokens needs a block, and one after a fork
            self._new_slots(rows, slots)
        return slots

    @whole
    def _new_slots(self, rows: Ints, slots: Ints) -> None:
        """The slots of those sequences, among ``rows [n]``, for which none is known in ``slots [n]``."""
        waiting: list[int] = []
        for i in np.flatnonzero(slots < 0).tolist():
            s = self._sequences.by_row[int(rows[i])]
            done = self._sequences.computed(s)
            if done // self._tokens >= len(s.blocks):
                waiting.append(i)
                continue
            self._extend(rows, waiting, slots)
            waiting = []
            slots[i] = self._next_slot(s) if self._append(s, done + 1) else PADDING
        self._extend(rows, waiting, slots)

    def _extend(self, rows: Ints, waiting: list[int], slots: Ints) -> None:
        """One more block, and a slot, for each of the sequences ``waiting`` among ``rows``, in order: as far as there
        is room. All blocks begin their lives in one call."""
        fresh = self._pool.choose(len(waiting)) or self._pool.choose(min(len(waiting), self._pool.room))
        self._pool.take(fresh)
        slots[waiting] = PADDING
        for i, block in zip(waiting, fresh, strict=False):
            s = self._sequences.by_row[int(rows[i])]
            s.blocks.append(block)
            slots[i] = self._next_slot(s)

    def _next_slot(self, s: Sequence) -> int:
        """The slot of its next token, for which it has a block of its own."""
        all_, size, done = self._sequences, self._tokens, self._sequences.computed(s)
        column = done // size
        s.offset, all_.edge[s.row] = (s.blocks[column] - column) * size, (s.blocks[column] + 1) * size
        all_.next[s.row] = slot = s.offset + done
        return slot

    def slots(self, owner: str, start: int, stop: int) -> Ints:
        """Device slots at which to write the tokens ``[start, stop)``; :class:`BlockStateError` if one of their blocks
        is shared, or can be found by key. Reads go by :meth:`table`."""
        if self._torn:
            self._mend()
        s, size = self._sequences.ready(owner), self._tokens
        most = len(s.blocks) * size
        if not 0 <= start <= stop <= most:
            raise InvalidInputError("start, stop", f"0 <= start <= stop <= {most}", f"{start}, {stop}")
        blocks = s.blocks[start // size : -(-stop // size)] if stop > start else []
        for block in filter(self._pool.others_use, blocks):
            raise BlockStateError(f"device block {block}", "append() before it is written", "one that others use too")
        slots: Ints = (np.array(blocks, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        return slots[start % size : start % size + stop - start]

    @whole
    def publish(self, owner: str, tokens: Tokens) -> None:
        """The KV and the committed rows of ``tokens``, all that the sequence has computed so far, are in place.

        Full blocks among them can be found by later sequences from here on.
        """
        s, size = self._sequences.ready(owner), self._tokens
        done, total, most = self._sequences.computed(s), len(tokens), len(s.blocks) * size
        if not done <= total <= most:
            raise InvalidInputError("tokens", f"{done} to {most} tokens", total)
        filling = self._sequences.filling[s.row]
        new = integers(tokens[done:], "tokens", "a flat sequence of integers")
        ids = np.concatenate((filling[: done % size], new)).astype("<i8", copy=False)
        full = [ids[at : at + size].tobytes() for at in range(0, ids.size - size + 1, size)]
        left, all_ = ids[len(full) * size :], self._sequences
        filling[: left.size], all_.next[s.row], all_.edge[s.row] = left, UNKNOWN + total, UNKNOWN
        for column, each in enumerate(full, done // size):
            self._full(s, column, each)

    def publish_batch(self, seqs: Any, tokens: Any) -> None:
        """:meth:`publish` of one more token of each of ``seqs`` ``[n]``, after :meth:`append_batch`; ``tokens [n]``."""
        if self._torn:
            self._mend()
        all_, size = self._sequences, self._tokens
        rows, ends = all_.ready_rows(seqs)
        ids = integers(tokens, "tokens", "one integer for each sequence", n=rows.size)
        slots = all_.next.take(rows)
        left = all_.edge.take(rows) - slots  # in the block of the next token, where that is known
        if (least := left.item(left.argmin()) if rows.size else size) <= 0:
            owner = f"owner {all_.by_row[int(rows[left.argmin()])].owner!r}"
            raise BlockStateError(owner, "append_batch() before it is written", "no room of its own for a token")
        all_.filled[ends - left] = ids
        slots += 1
        full: list[Sequence] = []
        if least == 1:
            full = [all_.by_row[row] for row in rows[left == 1].tolist()]
            slots[left == 1] = [UNKNOWN + all_.computed(s) + 1 for s in full]
        all_.next[rows] = slots  # of all at once, whatever becomes of what follows
        if full:
            self._all_full(full)

    @whole
    def _all_full(self, full: list[Sequence]) -> None:
        for s in full:
            self._sequences.edge[s.row] = UNKNOWN
            ids = self._sequences.filling[s.row].tobytes()
            self._full(s, self._sequences.computed(s) // self._tokens - 1, ids)

    def _full(self, s: Sequence, column: int, ids: bytes) -> None:
        """The sequence's block ``column`` is full of ``ids``: let a key find it.

        But not for a sequence from before a reset: its KV is of older weights than the key would say. Nor behind a
        block whose key is missing, as after a call that a signal ended: the key would name another prefix. The block
        counts as computed already.
        """
        if self._caching and s.base is self.aux.keys and len(s.keys) == column:
            self._pool.publish(s.add(column, ids), s.blocks[column])

    def _moved(self, taken: list[int], move: Callable[..., None], *given: Any) -> bool:
        """Whether blocks were moved; if not, the blocks ``taken`` for them are free again, their cached content lost.

        The loss of a process that moves blocks counts as no room now. Other errors of a move are raised.
        """
        try:
            move(*given)
        except BaseException as error:
            self._pool.let_go(taken)
            if not isinstance(error, TransferProcessError):
                raise
            self._counts["moves_failed"] += 1
            logger.warning("blocks were not moved, going on without that: %s", str(error))
            return False
        return True

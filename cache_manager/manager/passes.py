"""What a forward pass asks of a block manager: room for the next tokens, their slots, and their publication.

For one sequence and any number of tokens, or (``..._batch``) for one more token of each of many, as a decode step does:
its arrays have one element a sequence, and only the sequences that need a block, or have filled one, cost Python.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockStateError, InvalidInputError
from cache_manager.keys import Tokens
from cache_manager.manager.calls import Calls, whole
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequence import UNKNOWN, Sequence, Sequences
from cache_manager.slots import Flags, Ints, integers
from cache_manager.step import PADDING


class Passes:
    """The calls of :class:`BlockManager` around a forward pass, which has their contracts."""

    def __init__(
        self,
        aux: AuxBlocks,
        pool: BlockPool,
        sequences: Sequences,
        counts: Counter[str],
        calls: Calls,
        *,
        caching: bool,
    ) -> None:
        self.calls = calls
        self._aux = aux
        self._pool = pool
        self._sequences = sequences
        self._counts = counts
        self._caching = caching
        self._tokens = aux.block_tokens

    # ---------------------------------------------------------------- room

    def append(self, s: Sequence, total_tokens: int) -> bool:
        size = self._tokens
        if not isinstance(total_tokens, (int, np.integer)) or total_tokens < 0:
            raise InvalidInputError("total_tokens", "an integer of 0 or more", repr(total_tokens))
        pool = self._pool
        done = self._sequences.computed(s)
        have = len(s.blocks)
        wanted = -(-total_tokens // size)
        shared = [i for i in range(done // size, min(wanted, have)) if pool.others_use(s.blocks[i])]
        n = len(shared) + max(0, wanted - have)
        if not n:
            return True
        if n > self._aux.device_blocks:
            return False
        fresh = pool.choose(n)
        if not fresh:
            return False
        pool.take(fresh)
        if shared:
            sources = [s.blocks[i] for i in shared]
            rows = [min(size, max(0, done - i * size)) for i in shared]
            pairs = list(zip(sources, fresh, strict=False))
            if not pool.moved(fresh, partial(self._aux.copy, pairs, rows)):
                return False
            for i, block in zip(shared, fresh, strict=False):
                s.blocks[i] = block
            pool.let_go(sources)
            self._counts.update(cow_blocks=len(shared), cow_tokens=sum(rows))
        s.blocks += fresh[len(shared) :]
        return True

    def append_batch(self, seqs: Any) -> Ints:
        numbers, _ = self._sequences.ready_numbers(seqs)
        slots: Ints = self._sequences.next.take(numbers)
        if numbers.size and slots.item(slots.argmin()) < 0:  # one in block_tokens needs a block, and one after a fork
            self._new_slots(numbers, slots)
        return slots

    @whole
    def _new_slots(self, numbers: Ints, slots: Ints) -> None:
        """The slots of those sequences, among ``numbers [n]``, for which none is known in ``slots [n]``."""
        waiting: list[int] = []
        for i in np.flatnonzero(slots < 0).tolist():
            s = self._sequences.by_number[int(numbers[i])]
            done = self._sequences.computed(s)
            if done // self._tokens >= len(s.blocks):
                waiting.append(i)
                continue
            self._extend(numbers, waiting, slots)
            waiting = []
            slots[i] = self._next_slot(s) if self.append(s, done + 1) else PADDING
        self._extend(numbers, waiting, slots)

    def _extend(self, numbers: Ints, waiting: list[int], slots: Ints) -> None:
        """One more block, and a slot, for each of the sequences ``waiting`` among ``numbers``, in order: as far as
        there is room. All blocks begin their lives in one call."""
        fresh = self._pool.choose(len(waiting)) or self._pool.choose(min(len(waiting), self._pool.room))
        self._pool.take(fresh)
        slots[waiting] = PADDING
        for i, block in zip(waiting, fresh, strict=False):
            s = self._sequences.by_number[int(numbers[i])]
            s.blocks.append(block)
            slots[i] = self._next_slot(s)

    def _next_slot(self, s: Sequence) -> int:
        """The slot of its next token, for which it has a block of its own."""
        size = self._tokens
        done = self._sequences.computed(s)
        column = done // size
        block = s.blocks[column]
        s.offset = (block - column) * size
        self._sequences.edge[s.number] = (block + 1) * size
        slot = s.offset + done
        self._sequences.next[s.number] = slot
        return slot

    def slots(self, s: Sequence, start: int, stop: int) -> Ints:
        size = self._tokens
        most = len(s.blocks) * size
        integer = (int, np.integer)
        whole_numbers = isinstance(start, integer) and isinstance(stop, integer)
        if not (whole_numbers and 0 <= start <= stop <= most):
            raise InvalidInputError("start, stop", f"0 <= start <= stop <= {most}", f"{start!r}, {stop!r}")
        blocks = s.blocks[start // size : -(-stop // size)] if stop > start else []
        for block in filter(self._pool.others_use, blocks):
            raise BlockStateError(f"device block {block}", "append() before it is written", "one that others use too")
        slots: Ints = (np.array(blocks, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        return slots[start % size : start % size + stop - start]

    # ---------------------------------------------------------------- publication

    def publish(self, s: Sequence, tokens: Tokens) -> None:
        size = self._tokens
        done = self._sequences.computed(s)
        most = len(s.blocks) * size
        try:
            total = len(tokens)
            later = tokens[done:]
        except TypeError as error:
            raise InvalidInputError("tokens", "a flat sequence of integers", repr(tokens)) from error
        if not done <= total <= most:
            raise InvalidInputError("tokens", f"{done} to {most} tokens", total)
        filling = self._sequences.filling[s.number]
        new = integers(later, "tokens", "a flat sequence of integers")
        ids = np.concatenate((filling[: done % size], new)).astype("<i8", copy=False)
        full = [ids[at : at + size].tobytes() for at in range(0, ids.size - size + 1, size)]
        left = ids[len(full) * size :]
        filling[: left.size] = left
        self._sequences.place(s, total)
        for column, of_block in enumerate(full, done // size):
            self._full(s, column, of_block)

    def publish_batch(self, seqs: Any, tokens: Any) -> None:
        sequences = self._sequences
        numbers, ends = sequences.ready_numbers(seqs)
        ids = integers(tokens, "tokens", "one integer for each sequence", n=numbers.size)
        slots = sequences.next.take(numbers)
        left = sequences.edge.take(numbers) - slots  # in the block of the next token, where that is known
        least = left.item(left.argmin()) if numbers.size else self._tokens
        if least <= 0:
            owner = f"owner {sequences.by_number[int(numbers[left.argmin()])].owner!r}"
            raise BlockStateError(owner, "append_batch() before it is written", "no room of its own for a token")
        sequences.filled[ends - left] = ids
        if least > 1:
            sequences.next[numbers] = slots + 1
        else:
            self._publish_full(numbers, slots + 1, left == 1)

    @whole
    def _publish_full(self, numbers: Ints, slots: Ints, is_full: Flags) -> None:
        """The next ``slots [n]`` of sequences whose tokens are computed, some of which have filled a block."""
        sequences = self._sequences
        full = [sequences.by_number[number] for number in numbers[is_full].tolist()]
        slots[is_full] = [UNKNOWN + sequences.computed(s) + 1 for s in full]
        sequences.next[numbers] = slots
        for s in full:
            sequences.edge[s.number] = UNKNOWN
            self._full(s, sequences.computed(s) // self._tokens - 1, sequences.filling[s.number].tobytes())

    def _full(self, s: Sequence, column: int, ids: bytes) -> None:
        """The sequence's block ``column`` is full of ``ids``: let a key find it.

        But not for a sequence from before a reset: its KV is of older weights than the key would say.
        """
        if self._caching and s.base is self._aux.keys:
            assert len(s.keys) == column, "the key would name another prefix"
            self._pool.publish(s.add(column, ids), s.blocks[column])

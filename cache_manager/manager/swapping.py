"""Sequences of a block manager on their way to host blocks and back: all of a sequence or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import TransferProcessError
from cache_manager.manager.counters import Counts
from cache_manager.manager.growth import not_moved
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequences import Ints, Phase, Sequences


class Swapping:
    def __init__(self, aux: AuxBlocks, sequences: Sequences, pool: BlockPool, counts: Counts) -> None:
        self._aux, self._sequences, self._pool, self._counts = aux, sequences, pool, counts

    def out(self, row: int) -> bool:
        """See :meth:`BlockManager.preempt`."""
        sequences, owner = self._sequences, self._sequences.record(row).owner
        blocks, computed = sequences.table(row).copy(), int(sequences.computed[row])
        written = -(-computed // sequences.tokens)
        targets = self._pool.host.choose(written) if self._aux.host_blocks else None
        if targets is None:
            return False
        try:
            self._aux.swap_out(_pairs(blocks[:written], targets), owner)
        except TransferProcessError as error:
            not_moved(self._counts, error)
            return False
        self._pool.host.remove(targets)
        sequences.set_blocks(row, targets)
        sequences.set_phase(row, Phase.SWAPPED)
        if written < blocks.size:
            self._aux.free(owner, blocks[written:])
        self._pool.let_go(blocks)
        self._counts["preemptions"] += 1
        self._counts["swapped_out_tokens"] += computed
        return True

    def back(self, row: int) -> bool:
        """See :meth:`BlockManager.resume`."""
        sequences, record = self._sequences, self._sequences.record(row)
        if sequences.phase[row] != Phase.SWAPPED:
            return True
        sources = sequences.table(row).copy()
        targets, free = self._pool.choose(sources.size)
        if len(targets) < sources.size:
            return False
        try:
            self._swap_in(record.owner, _pairs(sources, targets), free)
        except TransferProcessError as error:
            not_moved(self._counts, error)
            return False
        self._pool.take_out(targets)
        sequences.set_blocks(row, targets)
        sequences.set_phase(row, Phase.READY)
        self._pool.host.let_go(sources.tolist())
        for key, block in zip(record.keys, targets, strict=False):  # none of a sequence from before a reset
            self._pool.publish(key, block)
        self._counts["swapped_in_tokens"] += int(sequences.computed[row])
        return True

    def _swap_in(self, owner: str, pairs: Ints, free: int) -> None:
        """Swap ``pairs`` in, first those to the ``free`` blocks, or to one cached block where there are none.

        If the mover fails, cached blocks that it has not overwritten stay cached.
        """
        first, cached = free or 1, pairs[free:, 1]
        lives = self._aux.generations(cached)
        try:
            with self._aux.begin_swap_in(pairs[:first], owner):
                if first < len(pairs):
                    self._aux.swap_in(pairs[first:], owner)
        except BaseException:
            after = zip(cached.tolist(), lives, self._aux.generations(cached), strict=True)
            self._pool.forget_cached([block for block, before, now in after if before != now])
            raise


def _pairs(sources: Ints, targets: Sequence[int]) -> Ints:
    return np.column_stack((sources, np.asarray(targets, np.int64)))

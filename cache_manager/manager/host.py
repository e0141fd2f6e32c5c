"""The host blocks of a manager, to which sequences are swapped out."""

from __future__ import annotations

from collections import Counter
from functools import partial

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequence import Phase, Sequence, Sequences


class HostBlocks:
    """Which host blocks are ``free``, the last one given first; ``counts`` are the manager's."""

    def __init__(self, aux: AuxBlocks, pool: BlockPool, sequences: Sequences, counts: Counter[str]) -> None:
        self._aux = aux
        self._pool = pool
        self._sequences = sequences
        self._counts = counts
        self.free = list(range(aux.host_blocks - 1, -1, -1))

    def swap_out(self, s: Sequence) -> bool:
        """Whether the sequence is swapped out now: :meth:`BlockManager.preempt`."""
        check_no_step(self._aux, s, s.blocks, "preempt")
        n = -(-self._sequences.computed(s) // self._aux.block_tokens)
        if not self._aux.host_blocks or n > len(self.free):
            return False
        targets = self.free[: -n - 1 : -1] if n else []  # they stay free if the move fails
        pairs = list(zip(s.blocks, targets, strict=False))
        if not self._pool.moved([], partial(self._aux.swap_out, pairs)):
            return False
        left = s.blocks
        self._sequences.enter(s, Phase.SWAPPED, targets)
        del self.free[len(self.free) - n :]
        self._pool.let_go(left)
        self._counts["preemptions"] += 1
        return True

    def swap_in(self, s: Sequence) -> bool:
        """Whether the swapped sequence is on the device again: :meth:`BlockManager.resume`."""
        targets = self._pool.choose(len(s.blocks))
        if len(targets) < len(s.blocks):
            return False
        self._pool.take(targets)
        pairs = list(zip(s.blocks, targets, strict=True))
        if not self._pool.moved(targets, partial(self._aux.swap_in, pairs)):
            return False
        left = s.blocks
        self._sequences.enter(s, Phase.READY, targets)
        self.free += left
        for key, block in zip(s.keys, targets, strict=False):  # a sequence from before a reset has none
            self._pool.publish(key, block)
        return True

    def assert_consistent(self, held: list[int]) -> None:
        """Raise ``AssertionError`` unless each host block is free, or one of ``held``, those of sequences, once."""
        everywhere = sorted([*held, *self.free])
        assert everywhere == list(range(self._aux.host_blocks)), "a host block is lost or shared"


def check_no_step(aux: AuxBlocks, s: Sequence, blocks: list[int], event: str) -> None:
    """``BlockBusyError`` while a step in flight writes one of the sequence's ``blocks``."""
    if aux.writing(blocks).any():
        raise BlockBusyError(f"owner {s.owner!r}", f"no step in flight to {event} it", "a step")

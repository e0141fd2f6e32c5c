"""Decides which tokens the next forward pass computes, and which sequences are preempted.

Sequences are served in order of arrival: running ones get a token each or the next chunk of their prompt, then swapped
ones return, then new ones are admitted, until the step's budget of tokens is spent. When a running sequence needs a
block and none is free, the latest arrival among the running ones is preempted: swapped out to host blocks, or dropped
and computed again later when the host is full too. The earliest arrival is therefore never preempted for another, so
that something always finishes. A sequence whose prompt another engine computes gets its blocks in its turn, and then
waits beside the others until the transfer to these blocks is over.

If the store may have blocks of a new sequence, these are restored first. The scheduler never waits for the store: other
sequences are computed meanwhile, and a later step's plan finds the restore done. If the store takes longer than
``restore_wait_s``, the sequence is computed instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from cache_manager.manager import BlockManager
from paged_engine.request import EngineConfig
from paged_engine.sequence import Sequence, State


class Work(NamedTuple):
    """The tokens ``[start, stop)`` of a sequence are to be computed."""

    sequence: Sequence
    start: int
    stop: int


class Scheduler:
    """The sequences that have not ended, and the plan of each step.

    ``losing`` is called with a sequence that is about to lose its blocks and all that was computed of it.
    """

    def __init__(self, config: EngineConfig, manager: BlockManager, losing: Callable[[Sequence], None]) -> None:
        self._config, self._manager, self._losing = config, manager, losing
        self._sequences: dict[str, Sequence] = {}
        self._preempted = 0
        self.dropped = 0
        """Preemptions without room on the host: the whole sequence is computed again."""

    @property
    def unfinished(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences.values())

    def of(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended."""
        return [s for s in self._sequences.values() if s.request.id == request_id]

    def add(self, sequence: Sequence) -> None:
        """Add a sequence: a new one that waits, or a fork that runs already."""
        self._sequences[sequence.owner] = sequence

    def counts(self) -> dict[State, int]:
        """How many sequences are in each state."""
        return {state: len(self._in(state)) for state in State}

    def finish(self, sequence: Sequence) -> None:
        """The sequence ends; its blocks are freed."""
        sequence.become(State.FINISHED)
        self._manager.free(sequence.owner)
        del self._sequences[sequence.owner]

    def drop_all(self) -> None:
        """Drop everything that has been computed, and all transfers and restores in flight."""
        for sequence in self._in(State.RUNNING, State.SWAPPED, State.RESTORING, State.LANDING):
            self._drop(sequence)

    def plan(self) -> list[Work]:
        """The next step's work, with its blocks already allocated; at most ``step_tokens`` tokens."""
        self._take_in_restored()
        work: list[Work] = []
        budget, before = self._config.step_tokens, self._preempted

        def give(sequence: Sequence) -> int:
            """The budget left after the sequence's next chunk."""
            stop = min(len(sequence.tokens), sequence.computed + budget)
            work.append(Work(sequence, sequence.computed, stop))
            return budget - (stop - sequence.computed)

        for sequence in self._in(State.RUNNING):
            if sequence.state is State.RUNNING and budget and self._make_room(sequence, budget):
                budget = give(sequence)
        if self._preempted > before:
            return work
        for sequence in (*self._in(State.SWAPPED), *self._in(State.WAITING)):
            active = len(self._in(State.RUNNING, State.RESTORING, State.LANDING))
            if not budget or active >= self._config.sequences_max:
                break
            if not (self._resume(sequence, budget) if sequence.state is State.SWAPPED else self._admit(sequence)):
                break
            if sequence.state is State.RUNNING:
                budget = give(sequence)
        return work

    def _in(self, *states: State) -> list[Sequence]:
        return sorted((s for s in self._sequences.values() if s.state in states), key=lambda s: s.rank)

    def _take_in_restored(self) -> None:
        for owner, admission in self._manager.poll().items():
            sequence = self._sequences[owner]
            sequence.become(State.RUNNING)
            sequence.computed = admission.cached_tokens
        for sequence in self._in(State.RESTORING):
            if time.monotonic() >= sequence.give_up_s:
                sequence.store_gave_nothing = True
                self._drop(sequence)

    def _resume(self, sequence: Sequence, budget: int) -> bool:
        """Swap in, if there are blocks for the next chunk too."""
        stop = min(len(sequence.tokens), sequence.computed + budget)
        needed = -(-stop // self._config.block_tokens)
        if needed > self._manager.free_device_blocks or not self._manager.resume(sequence.owner):
            return False
        sequence.become(State.RUNNING)
        return self._manager.append(sequence.owner, stop)  # the copy of a shared block may fail: then it runs later

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate its blocks; it then runs, or waits for the store or another engine to fill some of them."""
        ask = not sequence.store_gave_nothing and sequence.handover is None
        admission = self._manager.begin_allocate(sequence.owner, sequence.tokens, restore=ask)
        if admission is None:
            return False
        if admission.pending:
            sequence.become(State.RESTORING)
            sequence.give_up_s = time.monotonic() + self._config.restore_wait_s
        else:
            sequence.become(State.RUNNING if sequence.handover is None else State.LANDING)
            sequence.computed = admission.cached_tokens
        return True

    def _make_room(self, sequence: Sequence, budget: int) -> bool:
        """Get blocks for its next chunk by preemption; ``False`` if it was preempted itself or has to wait."""
        stop = min(len(sequence.tokens), sequence.computed + budget)
        while not self._manager.append(sequence.owner, stop):
            victims = [s for s in self._in(State.RUNNING, State.RESTORING) if s.rank >= sequence.rank]
            if not victims:
                return False
            self._preempt(victims[-1])
            if victims[-1] is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._preempted += 1
        if victim.computed and self._manager.preempt(victim.owner):
            victim.become(State.SWAPPED)
        else:
            self._drop(victim)
            self.dropped += 1

    def _drop(self, sequence: Sequence) -> None:
        self._losing(sequence)
        self._manager.free(sequence.owner)
        sequence.become(State.WAITING)

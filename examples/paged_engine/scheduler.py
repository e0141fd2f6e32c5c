"""Decides which tokens the next forward pass computes, and who has to make room.

Sequences are served in order of arrival: those that run get a token each or the next chunk of their prompt, then those
that were swapped out come back, then new ones are admitted, until the step's budget of tokens is spent. When a running
sequence needs a block and there is none, the latest arrival among the running ones is preempted: swapped out to host
blocks, or dropped and computed again later when the host is full too. The earliest arrival is therefore never
preempted for another, so that something always finishes. A sequence whose prompt another engine has computed is given
its blocks in its turn and then waits beside the others, until what is on its way to them has come.

A new sequence of which the store may have something is restored first, and the store is never waited for: the others
are computed meanwhile, and it is found done by the plan of some later step. A store that takes longer than
``restore_wait_s`` is given up on, and the sequence is computed instead.

It asks a ``BlockManager`` and computes nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cache_manager.manager import BlockManager
from paged_engine.request import EngineConfig, FinishReason
from paged_engine.sequence import Event, Sequence, State


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens ``[start, stop)`` of a sequence are to be computed."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after the last of these."""
        return self.stop == len(self.sequence.tokens)


class Scheduler:
    """The sequences that have not ended, and the plan of each step."""

    def __init__(
        self,
        config: EngineConfig,
        manager: BlockManager,
        clock: Callable[[], float] = time.monotonic,
        losing: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._losing = losing
        self._manager = manager
        self._sequences: dict[str, Sequence] = {}
        self._preempted = 0
        self.dropped = 0
        """Preemptions that found no room on the host: all that was computed is computed again."""
        self.given_up = 0
        """Sequences that did not wait for the store any longer."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def unfinished(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences.values())

    def of(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended."""
        return [s for s in self._sequences.values() if s.request.id == request_id]

    def add(self, sequence: Sequence) -> None:
        """Take a sequence into care: a new one that waits, or a fork that runs already."""
        self._sequences[sequence.owner] = sequence

    def counts(self) -> dict[State, int]:
        """How many sequences are in each state."""
        return {state: sum(s.state is state for s in self._sequences.values()) for state in State}

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence ends; its blocks go back."""
        sequence.finish(reason)
        self._manager.free(sequence.owner)
        del self._sequences[sequence.owner]

    def plan(self) -> list[Work]:
        """The next step's work, with the blocks it needs already there; at most ``step_tokens`` tokens."""
        self._take_in_restored()
        work: list[Work] = []
        budget, before = self._config.step_tokens, self._preempted
        for sequence in self._in(State.RUNNING):
            if sequence.state is not State.RUNNING or not budget:
                continue
            stop = min(len(sequence.tokens), sequence.computed + budget)
            if self._make_room(sequence, stop):
                work.append(Work(sequence, sequence.computed, stop))
                budget -= stop - sequence.computed
        if self._preempted > before:
            return work
        for sequence in (*self._in(State.SWAPPED), *self._in(State.WAITING)):
            if not budget or self._active >= self._config.sequences_max:
                break
            back = self._resume(sequence, budget) if sequence.state is State.SWAPPED else self._admit(sequence)
            if not back:
                break
            if sequence.state is not State.RUNNING:
                continue
            stop = min(len(sequence.tokens), sequence.computed + budget)
            work.append(Work(sequence, sequence.computed, stop))
            budget -= stop - sequence.computed
        return work

    @property
    def _active(self) -> int:
        """Sequences that run, or hold the blocks to do so and wait for something."""
        return len(self._in(State.RUNNING, State.RESTORING, State.LANDING))

    def drop_all(self) -> None:
        """Give up all that has been computed, and all that is on its way."""
        for sequence in self._in(State.RUNNING, State.SWAPPED, State.RESTORING, State.LANDING):
            self._drop(sequence)

    def _in(self, *states: State) -> list[Sequence]:
        return sorted((s for s in self._sequences.values() if s.state in states), key=_rank)

    def _take_in_restored(self) -> None:
        for owner, admission in self._manager.poll().items():
            sequence = self._sequences[owner]
            sequence.on(Event.ADMIT)
            sequence.computed = admission.cached_tokens
        waiting = self._in(State.RESTORING)
        now_s = self._clock() if waiting else 0.0
        for sequence in waiting:
            if now_s >= sequence.give_up_s:
                sequence.store_gave_nothing = True
                self._drop(sequence)
                self.given_up += 1

    def _resume(self, sequence: Sequence, budget: int) -> bool:
        """Swap in, if the blocks that the next chunk needs are there too."""
        stop = min(len(sequence.tokens), sequence.computed + budget)
        needed = -(-stop // self._config.block_tokens)
        if needed > self._manager.free_device_blocks or not self._manager.resume(sequence.owner):
            return False
        sequence.on(Event.SWAP_IN)
        return self._manager.append(sequence.owner, stop)  # the copy of a shared block may fail: it runs later then

    def _admit(self, sequence: Sequence) -> bool:
        """Give it blocks; it runs then, or waits for the store or another engine to fill some of them."""
        ask = not sequence.store_gave_nothing and sequence.handover is None
        admission = self._manager.begin_allocate(sequence.owner, sequence.tokens, restore=ask)
        if admission is None:
            return False
        if admission.pending:
            sequence.on(Event.RESTORE)
            sequence.give_up_s = self._clock() + self._config.restore_wait_s
        else:
            sequence.on(Event.ADMIT if sequence.handover is None else Event.AWAIT)
            sequence.computed = admission.cached_tokens
        return True

    def _make_room(self, sequence: Sequence, stop: int) -> bool:
        """Blocks for ``stop`` tokens, whoever has to go; ``False`` when it goes itself or has to wait for a while."""
        while not self._manager.append(sequence.owner, stop):
            going = self._in(State.RUNNING, State.RESTORING)
            victims = [s for s in going if s.rank >= sequence.rank]
            if not victims:
                return False
            self._preempt(victims[-1])
            if victims[-1] is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._preempted += 1
        if victim.computed and self._manager.preempt(victim.owner):
            victim.on(Event.SWAP_OUT)
        else:
            self._drop(victim)
            self.dropped += 1

    def _drop(self, sequence: Sequence) -> None:
        """Its blocks go, and with them all that was computed; ``losing`` hears of it first."""
        self._losing(sequence)
        self._manager.free(sequence.owner)
        sequence.on(Event.DROP)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

"""One sample on its way through the engine.

The law: a sequence holds device blocks when RUNNING, RESTORING or LANDING, host blocks when SWAPPED, and none when
WAITING or FINISHED. It is computed only when RUNNING. Others go on while a RESTORING one waits for the store, and a
LANDING one for rows and KV that another engine computes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvroute.journal import RequestJournal
from paged_engine.request import FinishReason, Request


class State(Enum):
    WAITING = auto()
    RESTORING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    LANDING = auto()
    FINISHED = auto()


NEXT: dict[State, set[State]] = {
    State.WAITING: {State.RESTORING, State.RUNNING, State.LANDING, State.FINISHED},
    State.RESTORING: {State.RUNNING, State.WAITING, State.FINISHED},
    State.LANDING: {State.RUNNING, State.WAITING, State.FINISHED},
    State.RUNNING: {State.SWAPPED, State.WAITING, State.FINISHED},
    State.SWAPPED: {State.RUNNING, State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(frozen=True, slots=True)
class Handover:
    """Another engine computes the prompt: as what its blocks are lent, and where."""

    transfer: bytes
    address: str


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample's tokens, prompt first, of which the first ``computed`` have KV and rows."""

    request: Request
    sample: int
    arrival: int
    tokens: list[int]
    state: State = State.WAITING
    computed: int = 0
    give_up_s: float = 0.0
    """While RESTORING: when to stop waiting for the store."""
    store_gave_nothing: bool = False
    """The store was given up on once, and is not asked again."""
    handover: Handover | None = None
    note: str = ""
    """Why a part of what was handed over was computed again."""
    journal: RequestJournal | None = None
    """The rows from before something was lost, if something ever was."""
    owner: str = field(init=False)

    def __post_init__(self) -> None:
        self.owner = f"{self.request.id}#{self.sample}"

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower one. The highest is the first to be preempted."""
        return self.arrival, self.sample

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt) :])

    def become(self, state: State) -> None:
        """Change the state; a change that the table does not allow is a bug. Who waits again has nothing any more."""
        if state not in NEXT[self.state]:
            raise AssertionError(f"{self.owner}: {state.name} after {self.state.name}")
        self.state = state
        if state is State.WAITING:
            self.computed, self.handover = 0, None

    def sample_from(self, logits: NDArray[Any]) -> FinishReason | None:
        """Append the token that ``logits [vocabulary]`` of the last one lead to; why the sample ends with it, if so.

        Gumbel noise on the scaled logits draws from their softmax; it is a function of seed, request, sample and
        position, so the batch that the token was computed in cannot show.
        """
        request = self.request
        if request.temperature:
            name = f"{request.seed} {self.sample} {len(self.tokens)} {request.draw or request.id}".encode()
            key = hashlib.blake2b(name, digest_size=16, person=b"kvroute.noise").digest()
            random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            logits = logits / request.temperature + random.gumbel(size=logits.size)
        self.tokens.append(token := int(logits.argmax()))
        generated = self.generated
        if token in request.stop_tokens or any(generated[-len(s) :] == s for s in request.stop_sequences):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(generated) >= request.max_tokens else None

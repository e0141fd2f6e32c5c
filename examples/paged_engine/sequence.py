"""One sample on its way through the engine.

The law: a sequence holds device blocks when RUNNING, RESTORING or LANDING, host blocks when SWAPPED, and none when
WAITING or FINISHED. It is computed only when RUNNING. A RESTORING one waits for the store, a LANDING one for rows and
KV of another engine; others go on meanwhile.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
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


class Handover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another engine computes the prompt: the transfer id and the address of its blocks; in JSON the id is in base64.

    It says nothing of weights and prompts: the transfer itself refuses others, and decode computes the prompt then.
    """

    transfer: Annotated[bytes, Meta(min_length=16, max_length=16)]
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
    """The wait for the store ended once without result; the store is not asked again."""
    handover: Handover | None = None
    note: str = ""
    """Why a part of the handed-over prompt was computed again."""
    journal: RequestJournal | None = None
    """The rows from before the first loss of blocks, if there was one."""

    @property
    def owner(self) -> str:
        return f"{self.request.id}#{self.sample}"

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest rank is served first; the highest is preempted first."""
        return self.arrival, self.sample

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt) :])

    def become(self, state: State) -> None:
        """Change the state; a change that the table does not allow is a bug. A sequence that waits again is empty."""
        if state not in NEXT[self.state]:
            raise AssertionError(f"{self.owner}: {state.name} after {self.state.name}")
        self.state = state
        if state is State.WAITING:
            self.computed, self.handover = 0, None

    def sample_from(self, logits: NDArray[Any]) -> FinishReason | None:
        """Append the token sampled from ``logits [vocabulary]`` of the last one; returns why the sample ends with it.

        Gumbel noise on the scaled logits draws from their softmax; it is a function of seed, sample and position, so it
        does not depend on the batch.
        """
        request = self.request
        if request.temperature:
            name = f"{request.seed} {self.sample} {len(self.tokens)}".encode()
            key = hashlib.blake2b(name, digest_size=16, person=b"kvroute.noise").digest()
            random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            logits = logits / request.temperature + random.gumbel(size=logits.size)
        self.tokens.append(token := int(logits.argmax()))
        if token in request.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= request.max_tokens else None

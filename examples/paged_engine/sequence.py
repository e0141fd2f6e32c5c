"""One sample on its way through the engine.

The law: a sequence holds device blocks when RUNNING, RESTORING or LANDING, host blocks when SWAPPED, and none when
WAITING or FINISHED. It is computed only when RUNNING. Others go on while a RESTORING one waits for the store, and a
LANDING one for rows and KV that another engine has computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvroute.journal import RequestJournal
from paged_engine.request import FinishReason, Request


class State(Enum):
    WAITING = auto()
    RESTORING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    LANDING = auto()
    FINISHED = auto()


class Event(Enum):
    RESTORE = auto()
    ADMIT = auto()
    SWAP_OUT = auto()
    SWAP_IN = auto()
    DROP = auto()  # preempted without room on the host, or overtaken while something came: it starts again later
    AWAIT = auto()  # blocks are there, rows and KV are on their way to them
    LAND = auto()  # what came is in place, and no more will come
    FINISH = auto()


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {
        Event.RESTORE: State.RESTORING,
        Event.ADMIT: State.RUNNING,
        Event.AWAIT: State.LANDING,
        Event.FINISH: State.FINISHED,
    },
    State.RESTORING: {Event.ADMIT: State.RUNNING, Event.DROP: State.WAITING, Event.FINISH: State.FINISHED},
    State.LANDING: {Event.LAND: State.RUNNING, Event.DROP: State.WAITING, Event.FINISH: State.FINISHED},
    State.RUNNING: {
        Event.SWAP_OUT: State.SWAPPED,
        Event.DROP: State.WAITING,
        Event.FINISH: State.FINISHED,
    },
    State.SWAPPED: {Event.SWAP_IN: State.RUNNING, Event.DROP: State.WAITING, Event.FINISH: State.FINISHED},
    State.FINISHED: {},
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
    reason: FinishReason | None = None
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

    def on(self, event: Event) -> None:
        """Change the state; an event that the table does not allow is a bug."""
        if event not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.owner}: {event.name} while {self.state.name}")
        self.state = TRANSITIONS[self.state][event]
        if event in (Event.ADMIT, Event.DROP):
            self.computed = 0
        if event is Event.DROP:
            self.handover = None  # what came is gone

    def finish(self, reason: FinishReason) -> None:
        self.on(Event.FINISH)
        self.reason = reason

    def accept(self, token: int) -> FinishReason | None:
        """Append a sampled token; why the sample ends with it, if it does."""
        self.tokens.append(token)
        request, generated = self.request, self.generated
        if token in request.stop_tokens or any(generated[-len(s) :] == s for s in request.stop_sequences):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(generated) >= request.max_tokens else None

"""One pull as the decode side sees it: its life as a table, and what is kept for it.

The law: the ack follows the last installation, and every wanted record ends as installed or as missing with a reason.

    PULLING -- something wanted is neither in place nor given up
    ACKING --- all settled; prefill has not said yet that it knows
    DONE ----- over; what is not in place is missing for a reason of its own
    FAILED --- over before its end, for one reason
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cache_manager.keys import BlockKey
from transfer.actions import Missing
from transfer.link import Peer
from transfer.messages import TransferId, Want


class State(StrEnum):
    PULLING = "pulling"
    ACKING = "acking"
    DONE = "done"
    FAILED = "failed"


class Event(StrEnum):
    ARRIVED = "a record was settled"
    RETRY = "nothing came"
    ALL_SETTLED = "every wanted record was settled"
    FAIL = "fail"
    HEARD = "prefill knows"
    GIVE_UP = "prefill does not say that it knows"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.PULLING: {
        Event.ARRIVED: State.PULLING,
        Event.RETRY: State.PULLING,
        Event.ALL_SETTLED: State.ACKING,
        Event.FAIL: State.FAILED,
    },
    State.ACKING: {
        Event.RETRY: State.ACKING,
        Event.HEARD: State.DONE,
        Event.GIVE_UP: State.DONE,
    },
    State.DONE: {},
    State.FAILED: {},
}

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DecodeCounters:
    """What a :class:`DecodeSession` has seen so far; every number only grows.

    ``duplicate_records`` were in place already, ``stale_messages`` belong to a pull that is over or an epoch that is,
    ``foreign_messages`` came from a peer that was not asked, ``corrupt_records`` failed a check and were asked for
    again.
    """

    pulls: int = 0
    done: int = 0
    failed: int = 0
    attempts: int = 0
    retries: int = 0
    records_installed: int = 0
    records_stale: int = 0
    records_absent: int = 0
    corrupt_records: int = 0
    duplicate_records: int = 0
    postponed_records: int = 0
    sends_refused: int = 0
    foreign_messages: int = 0
    stale_messages: int = 0
    bad_messages: int = 0
    refusals: int = 0


@dataclass(slots=True, eq=False)
class Greeting:
    """Where this side stands with a peer."""

    boot_id: bytes | None = None  # the prefill run that welcomed us; None: not (or no longer) welcomed
    renew_s: float = 0.0
    hello_s: float | None = None  # when the last hello was sent
    pulls: dict[TransferId, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Pulling:
    """What is kept for a pull. A *place* is (part, index); times are monotonic seconds."""

    id: TransferId
    peer: Peer
    outstanding: dict[Place, BlockKey]  # of what is neither settled nor being installed
    due_s: float
    spoken_s: float
    wake_s: float = math.inf  # when the session looks at it next
    state: State = State.PULLING
    epoch: int = 0
    retries: int = 0  # in a row
    asked: bool = False  # the message for this epoch is with the link
    owed: set[Place] = field(default_factory=set)  # asked for in this epoch, not yet come
    granted_nbytes: int = 0
    consumed_nbytes: int = 0  # of this epoch, since the last credit
    installing: dict[Place, BlockKey] = field(default_factory=dict)
    installed: int = 0
    missing: list[Missing] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """The one place where a pull changes its state."""
        after = TRANSITIONS[self.state].get(event)
        assert after is not None, f"{event.name} while {self.state.name}"
        self.state = after

    def wants(self) -> list[Want]:
        """What is missing, block by block."""
        blocks: dict[int, tuple[BlockKey, int]] = {}
        for (part, index), key in self.outstanding.items():
            blocks[index] = key, blocks.get(index, (key, 0))[1] | 1 << part
        return [Want(index, key, parts) for index, (key, parts) in blocks.items()]

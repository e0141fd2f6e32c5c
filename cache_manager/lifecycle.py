"""The life of a block, as a table.

The law: a step that writes a block's rows begins while somebody holds it; rows may be read in any state but FREE and
ARRIVING; a block in motion (LEAVING, ARRIVING) can be neither freed, nor given to a new owner, nor written. Every time
a block starts a new life its generation goes up, and whatever was issued for an older generation is dropped.

    FREE ----- nobody's; nothing in it is readable
    HELD ----- at least one owner has a lease, or the engine that owns all blocks has given it out
    CACHED --- no owner; the rows stay readable until the block is given away or evicted
    LEAVING -- being copied from (leases may come and go; the block stays)
    ARRIVING - being copied into; not readable until it has arrived

Pure.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    FREE = 0
    HELD = 1
    CACHED = 2
    LEAVING = 3
    ARRIVING = 4


class Event(Enum):
    __hash__ = object.__hash__  # Enum's own is a Python function, and each check and change of state looks events up

    ALLOCATE = "allocate"
    RENEW = "give out anew"
    SHARE = "share"
    LAST_RELEASE = "release by the last owner"
    EVICT = "evict"
    WRITE = "write"
    BEGIN_DEPARTURE = "copy from"
    DEPARTED_HELD = "copied from, held"
    DEPARTED_UNHELD = "copied from, unheld"
    BEGIN_ARRIVAL = "copy into"
    ARRIVED_HELD = "arrived, held"
    ARRIVED_UNHELD = "arrived, unheld"
    FAILED_UNHELD = "failed to arrive, unheld"
    RESET_UNHELD = "reset, unheld"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.FREE: {
        Event.ALLOCATE: State.HELD,
        Event.RENEW: State.HELD,
        Event.EVICT: State.FREE,
        Event.BEGIN_ARRIVAL: State.ARRIVING,
        Event.RESET_UNHELD: State.FREE,
    },
    State.HELD: {
        Event.RENEW: State.HELD,
        Event.SHARE: State.HELD,
        Event.WRITE: State.HELD,
        Event.LAST_RELEASE: State.CACHED,
        Event.BEGIN_DEPARTURE: State.LEAVING,
        Event.BEGIN_ARRIVAL: State.ARRIVING,
    },
    State.CACHED: {
        Event.ALLOCATE: State.HELD,
        Event.SHARE: State.HELD,
        Event.EVICT: State.FREE,
        Event.BEGIN_DEPARTURE: State.LEAVING,
        Event.BEGIN_ARRIVAL: State.ARRIVING,
        Event.RESET_UNHELD: State.FREE,
    },
    State.LEAVING: {
        Event.SHARE: State.LEAVING,
        Event.LAST_RELEASE: State.LEAVING,
        Event.BEGIN_DEPARTURE: State.LEAVING,
        Event.DEPARTED_HELD: State.HELD,
        Event.DEPARTED_UNHELD: State.CACHED,
    },
    State.ARRIVING: {
        Event.LAST_RELEASE: State.ARRIVING,
        Event.ARRIVED_HELD: State.HELD,
        Event.ARRIVED_UNHELD: State.CACHED,
        Event.FAILED_UNHELD: State.FREE,
    },
}

ILLEGAL: Final = 255
NEXT: Final[dict[Event, bytes]] = {
    event: bytes(TRANSITIONS[s].get(event, ILLEGAL) for s in State).ljust(256, b"\xff") for event in Event
}
"""By event: the state after it for each state before it, or ``ILLEGAL``; for ``bytes.translate``, which is quick."""
ALLOWED: Final[dict[Event, NDArray[np.bool_]]] = {
    event: np.array([after[s] != ILLEGAL for s in State]) for event, after in NEXT.items()
}
IN_MOTION: Final = (State.LEAVING, State.ARRIVING)

"""One transfer as the prefill side sees it: its life as a table, and what is kept for it.

The law: a transfer's blocks are released once, after an ack, an abort, a reset or the end of its lease, and only when
the link has let go of every buffer of theirs.

    OFFERED --- nobody has asked for it yet
    SENDING --- something that its owner wants has not been handed to the link
    SENT ------ everything wanted is with the link or beyond
    ENDING ---- over, but the link still reads its blocks
    RELEASED -- its blocks are free
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from transfer.actions import OfferedBlock
from transfer.link import Peer
from transfer.messages import Outcome, TransferId


class State(StrEnum):
    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    ENDING = "ending"
    RELEASED = "released"


class Event(StrEnum):
    PULL = "pull"
    ALL_SENT = "everything wanted is with the link"
    TAKEN_BACK = "the link refused records"
    END_HELD = "end while the link holds buffers"
    END_FREE = "end while the link holds none"
    LET_GO = "the link let go of the last buffer"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.OFFERED: {
        Event.PULL: State.SENDING,
        Event.END_FREE: State.RELEASED,
    },
    State.SENDING: {
        Event.PULL: State.SENDING,
        Event.ALL_SENT: State.SENT,
        Event.TAKEN_BACK: State.SENDING,
        Event.END_HELD: State.ENDING,
        Event.END_FREE: State.RELEASED,
    },
    State.SENT: {
        Event.PULL: State.SENDING,
        Event.TAKEN_BACK: State.SENDING,
        Event.END_HELD: State.ENDING,
        Event.END_FREE: State.RELEASED,
    },
    State.ENDING: {
        Event.LET_GO: State.RELEASED,
    },
    State.RELEASED: {},
}

PULLED: Final = (State.SENDING, State.SENT)


@dataclass(frozen=True, slots=True)
class PrefillCounters:
    """What a :class:`PrefillSession` has seen so far; every number only grows.

    ``late_messages`` came for a transfer that had ended, ``foreign_messages`` from somebody who does not own it,
    ``stale_messages`` belong to an epoch that is over, ``stranger_messages`` came without a hello. ``slow_peers`` were
    cut off, as they did not read what they had pulled until long after the transfer's end.
    """

    offered: int = 0
    pulled: int = 0
    acked: int = 0
    aborted: int = 0
    expired: int = 0
    reset: int = 0
    attempts: int = 0
    records_sent: int = 0
    records_absent: int = 0
    key_mismatches: int = 0
    sends_refused: int = 0
    late_messages: int = 0
    foreign_messages: int = 0
    stale_messages: int = 0
    stranger_messages: int = 0
    unknown_transfers: int = 0
    bad_messages: int = 0
    refused_peers: int = 0
    slow_peers: int = 0


@dataclass(slots=True, eq=False)
class Offer:
    """What is kept for a transfer. ``peer`` and ``boot_id`` own it; times are monotonic seconds."""

    id: TransferId
    blocks: dict[int, OfferedBlock]
    expires_s: float
    expires_max_s: float
    state: State = State.OFFERED
    peer: Peer | None = None
    boot_id: bytes = b""
    epoch: int = 0
    granted_nbytes: int = 0
    used_nbytes: int = 0
    in_link: int = 0  # messages whose buffers the link holds
    outcome: Outcome | None = None
    wanted: deque[tuple[int, int]] = field(default_factory=deque)  # (part, index) not yet sent in this epoch
    unsummed: list[tuple[int, int]] = field(default_factory=list)  # what may be sealed before it is asked for
    sealed: dict[tuple[int, int], bytes] = field(default_factory=dict)  # packed headers, of what was sent at least

    def seal_next(self) -> bool:
        """Have one more header packed before it is needed; whether more may be left."""
        if not self.unsummed:
            return False
        self.header(*self.unsummed.pop())
        return bool(self.unsummed)

    def header(self, part: int, index: int) -> bytes:
        """The packed header of a record that is there; the first call reads its payload."""
        place = part, index
        header = self.sealed.get(place)
        if header is None:
            record = self.blocks[index].records[part]
            assert record is not None, "a record that is not there was queued"
            header = self.sealed[place] = record.pack()
        return header

    def apply(self, event: Event) -> None:
        """The one place where a transfer changes its state."""
        after = TRANSITIONS[self.state].get(event)
        assert after is not None, f"{event.name} while {self.state.name}"
        self.state = after


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of a transfer that is over, ``peer`` being ``None`` if nobody had pulled it."""

    outcome: Outcome
    peer: Peer | None
    boot_id: bytes

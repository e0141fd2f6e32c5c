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
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cache_manager.record import Buffer
from transfer.actions import OfferedBlock, Send
from transfer.errors import LocalProtocolError
from transfer.frames import join
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    BLOCKS_MAX,
    CONTROL_NBYTES_MAX,
    Entry,
    Outcome,
    Part,
    Place,
    Pull,
    Records,
    TransferId,
)

ENTRY_NBYTES_MAX: Final = 64
"""Of an entry in a message beside its header, with a share of what is in the message once."""


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


@dataclass(slots=True)
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
    unsummed: list[tuple[int, int]] = field(init=False)  # what may be sealed before it is asked for
    sealed: dict[tuple[int, int], bytes] = field(default_factory=dict)  # packed headers, of what was sent at least

    def __post_init__(self) -> None:
        self.unsummed = [
            (part, b.index)
            for b in reversed(self.blocks.values())
            for part, record in enumerate(b.records)
            if record is not None
        ]

    def want(self, pull: Pull) -> tuple[list[Place], int]:
        """Begin the epoch of ``pull``: what it asks for and is not there, and of how many blocks the key is another."""
        self.apply(Event.PULL)
        self.epoch, self.granted_nbytes, self.used_nbytes = pull.epoch, pull.credit_nbytes, 0
        self.wanted.clear()
        absent: list[Place] = []
        mismatches = 0
        for want in {w.index: w for w in pull.wanted}.values():  # who asks for a block twice gets it once
            block = self.blocks.get(want.index)
            if block is not None and block.key != want.key:
                mismatches += 1
                block = None
            for part in range(want.parts.bit_length()):
                if not want.parts >> part & 1:
                    continue
                if block is None or part >= len(block.records) or block.records[part] is None:
                    absent.append(Place(part, want.index))
                else:
                    self.wanted.append((part, want.index))
        if not self.wanted:
            self.apply(Event.ALL_SENT)
        return absent, mismatches

    def take(self, parts: Sequence[Part], limits: TransferLimits, frame_nbytes_max: int) -> Send | None:
        """Records that fit one message and the credit, with the link from now on; ``None`` if not one does."""
        free_nbytes = self.granted_nbytes - self.used_nbytes
        entries: list[Entry] = []
        bulk: list[Buffer] = []
        sizes: list[int] = []
        nbytes = control_nbytes = 0
        while self.wanted and len(entries) < limits.records_max:
            part, index = self.wanted[0]
            size = parts[part].nbytes
            if nbytes + size > free_nbytes or (entries and nbytes + size > limits.records_nbytes_max):
                break
            record = self.blocks[index].records[part]
            assert record is not None, "a record that is not there was queued"
            header = self.header(part, index)
            control_nbytes += len(header) + ENTRY_NBYTES_MAX
            if control_nbytes > CONTROL_NBYTES_MAX:
                break
            self.wanted.popleft()
            entries.append(Entry(part, index, header))
            bulk.append(record.payload)
            sizes.append(size)
            nbytes += size
        if not entries:
            return None
        if not self.wanted:
            self.apply(Event.ALL_SENT)
        self.used_nbytes += nbytes
        self.in_link += 1
        assert self.peer is not None, "nobody pulled it"
        frames = join(bulk, sizes, limits.joined_nbytes_max, frame_nbytes_max)
        return Send(self.peer, Records(self.id, self.epoch, entries), frames)

    def take_back(self, records: Records, parts: Sequence[Part]) -> None:
        """The link refused what :meth:`take` answered just before."""
        assert self.state in PULLED, "the link refuses at once: nothing can have come between"
        assert self.epoch == records.epoch, "the link refuses at once: nothing can have come between"
        self.apply(Event.TAKEN_BACK)
        self.wanted.extendleft((e.part, e.index) for e in reversed(records.entries))
        self.used_nbytes -= sum(parts[e.part].nbytes for e in records.entries)
        self.in_link -= 1

    def seal_next(self) -> bool:
        """Have one more header packed before it is needed; whether more may be left."""
        if self.unsummed:
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


def check_blocks(blocks: Sequence[OfferedBlock], parts: Sequence[Part]) -> None:
    """Raise :class:`LocalProtocolError` unless ``blocks`` have indices of their own and records of ``parts``."""
    if len(blocks) > BLOCKS_MAX or len({b.index for b in blocks}) != len(blocks):
        raise LocalProtocolError(f"blocks: wanted at most {BLOCKS_MAX}, each index once, got {len(blocks)}")
    for block in blocks:
        if not 0 <= block.index < BLOCKS_MAX or len(block.records) != len(parts):
            raise LocalProtocolError(f"block {block.index}: wanted {len(parts)} records, got {len(block.records)}")
        for part, record in zip(parts, block.records, strict=True):
            if record is None:
                continue
            if record.fingerprint != part.fingerprint or record.nbytes != part.nbytes or record.key != block.key:
                raise LocalProtocolError(f"block {block.index}: wanted a {part.name} record of its key, got another")


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of a transfer that is over, ``peer`` being ``None`` if nobody had pulled it."""

    outcome: Outcome
    peer: Peer | None
    boot_id: bytes

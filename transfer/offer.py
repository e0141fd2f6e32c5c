"""One offer: its life as a table, and what is kept for it.

The law: an offer's blocks are released once, after an ack, an abort, a reset or the end of its lease. Until it is
sealed, a block that it has not is on its way; from then on it is absent.

    EXPECTED -- it was pulled, and was not offered yet
    OPEN ------ blocks may still be added
    SEALED ---- every block is there
    RELEASED -- over
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cache_manager.keys import KEY_NBYTES, BlockKey
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

FIRST_MESSAGE: Final = 8
"""The first message of an attempt is this much smaller than the largest; each is twice the one before."""


class State(StrEnum):
    EXPECTED = "expected"
    OPEN = "open"
    SEALED = "sealed"
    RELEASED = "released"


class Event(StrEnum):
    OFFER = "it is offered"
    GROW = "blocks are added"
    SEAL = "no more blocks come"
    END = "end"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.EXPECTED: {Event.OFFER: State.OPEN, Event.END: State.RELEASED},
    State.OPEN: {Event.GROW: State.OPEN, Event.SEAL: State.SEALED, Event.END: State.RELEASED},
    State.SEALED: {Event.END: State.RELEASED},
    State.RELEASED: {},
}


@dataclass(slots=True, eq=False)
class Offer:
    """What is kept for an offer. ``peer`` and ``boot_id`` own it; times are monotonic seconds."""

    id: TransferId
    expires_s: float = 0.0
    expires_max_s: float = 0.0
    asked: Pull | None = None  # before it was offered
    state: State = State.EXPECTED
    blocks: dict[int, OfferedBlock] = field(default_factory=dict)
    peer: Peer | None = None
    boot_id: bytes = b""
    epoch: int = 0
    granted_nbytes: int = 0
    used_nbytes: int = 0
    message_nbytes: int = 0
    wanted: deque[tuple[int, int]] = field(default_factory=deque)  # (part, index) there and not sent in this epoch
    later: dict[int, tuple[BlockKey, int]] = field(default_factory=dict)  # wanted in this epoch, and still to come
    unsummed: deque[tuple[int, int]] = field(default_factory=deque)  # what may be summed before it is asked for
    headers: dict[tuple[int, int], bytes] = field(default_factory=dict)  # packed; of what was sent at least

    def grow(self, blocks: Iterable[OfferedBlock]) -> list[Place]:
        """Add blocks; what was wanted of them under another key, and so is absent."""
        self.apply(Event.GROW)
        absent: list[Place] = []
        for block in blocks:
            self.blocks[block.index] = block
            self.unsummed.extend((part, block.index) for part, r in enumerate(block.records) if r is not None)
            if (asked := self.later.pop(block.index, None)) is not None:
                self._want(block.index, *asked, absent)
        return absent

    def seal(self) -> list[Place]:
        """No more blocks come; what was wanted of those that did not, and so is absent."""
        self.apply(Event.SEAL)
        absent: list[Place] = []
        later, self.later = self.later, {}
        for index, asked in later.items():
            self._want(index, *asked, absent)
        return absent

    def want(self, pull: Pull) -> tuple[list[Place], int]:
        """Begin the epoch of ``pull``: what it asks for and is not there, and of how many blocks the key is another."""
        self.epoch, self.granted_nbytes, self.used_nbytes, self.message_nbytes = pull.epoch, pull.credit_nbytes, 0, 0
        self.wanted.clear()
        self.later.clear()
        asked: dict[int, tuple[BlockKey, int]] = {}  # who asks for a block twice gets it once
        for wanted in pull.wanted:
            for at in range(min(len(wanted.keys) // KEY_NBYTES, BLOCKS_MAX - wanted.start)):
                key = BlockKey(wanted.keys[at * KEY_NBYTES : (at + 1) * KEY_NBYTES])
                asked[wanted.start + at] = key, wanted.parts
        absent: list[Place] = []
        mismatches = sum(self._want(index, key, parts, absent) for index, (key, parts) in asked.items())
        return absent, mismatches

    def _want(self, index: int, key: BlockKey, parts: int, absent: list[Place]) -> bool:
        """Queue what is wanted of a block, or add it to ``absent``; whether the block has another key."""
        block = self.blocks.get(index)
        if block is None and self.state is State.OPEN:
            self.later[index] = key, parts
            return False
        other = block is not None and block.key != key
        for part in range(parts.bit_length()):
            if not parts >> part & 1:
                continue
            if block is None or other or part >= len(block.records) or block.records[part] is None:
                absent.append(Place(part, index))
            else:
                self.wanted.append((part, index))
        return other

    def take(self, parts: Sequence[Part], limits: TransferLimits, frame_nbytes_max: int) -> Send | None:
        """Records that fit one message and the credit, taken to be sent; ``None`` if not one does."""
        free_nbytes = self.granted_nbytes - self.used_nbytes
        largest = limits.records_nbytes_max
        self.message_nbytes = min(largest, 2 * self.message_nbytes or largest // FIRST_MESSAGE)
        entries: list[Entry] = []
        bulk: list[Buffer] = []
        sizes: list[int] = []
        nbytes = control_nbytes = 0
        while self.wanted and len(entries) < limits.records_max:
            part, index = self.wanted[0]
            size = parts[part].nbytes
            if nbytes + size > free_nbytes or (entries and nbytes + size > self.message_nbytes):
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
        self.used_nbytes += nbytes
        assert self.peer is not None, "nobody pulled it"
        frames = join(bulk, sizes, limits.joined_nbytes_max, frame_nbytes_max)
        return Send(self.peer, Records(self.id, self.epoch, entries), frames)

    def take_back(self, records: Records, parts: Sequence[Part]) -> None:
        """The link refused what :meth:`take` answered just before."""
        assert self.epoch == records.epoch, "the link refuses at once: nothing can have come between"
        self.wanted.extendleft((e.part, e.index) for e in reversed(records.entries))
        self.used_nbytes -= sum(parts[e.part].nbytes for e in records.entries)

    def sum_next(self) -> bool:
        """Have one more header packed before it is needed; whether more may be left."""
        if self.unsummed:
            self.header(*self.unsummed.popleft())
        return bool(self.unsummed)

    def header(self, part: int, index: int) -> bytes:
        """The packed header of a record that is there; the first call reads its payload."""
        place = part, index
        header = self.headers.get(place)
        if header is None:
            record = self.blocks[index].records[part]
            assert record is not None, "a record that is not there was queued"
            header = self.headers[place] = record.pack()
        return header

    def apply(self, event: Event) -> None:
        """The one place where an offer changes its state."""
        after = TRANSITIONS[self.state].get(event)
        assert after is not None, f"{event.name} while {self.state.name}"
        self.state = after


def check_blocks(blocks: Sequence[OfferedBlock], parts: Sequence[Part], there: Mapping[int, object] = {}) -> None:
    """Raise :class:`LocalProtocolError` unless ``blocks`` have indices that are not ``there``, and records of
    ``parts``.
    """
    indices = {b.index for b in blocks}
    if len(indices) != len(blocks) or indices & there.keys() or not indices <= _INDICES:
        raise LocalProtocolError(f"blocks: wanted each index in [0, {BLOCKS_MAX}) once, got {sorted(indices)[:8]}")
    for block in blocks:
        if len(block.records) != len(parts):
            raise LocalProtocolError(f"block {block.index}: wanted {len(parts)} records, got {len(block.records)}")
        for part, record in zip(parts, block.records, strict=True):
            if record is None:
                continue
            if record.fingerprint != part.fingerprint or record.nbytes != part.nbytes or record.key != block.key:
                raise LocalProtocolError(f"block {block.index}: wanted a {part.name} record of its key, got another")


_INDICES: Final = frozenset(range(BLOCKS_MAX))


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of an offer that is over, ``peer`` being ``None`` if nobody had pulled it."""

    outcome: Outcome
    peer: Peer | None
    boot_id: bytes

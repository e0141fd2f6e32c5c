"""One pull as the decode side sees it: its life as a table, and what is kept for it.

The law: the ack follows the last installation, and every wanted record ends as installed or as missing with a reason.

    PULLING -- something wanted is neither in place nor given up
    ACKING --- all settled; prefill has not said yet that it knows
    DONE ----- over; what is not in place is missing for a reason of its own
    FAILED --- over before its end, for one reason
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cache_manager.errors import RecordError
from cache_manager.keys import BlockKey
from cache_manager.record import check_record, unpack_header
from transfer.actions import Install, Missing, PullResult, Reason, WantedBlock
from transfer.errors import LocalProtocolError
from transfer.link import Peer
from transfer.messages import BLOCKS_MAX, Absent, Ack, BootId, Credit, Part, Pull, Records, Renew, TransferId, Want


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


def places_of(wanted: Sequence[WantedBlock], parts: int) -> dict[Place, BlockKey]:
    """The records of ``wanted`` with their keys; :class:`LocalProtocolError` for what cannot be wanted."""
    if len({b.index for b in wanted}) != len(wanted):
        raise LocalProtocolError("wanted: wanted each index once, got one twice")
    keys: dict[Place, BlockKey] = {}
    for block in wanted:
        if not 0 <= block.index < BLOCKS_MAX or not block.parts:
            raise LocalProtocolError(f"wanted: wanted parts of an index in [0, {BLOCKS_MAX}), got {block}")
        for part in block.parts:
            if not 0 <= part < parts:
                raise LocalProtocolError(f"wanted: wanted a part in [0, {parts}), got {part}")
            keys[part, block.index] = block.key
    return keys


@dataclass(slots=True)
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

    def says_hello(self, now_s: float, retry_s: float) -> bool:
        """Whether a hello is due, which is then taken to be sent; not so soon after another."""
        due = self.hello_s is None or now_s >= self.hello_s + retry_s
        if due:
            self.hello_s = now_s
        return due


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

    @property
    def unsettled(self) -> bool:
        return bool(self.outstanding or self.installing)

    def next_message(self, boot_id: BootId, credit_nbytes: int, now_s: float) -> Pull | Ack | Renew:
        """What the state asks for, taken to be sent: a pull begins the next epoch; where all was said, a renewal."""
        self.spoken_s = now_s
        if self.asked:
            return Renew(boot_id, self.id)
        self.asked = True
        if self.state is State.ACKING:
            return Ack(boot_id, self.id, max(1, self.epoch), self.installed, len(self.missing))
        self.epoch += 1
        self.owed = set(self.outstanding)
        self.granted_nbytes, self.consumed_nbytes = credit_nbytes, 0
        return Pull(boot_id, self.id, self.epoch, self._wants(), credit_nbytes)

    def take(
        self, records: Records, payloads: Sequence[memoryview], parts: Sequence[Part], counters: DecodeCounters
    ) -> list[Install]:
        """The records that are wanted and sound, to be installed from now on; what was owed is credit again."""
        installs: list[Install] = []
        current = records.epoch == self.epoch
        owed, keys, installing = self.owed, self.outstanding, self.installing
        for entry, payload in zip(records.entries, payloads, strict=True):
            place = entry.part, entry.index
            part = parts[entry.part]
            if current and place in owed:
                owed.discard(place)
                self.consumed_nbytes += part.nbytes
            key = keys.get(place)
            if key is None:
                counters.duplicate_records += 1
                continue
            try:
                header = unpack_header(entry.header)
                if payload.nbytes != part.nbytes:
                    raise RecordError("payload size", part.nbytes, payload.nbytes)
                check_record(header, key, part.fingerprint, payload)
            except RecordError:
                counters.corrupt_records += 1
                continue
            installing[place] = keys.pop(place)
            installs.append(Install(self.id, *place, header, payload))
        return installs

    def credit(self, boot_id: BootId, credit_nbytes: int, now_s: float) -> Credit | None:
        """More credit when half of it has come and more is wanted, taken to be sent."""
        if not self.outstanding or 2 * self.consumed_nbytes < credit_nbytes:
            return None
        self.granted_nbytes += self.consumed_nbytes
        self.consumed_nbytes, self.spoken_s = 0, now_s
        return Credit(boot_id, self.id, self.epoch, self.granted_nbytes)

    def give_up(self, absent: Absent) -> int:
        """Settle what prefill does not have; how many records that are."""
        settled = 0
        for entry in absent.entries:
            place = entry.part, entry.index
            if self.outstanding.pop(place, None) is not None:
                settled += 1
                self.owed.discard(place)
                self.missing.append(Missing(*place, Reason.ABSENT))
        return settled

    def result(self, event: Event, reason: Reason | None, detail: str) -> PullResult:
        """After ``event``, which ended the pull."""
        return PullResult(self.installed, tuple(self.missing), reason, detail, self.epoch, event is Event.HEARD)

    def _wants(self) -> list[Want]:
        """What is missing, block by block."""
        blocks: dict[int, tuple[BlockKey, int]] = {}
        for (part, index), key in self.outstanding.items():
            blocks[index] = key, blocks.get(index, (key, 0))[1] | 1 << part
        return [Want(index, key, parts) for index, (key, parts) in blocks.items()]

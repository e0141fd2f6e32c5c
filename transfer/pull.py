"""One pull as the decode side sees it: its life as a table, and what is kept for it.

The law: the ack follows the last installation, and every wanted record ends as installed or as missing with a reason.

    PULLING -- something wanted is neither in place nor given up
    ACKING --- all settled, and the engine told; prefill has not said yet that it knows
    ENDED ---- over
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
from transfer.actions import Install, Missing, Reason, WantedBlock
from transfer.counters import PullCounters
from transfer.errors import LocalProtocolError, RemoteProtocolError
from transfer.frames import split
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import BLOCKS_MAX, Absent, Ack, BootId, Credit, Part, Pull, Range, Records, TransferId


class State(StrEnum):
    PULLING = "pulling"
    ACKING = "acking"
    ENDED = "ended"


class Event(StrEnum):
    ARRIVED = "a record was settled"
    RETRY = "nothing came"
    ALL_SETTLED = "every wanted record was settled"
    FAIL = "fail"
    GIVE_UP = "prefill knows, or nobody can tell"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.PULLING: {
        Event.ARRIVED: State.PULLING,
        Event.RETRY: State.PULLING,
        Event.ALL_SETTLED: State.ACKING,
        Event.FAIL: State.ENDED,
    },
    State.ACKING: {
        Event.RETRY: State.ACKING,
        Event.GIVE_UP: State.ENDED,
    },
    State.ENDED: {},
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


def payloads_of(records: Records, bulk: Sequence[memoryview], parts: Sequence[Part]) -> Sequence[memoryview]:
    """The payloads of the entries of ``records``; :class:`RemoteProtocolError` for bulk that is not theirs."""
    try:
        sizes = [parts[entry.part].nbytes for entry in records.entries]
    except IndexError as error:
        raise RemoteProtocolError(f"part: wanted one of {len(parts)}, got a later one") from error
    return split(bulk, sizes)


@dataclass(slots=True, eq=False)
class Greeting:
    """Where this side stands with a peer."""

    boot_id: bytes | None = None  # the prefill run that welcomed us; None: not (or no longer) welcomed
    renew_s: float = 0.0
    hello_s: float | None = None  # when the last hello was sent
    pulls: dict[TransferId, None] = field(default_factory=dict)
    unsaid: dict[TransferId, None] = field(default_factory=dict)  # pulls for which the link refused a message
    again_s: float = 0.0  # when those are tried again
    pause_s: float = 0.0  # before that; twice as long each time

    def refused(self, now_s: float, limits: TransferLimits) -> None:
        """The link refused a message to this peer."""
        self.pause_s = min(2 * self.pause_s or limits.resend_s, limits.retry_s)
        self.again_s = now_s + self.pause_s

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
    give_up_s: float  # however much prefill promises
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

    def next_message(self, boot_id: BootId, credit_nbytes: int, now_s: float) -> Pull | Ack | Credit:
        """What the state asks for, taken to be sent: a pull begins the next epoch; where all was said, a renewal."""
        self.spoken_s = now_s
        if self.asked:
            return Credit(boot_id, self.id, max(1, self.epoch), self.granted_nbytes)
        self.asked = True
        if self.state is State.ACKING:
            return Ack(boot_id, self.id, max(1, self.epoch), self.installed, len(self.missing))
        self.epoch += 1
        self.owed = set(self.outstanding)
        self.granted_nbytes, self.consumed_nbytes = credit_nbytes, 0
        return Pull(boot_id, self.id, self.epoch, self._wants(), credit_nbytes)

    def take(
        self, records: Records, payloads: Sequence[memoryview], parts: Sequence[Part], counters: PullCounters
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

    def _wants(self) -> list[Range]:
        """What is missing: neighbouring blocks of which the same parts are wanted are one range."""
        blocks: dict[int, tuple[BlockKey, int]] = {}
        for (part, index), key in self.outstanding.items():
            blocks[index] = key, blocks.get(index, (key, 0))[1] | 1 << part
        ranges: list[tuple[int, int, list[bytes]]] = []
        for index, (key, parts) in sorted(blocks.items()):
            if ranges and ranges[-1][0] + len(ranges[-1][2]) == index and ranges[-1][1] == parts:
                ranges[-1][2].append(key)
            else:
                ranges.append((index, parts, [key]))
        return [Range(start, parts, b"".join(keys)) for start, parts, keys in ranges]

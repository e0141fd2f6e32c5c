"""One pull on the decode side: its life as a table, and its data.

The law: the ack follows the last installation, and every wanted record ends as installed or as missing with a reason.

    PULLING -- a wanted record is neither in place nor given up ACKING --- all settled, and the engine told; prefill has
    not confirmed yet ENDED ---- over
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from cache_manager.errors import BlockBusyError, RecordError
from cache_manager.keys import BlockKey
from cache_manager.record import check_record, unpack_header
from transfer.actions import BlockSink, Missing, Reason, WantedBlock
from transfer.counters import Counters
from transfer.errors import LocalProtocolError, RemoteProtocolError, SinkError
from transfer.link import Peer
from transfer.messages import BLOCKS_MAX, Absent, Ack, BootId, Part, Pull, Range, Records, Renew, TransferId, split


class State(StrEnum):
    PULLING = "pulling"
    ACKING = "acking"
    ENDED = "ended"


class Event(StrEnum):
    ALL_SETTLED = "every wanted record was settled"
    FAIL = "fail"
    GIVE_UP = "prefill has confirmed, or cannot be reached"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.PULLING: {Event.ALL_SETTLED: State.ACKING, Event.FAIL: State.ENDED},
    State.ACKING: {Event.GIVE_UP: State.ENDED},
    State.ENDED: {},
}

Place = tuple[int, int]
"""(part, index)"""


def places_of(wanted: Sequence[WantedBlock], parts: int) -> dict[Place, BlockKey]:
    """The records of ``wanted`` with their keys; :class:`LocalProtocolError` for invalid blocks or parts."""
    keys: dict[Place, BlockKey] = {}
    every = set(range(parts))
    for block in wanted:
        if not 0 <= block.index < BLOCKS_MAX or not block.parts or not every.issuperset(block.parts):
            raise LocalProtocolError(f"wanted: wanted some of {parts} parts of a block below {BLOCKS_MAX}, got {block}")
        for part in block.parts:
            keys[part, block.index] = block.key
    if len({b.index for b in wanted}) != len(wanted):
        raise LocalProtocolError("wanted: wanted each index once, got one twice")
    return keys


def payloads_of(records: Records, bulk: Sequence[memoryview], parts: Sequence[Part]) -> Sequence[memoryview]:
    """The payloads of the entries of ``records``; :class:`RemoteProtocolError` for bulk that does not fit them."""
    try:
        sizes = [parts[entry.part].nbytes for entry in records.entries]
    except IndexError as error:
        raise RemoteProtocolError(f"part: wanted one of {len(parts)}, got a later one") from error
    return split(bulk, sizes)


class Pulling(msgspec.Struct, eq=False):
    """The data of a pull. Times are monotonic seconds."""

    id: TransferId
    peer: Peer
    sink: BlockSink
    outstanding: dict[Place, BlockKey]  # keys of records that are not settled
    due_s: float
    spoken_s: float
    give_up_s: float  # even if prefill promises more
    state: State = State.PULLING
    epoch: int = 0
    retries: int = 0  # in a row
    asked: bool = False  # the link has taken the message that the state needs
    installed: int = 0
    missing: list[Missing] = []

    def apply(self, event: Event) -> None:
        """The one place where a pull changes its state."""
        after = TRANSITIONS[self.state].get(event)
        assert after is not None, f"{event.name} while {self.state.name}"
        self.state = after

    def next_message(self, boot_id: BootId, now_s: float) -> Pull | Ack | Renew:
        """The message that the state needs, to be sent: a pull begins the next epoch; a renewal if all was sent."""
        self.spoken_s = now_s
        if self.asked:
            return Renew(boot_id, self.id)
        self.asked = True
        if self.state is State.ACKING:
            return Ack(boot_id, self.id)
        self.epoch += 1
        return Pull(boot_id, self.id, self.epoch, self._wants())

    def take(self, records: Records, payloads: Sequence[memoryview], parts: Sequence[Part], counters: Counters) -> bool:
        """Install the records that are wanted and sound; whether any was settled."""
        before = len(self.outstanding)
        for entry, payload in zip(records.entries, payloads, strict=True):
            place, part = (entry.part, entry.index), parts[entry.part]
            if (key := self.outstanding.get(place)) is None:
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
            try:
                reason = None if self.sink.install(*place, header, payload) else Reason.STALE
            except BlockBusyError:  # requested again in the next epoch
                counters.postponed_records += 1
                continue
            except SinkError:
                reason = Reason.FAILED
            del self.outstanding[place]
            if reason is None:
                counters.records_installed += 1
                self.installed += 1
            else:
                counters.records_stale += reason is Reason.STALE
                self.missing.append(Missing(*place, reason))
        return len(self.outstanding) < before

    def give_up(self, absent: Absent, counters: Counters) -> bool:
        """Settle the records that prefill does not have; whether there were any."""
        places = {(entry.part, entry.index) for entry in absent.entries} & self.outstanding.keys()
        for place in places:
            del self.outstanding[place]
            self.missing.append(Missing(*place, Reason.ABSENT))
        counters.records_absent += len(places)
        return bool(places)

    def _wants(self) -> list[Range]:
        """The outstanding records: neighbouring blocks with the same wanted parts are one range."""
        blocks: dict[int, tuple[BlockKey, int]] = {}
        for (part, index), key in self.outstanding.items():
            blocks[index] = key, blocks.get(index, (key, 0))[1] | 1 << part
        ranges: list[tuple[int, int, list[bytes]]] = []
        for index in sorted(blocks):
            key, parts = blocks[index]
            if ranges and ranges[-1][0] + len(ranges[-1][2]) == index and ranges[-1][1] == parts:
                ranges[-1][2].append(key)
            else:
                ranges.append((index, parts, [key]))
        return [Range(start, parts, b"".join(keys)) for start, parts, keys in ranges]

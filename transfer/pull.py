"""One pull on the decode side: what is still wanted, and the message that comes next.

The law: the ack follows the last installation, and every wanted record ends as installed or as missing with a reason.

    pulling -- a wanted record is neither in place nor given up
    acking --- all settled, and the engine told; prefill has not confirmed yet
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cache_manager.errors import BlockBusyError, RecordError
from cache_manager.keys import BlockKey
from cache_manager.record import check_record, unpack_header
from transfer.actions import BlockSink, Missing, Reason, WantedBlock
from transfer.counters import Counters
from transfer.errors import LocalProtocolError, RemoteProtocolError, SinkError
from transfer.identity import Identity
from transfer.link import Peer
from transfer.messages import BLOCKS_MAX, Absent, Ack, Part, Pull, Range, RecordPlace, Records, Renew, TransferId, split


def places_of(wanted: Sequence[WantedBlock], parts: int) -> dict[RecordPlace, BlockKey]:
    """The records of ``wanted`` with their keys; :class:`LocalProtocolError` for invalid blocks or parts."""
    keys: dict[RecordPlace, BlockKey] = {}
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
    outstanding: dict[RecordPlace, BlockKey]  # keys of records that are not settled
    due_s: float
    last_sent_s: float
    give_up_s: float  # even if prefill promises more
    renew_s: float  # the longest silence of this side
    resend_s: float = math.inf  # when a message that the link refused is tried again
    pause_s: float = 0.0  # the pause before that; twice as long each time
    acking: bool = False
    epoch: int = 0
    retries: int = 0  # in a row
    sent: bool = False  # the link has taken the message that is needed now
    installed: int = 0
    missing: list[Missing] = []

    @property
    def next_check_s(self) -> float:
        return min(self.due_s, self.resend_s, self.last_sent_s + self.renew_s)

    def settle(self) -> None:
        """Every wanted record was settled: from here on only the ack is left."""
        assert not self.acking, "a pull is settled once"
        assert not self.outstanding, "a record is neither in place nor given up"
        self.acking = True
        self.sent = False

    def next_message(self, own: Identity, now_s: float) -> Pull | Ack | Renew:
        """The message that is needed now, to be sent: a pull begins the next epoch; a renewal if all was sent."""
        self.last_sent_s = now_s
        self.resend_s = math.inf
        if self.sent:
            return Renew(own.boot_id, self.id)
        self.sent = True
        if self.acking:
            return Ack(own.boot_id, self.id)
        self.epoch += 1
        return Pull(own.boot_id, self.id, self.epoch, own.digest, self._wants())

    def refused(self, now_s: float, pause_s_min: float, pause_s_max: float) -> None:
        """The link refused the message: it is tried again after a pause that grows."""
        self.sent = False
        self.pause_s = min(2 * self.pause_s or pause_s_min, pause_s_max)
        self.resend_s = now_s + self.pause_s

    def take(self, records: Records, payloads: Sequence[memoryview], parts: Sequence[Part], counters: Counters) -> bool:
        """Install the records that are wanted and sound; whether any was settled."""
        before = len(self.outstanding)
        for entry, payload in zip(records.entries, payloads, strict=True):
            part = parts[entry.part]
            place = entry.part, entry.index
            key = self.outstanding.get(place)
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

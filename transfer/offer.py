"""One offer: its blocks, and what its owner still wants of them.

The law: an offer's blocks are released once, after an ack, an abort, a reset or the end of its lease. Until it is
sealed, a block that it lacks is still to come; after that the block is absent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cache_manager.keys import KEY_NBYTES
from cache_manager.record import HEADER_NBYTES_MAX, HEADER_NBYTES_MIN, Buffer
from transfer.actions import OfferedBlock, Send
from transfer.errors import LocalProtocolError
from transfer.kept import KeptBuffers
from transfer.link import Peer
from transfer.messages import (
    BLOCKS_MAX,
    CONTROL_NBYTES_MAX,
    ENTRIES_MAX,
    JOINED_NBYTES_MAX,
    Entry,
    Part,
    Place,
    Pull,
    RecordPlace,
    Records,
    TransferId,
    join,
)

ENTRY_NBYTES_MAX: Final = 64
"""Bytes of an entry in a message beside its header, with a share of the message's fixed part."""

FIRST_MESSAGE: Final = 8
"""The first message of an attempt is this much smaller than the largest; each is twice the one before."""

VALID_NBYTES_MAX: Final = HEADER_NBYTES_MAX - HEADER_NBYTES_MIN
"""Of the valid bits of one record."""

PACKED_MAX: Final = 1024
"""Records that are summed when their blocks are added, of one addition: a node does nothing else meanwhile. The others
are summed when they are sent."""

Owner = tuple[Peer, bytes]
"""A peer and its run."""


@dataclass(slots=True, eq=False)
class Offer:
    """The data of an offer. Times are monotonic seconds."""

    id: TransferId
    expires_s: float
    expires_max_s: float
    sealed: bool = False
    blocks: dict[int, OfferedBlock] = field(default_factory=dict)
    packed: dict[RecordPlace, Entry] = field(default_factory=dict)  # of small records: packed before a peer waits
    owner: Owner | None = None  # the peer that pulled it first
    epoch: int = 0
    message_nbytes: int = 0
    wanted: deque[RecordPlace] = field(default_factory=deque)  # records to send in this epoch
    later: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # wanted in this epoch, still to come
    refused: bool = False  # the link has refused the last message
    pause_s: float = 0.0  # before it is tried again; twice as long each time
    resend_s: float = math.inf  # when that is

    def grow(self, blocks: Iterable[OfferedBlock]) -> list[Place]:
        """Add blocks; returns the wanted records that turn out absent, because they were wanted under another key."""
        assert not self.sealed, "an offer that is sealed does not grow"
        absent: list[Place] = []
        packs = PACKED_MAX
        for block in blocks:
            self.blocks[block.index] = block
            for part, record in enumerate(block.records):
                if packs and record is not None and record.nbytes <= JOINED_NBYTES_MAX:
                    self.packed[part, block.index] = Entry(part, block.index, record.pack())
                    packs -= 1
            wish = self.later.pop(block.index, None)
            if wish is not None:
                self._want(block.index, *wish, absent)
        return absent

    def seal(self) -> list[Place]:
        """No more blocks come; returns the wanted records that are absent for that reason."""
        assert not self.sealed, "an offer is sealed once"
        self.sealed = True
        later = self.later
        self.later = {}
        absent: list[Place] = []
        for index, wish in later.items():
            self._want(index, *wish, absent)
        return absent

    def want(self, pull: Pull) -> list[Place]:
        """Begin the epoch of ``pull``; returns the wanted records that are absent."""
        self.epoch = pull.epoch
        self.message_nbytes = 0
        self.wanted.clear()
        self.later.clear()
        wishes: dict[int, tuple[bytes, int]] = {}  # a block that is wanted twice is sent once
        for neighbours in pull.wanted:
            keys = neighbours.keys
            stop = min(neighbours.start + len(keys) // KEY_NBYTES, BLOCKS_MAX)
            for place, index in enumerate(range(neighbours.start, stop)):
                wishes[index] = keys[place * KEY_NBYTES : (place + 1) * KEY_NBYTES], neighbours.parts
        absent: list[Place] = []
        for index, wish in wishes.items():
            self._want(index, *wish, absent)
        return absent

    def _want(self, index: int, key: bytes, parts: int, absent: list[Place]) -> None:
        """Queue the wanted records of a block, or add them to ``absent``."""
        block = self.blocks.get(index)
        if block is None and not self.sealed:
            self.later[index] = key, parts
            return
        records = block.records if block is not None and block.key == key else ()
        for part in range(parts.bit_length()):
            if parts >> part & 1:
                if part < len(records) and records[part] is not None:
                    self.wanted.append((part, index))
                else:
                    absent.append(Place(part, index))

    def take(self, message_nbytes_max: int, lease_ms: int, kept: KeptBuffers) -> Send:
        """Records that fit one message, of those that are wanted, taken to be sent."""
        assert self.owner is not None, "no peer pulled it"
        assert self.wanted, "nothing is wanted"
        if not self.refused:
            self.pause_s = 0.0
        self.refused = False
        self.message_nbytes = min(message_nbytes_max, 2 * self.message_nbytes or message_nbytes_max // FIRST_MESSAGE)
        entries: list[Entry] = []
        bulk: list[Buffer] = []
        nbytes = 0
        control_nbytes = 0
        while self.wanted and len(entries) < ENTRIES_MAX:
            part, index = self.wanted[0]
            record = self.blocks[index].records[part]
            assert record is not None, "a record that is not there was queued"
            nbytes += record.nbytes
            if entries and nbytes > self.message_nbytes:
                break
            entry = self.packed.get((part, index)) or Entry(part, index, record.pack())
            control_nbytes += len(entry.header) + ENTRY_NBYTES_MAX
            if control_nbytes > CONTROL_NBYTES_MAX:
                break
            self.wanted.popleft()
            entries.append(entry)
            bulk.append(record.payload)
        peer, boot_id = self.owner
        records = Records(boot_id, self.id, self.epoch, lease_ms, entries)
        return Send(peer, records, join(bulk, kept.together))

    def take_back(self, records: Records, now_s: float, pause_s_min: float, pause_s_max: float) -> None:
        """The link refused the result of the last :meth:`take`: it is tried again after a pause that grows."""
        assert self.epoch == records.epoch, "the link refuses at once: nothing can have come between"
        self.wanted.extendleft((entry.part, entry.index) for entry in reversed(records.entries))
        self.refused = True
        self.pause_s = min(2 * self.pause_s or pause_s_min, pause_s_max)
        self.resend_s = now_s + self.pause_s


def check_blocks(blocks: Sequence[OfferedBlock], parts: Sequence[Part], there: Container[int] = ()) -> None:
    """Raise :class:`LocalProtocolError` unless ``blocks`` have indices that are not ``there``, and records of
    ``parts``.
    """
    seen: set[int] = set()
    for block in blocks:
        if block.index in seen or block.index in there or not 0 <= block.index < BLOCKS_MAX:
            raise LocalProtocolError(f"blocks: wanted each index in [0, {BLOCKS_MAX}) once, got {block.index}")
        seen.add(block.index)
        if len(block.records) != len(parts):
            raise LocalProtocolError(f"block {block.index}: wanted {len(parts)} records, got {len(block.records)}")
        for part, record in zip(parts, block.records, strict=True):
            if record is None:
                continue
            if (record.fingerprint, record.nbytes, record.key) != (part.fingerprint, part.nbytes, block.key):
                raise LocalProtocolError(f"block {block.index}: wanted a {part.name} record of its key, got another")
            if not (0 <= record.generation < 1 << 64 and 0 <= record.origin < 1 << 64):
                numbers = f"generation {record.generation} and origin {record.origin}"
                raise LocalProtocolError(f"block {block.index}: wanted integers of 64 bits, got {numbers}")
            if len(record.valid) % 8 or not 0 < len(record.valid) <= VALID_NBYTES_MAX:  # no header could be made of it
                raise LocalProtocolError(
                    f"block {block.index}: wanted words of valid bits, got {len(record.valid)} bytes"
                )

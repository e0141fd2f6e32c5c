"""What sessions tell their node to do, and tell the engine at the end. Values, and the port to the engine's blocks.

Values are structs: making one costs a tenth of a frozen dataclass, and every message makes several.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, OfferedRecord, RecordHeader
from transfer.link import Peer
from transfer.messages import Message, Outcome, TransferId


class OfferedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that prefill lends to decode: one record per part, or ``None``.

    The payloads are held by reference until the offer's :class:`Release` and must not change before: each is a copy
    that the lender owns, or a block that it holds. Records that the link sends after that are checked by their sums on
    arrival.
    """

    index: int
    key: BlockKey
    records: tuple[OfferedRecord | None, ...]


class WantedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that decode wants: its place in the request, the key that decode derived for it, and the parts."""

    index: int
    key: BlockKey
    parts: tuple[int, ...]


class BlockSink(Protocol):
    """Where pulled records go: the engine's side, called in the node's thread."""

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        """Put a verified record in its place. ``payload`` is valid during the call.

        ``False``: the block has another generation now, or was computed here meanwhile; the record is dropped and
        reported missing. A :class:`~cache_manager.errors.BlockBusyError` makes the node ask for it again later. A node
        counts and logs any other error, and the record is missing as ``failed``.
        """


class Send(msgspec.Struct, frozen=True):
    """Hand ``message`` to the link, ``bulk`` in frames of its own; if the link refuses, tell ``unsent`` at once."""

    peer: Peer
    message: Message
    bulk: tuple[Buffer, ...] = ()


class Release(msgspec.Struct, frozen=True):
    """The offer is over: no record of it is sent any more. Reported once for each offer.

    If a node could not begin the offer, or not read its records, ``detail`` says why; otherwise it is empty.
    """

    transfer: TransferId
    outcome: Outcome
    detail: str = ""


class Reason(Enum):
    """Why a record is missing, or a pull failed."""

    ABSENT = "absent"  # prefill does not have it, or has other tokens there
    STALE = "stale"  # the target block is in another life now, or was computed here meanwhile
    FAILED = "failed"  # this side's engine raised an error instead of taking the record
    GONE = "gone"  # prefill has ended the transfer, or never had it
    TIMEOUT = "timeout"  # no more messages came
    REFUSED = "refused"  # the two sides' rows have different meanings
    ABORTED = "aborted"  # this side gave up
    RESET = "reset"  # this side's rows belong to another namespace now


class Missing(msgspec.Struct, frozen=True, gc=False):
    """A wanted record that is not in place."""

    part: int
    index: int
    reason: Reason


class Finished(msgspec.Struct, frozen=True):
    """A pull is over: no record of it will be installed after this. Reported once for each.

    ``installed`` records are in place, every other wanted one is in ``missing``. ``reason`` is ``None`` for a pull that
    came to its end; ``detail`` has the peer's details, if any.
    """

    transfer: TransferId
    installed: int
    missing: tuple[Missing, ...]
    reason: Reason | None = None
    detail: str = ""

    @property
    def complete(self) -> bool:
        return not self.missing


Action = Send | Release | Finished

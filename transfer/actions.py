"""What sessions tell their node to do, and what they tell the engine in the end. Values, and the port to its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from cache_manager.keys import BlockKey
from cache_manager.record import Buffer, OfferedRecord, RecordHeader
from transfer.link import Peer
from transfer.messages import Message, Outcome, TransferId


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A block that prefill lends to decode: one record a part, ``None`` where it has none.

    The payloads are held by reference until the offer's :class:`Release` and must not change before: a copy that the
    lender owns, or a block that it holds. What the link still has to send then is proved by its sum when it comes.
    """

    index: int
    key: BlockKey
    records: tuple[OfferedRecord | None, ...]


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """A block that decode wants: its place in the request, the key that decode derived for it, and the parts."""

    index: int
    key: BlockKey
    parts: tuple[int, ...]


class BlockSink(Protocol):
    """Where pulled records go: the engine's side, called in the node's thread."""

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        """Put a record, which was verified, in its place. ``payload`` is valid during the call.

        ``False``: the block has another generation now; the record is dropped and reported missing. A
        :class:`~cache_manager.errors.BlockBusyError` has it sent again later. A node counts any other error, and the
        record is missing.
        """


@dataclass(frozen=True, slots=True)
class Send:
    """Hand ``message`` to the link, ``bulk`` in frames of its own; if the link refuses, tell ``unsent`` at once."""

    peer: Peer
    message: Message
    bulk: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Break the connection of a peer that let a transfer's lease end, so that the link keeps nothing for it."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Release:
    """The offer is over: nobody gets a record of it any more. Said once for each offer.

    ``detail`` is not empty when a node could not begin the offer, and says why.
    """

    transfer: TransferId
    outcome: Outcome
    detail: str = ""


class Reason(Enum):
    """Why a record is missing, or a pull failed."""

    ABSENT = "absent"  # prefill does not have it, or has other tokens there
    STALE = "stale"  # the block that it was for has another owner now
    GONE = "gone"  # prefill has ended the transfer, or never had it
    TIMEOUT = "timeout"  # nothing came any more
    REFUSED = "refused"  # the two sides do not mean the same by their rows
    ABORTED = "aborted"  # this side gave up
    RESET = "reset"  # this side's rows belong to another namespace now


@dataclass(frozen=True, slots=True)
class Missing:
    """A wanted record that is not in place."""

    part: int
    index: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Finished:
    """A pull is over: nothing of it will be installed from here on. Said once for each.

    So many records are in place, every other wanted one is in ``missing``. ``reason`` is ``None`` for a pull that came
    to its end; ``detail`` says more where the peer did.
    """

    transfer: TransferId
    installed: int
    missing: tuple[Missing, ...]
    reason: Reason | None = None
    detail: str = ""

    @property
    def complete(self) -> bool:
        return not self.missing


Action = Send | Cut | Release | Finished

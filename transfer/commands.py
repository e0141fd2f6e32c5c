"""What an engine's threads ask of a node's thread, and what that has met. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache_manager.keys import Namespace
from transfer.actions import OfferedBlock, WantedBlock
from transfer.messages import TransferId
from transfer.offer import OfferCounters
from transfer.pull import PullCounters


@dataclass(slots=True)
class ThreadCounters:
    """What a node's thread has met. ``bad_messages`` are none, or not meant for either side; ``sink_errors`` are
    exceptions of sinks, whose records are missing, ``notify_errors`` those of ``notify``; ``errors`` all others.
    """

    arrivals: int = 0
    bad_messages: int = 0
    peers_lost: int = 0
    commands: int = 0
    commands_refused: int = 0
    sink_errors: int = 0
    notify_errors: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class NodeCounters:
    """``link`` are those of the link, ``offers_in_flight`` and ``pulls_in_flight`` of this moment."""

    node: ThreadCounters
    offers: OfferCounters
    pulls: PullCounters
    link: Any
    offers_in_flight: int
    pulls_in_flight: int


@dataclass(frozen=True, slots=True)
class Offer:
    transfer: TransferId
    blocks: tuple[OfferedBlock, ...]
    is_open: bool
    lease_s: float | None


@dataclass(frozen=True, slots=True)
class Grow:
    transfer: TransferId
    blocks: tuple[OfferedBlock, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Withdraw:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Pull:
    transfer: TransferId
    address: str
    wanted: tuple[WantedBlock, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Reset:
    namespace: Namespace


Command = Offer | Grow | Seal | Withdraw | Pull | Abort | Reset

"""What a node and its sessions have met so far. Every number only grows, but for those of the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class OfferCounters:
    """What :class:`~transfer.offers.Offers` has seen.

    ``early_pulls`` came before their offer. ``late_messages`` came for a transfer that had ended, ``foreign_messages``
    from a peer that does not own it, ``stale_messages`` belong to an epoch that is over, ``stranger_messages`` came
    without a hello. ``slow_peers`` were cut off, as they let a lease end; ``forgotten_peers`` were the idlest of too
    many.
    """

    offered: int = 0
    pulled: int = 0
    acked: int = 0
    aborted: int = 0
    expired: int = 0
    reset: int = 0
    attempts: int = 0
    early_pulls: int = 0
    records_sent: int = 0
    records_absent: int = 0
    key_mismatches: int = 0
    sends_refused: int = 0
    late_messages: int = 0
    foreign_messages: int = 0
    stale_messages: int = 0
    stranger_messages: int = 0
    unknown_transfers: int = 0
    refused_peers: int = 0
    slow_peers: int = 0
    forgotten_peers: int = 0


@dataclass(slots=True)
class PullCounters:
    """What :class:`~transfer.pulls.Pulls` has seen.

    ``duplicate_records`` were in place already, ``stale_messages`` belong to a pull that is over or an epoch that is,
    ``foreign_messages`` came from a peer that was not asked, ``corrupt_records`` failed a check and were asked for
    again.
    """

    pulls: int = 0
    done: int = 0
    failed: int = 0
    attempts: int = 0
    retries: int = 0
    told_later: int = 0
    records_installed: int = 0
    records_stale: int = 0
    records_absent: int = 0
    corrupt_records: int = 0
    duplicate_records: int = 0
    postponed_records: int = 0
    sends_refused: int = 0
    foreign_messages: int = 0
    stale_messages: int = 0
    refusals: int = 0
    forgotten_peers: int = 0


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

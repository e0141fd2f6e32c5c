"""Counts of a node so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """Every number only grows, except those ``in_flight``, which are current; ``link`` has the link's own counters.
    A transfer is in flight from the engine's call until its end is there to be polled.

    Of offers: ``early_pulls`` came before their offer; ``late_messages`` for a transfer that had ended,
    ``unknown_transfers`` for one that never existed. ``refused_pulls`` came from a peer of another identity.

    Of pulls: ``duplicate_records`` were in place already, ``corrupt_records`` failed a check and were requested again,
    ``postponed_records`` came for a busy block.

    Of both: ``foreign_messages`` came from a peer that has no part in the transfer, ``stale_messages`` belong to an
    epoch that is over, or to another run, ``bad_messages`` are not valid messages. ``engine_errors`` were raised by
    sinks, whose records are missing, by ``notify``, or by the memory of lent records, whose offers have ended.
    """

    offered: int = 0
    pulled: int = 0
    acked: int = 0
    aborted: int = 0
    expired: int = 0
    reset: int = 0
    early_pulls: int = 0
    records_sent: int = 0
    late_messages: int = 0
    unknown_transfers: int = 0
    refused_pulls: int = 0

    pulls: int = 0
    done: int = 0
    failed: int = 0
    retries: int = 0
    told_later: int = 0
    records_installed: int = 0
    records_stale: int = 0
    corrupt_records: int = 0
    duplicate_records: int = 0
    postponed_records: int = 0
    refusals: int = 0

    records_absent: int = 0
    foreign_messages: int = 0
    stale_messages: int = 0
    bad_messages: int = 0
    sends_refused: int = 0
    peers_lost: int = 0
    engine_errors: int = 0
    errors: int = 0

    offers_in_flight: int = 0
    pulls_in_flight: int = 0
    link: Any = None

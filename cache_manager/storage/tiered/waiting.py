"""Records on their way to a tier."""

from __future__ import annotations

from dataclasses import dataclass

from cache_manager.record import RecordHeader

Offer = tuple[RecordHeader, memoryview]
"""A record that a caller puts."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A record on its way to a tier; the payload is a copy."""

    header: RecordHeader
    payload: bytes
    promoted: bool  # read from a later tier, not put by the caller
    sequence: int
    in_flight: bool = False
    cancelled: bool = False


__all__ = ["Offer", "Waiting"]

"""Every bound of a transfer in one frozen object."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from cache_manager.errors import ConfigError
from transfer.messages import ENTRIES_MAX


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long, how often, how much. Both sides have their own; only ``lease_s`` is told to the peer.

    ``lease_s``: a transfer whose peer is silent for so long is over; no offer and no pull lasts longer than
    ``lease_max_s``. ``retry_s``: decode asks again when nothing has come for so long, at most ``retries_max`` times in
    a row. ``early_s``: a pull that comes before its offer waits so long for it. ``resend_s``: what the link refused is
    handed to it again after so long, then after twice as long, up to ``retry_s``.
    ``credit_nbytes``: payload of one transfer on its way at a time. ``records_max`` and ``records_nbytes_max``: the
    size of one message (a record that is larger goes alone); smaller messages arrive while the next are made, and
    the first of an attempt is the smallest. Payloads
    up to ``joined_nbytes_max`` are copied into one frame a message; larger ones are sent from where they lie.
    ``remembered_max``: ids of ended transfers.
    """

    lease_s: float = 30.0
    lease_max_s: float = 600.0
    retry_s: float = 2.0
    early_s: float = 2.0
    resend_s: float = 0.01
    retries_max: int = 5
    transfers_max: int = 1024
    peers_max: int = 1024
    remembered_max: int = 8192
    credit_nbytes: int = 64 << 20
    frame_nbytes_max: int = 256 << 20
    records_max: int = 64
    records_nbytes_max: int = 512 << 10
    joined_nbytes_max: int = 128 << 10

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_s"):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
                    raise ConfigError(f.name, "seconds in (0, 1e6)", repr(value))
            elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
                raise ConfigError(f.name, "an integer of at least 1", repr(value))
        if self.lease_s > self.lease_max_s:
            raise ConfigError("lease_s", f"at most lease_max_s = {self.lease_max_s}", self.lease_s)
        if self.records_max > ENTRIES_MAX:
            raise ConfigError("records_max", f"at most {ENTRIES_MAX}", self.records_max)

    @property
    def lease_ms(self) -> int:
        """``lease_s`` as it is told to the peer."""
        return max(1, math.floor(self.lease_s * 1000))

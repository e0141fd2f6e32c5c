"""Every bound of a transfer in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cache_manager.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Times, counts and sizes. Both sides have their own; only ``lease_s`` is told to the peer.

    ``lease_s``: a transfer whose peer is silent for this time is over; no offer and no pull lasts longer than
    ``lease_max_s``. ``retry_s``: decode asks again after this time without a message, at most ``retries_max`` times in
    a row. ``early_s``: a pull that comes before its offer waits this long for it. ``resend_s``: a message that the link
    refused is tried again after this time, then after twice as long, up to ``retry_s``. ``records_nbytes_max``: the
    size of one message (a larger record goes alone); smaller messages arrive while the next are made, and the first of
    an attempt is the smallest. ``remembered_max``: ids of ended transfers.
    """

    lease_s: float = 30.0
    lease_max_s: float = 600.0
    retry_s: float = 2.0
    early_s: float = 2.0
    resend_s: float = 0.01
    retries_max: int = 5
    transfers_max: int = 1024
    remembered_max: int = 8192
    records_nbytes_max: int = 512 << 10

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_s"):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-3 <= value < 1e6:
                    raise ConfigError(f.name, "seconds in [0.001, 1e6)", repr(value))
            elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
                raise ConfigError(f.name, "an integer of at least 1", repr(value))
        if self.lease_s > self.lease_max_s:
            raise ConfigError("lease_s", f"at most lease_max_s = {self.lease_max_s}", self.lease_s)

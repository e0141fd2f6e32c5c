"""Every limit of a connector in one frozen object: how long it waits, how much it keeps.

It is made where an engine is described (:class:`~kvroute.connector.engine.Engine`) and passed down from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Final

from cache_manager.errors import ConfigError
from transfer.limits import TransferLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """Times end in ``_s``, counts in ``_max``, sizes in ``_nbytes_max``; ``docs/concepts/connector.md`` has a table.

    Raises :class:`ConfigError` that names the limit for anything but a number from 0.
    """

    # ---------------------------------------------------------------- the ends of requests, and the rows of outputs

    answer_s: float = 10.0
    """How long an answer, or an output with its rows, waits for rows that a worker, behind its device, has to write."""
    ends_max: int = 4096
    """Ended requests whose rows have not been left yet; a further one gets no rows."""
    burst_max: int = 32
    """Requests whose clients are told together: clients handle hundreds of messages much slower than a few."""
    end_poll_s: float = 500e-6
    """Between two looks at the worker of the thread that leaves rows."""
    steps_max: int = 4
    """Steps that are remembered of those sent to the worker; the first of them stands for all earlier ones."""
    spares_max: int = 64
    """Spare blocks."""
    field_spares_max: int = 512
    """Beside them, where rows are returned with their tokens: one row that is missing costs the answer its field."""
    cuts_max: int = 1024
    """Last tokens that the front end may have cut off, because it ended the request before it saw them."""
    idle_groups_max: int = 1024
    """Groups kept with no completion under way. A further one may still come: vLLM sends the engine one after the
    other, so that the first may be done before the next is there."""
    idle_nbytes_max: int = 64 << 20
    """Their data, in characters."""
    forgetting_s: float = 1.0
    """How long the scheduling thread waits for rows of outputs, when all rows are about to be forgotten."""
    output_poll_s: float = 300e-6
    """Between two looks at the worker of the thread that sends. Each takes the interpreter from the thread that
    launches steps:"""
    asleep_max_s: float = 0.02
    """so the first look comes after most of the time that the last wait took, this at most."""

    # ---------------------------------------------------------------- the worker

    pending_max: int = 16
    """Calls that a worker has under way behind its device."""
    settle_s: float = 30.0
    """How long the end of a worker, or a test, waits for the host's part of all steps."""

    gather_nbytes_max: int = 32 << 20
    """KV that is copied at a time to be folded; the device briefly needs about three times that."""

    # ---------------------------------------------------------------- rows by key

    restore_s: float = 30.0
    """How long a step waits for the rows of KV that it loads; rows that have not come by then are missing."""
    question_s: float = 1.0
    """How long a question to the store waits for its answer,"""
    open_s: float = 30.0
    """and the start of an engine for the store to be opened."""

    # ---------------------------------------------------------------- rows by transfer

    fetch_s: float = 1.0
    """How long a request whose KV has come waits for its rows; later ones may land until the request ends."""
    lease_s: float = 300.0
    """How long rows are lent before decode asks for them: a decode engine may have a queue."""
    transfer: TransferLimits = field(default_factory=TransferLimits)
    """Those of a transfer itself."""

    # ---------------------------------------------------------------- what is counted

    metrics_s: float = 1.0
    """Shortest time between two readings of the counters: there are a hundred."""
    causes_max: int = 32
    """Causes that have a label of their own; later ones are ``other``."""
    times_max: int = 4096
    """Times that wait to be read; older ones are dropped."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            wanted = _wanted_number(limit.name, value)
            if wanted:
                raise ConfigError(f"limits.{limit.name}", wanted, repr(value))


def _wanted_number(name: str, value: Any) -> str:
    """What the limit of this name wants; empty: the ``value`` is one."""
    if name == "transfer":
        return "" if isinstance(value, TransferLimits) else "TransferLimits"
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    if name.endswith("_s"):
        return "" if number else "seconds from 0"
    return "" if number and isinstance(value, int) else "a whole number from 0"


LIMITS: Final = Limits()
"""Of an engine that has no others."""


__all__ = ["LIMITS", "Limits"]

"""No carrier: rows do not come beside KV from outside, and are counted as missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvroute.connector.carriers.port import (
    Admission,
    Carrier,
    SchedulerParts,
    SchedulerSide,
    WorkerParts,
    WorkerSide,
)
from kvroute.witness import Run

NO_CARRIER: Final = "nothing brings the rows of KV that was loaded: no store, or a part of a block"


@dataclass(frozen=True, slots=True)
class NoCarrier(Carrier):
    """Rows end with their blocks."""

    def scheduler(self, parts: SchedulerParts) -> SchedulerSide:
        return _NoScheduler(parts.spec.block_tokens)

    def worker(self, parts: WorkerParts) -> WorkerSide:
        return _NoWorker(parts)


class _NoScheduler(SchedulerSide):
    def __init__(self, size: int) -> None:
        self._size = size

    def admitted(self, admission: Admission) -> Run | None:
        return admission.run(self._size)


class _NoWorker(WorkerSide):
    def __init__(self, parts: WorkerParts) -> None:
        self._meter = parts.meter

    def compare(self, runs: Sequence[Run], look: Any) -> None:
        self._meter.miss(NO_CARRIER, sum(run.tokens for run in runs))


__all__ = ["NO_CARRIER", "NoCarrier"]

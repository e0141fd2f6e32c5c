"""Rows in the KV itself: they are one more layer of it, and go wherever a block's KV goes.

The message with a step is the fingerprint of the present namespace; empty: of no weights that have one name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvroute.checks import valid_rows
from kvroute.connector.carriers.port import (
    Admission,
    Carrier,
    SchedulerParts,
    SchedulerSide,
    WorkerParts,
    WorkerSide,
)
from kvroute.connector.meter import NO_IDS
from kvroute.witness import Run

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvroute.connector.messages import StepMeta
    from kvroute.connector.pages import Look


@dataclass(frozen=True, slots=True)
class InKv(Carrier):
    """Rows are in :class:`~kvroute.connector.pages.Pages`, which the worker's end is given."""

    word: ClassVar[str] = "layer"

    def scheduler(self, parts: SchedulerParts) -> SchedulerSide:
        return _InKvScheduler(parts)

    def worker(self, parts: WorkerParts) -> WorkerSide:
        return InKvWorker(parts)


class _InKvScheduler(SchedulerSide):
    def __init__(self, parts: SchedulerParts) -> None:
        self._parts, self._size = parts, parts.spec.block_tokens

    def admitted(self, admission: Admission) -> Run | None:
        """Of a partial block, too: a page proves each row by itself."""
        run = admission.run(self._size)
        if run is None:
            return None
        last = admission.first + -(-admission.external // self._size)
        stop = run.start + admission.external
        token_ids = list(admission.request.all_token_ids[run.start : stop])
        return replace(run, blocks=admission.blocks[admission.first : last], token_ids=token_ids)

    def step(self, scheduled: Mapping[str, int]) -> bytes:
        return b"" if self._parts.weights.mixed else self._parts.keys().namespace.fingerprint


class InKvWorker(WorkerSide):
    def __init__(self, parts: WorkerParts) -> None:
        assert parts.pages is not None, "rows in the KV need its pages"
        self.pages, self._blocks, self._meter = parts.pages, parts.blocks, parts.meter
        self._spec = parts.spec
        self.layer = parts.pages.cache

    def begun(self, step: StepMeta) -> bool:
        self.pages.seen.begin()
        return False

    def look(self, runs: Sequence[Run], without: Collection[int] = ()) -> Look:
        return self.pages.look(runs, without)

    def computed(
        self, step: StepMeta, slots: torch.Tensor | None, ids: torch.Tensor | None, redone: Sequence[int]
    ) -> None:
        if slots is not None:
            keep = self.pages.outside(slots, redone) if redone else None
            self.pages.put(slots, ids, step.carrier, keep)
        elif step.tokens:
            self.pages.forget()

    def compare(self, step: StepMeta, runs: Sequence[Run], look: Look) -> None:
        ids, proved, missing = self.pages.rows(look, step.carrier)
        sound = proved & valid_rows(self._spec, ids)
        missing[NO_IDS] = int(np.count_nonzero(proved & ~sound))
        for reason, tokens in missing.items():
            self._meter.miss(reason, tokens)
        self._blocks.write_step(look.slots, {self._spec.name: ids}, sound)


__all__ = ["InKv", "InKvWorker"]

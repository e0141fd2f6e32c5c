"""Rows by key, from a store: they are stored as blocks fill, and restored when KV of the same key is loaded.

A key names tokens, not KV. So a fold of the KV goes with the rows as their origin, and is compared when both are here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvroute
from cache_manager.job import RestoreJob
from cache_manager.keys import BlockKey
from kvroute.connector.carriers.none import NO_CARRIER
from kvroute.connector.carriers.port import (
    Admission,
    Carrier,
    SchedulerParts,
    SchedulerSide,
    WorkerParts,
    WorkerSide,
)
from kvroute.connector.fills import Fills, Request
from kvroute.connector.job_counts import JobCounts
from kvroute.connector.reader import StoreReader
from kvroute.witness import Run

if TYPE_CHECKING:
    import torch

    from cache_manager.ports import StorageBackend
    from cache_manager.spec import AuxBlockDataSpec
    from kvroute.connector.limits import Limits
    from kvroute.connector.messages import StepMeta
    from kvroute.connector.settings import Settings
    from kvroute.connector.witness import Join, KvWitness, OtherRank

WRONG_KV: Final = "rows of other KV than was loaded"
NO_ANSWER: Final = "the store of rows has not answered within {} s"
NO_ROOM: Final = "the store of rows is behind, and takes no further request to read"


@dataclass(frozen=True, slots=True)
class ByKey(Carrier):
    """Rows come from ``settings.store``."""

    word: ClassVar[str] = "connector"

    witness: Literal["missing", "flagged", "off"]
    """What is said of the last router's choice, which no fold shows; "off": no KV is loaded that others kept."""
    gate: bool = True
    """Whether hits are cut to KV that has rows."""
    cuts: bool = True
    """Whether a hit may be cut anywhere; else one without all of its rows is none: states of other layers, which are
    kept for its end alone, belong to it."""

    @property
    def flagged(self) -> bool:  # type: ignore[override]
        return self.witness == "flagged"

    def store(self, settings: Settings) -> StorageBackend:
        return kvroute.open_store(settings.opens)

    def scheduler(self, parts: SchedulerParts) -> SchedulerSide:
        return ByKeyScheduler(self, parts)

    def worker(self, parts: WorkerParts) -> WorkerSide:
        from kvroute.connector.witness import KvFolder, KvWitness, witnessing

        witness: KvWitness | None = None
        if self.witness != "off":
            layers = witnessing(parts.kv_caches, parts.spec.attrs["layer_ids"])
            folder = KvFolder(layers, join=parts.joined, limits=parts.limits)
            witness = KvWitness(parts.blocks, folder, parts.kv_blocks)
        return ByKeyWorker(parts, witness)

    def other_rank(
        self,
        spec: AuxBlockDataSpec,
        kv_caches: Mapping[str, torch.Tensor],
        rank: int,
        joined: Join | None,
        limits: Limits,
    ) -> OtherRank | None:
        from kvroute.connector.witness import KvFolder, OtherRank, witnessing

        if self.witness == "off" or joined is None:
            return None
        layers = witnessing(kv_caches, spec.attrs["layer_ids"])
        return OtherRank(KvFolder(layers, rank * layers[0].shape[1], joined, limits))


class Filled(NamedTuple):
    """The message with a step: the blocks that it fills, and a batch of the feed that stores their rows after it."""

    runs: Sequence[Run]
    persist: bytes


class ByKeyScheduler(SchedulerSide):
    """Keys, what fills, and how much of a hit has rows."""

    def __init__(self, carrier: ByKey, parts: SchedulerParts) -> None:
        self._parts = parts
        self._size = parts.spec.block_tokens
        self._writes = parts.settings.writes
        self._fills = Fills(parts.kv_blocks, self._size, parts.blocks_of, parts.hashes)
        self._restores: dict[str, list[BlockKey]] = {}  # keys of rows to restore, by request, until its load begins
        last_router: int = parts.spec.attrs["layer_ids"][-1]
        # no layer behind the last router has KV that depends on its choice
        self.has_unproved = carrier.witness != "off" and last_router == parts.spec.attrs["num_layers"] - 1
        self._cuts = carrier.cuts
        self.reader: StoreReader | None = None
        if carrier.gate:
            self.reader = StoreReader(parts.settings.reads, parts.limits)

    def takes(self, request: Request, first: int, external: int) -> int:
        if self.reader is None or not external:
            return external
        keys = self._keys(request, first, first + external // self._size)
        stored = [False] * len(keys) if self._parts.weights.mixed else self.reader.contains(keys)
        if not self._cuts:
            return external if all(stored) and len(stored) * self._size == external else 0
        return stored.index(False) * self._size if False in stored else external

    def admitted(self, admission: Admission) -> Run | None:
        request = admission.request
        first = admission.first
        last = first + admission.external // self._size
        self._fills.admitted(request, last * self._size, loaded=admission.external > 0)
        self._restores.pop(request.request_id, None)
        run = admission.run(self._size)
        if run is not None and not self._parts.weights.mixed:
            self._restores[request.request_id] = self._keys(request, first, last)
        return run

    def load(self, loads: Sequence[tuple[str, Run]]) -> None:
        """One restore for all of them, because each is a job. A key of several requests is in as many."""
        restores: list[dict[BlockKey, int]] = []
        named = Counter[BlockKey]()
        for request_id, run in loads:
            keys = self._restores.pop(request_id, [])
            for key, block in zip(keys, run.blocks, strict=False):
                if named[key] == len(restores):
                    restores.append({})
                restores[named[key]][key] = block
                named[key] += 1
            if keys:
                self._fills.by_kv(run.blocks, self._parts.feed.generations[run.blocks])
        for blocks in restores:
            self._parts.feed.restore(blocks)

    def copied(self, source: int, target: int, rows: int) -> None:
        self._fills.copied(source, target, rows, self._parts.feed.generations[[source, target]])

    def step(self, scheduled: Mapping[str, int]) -> Filled:
        keys: dict[BlockKey, int] = {}
        runs: list[Run] = []
        for request, first, last in self._fills.step(scheduled, stores=not self._parts.weights.mixed):
            blocks = self._parts.blocks_of(request.request_id, max(0, first - 1), last)
            run = Run(blocks[0], blocks[1:]) if first else Run(-1, blocks)
            runs.append(run)
            keys |= zip(self._keys(request, first, last), run.blocks, strict=True)
        if keys and self._writes:
            self._parts.feed.persist(keys)
        return Filled(runs, self._parts.feed.take())

    def unproved(
        self,
        slots: NDArray[np.int64],
        lives: NDArray[np.int64],
    ) -> NDArray[np.bool_] | None:
        return self._fills.slots_by_kv(slots, lives) if self.has_unproved else None

    def ended(self, request_id: str) -> Mapping[int, str]:
        self._fills.ended(request_id)
        self._restores.pop(request_id, None)
        return {}

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()

    def _keys(self, request: Request, first: int, last: int) -> list[BlockKey]:
        """The names of the blocks ``[first, last)``: of the last hash of each, which stands for all tokens before."""
        keys = self._parts.keys()
        per_block = self._parts.hashes
        hashes = request.block_hashes
        stop = min(last * per_block, len(hashes))
        return [keys.adopt(bytes(hashes[place])) for place in range(first * per_block + per_block - 1, stop, per_block)]


class ByKeyWorker(WorkerSide):
    """Folds of KV, and the jobs of the store."""

    def __init__(self, parts: WorkerParts, witness: KvWitness | None) -> None:
        self.witness = witness
        self._blocks = parts.blocks
        self._meter = parts.meter
        self._size = parts.spec.block_tokens
        self._restore_s = parts.limits.restore_s
        self._counts = JobCounts(parts.meter, parts.spec.block_tokens)
        self._refused = 0  # blocks whose restores had no room, counted so far

    def look(self, runs: Sequence[Run]) -> torch.Tensor | None:
        return None if self.witness is None else self.witness.look(runs)

    def computed(self, step: StepMeta) -> torch.Tensor | None:
        filled: Filled | None = step.carrier
        return None if self.witness is None or not filled or not filled.runs else self.witness.look(filled.runs)

    def start(self, step: StepMeta) -> None:
        """Count the blocks of restores for which there was no room."""
        if step.loads.joined:
            refused = self._blocks.counters.refused_blocks_not_restored
            before = self._refused
            self._refused = refused
            self._meter.miss(NO_ROOM, (refused - before) * self._size)

    def land(self) -> None:
        """Wait for rows that are on their way from the store, but not for cancelled jobs."""
        give_up_s = time.monotonic() + self._restore_s
        for job in self._blocks.jobs:
            if not isinstance(job, RestoreJob) or job.cancelled:
                continue
            if job.wait(max(0.0, give_up_s - time.monotonic())):
                self._counts.count(job)
            else:
                job.cancel()
                self._meter.miss(NO_ANSWER.format(self._restore_s), len(job.blocks) * self._size)

    def compare(self, runs: Sequence[Run], look: torch.Tensor | None) -> None:
        """The store brings rows of whole blocks only."""
        self._meter.miss(NO_CARRIER, sum(max(0, run.tokens - self._size * len(run.blocks)) for run in runs))
        if self.witness is not None and look is not None:
            self._meter.miss(WRONG_KV, len(self.witness.refused(runs, look)) * self._size)

    def filled(self, step: StepMeta, computed: torch.Tensor | None) -> None:
        filled: Filled | None = step.carrier
        if filled and self.witness is not None and computed is not None:
            self.witness.name(filled.runs, computed)
        if filled and filled.persist:
            self._blocks.apply(filled.persist)
        if step.before or (filled and filled.persist):
            for job in self._blocks.jobs.poll():
                self._counts.count(job)

    def counters(self) -> dict[str, Any]:
        store = self._blocks.store
        return {"store": {} if store is None else store.counters}

    def close(self) -> None:
        give_up_s = time.monotonic() + self._restore_s
        for job in self._blocks.jobs:
            job.wait(max(0.0, give_up_s - time.monotonic()))


__all__ = ["NO_ANSWER", "NO_ROOM", "WRONG_KV", "ByKey", "ByKeyScheduler", "ByKeyWorker", "Filled"]

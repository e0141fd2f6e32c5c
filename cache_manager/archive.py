"""Blocks to the store and back, as jobs: begun and landed under the lock, carried without it.

Persist and restore are written once: a job that is *queued* is carried by a thread of the runner's and landed by
whoever polls it, any other is carried and landed by the thread that asks, before it gets the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import StorageError
from cache_manager.jobs import Job, JobRunner, Phase
from cache_manager.keys import BlockKey
from cache_manager.ledger import Ledger
from cache_manager.lifecycle import Event
from cache_manager.ports import Absence, BlockMover, HitPolicy, Lookup, RecordCarrier
from cache_manager.record import RecordHeader
from cache_manager.tier import Tier

ANSWERS_MAX: Final = 1 << 16
"""Lookups that were answered and not yet asked for again; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Companion:
    """What is stored beside the rows of the same blocks, by the same job; the keys are then a prefix, in order.

    With ``gate`` a block counts when both have been stored or have come back; with ``mask`` when the mover's part has.
    """

    mover: BlockMover
    policy: HitPolicy


class StoreJob(Job):
    """A job for some blocks; :meth:`result` says, key by key, what has become of it."""

    __slots__ = ("_archive", "_companion", "_done", "_generations", "_ids", "_keys")

    def __init__(
        self, archive: Archive, what: str, wanted: Sequence[BlockKey], companion: Companion | None, phase: Phase
    ) -> None:
        nbytes = len(wanted) * archive.device.layout.nbytes
        super().__init__(archive.runner, archive.ledger.lock, f"{what} of {len(wanted)} blocks", nbytes, phase)
        self._archive = archive
        self._companion = companion
        self._done = dict.fromkeys(wanted, False)
        self._keys: list[BlockKey] = []
        self._ids = np.empty(0, dtype=np.int64)
        self._generations = self._ids

    def result(self) -> dict[BlockKey, bool]:
        """The caller's own. Raises what the store raised, and :class:`BlockStateError` before the job is over."""
        self._check_over()
        return dict(self._done)

    def done(self) -> dict[BlockKey, bool]:
        """As :meth:`result`, without raising: what has been done so far, also by a job that failed half way."""
        return dict(self._done)

    def _takes_off(self, keys: list[BlockKey], ids: NDArray[np.int64]) -> None:
        """The blocks are in motion from here on; the lock is held."""
        self._keys, self._ids = keys, ids
        self._generations = self._archive.device.life.generations[ids]
        self._archive.begun(self._keys)

    def _blocks(self, count: int | None = None) -> dict[BlockKey, int]:
        return dict(zip(self._keys[:count], self._ids[:count].tolist(), strict=True))


class PersistJob(StoreJob):
    """Rows, and what accompanies them, on their way to the store."""

    __slots__ = ("_complete", "_stored", "_valid")

    def takes_off(self, keys: list[BlockKey], ids: NDArray[np.int64], complete: NDArray[np.bool_]) -> None:
        """Of all the blocks ``complete`` ones have their rows; the companion reads the others too. The lock is held."""
        device = self._archive.device
        self._takes_off(keys, ids)
        self._complete: NDArray[np.bool_] = complete
        self._valid = [v.astype("<u8").tobytes() for v in device.region.valid[ids[complete]]]
        self._stored: list[bool] = []
        device.life.begin_departure(ids)

    def _carry(self) -> None:
        keys = [key for key, complete in zip(self._keys, self._complete.tolist(), strict=True) if complete]
        ids, generations = self._ids[self._complete].tolist(), self._generations[self._complete].tolist()
        self._stored = self._archive.carrier.put(keys, ids, self._valid, generations) if keys else []
        rows = dict(zip(keys, self._stored, strict=True))
        if self._companion is None:
            self._done.update(rows)
            return
        blocks = self._blocks()
        if self._companion.policy == "gate":
            blocks = {key: block for key, block in blocks.items() if rows.get(key)}
        self._done.update(self._companion.mover.persist(blocks))

    def _land(self) -> None:
        self._archive.device.life.end_departure(self._ids)
        self._archive.ledger.count("persisted_blocks", sum(self._stored))
        self._archive.landed(self, self._keys)


class RestoreJob(StoreJob):
    """Rows, and what accompanies them, on their way from the store into blocks without rows."""

    __slots__ = ("_beside", "_found")

    def takes_off(self, keys: list[BlockKey], ids: NDArray[np.int64]) -> None:
        """The lock is held, and the blocks are ones that may be filled."""
        device = self._archive.device
        device.begin_life(device.life.begin_arrival(ids))
        self._takes_off(keys, ids)
        self._found: list[RecordHeader | Absence] = []
        self._beside: NDArray[np.bool_] = np.zeros(len(keys), dtype=np.bool_)  # what came with the companion

    def _carry(self) -> None:
        carrier, companion = self._archive.carrier, self._companion
        if companion is None:
            self._bring_rows(len(self._keys))
        elif companion.policy == "gate":
            self._bring_rows(_run(carrier.contains(self._keys)))
            self._bring_beside(_run([isinstance(header, RecordHeader) for header in self._found]))
        else:
            self._bring_rows(self._bring_beside(len(self._keys)))

    def _bring_rows(self, count: int) -> None:
        if count and not self.cancelled:
            self._found = self._archive.carrier.get_into(self._keys[:count], self._ids[:count].tolist())

    def _bring_beside(self, count: int) -> int:
        """Let the companion bring its part of the first ``count`` blocks; for how many, from the first on, it did."""
        assert self._companion is not None
        if not count or self.cancelled:
            return 0
        brought = self._companion.mover.restore(self._blocks(count))
        came = _run([brought.get(key, False) for key in self._keys[:count]])
        self._beside[:came] = True
        return came

    def _land(self) -> None:
        """Make readable what was read for blocks still in the life it was read for."""
        device, ledger, companion = self._archive.device, self._archive.ledger, self._companion
        arrived = np.zeros(len(self._keys), dtype=np.bool_)
        live = device.life.generations[self._ids] == self._generations
        try:
            if self.cancelled:
                ledger.count("cancelled_restores_dropped", int(np.count_nonzero(self._read())))
            elif self._failure is None:
                arrived = self._readable(live)
        finally:
            device.life.end_arrival(self._ids[arrived], arrived=True)
            device.life.end_arrival(self._ids[~arrived], arrived=False)
            self._archive.landed(self, self._keys)
        if companion is not None and companion.policy == "mask" and not self.cancelled:
            arrived = self._beside & live
        self._done.update(zip(self._keys, arrived.tolist(), strict=True))

    def _read(self) -> NDArray[np.bool_]:
        """Which blocks' rows came back sound."""
        read = np.zeros(len(self._keys), dtype=np.bool_)
        read[: len(self._found)] = [isinstance(header, RecordHeader) for header in self._found]
        return read

    def _readable(self, live: NDArray[np.bool_]) -> NDArray[np.bool_]:
        archive, read = self._archive, self._read()
        device, ledger = archive.device, archive.ledger
        bits = np.zeros((len(self._ids), *device.region.valid.shape[1:]), dtype=np.uint64)
        for i, header in enumerate(self._found):
            if isinstance(header, RecordHeader):
                bits[i] = np.frombuffer(header.valid, "<u8").reshape(bits.shape[1:])
        whole = (bits[:, archive.required, :] == device.full).all(axis=(1, 2))
        arrived: NDArray[np.bool_] = read & live & whole
        if self._companion is not None:
            ledger.count("unaccompanied_blocks_not_restored", int(np.count_nonzero(arrived & ~self._beside)))
            arrived &= self._beside
        device.region.valid[self._ids[arrived]] = bits[arrived]
        ledger.count("restored_blocks", int(np.count_nonzero(arrived)))
        ledger.count("late_restores_dropped", int(np.count_nonzero(read & ~live)))
        ledger.count("incomplete_blocks_not_restored", int(np.count_nonzero(read & live & ~whole)))
        return arrived


class LookupJob(Job):
    """A question to the store whether it has some keys; the answers are kept for :meth:`Archive.lookup`."""

    __slots__ = ("_archive", "_keys", "_there")

    def __init__(self, archive: Archive, keys: list[BlockKey]) -> None:
        super().__init__(archive.runner, archive.ledger.lock, f"lookup of {len(keys)} keys", 0, Phase.QUEUED)
        self._archive = archive
        self._keys = keys
        self._there = [False] * len(keys)

    def _carry(self) -> None:
        there = self._archive.carrier.contains(self._keys)
        if len(there) != len(self._keys):
            raise StorageError(f"the carrier answered {len(there)} of {len(self._keys)} keys")
        self._there = there

    def _land(self) -> None:
        if not self.cancelled:
            self._archive.learn(self._keys, self._there)
        if self._failure is not None:
            self._archive.ledger.count("lookups_failed")
        self._archive.landed(self, self._keys)


class Archive:
    """Persists and restores the device blocks of one :class:`AuxBlocks`; ``required`` are spec indices."""

    __slots__ = ("_answers", "_asked", "carrier", "device", "ledger", "required", "runner")

    def __init__(
        self, carrier: RecordCarrier, device: Tier, ledger: Ledger, required: tuple[int, ...], runner: JobRunner
    ) -> None:
        self.carrier = carrier
        self.device = device
        self.ledger = ledger
        self.required = required
        self.runner = runner
        self._asked: Counter[BlockKey] = Counter()  # keys of jobs that have not landed; the lock guards it
        self._answers: dict[BlockKey, bool] = {}

    def lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See :meth:`AuxBlocks.lookup`."""
        found: list[Lookup] = []
        unknown: dict[BlockKey, None] = {}
        with self.ledger.lock:
            for key in keys:
                if not self.ledger.keys.owns(key):
                    self.ledger.count("stale_keys")
                    found.append(Lookup.MISS)
                elif key in self._asked or (there := self._answers.pop(key, None)) is None:
                    found.append(Lookup.PENDING)
                    if key not in self._asked:
                        unknown[key] = None
                else:
                    found.append(Lookup.HIT if there else Lookup.MISS)
            job = LookupJob(self, list(unknown))
            begun = bool(unknown) and self._admits(job)
            if begun:
                self.begun(list(unknown))
        if begun:
            self.runner.start(job)
        return found

    def begin_persist(
        self, blocks: Mapping[BlockKey, int], companion: Companion | None, *, queued: bool
    ) -> PersistJob | None:
        """See :meth:`AuxBlocks.begin_persist`."""
        device, ledger = self.device, self.ledger
        with ledger.lock:
            keys, ids = self._own(blocks)
            complete = device.complete(ids, self.required)
            if companion is None or companion.policy == "gate":  # nothing else of an incomplete block is stored
                keys = [key for key, whole in zip(keys, complete.tolist(), strict=True) if whole]
                ids, missing = ids[complete], int(np.count_nonzero(~complete))
                complete = complete[complete]
            else:
                missing = int(np.count_nonzero(~complete))
            phase = Phase.QUEUED if keys else Phase.LANDED
            job = PersistJob(self, "persist", list(blocks), companion, phase)
            if keys:
                device.check_no_step(ids, "store it")
                device.life.check(Event.BEGIN_DEPARTURE, ids)
                if queued and not self._admits(job):
                    return None
                job.takes_off(keys, ids, complete)
            ledger.count("incomplete_blocks_not_persisted", missing)
        if keys:
            self._send(job, queued=queued)
        return job

    def begin_restore(
        self, blocks: Mapping[BlockKey, int], companion: Companion | None, *, queued: bool
    ) -> RestoreJob | None:
        """See :meth:`AuxBlocks.begin_restore`."""
        device = self.device
        with self.ledger.lock:
            keys, ids = self._own(blocks)
            job = RestoreJob(self, "restore", list(blocks), companion, Phase.QUEUED if keys else Phase.LANDED)
            if keys:
                device.check_no_step(ids, "restore it")
                device.life.check(Event.BEGIN_ARRIVAL, ids)
                device.check_empty(ids)
                if queued and not self._admits(job):
                    return None
                job.takes_off(keys, ids)
        if keys:
            self._send(job, queued=queued)
        return job

    def begun(self, keys: list[BlockKey]) -> None:
        """A job for ``keys`` has begun; the lock is held."""
        self._asked.update(keys)
        self.ledger.jobs += 1
        self.ledger.count("jobs_begun")

    def landed(self, job: Job, keys: list[BlockKey]) -> None:
        """A job for ``keys`` is over; the lock is held."""
        self._asked.subtract(keys)
        for key in keys:
            if not self._asked[key]:
                del self._asked[key]
        self.ledger.jobs -= 1
        self.ledger.count("jobs_landed")
        self.ledger.count("jobs_cancelled", int(job.cancelled))

    def learn(self, keys: list[BlockKey], there: list[bool]) -> None:
        """Keep the answers of a lookup; the lock is held."""
        self._answers.update(zip(keys, there, strict=True))
        while len(self._answers) > ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]

    def _send(self, job: StoreJob, *, queued: bool) -> None:
        if queued:
            self.runner.start(job)
        else:
            self.runner.carry(job)
            job.poll()

    def _admits(self, job: Job) -> bool:
        """Whether there is room for the job; it is counted when there is none. The lock is held."""
        admitted = self.runner.reserve(job)
        self.ledger.count("jobs_refused", int(not admitted))
        return admitted

    def _own(self, blocks: Mapping[BlockKey, int]) -> tuple[list[BlockKey], NDArray[np.int64]]:
        """The keys of the current namespace and their blocks; the others are counted. The lock is held."""
        ids = self.device.life.ids(list(blocks.values()))
        own = [self.ledger.keys.owns(key) for key in blocks]
        self.ledger.count("stale_keys", own.count(False))
        return [key for key, ours in zip(blocks, own, strict=True) if ours], ids[own]


def _run(done: Sequence[bool]) -> int:
    """How many are done before the first that is not."""
    return next((i for i, each in enumerate(done) if not each), len(done))

"""What the store does for the sequences of a block manager.

An errand is a store job, which has a lease of its own on its blocks, so that a sequence may end or be preempted while
the store is still at work on what it had: its blocks come back when the job has landed, and not before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.jobs import Phase as JobPhase
from cache_manager.keys import BlockKey
from cache_manager.manager.counters import ManagerCounts
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequences import Phase, Sequences
from cache_manager.store_jobs import PersistJob, RestoreJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a new sequence got: its blocks, and how many of its first tokens need no forward pass.

    ``cached_tokens`` counts those whose KV was on the device or came from the store, ``restored_tokens`` the latter.
    While it is ``pending`` the store is being asked for more, and :meth:`BlockManager.poll` will answer a final one.
    """

    blocks: tuple[int, ...]
    cached_tokens: int
    restored_tokens: int
    pending: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """``owner``'s sequence is what the job was begun for; it may have ended since."""

    owner: str
    job: PersistJob | RestoreJob
    wanted: Mapping[BlockKey, int]

    @property
    def over(self) -> bool:
        return self.job.phase is JobPhase.LANDED

    @property
    def stored(self) -> int:
        """How many blocks a persist has found or made stored."""
        return sum(origin != 0 for origin in self.job.stored().values()) if isinstance(self.job, PersistJob) else 0

    def run(self) -> list[tuple[BlockKey, int]]:
        """The longest run of the wanted blocks, from the first on, that a restore has brought."""
        assert isinstance(self.job, RestoreJob), "a persist brings nothing"
        back, run = self.job.restored(), []
        for key, block in self.wanted.items():
            if not back[key]:
                break
            run.append((key, block))
        return run


class Storing:
    """The errands of one block manager that are not over, and what comes of them.

    A store that hangs must leave blocks to compute with: it keeps at most ``pinned_max``. What it can keep are the
    blocks of every persist, and those of as many restores as it has threads, should their sequences end: a restore
    that no thread has begun ends with its sequence. A queued errand for which that is too much is cut to its first
    blocks, or refused when not even one fits; one that its caller waits for is neither.
    """

    def __init__(
        self, aux: AuxBlocks, sequences: Sequences, pool: BlockPool, counts: ManagerCounts, *, pinned_max: int
    ) -> None:
        self._aux, self._sequences, self._pool, self._counts = aux, sequences, pool, counts
        self._pinned_max = pinned_max
        self._errands: dict[Errand, None] = {}
        self._settled: dict[str, Admission] = {}

    def __len__(self) -> int:
        return len(self._errands)

    # ---------------------------------------------------------------- beginning

    def persist(self, row: int) -> int:
        """See :meth:`BlockManager.persist`."""
        errand = self._persist(row, queued=False)
        if errand is None:
            return 0
        self._end(errand)
        return errand.stored

    def begin_persist(self, row: int) -> bool:
        """See :meth:`BlockManager.begin_persist`."""
        return self._persist(row, queued=True) is not None

    def _persist(self, row: int, *, queued: bool) -> Errand | None:
        record = self._sequences.record(row)
        if not self._aux.has_store or record.base is not self._aux.keys or not record.keys:
            return None
        wanted = dict(zip(record.keys, self._sequences.table(row).tolist(), strict=False))
        first = self._first(wanted, restores=self._aux.job_limits.threads_max) if queued else wanted
        job = self._aux.begin_persist(first, owner=record.owner, queued=queued) if first else None
        return self._begun(record.owner, job, first, wanted)

    def restore(self, row: int, wanted: Mapping[BlockKey, int], *, queued: bool) -> int:
        """Fill blocks of the sequence with the longest run of keys that the store has; how many tokens that are by now.

        If it is ``queued``, the sequence is pending.
        """
        if not wanted or not self._aux.has_store:
            return 0
        record = self._sequences.record(row)
        # It is itself one of the restores that threads may hang in.
        first = self._first(wanted, restores=self._aux.job_limits.threads_max - 1) if queued else wanted
        job = self._aux.begin_restore(first, owner=record.owner, queued=queued) if first else None
        record.errand = errand = self._begun(record.owner, job, first, wanted)
        if errand is None:
            return 0
        self._sequences.set_phase(row, Phase.PENDING)
        if queued:
            return 0
        self._end(errand)
        return self._settled.pop(record.owner).restored_tokens

    def _begun(
        self,
        owner: str,
        job: PersistJob | RestoreJob | None,
        first: Mapping[BlockKey, int],
        wanted: Mapping[BlockKey, int],
    ) -> Errand | None:
        if job is None:
            self._counts.count("errands_refused")
            return None
        self._counts.count("errands_cut", int(len(first) < len(wanted)))
        errand = Errand(owner, job, dict(first))
        self._errands[errand] = None
        return errand

    def _first(self, wanted: Mapping[BlockKey, int], restores: int) -> dict[BlockKey, int]:
        """The first of ``wanted``, so many that all persists and the ``restores`` largest restores may hang too."""
        pinned = {b for e in self._errands if isinstance(e.job, PersistJob) for b in e.wanted.values()}
        restored = (len(e.wanted) for e in self._errands if isinstance(e.job, RestoreJob))
        room = self._pinned_max - len(pinned) - sum(nlargest(restores, restored))
        first: dict[BlockKey, int] = {}
        for key, block in wanted.items():
            room -= block not in pinned
            if room < 0:
                break
            first[key] = block
        return first

    # ---------------------------------------------------------------- ending

    def poll(self) -> dict[str, Admission]:
        """See :meth:`BlockManager.poll`."""
        self._end_all()
        settled, self._settled = self._settled, {}
        return settled

    def drain(self, timeout_s: float) -> bool:
        """See :meth:`BlockManager.drain`."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            self._end_all()
            left_s = give_up_s - time.monotonic()
            if not self._errands or left_s <= 0:
                return not self._errands
            self._aux.wait(left_s)

    def abandon(self, owner: str, errand: Errand | None) -> None:
        """The owner's sequence has ended; ``errand`` is what it waited for."""
        self._settled.pop(owner, None)
        if errand is not None:
            self._counts.count("restores_abandoned")
            errand.job.cancel()
            if errand.over:
                self._end(errand)

    def _end_all(self) -> None:
        """Land what the store has done its part of."""
        self._aux.poll()
        for errand in [errand for errand in self._errands if errand.over]:
            self._end(errand)

    def _end(self, errand: Errand) -> None:
        """The store is done: a sequence that waited for it can go on."""
        assert errand.over, "its blocks are in motion"
        del self._errands[errand]
        row = self._sequences.by_owner.get(errand.owner)
        if row is not None and self._sequences.record(row).errand is errand:
            self._settle(row, errand)
        self._counts.count("persisted_blocks", errand.stored)
        failure = errand.job.failure
        if isinstance(failure, KVRouteError):
            self._counts.count("store_failures")
            # As text: a log record that keeps the exception keeps its frames, and with them views of the rows.
            logger.warning("store failed, going on without it: %s", str(failure))
        elif failure is not None:
            raise failure

    def _settle(self, row: int, errand: Errand) -> None:
        """The sequence has what the store had for it."""
        sequences, record = self._sequences, self._sequences.record(row)
        record.errand = None
        sequences.set_phase(row, Phase.READY)
        # After a reset what landed before it is gone, and what its sequence has is found by no key any more.
        run = errand.run() if record.base is self._aux.keys else []
        for key, block in run:
            record.keys.append(key)
            self._pool.publish(key, block)
        restored = len(run) * sequences.tokens
        sequences.computed[row] += restored
        self._counts.count("restored_tokens", restored)
        blocks, computed = tuple(sequences.table(row).tolist()), int(sequences.computed[row])
        self._settled[errand.owner] = Admission(blocks, computed, restored)


__all__ = ["Admission", "Errand", "Storing"]

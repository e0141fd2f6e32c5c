"""What the store does for the sequences of a block manager.

An errand is a store job, which has a lease of its own on its blocks, so that a sequence may end or be preempted while
the store is still at work on what it had: its blocks come back when the job has landed, and not before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import takewhile
from typing import TypeVar

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from cache_manager.manager.growth import GrowingSequences
from cache_manager.manager.sequences import Phase
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


J = TypeVar("J", PersistJob, RestoreJob)


class StoredSequences(GrowingSequences):
    """What the store does for sequences: the errands that are not over, and what comes of them.

    A store that hangs must leave blocks to compute with: it keeps at most half of them. What it can keep are the
    blocks of every persist, and those of as many restores as it has threads, should their sequences end: a restore
    that no thread has begun ends with its sequence. A queued errand for which that is too much is cut to its first
    blocks, or refused when not even one fits; one that its caller waits for is neither.
    """

    def __init__(self, aux: AuxBlocks, *, caching: bool, sequences_max: int) -> None:
        super().__init__(aux, caching=caching, sequences_max=sequences_max)
        self._errands: dict[PersistJob | RestoreJob, str] = {}  # and for whose sequence, which may have ended since
        self._settled: dict[str, Admission] = {}

    # ---------------------------------------------------------------- beginning

    def persist(self, owner: str) -> int:
        """:meth:`begin_persist`, waiting for the store; how many blocks are stored now. A failing store stores none."""
        return self._persist(self._sequences.ready(owner), queued=False)

    def begin_persist(self, owner: str) -> bool:
        """Begin to store the sequence's full blocks, rows and KV; whether there was anything to do, and room for it.

        The store is never waited for, and the sequence may go on or end meanwhile: the blocks are kept for the store
        until :meth:`poll` has found that it is done.
        """
        return self._persist(self._sequences.ready(owner), queued=True) > 0

    def _persist(self, row: int, *, queued: bool) -> int:
        """How many blocks are stored; if it is ``queued``, how many will be."""
        record = self._sequences.record(row)
        keys = record.keys if record.base is self.aux.keys else ()
        wanted = dict(zip(keys, self._sequences.table(row).tolist(), strict=False))
        job = self._begin(row, self.aux.begin_persist, wanted, self.aux.job_limits.threads_max, queued=queued)
        if job is None or queued:
            return 0 if job is None else len(job.blocks)
        self._end(job)
        return _stored(job)

    def _restore(self, row: int, wanted: Mapping[BlockKey, int], *, queued: bool) -> int:
        """Fill blocks of the sequence with the longest run of keys that the store has; how many tokens that are by now.

        If it is ``queued``, the sequence is pending.
        """
        # It is itself one of the restores that threads may hang in.
        others = self.aux.job_limits.threads_max - 1
        job = self._begin(row, self.aux.begin_restore, wanted, others, queued=queued)
        if job is None:
            return 0
        record = self._sequences.record(row)
        record.errand = job
        self._sequences.set_phase(row, Phase.PENDING)
        if queued:
            return 0
        self._end(job)
        return self._settled.pop(record.owner).restored_tokens

    def _begin(
        self,
        row: int,
        begin: Callable[..., J | None],
        wanted: Mapping[BlockKey, int],
        restores: int,
        *,
        queued: bool,
    ) -> J | None:
        """``begin`` a job for the sequence; ``None`` when there is nothing to do, or no room for it."""
        if not wanted or not self.aux.has_store:
            return None
        owner = self._sequences.record(row).owner
        first = self._first(wanted, restores) if queued else dict(wanted)
        job = begin(first, owner=owner, queued=queued) if first else None
        if job is None:
            self._counts["errands_refused"] += 1
            return None
        self._counts["errands_cut"] += len(first) < len(wanted)
        self._errands[job] = owner
        return job

    def _first(self, wanted: Mapping[BlockKey, int], restores: int) -> dict[BlockKey, int]:
        """The first of ``wanted``, so many that all persists and the ``restores`` largest restores may hang too."""
        pinned = {block for job in self._errands if isinstance(job, PersistJob) for block in job.blocks.values()}
        restored = (len(job.blocks) for job in self._errands if isinstance(job, RestoreJob))
        room = self.aux.device_blocks // 2 - len(pinned) - sum(nlargest(restores, restored))
        first: dict[BlockKey, int] = {}
        for key, block in wanted.items():
            room -= block not in pinned
            if room < 0:
                break
            first[key] = block
        return first

    # ---------------------------------------------------------------- ending

    @property
    def errands(self) -> int:
        """How many restores and persists have begun and were not found done by :meth:`poll`."""
        return len(self._errands)

    def poll(self) -> dict[str, Admission]:
        """Take in what the store has done; the final admissions of sequences that were pending. Waits for nothing."""
        self._end_all()
        settled, self._settled = self._settled, {}
        return settled

    def drain(self, timeout_s: float) -> bool:
        """Wait until the store has done everything; ``False`` when ``timeout_s`` was over before."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            self._end_all()
            left_s = give_up_s - time.monotonic()
            if not self._errands or left_s <= 0:
                return not self._errands
            self.aux.wait(left_s)

    def _abandon(self, owner: str, errand: RestoreJob | None) -> None:
        """The owner's sequence has ended; ``errand`` is what it waited for."""
        self._settled.pop(owner, None)
        if errand is not None:
            self._counts["restores_abandoned"] += 1
            errand.cancel()
            if errand.over:
                self._end(errand)

    def _end_all(self) -> None:
        """Land what the store has done its part of."""
        self.aux.poll()
        for job in [job for job in self._errands if job.over]:
            self._end(job)

    def _end(self, job: PersistJob | RestoreJob) -> None:
        """The store is done: a sequence that waited for it can go on."""
        assert job.over, "its blocks are in motion"
        row = self._sequences.by_owner.get(self._errands.pop(job))
        if isinstance(job, PersistJob):
            self._counts["persisted_blocks"] += _stored(job)
        elif row is not None and self._sequences.record(row).errand is job:
            self._settle(row, job)
        failure = job.failure
        if isinstance(failure, KVRouteError):
            self._counts["store_failures"] += 1
            # As text: a log record that keeps the exception keeps its frames, and with them views of the rows.
            logger.warning("store failed, going on without it: %s", str(failure))
        elif failure is not None:
            raise failure

    def _settle(self, row: int, job: RestoreJob) -> None:
        """The sequence has what the store had for it."""
        sequences, record = self._sequences, self._sequences.record(row)
        record.errand = None
        sequences.set_phase(row, Phase.READY)
        # After a reset what landed before it is gone, and what its sequence has is found by no key any more.
        back = job.known() if record.base is self.aux.keys else {}
        run = list(takewhile(lambda wanted: back.get(wanted[0]), job.blocks.items()))
        for key, block in run:
            record.keys.append(key)
            self._pool.publish(key, block)
        restored = len(run) * sequences.tokens
        sequences.computed[row] += restored
        self._counts["restored_tokens"] += restored
        blocks, computed = tuple(sequences.table(row).tolist()), int(sequences.computed[row])
        self._settled[record.owner] = Admission(blocks, computed, restored)


def _stored(job: PersistJob) -> int:
    """How many blocks it has found or made stored."""
    return sum(origin != 0 for origin in job.known().values())

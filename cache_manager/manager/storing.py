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

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.jobs import Phase as JobPhase
from cache_manager.keys import BlockKey
from cache_manager.manager.counters import Counts
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


class Storing:
    """The errands of one block manager that are not over, and what comes of them: the calls of the same names.

    A store that hangs must leave blocks to compute with: it keeps at most ``pinned_max``. What it can keep are the
    blocks of every persist, and those of as many restores as it has threads, should their sequences end: a restore
    that no thread has begun ends with its sequence. A queued errand for which that is too much is cut to its first
    blocks, or refused when not even one fits; one that its caller waits for is neither.
    """

    def __init__(
        self, aux: AuxBlocks, sequences: Sequences, pool: BlockPool, counts: Counts, *, pinned_max: int
    ) -> None:
        self._aux, self._sequences, self._pool, self._counts = aux, sequences, pool, counts
        self._pinned_max = pinned_max
        self._errands: dict[Errand, None] = {}
        self._settled: dict[str, Admission] = {}

    def __len__(self) -> int:
        return len(self._errands)

    # ---------------------------------------------------------------- beginning

    def persist(self, row: int, *, queued: bool) -> int:
        """See :meth:`BlockManager.persist`: how many blocks are stored; if it is ``queued``, how many will be."""
        record = self._sequences.record(row)
        keys = record.keys if record.base is self._aux.keys else ()
        wanted = dict(zip(keys, self._sequences.table(row).tolist(), strict=False))
        errand = self._begin(row, self._aux.begin_persist, wanted, self._aux.job_limits.threads_max, queued=queued)
        if errand is None or queued:
            return 0 if errand is None else len(errand.wanted)
        self._end(errand)
        return errand.stored

    def restore(self, row: int, wanted: Mapping[BlockKey, int], *, queued: bool) -> int:
        """Fill blocks of the sequence with the longest run of keys that the store has; how many tokens that are by now.

        If it is ``queued``, the sequence is pending.
        """
        # It is itself one of the restores that threads may hang in.
        others = self._aux.job_limits.threads_max - 1
        errand = self._begin(row, self._aux.begin_restore, wanted, others, queued=queued)
        if errand is None:
            return 0
        self._sequences.record(row).errand = errand
        self._sequences.set_phase(row, Phase.PENDING)
        if queued:
            return 0
        self._end(errand)
        return self._settled.pop(errand.owner).restored_tokens

    def _begin(
        self,
        row: int,
        begin: Callable[..., PersistJob | RestoreJob | None],
        wanted: Mapping[BlockKey, int],
        restores: int,
        *,
        queued: bool,
    ) -> Errand | None:
        """``begin`` a job for the sequence; ``None`` when there is nothing to do, or no room for it."""
        if not wanted or not self._aux.has_store:
            return None
        owner = self._sequences.record(row).owner
        first = self._first(wanted, restores) if queued else dict(wanted)
        job = begin(first, owner=owner, queued=queued) if first else None
        if job is None:
            self._counts["errands_refused"] += 1
            return None
        self._counts["errands_cut"] += len(first) < len(wanted)
        errand = Errand(owner, job, first)
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
        self._end_all()
        settled, self._settled = self._settled, {}
        return settled

    def drain(self, timeout_s: float) -> bool:
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
            self._counts["restores_abandoned"] += 1
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
        self._counts["persisted_blocks"] += errand.stored
        failure = errand.job.failure
        if isinstance(failure, KVRouteError):
            self._counts["store_failures"] += 1
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
        assert isinstance(errand.job, RestoreJob), "no sequence waits for a persist"
        back = errand.job.restored() if record.base is self._aux.keys else {}
        run = list(takewhile(lambda wanted: back.get(wanted[0]), errand.wanted.items()))
        for key, block in run:
            record.keys.append(key)
            self._pool.publish(key, block)
        restored = len(run) * sequences.tokens
        sequences.computed[row] += restored
        self._counts["restored_tokens"] += restored
        blocks, computed = tuple(sequences.table(row).tolist()), int(sequences.computed[row])
        self._settled[errand.owner] = Admission(blocks, computed, restored)

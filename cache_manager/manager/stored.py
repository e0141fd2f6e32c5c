"""What a block manager has asked of the store, and which sequences wait for an answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.job import AnyJob, PersistJob
from cache_manager.jobs import J
from cache_manager.keys import BlockKey
from cache_manager.manager.calls import Calls, whole
from cache_manager.manager.pool import BlockPool
from cache_manager.manager.sequence import Phase, Sequence, Sequences

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a new sequence got: its blocks, and how many of its first tokens need no forward pass.

    ``cached_tokens`` counts those whose KV was on the device or came from the store, ``restored_tokens`` the latter.
    While it is ``pending`` the store is being asked for more, and :meth:`BlockManager.poll` returns the final admission
    later.
    """

    blocks: tuple[int, ...]
    cached_tokens: int
    restored_tokens: int
    pending: bool = False


class AskedOfStore:
    """The jobs of a manager that it has not collected yet, with their sequences, which may have ended.

    ``settled`` has the final admissions of sequences that were pending, until the manager hands them out.
    """

    def __init__(
        self, aux: AuxBlocks, pool: BlockPool, sequences: Sequences, counts: Counter[str], calls: Calls
    ) -> None:
        self._aux = aux
        self._pool = pool
        self._sequences = sequences
        self._counts = counts
        self.calls = calls
        self.jobs: dict[AnyJob, Sequence] = {}
        self.settled: dict[str, Admission] = {}

    def begin(self, s: Sequence, begin: Callable[..., J | None], wanted: dict[BlockKey, int]) -> J | None:
        """The job for these blocks; ``None`` where there is no room, no thread, or their KV could not be copied."""
        try:
            job = begin(wanted, self._aux.generations(list(wanted.values())))
        except KVRouteError as error:
            self.failed(error)
            return None
        if job is None:
            self._counts["jobs_refused"] += 1
        else:
            self.jobs[job] = s
        return job

    @whole
    def take_in(self) -> None:
        """Land the jobs whose store part is done. An error that is not a store's is raised behind the last of them."""
        self._aux.jobs.poll()
        bug: BaseException | None = None
        for job in [job for job in self.jobs if job.over]:
            s = self.jobs.pop(job)
            if isinstance(job, PersistJob):
                self._counts["persisted_blocks"] += sum(origin != 0 for origin in job.answers.values())
            elif s.job is job and self._sequences.by_owner.get(s.owner) is s:
                self.settle(s, job.answers)
            if isinstance(job.failure, KVRouteError):
                self.failed(job.failure)
            else:
                bug = bug or job.failure
        if bug is not None:
            self.calls.undone = True
            raise bug

    def settle(self, s: Sequence, back: dict[BlockKey, bool]) -> int:
        """Give the sequence the longest run of blocks that are ``back`` from the store; how many tokens that is."""
        run = list(takewhile(back.get, back)) if s.base is self._aux.keys else []  # a reset has taken it away
        for key, block in zip(run, s.blocks[len(s.keys) :], strict=False):
            self._pool.publish(key, block)
        restored = len(run) * self._aux.block_tokens
        computed = self._sequences.computed(s) + restored
        if s.phase is Phase.PENDING:
            self.settled[s.owner] = Admission(tuple(s.blocks), computed, restored)
        self._sequences.settle(s, s.keys + run, computed)
        self._counts["restored_tokens"] += restored
        return restored

    def failed(self, failure: KVRouteError) -> None:
        self._counts["store_failures"] += 1
        # As text: a log record that keeps the exception keeps its frames, and with them views of the rows.
        logger.warning("store failed, going on without it: %s", str(failure))

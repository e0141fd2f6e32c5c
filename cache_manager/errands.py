"""What the store does for a block manager, and the blocks that it needs for that.

An errand is a job with a lease of its own on the job's blocks, so that a sequence may end or be preempted while the
store is still at work on what it had: its blocks come back when the job has landed, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from cache_manager.archive import Companion, PersistJob, RestoreJob
from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import InvalidInputError
from cache_manager.jobs import Phase
from cache_manager.keys import BlockKey
from cache_manager.manager_counters import ManagerCounts

LEASE_PREFIX: Final = "store-job "


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """``owner``'s sequence is what the job was begun for; it may have ended since."""

    owner: str
    lease: str
    job: PersistJob | RestoreJob
    wanted: Mapping[BlockKey, int]

    @property
    def over(self) -> bool:
        return self.job.phase is Phase.LANDED

    def run(self) -> list[tuple[BlockKey, int]]:
        """The longest run of the wanted blocks, from the first on, for which the job has done what it was to do."""
        done, run = self.job.done(), []
        for key, block in self.wanted.items():
            if not done[key]:
                break
            run.append((key, block))
        return run


class Errands:
    """The errands of one block manager that are not over.

    A store that hangs must leave blocks to compute with: it keeps at most ``pinned_max``. What it can keep are the
    blocks of every persist, and those of as many restores as it has threads, should their sequences end: a restore
    that no thread has begun ends with its sequence. A queued errand for which that is too much is cut to its first
    blocks, or refused when not even one fits; one that its caller waits for is neither.
    """

    def __init__(self, aux: AuxBlocks, companion: Companion, counts: ManagerCounts, *, pinned_max: int) -> None:
        self._aux = aux
        self._companion = companion
        self._counts = counts
        self._pinned_max = pinned_max
        self._errands: dict[Errand, None] = {}
        self._begun = 0

    def __len__(self) -> int:
        return len(self._errands)

    @property
    def blocks(self) -> set[int]:
        """Device blocks that some errand holds."""
        return {block for errand in self._errands for block in errand.wanted.values()}

    def persist(self, owner: str, wanted: Mapping[BlockKey, int], *, queued: bool) -> Errand | None:
        """Send blocks that ``owner`` holds to the store; ``None`` when there is no room for that now."""
        first = self._first(wanted, restores=self._aux.job_limits.threads_max) if queued else wanted
        return self._counted(self._begin(owner, first, restore=False, queued=queued), wanted)

    def restore(self, owner: str, wanted: Mapping[BlockKey, int], *, queued: bool) -> Errand | None:
        """Fill blocks that ``owner`` holds from the store; ``None`` when there is no room for that now."""
        # It is itself one of the restores that threads may hang in.
        first = self._first(wanted, restores=self._aux.job_limits.threads_max - 1) if queued else wanted
        return self._counted(self._begin(owner, first, restore=True, queued=queued), wanted)

    def _counted(self, errand: Errand | None, wanted: Mapping[BlockKey, int]) -> Errand | None:
        self._counts.count("errands_refused", int(errand is None))
        self._counts.count("errands_cut", int(errand is not None and len(errand.wanted) < len(wanted)))
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

    def _begin(self, owner: str, wanted: Mapping[BlockKey, int], *, restore: bool, queued: bool) -> Errand | None:
        if not wanted:
            return None
        begin = self._aux.begin_restore if restore else self._aux.begin_persist
        lease, job = f"{LEASE_PREFIX}{self._begun}", None
        self._begun += 1
        self._aux.share(list(wanted.values()), lease)
        try:
            job = begin(wanted, self._companion, queued=queued)
        finally:
            if job is None:
                self._aux.free(lease)
        if job is None:
            return None
        errand = Errand(owner, lease, job, dict(wanted))
        self._errands[errand] = None
        return errand

    def over(self) -> list[Errand]:
        """Land what the store has done its part of; the errands that are over."""
        self._aux.poll()
        return [errand for errand in self._errands if errand.over]

    def end(self, errand: Errand) -> None:
        """Forget an errand that is over; its blocks are held by whoever else holds them."""
        assert errand.over, "its blocks are in motion"
        del self._errands[errand]
        self._aux.free(errand.lease)


def check_owner(owner: str) -> None:
    """:class:`InvalidInputError` for the name of an errand's lease."""
    if isinstance(owner, str) and owner.startswith(LEASE_PREFIX):
        raise InvalidInputError("owner", f"a name that does not begin with {LEASE_PREFIX!r}", repr(owner))


__all__ = ["LEASE_PREFIX", "Errand", "Errands", "check_owner"]

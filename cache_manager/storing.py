"""The front door of a set of blocks to its store: what is begun, polled and asked there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache_manager.checks import Blocks
from cache_manager.keys import BlockKey
from cache_manager.landing import Landing
from cache_manager.ports import RecordCounters
from cache_manager.stored import AnyJob, PersistJob, RestoreJob, Stored


class Storing(Landing):
    """The part of a set of blocks that stores them and brings them back."""

    _stored: Stored

    @property
    def has_store(self) -> bool:
        return self._stored.has_store

    @property
    def store_counters(self) -> RecordCounters | None:
        """What the store has answered so far, corrupt records included; ``None`` without one."""
        return self._stored.store.counters if self._stored.has_store else None

    @property
    def jobs(self) -> list[AnyJob]:
        """Those that have begun and not landed, the earliest first; any of them may be cancelled."""
        return self._stored.jobs

    def poll(self) -> list[AnyJob]:
        """Land the jobs that the store has done its part of; those jobs. Waits for nothing."""
        return self._stored.poll()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until :meth:`poll` has something to land, or no job is left; ``False`` after ``timeout_s``."""
        return self._stored.wait_any(timeout_s)

    def begin_persist(
        self, blocks: Mapping[BlockKey, int], generations: Blocks, *, queued: bool = True
    ) -> PersistJob | None:
        """Store device blocks, in these generations, under their keys; the answers: which origin is stored now.

        Equal to :meth:`origins` of the block, the answer says that this very content is stored; another one, that
        content of another computation was there and stays; 0, that nothing is. ``None`` when there is no room for a
        further job: nothing has changed. A job that is not ``queued`` is done by the calling thread.
        """
        return self._stored.begin(lambda: PersistJob(self._stored, blocks, generations), queued=queued)

    def begin_restore(
        self,
        blocks: Mapping[BlockKey, int],
        generations: Blocks,
        origins: Mapping[BlockKey, int] | None = None,
        *,
        queued: bool = True,
    ) -> RestoreJob | None:
        """Fill device blocks without rows with what is stored under their keys; the answers: which have come back.

        Whoever keeps the KV elsewhere says with ``origins``, by key, of which computation it is: rows of another are
        not restored, and counted. What was read is dropped after a reset, a cancel, or a write into the block.
        """
        return self._stored.begin(lambda: RestoreJob(self._stored, blocks, generations, origins), queued=queued)

    def persist(self, blocks: Mapping[BlockKey, int], generations: Blocks) -> dict[BlockKey, int]:
        """:meth:`begin_persist`, done by the calling thread."""
        job = self.begin_persist(blocks, generations, queued=False)
        assert job is not None, "nothing but the queue is ever full"
        return job.result()

    def restore(
        self, blocks: Mapping[BlockKey, int], generations: Blocks, origins: Mapping[BlockKey, int] | None = None
    ) -> dict[BlockKey, bool]:
        """:meth:`begin_restore`, done by the calling thread."""
        job = self.begin_restore(blocks, generations, origins, queued=False)
        assert job is not None, "nothing but the queue is ever full"
        return job.result()

    def stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys the store seems to have; only ``restore`` verifies."""
        return self._stored.store.contains(keys)

    def flush(self) -> None:
        """Return when what was persisted is on stable storage."""
        self._stored.store.flush()

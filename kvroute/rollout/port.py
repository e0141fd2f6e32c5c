"""The port of a rollout store, and its counters. The contract is executable: :mod:`kvroute.testing.rollouts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_manager.ports import Absence
from kvroute.rollout.handle import RolloutHandle
from kvroute.routes import Routes, SamplingSupport
from kvroute.routes.parts import Range


@dataclass(frozen=True, slots=True)
class RolloutCounters:
    """Counts of a store so far, of rollouts unless noted otherwise. Every get is a hit, a miss or corrupt."""

    puts: int = 0
    put_failures: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    deletes: int = 0
    put_nbytes: int = 0  # of rows
    get_nbytes: int = 0  # read: headers, and whole parts


class RolloutStore(Protocol):
    """Where the routes of finished rollouts wait for trainers.

    * ``put`` returns a handle when the whole rollout can be read with it, and raises ``StorageError`` otherwise; a put
      that failed or was killed leaves nothing that a reader finds.
    * ``get`` returns the rows that were put, byte for byte, or an ``Absence``: ``MISS`` for a rollout that is not there
      (any more), ``CORRUPT`` for a damaged one, which is counted. A failure of the store is ``StorageError``.
    * Putting an id again replaces it: ``find`` returns the last whole put, and a handle of an earlier one may be a
      miss.

    Every call is safe from several threads, and from several processes that share a store. ``close`` is idempotent;
    after it every other call raises ``StoreClosedError``.
    """

    @property
    def counters(self) -> RolloutCounters: ...

    def put(
        self,
        rollout_id: str,
        routes: Routes,
        support: SamplingSupport | None = None,
    ) -> RolloutHandle:
        """Store the routes of a rollout, and with them what its tokens were drawn from.

        :class:`InvalidInputError` for an invalid id, and unless token hashes show that both are of one sequence.
        """

    def find(self, rollout_id: str) -> RolloutHandle | None:
        """The handle of the last put of this id, for callers without one; ``None`` if there is none."""

    def get(
        self,
        handle: RolloutHandle,
        layers: Sequence[int] | None = None,
        spans: Sequence[Range] | None = None,
    ) -> list[Routes] | Absence:
        """The routes of each range of positions in ``spans`` (``None``: one, of all), of the layers called ``layers``.

        ``layers`` are layer ids in any order; ids without rows are ignored. Routed layers that were not requested are
        ``missing_layers`` of the result. Reads little more than the wanted rows, a few MiB at a time.
        :class:`InvalidInputError` for positions that the rollout does not have, and if no layer is left.
        """

    def support(self, handle: RolloutHandle) -> SamplingSupport | Absence | None:
        """The sampling support that was put beside the routes, whole; ``None`` if there was none, or one of no
        position.

        Reads the header and the support alone; :meth:`get` reads no support.
        """

    def delete(self, handle: RolloutHandle) -> None:
        """Forget one put; harmless if it is not there."""

    def close(self) -> None: ...

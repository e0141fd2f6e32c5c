"""What a rollout store is: the port, and its counters. The contract is executable: :mod:`kvroute.testing.rollouts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_manager.ports import Absence
from kvroute.rollout.handle import RolloutHandle
from kvroute.routes import Routes
from kvroute.routes.parts import Range


@dataclass(frozen=True, slots=True)
class RolloutCounters:
    """What a store has done so far; rollouts, unless it says otherwise. Every get is a hit, a miss or corrupt."""

    puts: int = 0
    put_failures: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    deletes: int = 0
    put_nbytes: int = 0  # of rows
    get_nbytes: int = 0  # that were read: headers, and whole parts


class RolloutStore(Protocol):
    """Where the routes of finished rollouts wait for trainers.

    * ``put`` answers a handle when the whole rollout can be had with it, and raises ``StorageError`` when it cannot; a
      put that failed or was killed leaves nothing that is read.
    * ``get`` answers the rows that were put, byte for byte, or an ``Absence``: ``MISS`` for what is not there (any
      more), ``CORRUPT`` for what is damaged, which is counted. A failure of the store is ``StorageError``.
    * Putting an id again replaces it: ``find`` answers the last put that is whole, and a handle of an earlier one may
      be a miss.

    Every call is safe from several threads, and from several processes where they share a store. ``close`` is
    idempotent; after it every other call raises ``StoreClosedError``.
    """

    @property
    def counters(self) -> RolloutCounters: ...

    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        """Store the routes of a rollout. :class:`InvalidInputError` for an id that cannot be one."""

    def find(self, rollout_id: str) -> RolloutHandle | None:
        """The handle of the last put of this id, for callers without one; ``None`` where there is none."""

    def get(
        self,
        handle: RolloutHandle,
        layers: Sequence[int] | None = None,
        spans: Sequence[Range] | None = None,
    ) -> list[Routes] | Absence:
        """The routes of each range of positions in ``spans`` (``None``: one, of all), of the layers called ``layers``.

        ``layers`` are layer ids in any order, of which those without rows do not count. Routed layers that were not
        asked for are ``missing_layers`` of the answer. Reads little beside what is wanted, and few MiB at a time.
        :class:`InvalidInputError` for positions that the rollout does not have, and where no layer is left.
        """

    def delete(self, handle: RolloutHandle) -> None:
        """Forget one put; what is not there is forgotten already."""

    def flush(self) -> None:
        """Return when every rollout put before is on stable storage, as far as this store has any."""

    def close(self) -> None: ...

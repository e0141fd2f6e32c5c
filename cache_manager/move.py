"""Rows on their way from block to block: begun, copied, and then either all arrived or nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cache_manager.checks import integers
from cache_manager.errors import BlockStateError, InvalidInputError
from cache_manager.ledger import InFlight, Ledger
from cache_manager.lifecycle import Event
from cache_manager.ports import Copier
from cache_manager.tier import Tier, prefix_bits

Pairs = Sequence[tuple[int, int]]


class Followers(Enum):
    """Whose leases follow a move."""

    NOBODY = "nobody"
    EVERYBODY = "everybody"


Follow = Followers | str


def split_pairs(pairs: Pairs, source: Tier, target: Tier) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and target ids of ``pairs``, or :class:`InvalidInputError`.

    A source may serve several targets; a target is written once, and is not a source in the same call.
    """
    wanted = "(source, target) pairs of block ids"
    table = integers(pairs, "pairs", wanted, ndim=2)
    if table.size == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if table.shape[1] != 2:
        raise InvalidInputError("pairs", wanted, f"{table.dtype} of shape {table.shape}")
    targets = target.life.ids(table[:, 1], "pairs target")
    sources = table[:, 0]
    if sources.min() < 0 or sources.max() >= source.life.blocks:
        source.life.ids(np.unique(sources), "pairs source")  # says which
    if source is target and (both := set(sources.tolist()) & set(targets.tolist())):
        raise InvalidInputError("pairs", "no block as source and as target", min(both))
    return sources, targets


class Move(InFlight):
    """A move in flight, made by :meth:`AuxBlocks.begin_swap_out` and its kin. The rows are already copied.

    While it is open its blocks can be neither freed, nor given away, nor written. Exactly one of :meth:`commit` and
    :meth:`abort` ends it; as a context manager, leaving commits and an exception aborts, so that the engine's own KV
    copy can stand in the body and both arrive or neither.

    ``leases_of`` says whose leases follow from source to target, one owner being given by name; a lease taken while the
    move is open stays at the source. ``rows`` limits, pair by pair, how many of a block's first rows may arrive.
    ``counter`` is the counter of rows that arrived. ``copier`` copies them, without the lock.
    """

    __slots__ = (
        "_counter",
        "_followers",
        "_ledger",
        "_rows",
        "_source",
        "_sources",
        "_target",
        "_targets",
    )

    def __init__(
        self,
        source: Tier,
        target: Tier,
        ledger: Ledger,
        pairs: Pairs,
        *,
        leases_of: Follow,
        counter: str,
        copier: Copier,
        rows: Sequence[int] | None = None,
    ) -> None:
        sources, targets = split_pairs(pairs, source, target)
        if leases_of is not Followers.NOBODY:
            source.life.ids(sources, "pairs source")
        self._source, self._target, self._ledger = source, target, ledger
        self._sources, self._targets = sources, targets
        self._counter = counter
        self._followers: list[frozenset[str]] | None = None
        self._rows = None if rows is None else prefix_bits(integers(rows, "rows", "a row count for each pair"), target)
        if self._rows is not None and len(self._rows) != len(targets):
            raise InvalidInputError("rows", f"{len(targets)} row counts, one for each pair", len(self._rows))
        self._ended = False
        with ledger.lock:
            source.check_no_step(sources, "copy from it")
            target.check_no_step(targets, "copy into it")
            source.life.check(Event.BEGIN_DEPARTURE, sources)
            target.life.check(Event.BEGIN_ARRIVAL, targets)
            if leases_of is Followers.NOBODY:
                target.check_empty(targets)
            else:
                target.check_unheld(targets)
                self._followers = _followers(source, sources.tolist(), leases_of)
            source.life.begin_departure(sources)
            target.begin_life(target.life.begin_arrival(targets))
            ledger.moves += 1
        try:
            copier.copy(source.region, target.region, sources.tolist(), targets.tolist())
        except BaseException:
            self.abort()
            raise

    def commit(self) -> None:
        """The rows have arrived: they are readable at the target, and the leases that follow are there."""
        source, target = self._source, self._target
        with self._ledger.lock:
            if self._ended:
                raise BlockStateError("move", "one that is in flight", "one that has ended")
            # A reset in between has cleared the source's bits, and nobody can have written a block in motion since.
            valid = source.region.valid[self._sources]
            target.region.valid[self._targets] = valid if self._rows is None else valid & self._rows
            self._ledger.count(self._counter, target.valid_rows(self._targets))
            if self._followers is not None:
                leases, targets = source.life.leases, self._targets.tolist()
                leases.pass_on(self._sources.tolist(), target.life.leases, targets, self._followers)
            self._end(arrived=True)

    def abort(self) -> None:
        """Leave source, leases and every other block as they were. Harmless after the move has ended."""
        with self._ledger.lock:
            if not self._ended:
                self._ledger.count("moves_aborted")
                self._end(arrived=False)

    def _end(self, *, arrived: bool) -> None:
        self._ended = True
        self._ledger.moves -= 1
        self._source.life.end_departure(self._sources)
        self._target.life.end_arrival(self._targets, arrived=arrived)


def _followers(source: Tier, sources: list[int], leases_of: Follow) -> list[frozenset[str]]:
    """Whose leases on each of ``sources`` will follow; the lock is held."""
    leases = source.life.leases
    if leases_of is Followers.EVERYBODY:
        return leases.snapshot(sources)
    assert isinstance(leases_of, str)
    for block in sources:
        if not leases.holds(leases_of, block):
            raise BlockStateError(
                f"{source.life.tier} block {block}", f"one that {leases_of!r} holds", "one it does not"
            )
    return [frozenset((leases_of,))] * len(sources)

"""Moves between blocks: all arrived, rows and whatever else the mover carries, or nothing changed."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.bits import rows_in
from cache_manager.books import Books, InFlight
from cache_manager.checks import integers
from cache_manager.errors import BlockStateError, InvalidInputError
from cache_manager.leases import Followers
from cache_manager.lifecycle import Event
from cache_manager.memory import bits_of, put_bits
from cache_manager.ports import Mover, TierName
from cache_manager.table import BlockTable, Ints

Pairs = Sequence[tuple[int, int]] | NDArray[np.int64]
"""(source, target) block ids ``[n, 2]``; an array costs a fifth of a list of tuples."""


MOVED: Final[dict[tuple[TierName, TierName], str]] = {
    ("device", "device"): "copied_rows",
    ("device", "host"): "swapped_out_rows",
    ("host", "device"): "swapped_in_rows",
}
"""The tiers that blocks are moved between, and what counts the rows that arrive."""


def split_pairs(pairs: Pairs, source: BlockTable, target: BlockTable) -> tuple[Ints, Ints]:
    """Source and target ids of ``pairs``, or :class:`InvalidInputError`. The lock is held.

    A source may serve several targets; a target is written once, and is not a source in the same call.
    """
    wanted = "(source, target) pairs of block ids"
    table = integers(pairs, "pairs", wanted, ndim=2)
    if table.size == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if table.shape[1] != 2:
        raise InvalidInputError("pairs", wanted, f"{table.dtype} of shape {table.shape}")
    targets = target.ids(table[:, 1], "pairs target")
    sources = source.ids_often(table[:, 0], "pairs source")
    if source is target and count(both := source.leases.among(sources, targets)):
        raise InvalidInputError("pairs", "no block as source and as target", int(sources[both].min()))
    return sources, targets


class Move(InFlight):
    """A move in flight, made by ``begin_swap_out`` and its kin. The bytes are already copied.

    While it is open its blocks can be neither freed, nor given away, nor written. Exactly one of :meth:`commit` and
    :meth:`abort` ends it; as a context manager, leaving commits and an exception aborts, so that an engine's own copy
    can stand in the body and both arrive or neither. A move that is dropped is aborted.

    With ``follow`` the leases of everybody, or of one ``owner``, go from source to target; a lease taken while the move
    is open stays at the source. ``rows`` limits, pair by pair, how many of a block's first rows may arrive. ``mover``
    copies bytes, without the lock. ``beside_steps`` allows steps in flight to write the sources: what they commit later
    goes under an origin of its own.
    """

    __slots__ = ("_followers", "_lapses", "_rows", "_source", "_sources", "_target", "_targets")

    def __init__(
        self,
        books: Books,
        source: BlockTable,
        target: BlockTable,
        sources: Ints,
        targets: Ints,
        *,
        mover: Mover,
        follow: bool = False,
        owner: Hashable | None = None,
        rows: Sequence[int] | None = None,
        beside_steps: bool = False,
    ) -> None:
        self._ended = True  # until it has begun
        self._books, self._source, self._target = books, source, target
        self._sources, self._targets = sources, targets
        self._followers: Followers = []
        self._rows = None if rows is None else target.first_rows(rows, targets.size, "pair")
        with books.guard:
            if not beside_steps:
                source.check_no_step(sources, "copy from it")
            target.check_no_step(targets, "copy into it")
            source.check(Event.BEGIN_DEPARTURE, sources)
            target.check(Event.BEGIN_ARRIVAL, targets)
            if follow:
                source.check_once(sources, "pairs source")
                held = target.leases.holders.take(targets) > 0
                target.refuse(targets, held, "FREE or CACHED to copy into", "HELD", BlockStateError)
                self._followers = source.leases.followers(sources, owner)
                if owner is not None:
                    source.check_holder(owner, sources, self._followers[0][1])
            else:
                target.check_empty(targets)
            if beside_steps:  # a row that a step commits while the bytes are copied may not be among them
                there = bits_of(source.region, sources)
                self._rows = there if self._rows is None else there & self._rows
            source.begin_departure(sources)
            target.begin_arrival(targets)
            self._lapses = target.lapses.take(targets)
            books.moves[id(self)] = weakref.ref(self)
            self._ended = False
        try:
            if targets.size:
                mover.copy(source.tier, target.tier, sources, targets)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> None:
        """The rows have arrived: they are readable at the target, and the leases that follow are there."""
        source, target = self._source, self._target
        with self._books.guard:
            if self._ended:
                raise BlockStateError("move", "one that is in flight", "one that has ended")
            # A reset in between has cleared the source's bits, and no step was begun for a block in motion since.
            valid, origins = bits_of(source.region, self._sources), source.origin.take(self._sources)
            if self._rows is not None:
                valid &= self._rows
            if count(lapsed := target.lapses.take(self._targets) != self._lapses):  # a pass has written its KV, say
                valid[lapsed], origins[lapsed] = 0, 0
            put_bits(target.region, self._targets, valid)
            target.carry_origin(self._targets, origins)
            self._books.count(MOVED[source.tier, target.tier], rows_in(valid))
            source.leases.pass_on(self._sources, target.leases, self._targets, self._followers)
            self._end(arrived=True)

    def _give_up(self, _how: str, /) -> None:
        """Source, leases and every other block are as they were."""
        if not self._ended:
            self._books.count("moves_aborted")
            self._target.carry_origin(self._targets, np.zeros(self._targets.size, np.uint64))
            self._end(arrived=False)

    def _end(self, *, arrived: bool) -> None:
        self._ended = True
        del self._books.moves[id(self)]
        self._source.end_departure(self._sources)
        self._target.end_arrival(self._targets, arrived=arrived)

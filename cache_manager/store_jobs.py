"""Blocks to the store and back, as jobs: begun and landed under the lock, moved without it.

A job has a lease of its own on its blocks, so that whoever else holds them may let go meanwhile: they come back when
the job has landed, and not before. Where an engine owns the blocks nothing is kept: a persist stores a copy, and a
restore reads into one, which lands in what is still as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.jobs import Archive, Job
from cache_manager.keys import BlockKey
from cache_manager.lifecycle import Event, State
from cache_manager.memory import bits_of, put_bits
from cache_manager.mover import one_each
from cache_manager.ports import Absence, BlockRecords, Found
from cache_manager.records import Claim, claimed


class PersistJob(Job[int]):
    """Blocks on their way to the store. :meth:`result`: by key, the origin that is stored now, 0 for none."""

    _stored: Sequence[Found | None] = ()

    def __init__(self, archive: Archive, claim: Claim) -> None:
        ids, live = claimed(archive.table, archive.books, claim)
        whole = archive.table.complete(ids, archive.required)
        archive.books.count("incomplete_blocks_not_persisted", int(count(live & ~whole)))
        if archive.policy == "gate":  # nothing of a block that misses required rows is stored
            live &= whole
        super().__init__(archive, "persist", claim.blocks, ids, live)

    def check(self) -> None:
        self._archive.table.check_no_step(self._ids, "store it")
        self._archive.table.check(Event.BEGIN_DEPARTURE, self._ids)

    def begin(self) -> None:
        table = self._archive.table
        if table.by_engine:
            table.seal(self._ids)
            self._work_on(table.region.rows[self._ids])
        else:
            table.begin_departure(self._ids)
            table.leases.acquire(self, self._ids, stays=True)
        self._origins: list[int] = table.origin.take(self._ids).tolist()
        self._valid = [words.astype("<u8").tobytes() for words in bits_of(table.region, self._ids)]

    def known(self) -> dict[BlockKey, int]:
        found = dict.fromkeys(self.blocks, 0)
        found.update((key, each.origin) for key, each in zip(self._keys, self._stored, strict=False) if each)
        return found

    def carry(self) -> None:
        records = BlockRecords(self._keys, self._at.tolist(), self._origins, self._valid, self._generations.tolist())
        self._stored = one_each(self._mover.put(records), self._keys)

    def _land(self) -> None:
        self._let_go()
        if not self._archive.table.by_engine:
            self._archive.table.end_departure(self._ids)
        self._archive.books.count("persisted_blocks", sum(each is not None for each in self._stored))


class RestoreJob(Job[bool]):
    """Blocks on their way from the store. :meth:`result`: by key, whether the block's rows have come back."""

    _found: Sequence[Found | Absence] = ()
    _arrived: NDArray[np.bool_] | None = None

    def __init__(self, archive: Archive, claim: Claim, origins: Mapping[BlockKey, int] | None) -> None:
        super().__init__(archive, "restore", claim.blocks, *claimed(archive.table, archive.books, claim))
        self.lost: dict[str, int] = {}
        """Blocks in their lives that did not come back, by the counter that says why; known once the job has landed."""
        self._expected: NDArray[np.uint64] | None = None  # the origins that count, one for each key
        if origins is not None:
            self._expected = np.array([origins.get(key, 0) for key in self._keys], np.uint64)

    def check(self) -> None:
        table = self._archive.table
        table.check_no_step(self._ids, "restore it")
        table.check(Event.BEGIN_ARRIVAL, self._ids)
        table.check_empty(self._ids)

    def begin(self) -> None:
        table = self._archive.table
        self._lapses = table.lapses.take(self._ids)
        if table.by_engine:
            self._work_on(np.empty((self._ids.size, table.layout.nbytes), np.uint8))
        else:
            table.begin_arrival(self._ids)
            table.leases.acquire(self, self._ids, stays=True)
            self._generations = table.generations.take(self._ids)

    def known(self) -> dict[BlockKey, bool]:
        found = dict.fromkeys(self.blocks, False)
        if self._arrived is not None:
            found.update(zip(self._keys, self._arrived.tolist(), strict=True))
        return found

    def carry(self) -> None:
        if not self.cancelled:
            self._found = one_each(self._mover.get_into(self._keys, self._at.tolist()), self._keys)

    def _land(self) -> None:
        """Make readable what was read for blocks still in the life it was read for."""
        table, arrived = self._archive.table, np.zeros(self._ids.size, np.bool_)
        try:
            if self.cancelled:
                read = sum(isinstance(each, Found) for each in self._found)
                self._archive.books.count("cancelled_restores_dropped", read)
            elif self.failure is not None:
                self._lose(failed_blocks_not_restored=int(count(self._live())))
            elif self._found:
                arrived = self._place()
        finally:
            self._arrived = arrived
            self._let_go()
            if not table.by_engine:
                lost = self._ids[~arrived]
                table.carry_origin(lost, np.zeros(lost.size, np.uint64))  # whatever is in there now
                table.end_arrival(self._ids[arrived], arrived=True)
                table.end_arrival(lost, arrived=False)

    def _live(self) -> NDArray[np.bool_]:
        """Which blocks are in the life that the rows were read for, and nobody has filled or written them since."""
        table, ids = self._archive.table, self._ids
        live: NDArray[np.bool_] = table.generations.take(ids) == self._generations
        if table.by_engine:
            live &= table.states.take(ids) == State.HELD
            live &= table.lapses.take(ids) == self._lapses  # no reset, no gap of a feed, no copy over it
            live &= table.empty(ids) & ~table.own.take(ids) & ~table.busy(ids)
        return live

    def _place(self) -> NDArray[np.bool_]:
        """Publish what came; which blocks have come back."""
        archive, table, books, ids = self._archive, self._archive.table, self._archive.books, self._ids
        read = np.array([isinstance(each, Found) for each in self._found])
        origins = np.zeros(read.size, np.uint64)
        bits = np.zeros((read.size, *table.region.valid.shape[1:]), np.uint64)
        for i, each in enumerate(self._found):
            if isinstance(each, Found):
                origins[i] = each.origin
                if each.valid:
                    bits[i] = np.frombuffer(each.valid, "<u8").reshape(bits.shape[1:])
        live, named = self._live(), origins != 0
        if self._expected is not None:
            named &= origins == self._expected
        if table.by_engine:
            known = table.origin.take(ids)  # of the KV, where somebody has said so
            named &= (known == 0) | (known == origins)
        whole = (bits[:, archive.required, :] == table.full).all(axis=(1, 2)) | (archive.policy == "mask")
        arrived: NDArray[np.bool_] = read & live & named & whole
        if table.by_engine:
            table.region.rows[ids[arrived]] = self._copied[arrived]
        put_bits(table.region, ids[arrived], bits[arrived])
        table.carry_origin(ids[arrived], origins[arrived])
        absent, corrupt, other = (int(count(live & np.array([each is why for each in self._found]))) for why in Absence)
        self._lose(
            absent_blocks_not_restored=absent,
            corrupt_blocks_not_restored=corrupt,
            blocks_of_another_origin_not_restored=other + int(count(read & live & ~named)),
            incomplete_blocks_not_restored=int(count(read & live & named & ~whole)),
        )
        books.count("restored_blocks", int(count(arrived)))
        books.count("restored_without_rows", int(count(arrived & ~bits.any(axis=(1, 2)))))
        books.count("late_restores_dropped", int(count(read & ~live)))
        return arrived

    def _lose(self, **blocks: int) -> None:
        self.lost = {name: n for name, n in blocks.items() if n}
        for name, n in self.lost.items():
            self._archive.books.count(name, n)

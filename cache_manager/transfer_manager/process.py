"""The cache-transfer process: ``python -m cache_manager.transfer_manager.process SOCKET_FD PARENT_PID``.

It moves bytes between shared regions and stores when its engine says so, and decides nothing: which blocks may be
touched, and what becomes readable, is the engine's business. Moves have a thread of their own, so that a slow store
does not hold up a swap. When the engine is gone the process ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Final, NoReturn

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cache_manager.child import Parent
from cache_manager.errors import BlockStateError, StorageError
from cache_manager.keys import BlockKey
from cache_manager.memory import GENERATION_SHIFT
from cache_manager.mover import PairMover, RowsMover
from cache_manager.ports import Absence, Mover, TierName
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.transfer_manager import commands
from cache_manager.transfer_manager.commands import Answer, Asked

STORE_THREADS: Final = 2


class Process:
    """Answers commands from one socket until it is told to close or the engine is gone."""

    def __init__(self, engine: Parent) -> None:
        self._engine = engine
        self._moves = ThreadPoolExecutor(1, "moves")
        self._stores = ThreadPoolExecutor(STORE_THREADS, "stores")

    def serve(self) -> NoReturn:
        while (body := self._engine.receive()) is not None:
            self._take(commands.decode_asked(body))
        os._exit(1)  # stores are crash-safe, and nobody waits for an answer any more

    def _take(self, asked: Asked) -> None:
        match asked.command:
            case commands.SetUp():
                self._answer(asked)
            case commands.Close():
                self._moves.shutdown()
                self._stores.shutdown()
                self._answer(asked)
                os._exit(0)
            case commands.Move():
                self._moves.submit(self._answer, asked)
            case _:
                self._stores.submit(self._answer, asked)

    def _answer(self, asked: Asked) -> None:
        try:
            answer = structs.replace(self._do(asked.command), number=asked.number)
        except Exception as error:  # noqa: BLE001 - this process's loop edge: the asker gets the reason
            of_store = isinstance(error, StorageError)
            answer = Answer(asked.number, error=f"{type(error).__name__}: {error}", of_store=of_store)
        self._engine.send(commands.encode(answer))

    def _set_up(self, setup: commands.SetUp) -> None:
        self._regions = [_regions(part) for part in setup.parts]
        self._records = [
            RecordStore(open_store(part.store), regions["device"].layout) if part.store else None
            for part, regions in zip(setup.parts, self._regions, strict=True)
        ]
        rows, *more = (
            RowsMover(regions["device"], regions.get("host"), records, whole=number > 0)
            for number, (regions, records) in enumerate(zip(self._regions, self._records, strict=True))
        )
        self._mover: Mover = rows
        if more:
            self._mover = PairMover(rows, more[0], setup.policy, self._regions[0]["device"].layout, setup.required)

    def _do(self, command: commands.Command) -> Answer:
        """Do a command. What it is asked of blocks holds before and after."""
        answer = Answer()
        match command:
            case commands.SetUp():
                self._set_up(command)
            case commands.Move(source, target, sources, targets, generations):
                self._check(source, sources)
                self._check(target, targets, generations)
                self._mover.copy(source, target, np.array(sources), np.array(targets))
                self._check(target, targets, generations)
                return answer
            case commands.Persist(records):
                self._check("device", records.blocks, records.generations)
                answer = Answer(stored=self._mover.put(records))
                self._check("device", records.blocks, records.generations)
            case commands.Restore(names, blocks, generations):
                self._check("device", blocks, generations)
                found = self._mover.get_into([BlockKey(name) for name in names], blocks)
                self._check("device", blocks, generations)
                answer = Answer(restored=[each.value if isinstance(each, Absence) else each for each in found])
            case commands.Contains(names):
                answer = Answer(there=self._mover.contains([BlockKey(name) for name in names]))
            case commands.Flush():
                self._mover.flush()
            case commands.Close():
                for store in filter(None, self._records):
                    store.close()
        return structs.replace(answer, counters=list(astuple(self._mover.counters)))

    def _check(self, tier: TierName, blocks: Sequence[int], generations: Sequence[int] | None = None) -> None:
        """Whether there are such blocks, and whether they are still in the life that the command was made for."""
        for regions in self._regions:
            count = regions[tier].blocks
            assert all(0 <= block < count for block in blocks), f"{tier} blocks {blocks} of {count}"
        words: NDArray[np.uint64] = self._regions[0][tier].words
        now = (words[list(blocks)] >> np.uint64(GENERATION_SHIFT)).tolist()
        for block, found, wanted in zip(blocks, now, now if generations is None else generations, strict=True):
            if found != wanted:
                raise BlockStateError(f"{tier} block {block}", f"generation {wanted}", found)


def _regions(setup: commands.PartSetUp) -> dict[TierName, SharedRegion]:
    layout = RecordLayout(tuple(AuxBlockDataSpec.from_json(spec) for spec in setup.specs))
    names: dict[TierName, str] = {"device": setup.device, "host": setup.host}
    return {tier: SharedRegion.attach(name, layout, writable=True) for tier, name in names.items() if name}


if __name__ == "__main__":
    Process(Parent(*map(int, sys.argv[1:3]))).serve()

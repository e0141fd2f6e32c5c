"""The cache-transfer process: ``python -m cache_manager.transfer_manager.process SOCKET_FD``.

It moves bytes between shared regions and stores when its engine says so, and decides nothing: which blocks may be
touched, and what becomes readable, is the engine's business. Moves have a thread of their own, so that a slow store
does not hold up a swap. When the engine is gone the process ends.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Final, NoReturn

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cache_manager.errors import BlockStateError, StorageError
from cache_manager.framing import receive_frame, send_frame
from cache_manager.keys import BlockKey
from cache_manager.memory import GENERATION_SHIFT
from cache_manager.mover import PairMover, RowsMover
from cache_manager.ports import Absence, BlockRecords, Mover, TierName
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.transfer_manager import commands
from cache_manager.transfer_manager.commands import Answer, Asked

STORE_THREADS: Final = 2
ORPHAN_CHECK_MS: Final = 2_000


class Transfers:
    """What the commands do, given regions and stores."""

    def __init__(self, setup: commands.SetUp) -> None:
        self._regions = [_regions(part) for part in setup.parts]
        self._records = [
            RecordStore(open_store(part.store), regions["device"].layout) if part.store else None
            for part, regions in zip(setup.parts, self._regions, strict=True)
        ]
        movers = [
            RowsMover(regions["device"], regions.get("host"), records, whole=number > 0)
            for number, (regions, records) in enumerate(zip(self._regions, self._records, strict=True))
        ]
        rows, *more = movers
        layout = self._regions[0]["device"].layout
        self._mover: Mover = rows
        if more:
            self._mover = PairMover(rows, more[0], setup.policy, layout, [layout.specs[i].name for i in setup.required])

    def move(self, asked: commands.Move) -> Answer:
        for place, blocks in ((asked.source, asked.sources), (asked.target, asked.targets)):
            self._check_blocks(place, blocks)
        self._check_generations(asked.target, asked.targets, asked.generations)
        self._mover.copy(asked.source, asked.target, np.array(asked.sources), np.array(asked.targets))
        self._check_generations(asked.target, asked.targets, asked.generations)
        return Answer(0, asked.generations)

    def persist(self, asked: commands.Persist) -> Answer:
        self._check_device(asked.blocks, asked.generations)
        keys = [BlockKey(key) for key in asked.keys]
        stored = self._mover.put(BlockRecords(keys, asked.blocks, asked.origins, asked.valid, asked.generations))
        self._check_device(asked.blocks, asked.generations)
        return Answer(0, asked.generations, stored=stored, counters=self._counters())

    def restore(self, asked: commands.Restore) -> Answer:
        self._check_device(asked.blocks, asked.generations)
        found = self._mover.get_into([BlockKey(key) for key in asked.keys], asked.blocks)
        self._check_device(asked.blocks, asked.generations)
        restored = [each.value if isinstance(each, Absence) else each for each in found]
        return Answer(0, asked.generations, restored=restored, counters=self._counters())

    def contains(self, asked: commands.Contains) -> Answer:
        there = self._mover.contains([BlockKey(key) for key in asked.keys])
        return Answer(0, there=there, counters=self._counters())

    def flush(self) -> Answer:
        self._mover.flush()
        return Answer(0, counters=self._counters())

    def close(self) -> Answer:
        for records in self._records:
            if records is not None:
                records.close()
        return Answer(0)

    def _counters(self) -> list[int]:
        return list(astuple(self._mover.counters))

    def _check_blocks(self, tier: TierName, blocks: list[int]) -> None:
        for regions in self._regions:
            count = regions[tier].blocks
            assert all(0 <= block < count for block in blocks), f"{tier} blocks {blocks} of {count}"

    def _check_device(self, blocks: list[int], generations: list[int]) -> None:
        self._check_blocks("device", blocks)
        self._check_generations("device", blocks, generations)

    def _check_generations(self, tier: TierName, blocks: list[int], generations: list[int]) -> None:
        """Whether ``blocks`` are still in the life that the command was made for."""
        words: NDArray[np.uint64] = self._regions[0][tier].words
        now = (words[blocks] >> np.uint64(GENERATION_SHIFT)).tolist()
        for block, found, wanted in zip(blocks, now, generations, strict=True):
            if found != wanted:
                raise BlockStateError(f"{tier} block {block}", f"generation {wanted}", found)


def _regions(setup: commands.PartSetUp) -> dict[TierName, SharedRegion]:
    layout = RecordLayout(tuple(AuxBlockDataSpec.from_json(spec) for spec in setup.specs))
    names: dict[TierName, str] = {"device": setup.device, "host": setup.host}
    return {tier: SharedRegion.attach(name, layout, writable=True) for tier, name in names.items() if name}


class Process:
    """Answers commands from one socket until it is told to close or the engine is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._parent = os.getppid()
        self._sending = threading.Lock()
        self._moves = ThreadPoolExecutor(1, "moves")
        self._stores = ThreadPoolExecutor(STORE_THREADS, "stores")
        self._transfers: Transfers | None = None

    def serve(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while True:
            if not poll.poll(ORPHAN_CHECK_MS):
                if os.getppid() != self._parent:  # a fork of the engine may hold the socket open
                    os._exit(1)
                continue
            body = receive_frame(self._end)
            if body is None:
                os._exit(1)  # stores are crash-safe, and nobody waits for an answer any more
            self._take(commands.decode_asked(body))

    def _take(self, asked: Asked) -> None:
        match asked.command:
            case commands.SetUp() as setup:
                self._answer(asked.number, lambda: self._set_up(setup))
            case commands.Close():
                self._moves.shutdown()
                self._stores.shutdown()
                self._answer(asked.number, self._ready().close)
                os._exit(0)
            case commands.Move() as move:
                self._moves.submit(self._answer, asked.number, lambda: self._ready().move(move))
            case commands.Persist() as persist:
                self._stores.submit(self._answer, asked.number, lambda: self._ready().persist(persist))
            case commands.Restore() as restore:
                self._stores.submit(self._answer, asked.number, lambda: self._ready().restore(restore))
            case commands.Contains() as contains:
                self._stores.submit(self._answer, asked.number, lambda: self._ready().contains(contains))
            case commands.Flush():
                self._stores.submit(self._answer, asked.number, lambda: self._ready().flush())

    def _set_up(self, setup: commands.SetUp) -> Answer:
        assert self._transfers is None, "set up once"
        self._transfers = Transfers(setup)
        return Answer(0)

    def _ready(self) -> Transfers:
        assert self._transfers is not None, "a command before set-up"
        return self._transfers

    def _answer(self, number: int, work: Callable[[], Answer]) -> None:
        try:
            answer = structs.replace(work(), number=number)
        except Exception as error:  # noqa: BLE001 - this process's loop edge: the asker gets the reason
            of_store = isinstance(error, StorageError)
            answer = Answer(number, error=f"{type(error).__name__}: {error}", of_store=of_store)
        with self._sending:
            try:
                send_frame(self._end, commands.encode(answer))
            except OSError:  # the engine is gone; serve() sees the same
                return


if __name__ == "__main__":
    Process(socket.socket(fileno=int(sys.argv[1]))).serve()

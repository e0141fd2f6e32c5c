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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Final, NoReturn

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cache_manager.errors import BlockStateError, StorageError
from cache_manager.framing import receive_frame, send_frame
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import pack_header
from cache_manager.regions import SharedRegion
from cache_manager.regions.reader import SEQUENCE_BITS
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.transfer_manager import commands
from cache_manager.transfer_manager.commands import Answer, Asked

STORE_THREADS: Final = 2
ORPHAN_CHECK_MS: Final = 2_000


class Part:
    """One kind of record of every block: its regions by tier, and the store it is kept in, if any."""

    def __init__(self, setup: commands.PartSetUp) -> None:
        self.layout = RecordLayout(tuple(AuxBlockDataSpec.from_json(spec) for spec in setup.specs))
        self.regions = {
            tier: SharedRegion.attach(name, self.layout, writable=True)
            for tier, name in (("device", setup.device), ("host", setup.host))
            if name
        }
        self.records = RecordStore(open_store(setup.store), self.layout) if setup.store else None

    @property
    def store(self) -> RecordStore:
        if self.records is None:
            raise StorageError("this cache-transfer process was given no store")
        return self.records

    def views(self, blocks: list[int]) -> list[memoryview]:
        rows = self.regions["device"].rows
        return [rows[block].data for block in blocks]


class Transfers:
    """What the commands do, given regions and stores."""

    def __init__(self, setup: commands.SetUp) -> None:
        self._parts = [Part(part) for part in setup.parts]

    def move(self, asked: commands.Move) -> Answer:
        for place, blocks in ((asked.source, asked.sources), (asked.target, asked.targets)):
            self._check_blocks(place, blocks)
        self._check_generations(asked.target, asked.targets, asked.generations)
        for part in self._parts:
            source, target = part.regions[asked.source].rows, part.regions[asked.target].rows
            for s, t in zip(asked.sources, asked.targets, strict=True):
                target[t] = source[s]
        self._check_generations(asked.target, asked.targets, asked.generations)
        return Answer(0, asked.generations)

    def persist(self, asked: commands.Persist) -> Answer:
        """A key counts as stored when every part is: parts are put in order, and the first "no" ends it for a key."""
        self._check_blocks("device", asked.blocks)
        self._check_generations("device", asked.blocks, asked.generations)
        wanted = list(range(len(asked.keys)))
        for part, valid in zip(self._parts, asked.valid, strict=True):
            keys = [BlockKey(asked.keys[i]) for i in wanted]
            payloads = part.views([asked.blocks[i] for i in wanted])
            generations = [asked.generations[i] for i in wanted]
            stored = part.store.put(keys, payloads, [valid[i] for i in wanted], generations)
            wanted = [i for i, there in zip(wanted, stored, strict=True) if there]
        self._check_generations("device", asked.blocks, asked.generations)
        return self._done(asked.generations, stored=[i in set(wanted) for i in range(len(asked.keys))])

    def restore(self, asked: commands.Restore) -> Answer:
        """A key counts as restored when every part is there and sound."""
        self._check_blocks("device", asked.blocks)
        self._check_generations("device", asked.blocks, asked.generations)
        answers = [Absence.MISS.value.encode()] * len(asked.keys)
        wanted = list(range(len(asked.keys)))
        for number, part in enumerate(self._parts):
            keys = [BlockKey(asked.keys[i]) for i in wanted]
            found = part.store.get_into(keys, part.views([asked.blocks[i] for i in wanted]))
            there = []
            for i, header in zip(wanted, found, strict=True):
                if isinstance(header, Absence):
                    answers[i] = header.value.encode()
                else:
                    there.append(i)
                    if number == 0:
                        answers[i] = pack_header(header)
            wanted = there
        self._check_generations("device", asked.blocks, asked.generations)
        return self._done(asked.generations, restored=answers)

    def contains(self, asked: commands.Contains) -> Answer:
        there = [True] * len(asked.keys)
        for part in self._parts:
            found = part.store.contains([BlockKey(key) for key in asked.keys])
            there = [a and b for a, b in zip(there, found, strict=True)]
        return self._done([], stored=there)

    def flush(self) -> Answer:
        for part in self._parts:
            part.store.flush()
        return self._done([])

    def close(self) -> Answer:
        for part in self._parts:
            if part.records is not None:
                part.records.close()
        return Answer(0)

    def _done(self, generations: list[int], *, stored: Sequence[bool] = (), restored: Sequence[bytes] = ()) -> Answer:
        counters = list(astuple(self._parts[0].store.counters))
        return Answer(0, generations, list(stored), list(restored), counters)

    def _check_blocks(self, tier: commands.TierName, blocks: list[int]) -> None:
        for part in self._parts:
            region = part.regions[tier]
            assert all(0 <= block < region.blocks for block in blocks), f"{tier} blocks {blocks} of {region.blocks}"

    def _check_generations(self, tier: commands.TierName, blocks: list[int], generations: list[int]) -> None:
        """Whether ``blocks`` are still in the life that the command was made for."""
        words: NDArray[np.uint64] = self._parts[0].regions[tier].words
        now = (words[blocks] >> np.uint64(SEQUENCE_BITS)).tolist()
        for block, found, wanted in zip(blocks, now, generations, strict=True):
            if found != wanted:
                raise BlockStateError(f"{tier} block {block}", f"generation {wanted}", found)


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

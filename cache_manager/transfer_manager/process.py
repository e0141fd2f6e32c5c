"""The cache-transfer process: ``python -m cache_manager.transfer_manager.process SOCKET_FD PARENT_PID ARENA_FD``.

It copies records between shared regions, and asks a store, when its engine says so, and decides nothing: which blocks
may be touched, and what becomes readable, is the engine's business. Calls of the store leave a thread for copies, so
that a slow store does not hold up a swap.
"""

from __future__ import annotations

import threading

import numpy as np

from cache_manager.child import Parent
from cache_manager.moves import copy_records
from cache_manager.regions import SharedRegion
from cache_manager.storage import apart_process
from cache_manager.storage.apart_process import Answer, Command, Move


class Process(apart_process.Process):
    """A store's process that moves, too."""

    def __init__(self, parent: Parent, arena_fd: int) -> None:
        super().__init__(parent, arena_fd)
        self._moving = threading.Lock()
        self._regions: dict[str, SharedRegion] = {}  # guarded by it

    def done(self, command: Command) -> Answer:
        if not isinstance(command, Move):
            return super().done(command)
        with self._moving:
            source, target = self._region(command.source), self._region(command.target)
            for region, blocks in ((source, command.sources), (target, command.targets)):
                assert all(0 <= block < region.blocks for block in blocks), f"blocks {blocks} of {region.blocks}"
            assert source.layout.fingerprint == target.layout.fingerprint, "records of one layout"
            copy_records(source, target, np.array(command.sources), np.array(command.targets))
        return Answer()

    def _region(self, name: str) -> SharedRegion:
        if name not in self._regions:
            self._regions[name] = SharedRegion.attach(name, writable=True)
        return self._regions[name]


if __name__ == "__main__":
    apart_process.main(Process)

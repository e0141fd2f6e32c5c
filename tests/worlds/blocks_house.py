"""Blocks of an engine over a store whose background calls wait at a gate."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from canary import canary_rows
from gate import Gate, GatedStore

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockStateError
from cache_manager.job import AnyJob
from cache_manager.jobs import JobLimits
from cache_manager.keys import BlockKey, Namespace
from cache_manager.ports import TierName
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

TOKENS = 4
SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", TOKENS)


class House:
    """Six device blocks and three on the host; the options are those of :class:`AuxBlocks`."""

    def __init__(self, **options: object) -> None:
        self.gate = Gate()
        self.store = GatedStore(open_store("memory:"))
        self.store.gate = self.gate
        given = {"namespace": Namespace("m", 1), "jobs": JobLimits(threads_max=1), **options}
        self.engine = AuxBlocks([SPEC], blocks=6, host_blocks=3, store=self.store, **given)
        self.key = self.engine.keys.key(None, [1])

    def close(self) -> None:
        self.gate.open()
        with suppress(BlockStateError):  # it was closed
            for step in self.engine.steps:
                step.abort()
        self.engine.close()

    def rows(self, who: str, n: int = TOKENS) -> np.ndarray:
        return canary_rows(SPEC, [(who, i) for i in range(n)])

    def fill(self, block: int, who: str) -> np.ndarray:
        rows = self.rows(who)
        assert self.engine.write_step(slots(block), {"routing": rows}) == TOKENS
        return rows

    def valid(self, block: int, tier: TierName = "device") -> list[bool]:
        return self.engine.read("routing", [block], tier=tier).valid.tolist()

    def holds(self, block: int, rows: np.ndarray) -> bool:
        read = self.engine.read("routing", [block])
        return bool(read.valid.all()) and np.array_equal(read.values, rows)

    def store_block(self, block: int = 0, who: str = "stored") -> np.ndarray:
        """Give a block out, fill it and store it under ``key``."""
        lives = self.engine.renew([block])
        rows = self.fill(block, who)
        assert self.engine.persist({self.key: block}, lives)[self.key]
        return rows

    def brings(self, block: int, key: BlockKey | None = None) -> bool:
        """Whether what is stored under the key comes back into a block given out anew."""
        named = key or self.key
        return self.engine.restore({named: block}, self.engine.renew([block]))[named]

    def begin_restore(self, block: int) -> AnyJob:
        """Of ``key``, into a block that was given out."""
        job = self.engine.begin_restore({self.key: block}, self.engine.generations([block]))
        assert job is not None
        return job

    def begin_persist(self, block: int, n: int = 1) -> AnyJob | None:
        return self.engine.begin_persist({self.engine.keys.key(None, [n]): block}, self.engine.generations([block]))

    def settle(self) -> None:
        self.gate.settle(self.engine.jobs)

    def let_go(self) -> None:
        self.settle()
        self.gate.let_go()
        self.settle()


def slots(block: int) -> np.ndarray:
    return np.arange(block * TOKENS, (block + 1) * TOKENS)

"""Blocks of an engine over a store whose background calls wait at a gate."""

from __future__ import annotations

import numpy as np
from canary import canary_rows
from gate import Gate, GatedStore

from cache_manager.blocks import AuxBlocks
from cache_manager.stored import JobLimits
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

TOKENS = 4
SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", TOKENS)


class House:
    def __init__(self, **options: object) -> None:
        self.gate = Gate()
        self.store = GatedStore(open_store("memory:"))
        self.store.gate = self.gate
        self.engine = AuxBlocks(
            [SPEC],
            blocks=6,
            host_blocks=3,
            namespace=Namespace("m", 1),
            store=self.store,
            jobs=JobLimits(threads_max=1),
            **options,
        )

    def rows(self, who: str, n: int = TOKENS) -> np.ndarray:
        return canary_rows(SPEC, [(who, i) for i in range(n)])

    def fill(self, block: int, who: str) -> np.ndarray:
        rows = self.rows(who)
        assert self.engine.write_step(slots(block), {"routing": rows}) == TOKENS
        return rows

    def valid(self, block: int, tier: str = "device") -> list[bool]:
        return self.engine.read("routing", [block], tier=tier).valid.tolist()

    def holds(self, block: int, rows: np.ndarray) -> bool:
        read = self.engine.read("routing", [block])
        return bool(read.valid.all()) and np.array_equal(read.values, rows)


def slots(block: int) -> np.ndarray:
    return np.arange(block * TOKENS, (block + 1) * TOKENS)

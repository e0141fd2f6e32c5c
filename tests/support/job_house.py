"""Rows, and rows beside KV under a block manager, behind a store whose background calls wait at a gate."""

from __future__ import annotations

import numpy as np
from canary import canary_rows
from gate import Gate, GatedKV, GatedStore

from cache_manager.blocks import AuxBlocks
from cache_manager.stored import JobLimits
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.ports import HitPolicy
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", 4)
LIMITS = JobLimits(threads_max=1, jobs_max=3, nbytes_max=4 * SPEC.block_nbytes * 8, close_s=3600.0)
PROMPT = list(range(10))


class JobHouse:
    """Rows alone, of eight device blocks."""

    def __init__(self, limits: JobLimits = LIMITS, *, with_kv: bool = False, policy: HitPolicy = "gate") -> None:
        self.gate = Gate()
        self.store = GatedStore(open_store("memory:"))
        self.store.gate = self.gate
        self.kv = GatedKV(8, 4, 4)
        self.kv.gate = self.gate
        self.aux = AuxBlocks(
            [SPEC],
            device_blocks=8,
            host_blocks=4,
            namespace=Namespace("m", 1),
            store=self.store,
            kv=self.kv if with_kv else None,
            policy=policy,
            jobs=limits,
        )
        self.key = self.aux.keys.key(None, [1])

    def fill(self, block: int, owner: str) -> np.ndarray:
        """A block of ``owner`` with every row."""
        self.aux.allocate([block], owner)
        rows = canary_rows(SPEC, [(owner, i) for i in range(4)])
        with self.aux.step(range(block * 4, block * 4 + 4)) as step:
            step.write("routing", rows)
        return rows

    def store_block(self, block: int = 0, owner: str = "a") -> np.ndarray:
        """Fill a block and store it under ``key``."""
        rows = self.fill(block, owner)
        assert self.aux.persist({self.key: block}, owner=owner) == {self.key: self.aux.origins([block])[0]}
        return rows

    def settle(self) -> None:
        self.gate.settle(self.aux.jobs)

    def let_go(self) -> None:
        self.settle()
        self.gate.let_go()
        self.settle()


class ManagerHouse(JobHouse):
    """Rows and KV, and a manager of the blocks."""

    def __init__(self, limits: JobLimits = LIMITS, *, policy: HitPolicy = "gate") -> None:
        super().__init__(limits, with_kv=True, policy=policy)
        self.manager = BlockManager(self.aux)

    def run(self, owner: str, tokens: list[int]) -> None:
        """Admit, compute, publish."""
        admission = self.manager.allocate(owner, tokens)
        assert admission is not None
        new = range(admission.cached_tokens, len(tokens))
        with self.aux.step(self.manager.slots(owner, new.start, new.stop)) as step:
            step.write("routing", canary_rows(SPEC, [("x", p) for p in new]))
        self.manager.publish(owner, tokens)

    def forget(self) -> None:
        """Memory is forgotten, the store is not."""
        self.manager.reset(weights_version=self.aux.namespace.weights_version)

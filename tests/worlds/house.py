"""A block manager with everything it needs, for tests by example: the content of rows and KV names their owner."""

from __future__ import annotations

import numpy as np
from canary import canary_rows
from gate import Gate, GatedStore
from kv import SlotKV, prefix_digest

from cache_manager.blocks import AuxBlocks
from cache_manager.jobs import JobLimits
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

SPEC = AuxBlockDataSpec("routing", (2,), "uint8", 4)
PROMPT = list(range(10))
LIMITS = JobLimits(threads_max=1, jobs_max=3, close_s=3600.0)


class House:
    """One aux, one manager, one KV over a store that can be kept across restarts; blocks of four tokens.

    What a thread asks of the store waits at ``gate`` where it is shut.
    """

    def __init__(self, store=None, device=6, host=4, *, shut=False, required=None, jobs=LIMITS, **options) -> None:
        self.store = store or GatedStore(open_store("memory:?capacity=1MiB"))
        self.store.gate = self.gate = Gate()
        if not shut:
            self.gate.open()
        self.kv = SlotKV(device, host, 4)
        self.aux = AuxBlocks(
            [SPEC],
            blocks=device,
            host_blocks=host,
            namespace=Namespace("m", 0),
            store=self.store,
            kv=self.kv,
            required=required,
            jobs=jobs,
            strict=True,
        )
        self.manager = BlockManager(self.aux, **options)

    def run(self, owner: str, tokens: list[int], who: str = "x", **request) -> int:
        """Admit, compute everything, publish; how many tokens were cached."""
        admission = self.manager.allocate(owner, tokens, **request)
        assert admission is not None
        self.compute(owner, tokens, who)
        return admission.cached_tokens

    def compute(self, owner: str, tokens: list[int], who: str = "x", *, rows: bool = True) -> None:
        """KV, and rows, of the tokens that have none yet."""
        start = self.manager.state(owner).computed_tokens
        positions = range(start, len(tokens))
        slots = self.manager.slots(owner, start, len(tokens))
        self.kv.write(slots.tolist(), [prefix_digest(tokens[: p + 1]) for p in positions])
        if rows:
            self.aux.write_step(slots, {"routing": canary_rows(SPEC, [(who, p) for p in positions])})
        self.manager.publish(owner, tokens)

    def decode(self, owners: list[str], tokens: list[int]) -> list[bool]:
        """One token of each in one call each; rows only."""
        seqs = np.array([self.manager.sequence(owner) for owner in owners])
        slots = self.manager.append_batch(seqs)
        room = slots >= 0
        rows = canary_rows(SPEC, [("decode", t) for t in tokens])
        self.aux.write_step(slots, {"routing": rows})
        self.manager.publish_batch(seqs[room], np.array(tokens)[room])
        return room.tolist()

    def persist(self, owner: str) -> int:
        """Store its full blocks; how many are stored now."""
        before = self.manager.counters.persisted_blocks
        self.manager.begin_persist(owner)
        assert self.manager.drain(60.0)
        return self.manager.counters.persisted_blocks - before

    def settle(self) -> None:
        """No store thread runs: each has ended, or waits at the gate."""
        self.gate.settle(self.aux.jobs)

    def has_kv_of(self, owner: str, tokens: list[int]) -> bool:
        """Whether the KV of the owner's blocks is that of ``tokens``."""
        tier, table = ("host" if self.manager.state(owner).is_swapped else "device"), self.manager.table(owner)
        found = (self.kv.digest(tier, table[p // 4], p % 4) for p in range(len(tokens)))
        return all(digest == prefix_digest(tokens[: p + 1]) for p, digest in enumerate(found))

    def has_rows_of(self, owner: str, who: str, n: int) -> bool:
        """Whether the owner's first ``n`` rows are there, all of ``who``'s passes."""
        read = self.manager.read("routing", owner, 0, n)
        return bool(read.valid.all()) and np.array_equal(read.values, canary_rows(SPEC, [(who, p) for p in range(n)]))

    def state(self) -> tuple[object, ...]:
        """The state that a refused call must not change."""
        manager = self.manager
        tables = {owner: (manager.table(owner), manager.state(owner).computed_tokens) for owner in manager.owners}
        return tables, manager.free_device_blocks, manager.free_host_blocks

    def close(self) -> None:
        """Every block comes back."""
        self.gate.open()
        for owner in self.manager.owners:
            self.manager.free(owner)
        assert self.manager.drain(30.0), "the store has not answered"
        self.manager.assert_consistent()
        assert self.manager.free_device_blocks == self.aux.device_blocks
        assert self.manager.free_host_blocks == self.aux.host_blocks
        self.aux.close()

"""A block manager with everything it needs, for tests by example: rows and KV are told apart by whose they are."""

from __future__ import annotations

import numpy as np
from canary import canary_rows
from kv import SlotKV, prefix_digest

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.testing.faults import FaultyStore

SPEC = AuxBlockDataSpec("routing", (2,), "uint8", 4)
PROMPT = list(range(10))


class House:
    """One aux, one manager, one KV over a store that can be kept across restarts; blocks of four tokens."""

    def __init__(self, store=None, kv=None, device=6, host=4, policy="gate", **options) -> None:
        self.store = store or FaultyStore(open_store("memory:?capacity=1MiB"))
        self.kv = SlotKV(device, host, 4)
        self.kv.stored = kv.stored if kv else {}
        self.aux = AuxBlocks(
            [SPEC],
            device_blocks=device,
            host_blocks=host,
            namespace=Namespace("m", 0),
            store=self.store,
            kv=self.kv,
            policy=policy,
        )
        self.manager = BlockManager(self.aux, **options)

    def run(self, owner: str, tokens: list[int], who: str = "x", **request) -> int:
        """Admit, compute everything, publish; how many tokens were cached."""
        admission = self.manager.allocate(owner, tokens, **request)
        assert admission is not None
        self.compute(owner, tokens, who)
        return admission.cached_tokens

    def compute(self, owner: str, tokens: list[int], who: str = "x") -> None:
        """KV and rows of the tokens that have none yet."""
        start, positions = self.manager.computed(owner), range(self.manager.computed(owner), len(tokens))
        slots = self.manager.slots(owner, start, len(tokens))
        self.kv.write(slots.tolist(), [prefix_digest(tokens[: p + 1]) for p in positions])
        with self.aux.step(slots) as step:
            step.write("routing", canary_rows(SPEC, [(who, p) for p in positions]))
        self.manager.publish(owner, tokens)

    def decode(self, owners: list[str], tokens: list[int]) -> list[bool]:
        """One token of each in one call each; rows only."""
        seqs = np.array([self.manager.sequence(owner) for owner in owners])
        room = self.manager.append_batch(seqs)
        with self.aux.step(self.manager.slots_batch(seqs[room])) as step:
            step.write("routing", canary_rows(SPEC, [("decode", t) for t in np.array(tokens)[room].tolist()]))
        self.manager.publish_batch(seqs[room], np.array(tokens)[room])
        return room.tolist()

    def has_kv_of(self, owner: str, tokens: list[int]) -> bool:
        """Whether the KV of the owner's blocks is that of ``tokens``."""
        tier, table = ("host" if self.manager.is_swapped(owner) else "device"), self.manager.table(owner)
        entries = [self.kv.digest(tier, table[p // 4], p % 4) for p in range(len(tokens))]
        return entries == [prefix_digest(tokens[: p + 1]) for p in range(len(tokens))]

    def state(self) -> tuple[object, ...]:
        """What a call that is refused must not change."""
        manager = self.manager
        tables = {owner: (manager.table(owner), manager.computed(owner)) for owner in manager.owners}
        return tables, manager.free_device_blocks, manager.free_host_blocks

    def close(self) -> None:
        """Every block comes back."""
        for owner in self.manager.owners:
            self.manager.free(owner)
        assert self.manager.drain(30.0), "the store has not answered"
        self.manager.assert_consistent()
        assert self.manager.free_device_blocks == self.aux.device_blocks
        assert self.manager.free_host_blocks == self.aux.host_blocks
        self.aux.close()

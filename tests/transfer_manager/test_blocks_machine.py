"""A block manager whose rows and KV a cache-transfer process moves and stores, and that outlives this process.

Method: a row and a KV entry are functions of the token prefix alone. Whatever the process moved, stored or restored,
and whatever it was doing when it died, each sequence finds at each computed position its own prefix's KV and row.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import dataclass

import numpy as np
from budget import examples
from canary import canary_rows
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv import NBYTES, SlotKV, prefix_digest
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.transfer_manager import ApartSettings, CacheTransferManager

BLOCK, DEVICE, HOST, WAIT_S = 4, 9, 6, 120.0
ROW = AuxBlockDataSpec("topk_ids", (2, 2), "uint16", BLOCK)
NAMESPACE = Namespace("m", 0)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
SOON = ApartSettings(restart_pause_s=0.01, restart_pause_max_s=0.05)


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    swapped: bool = False


class KVApart(SlotKV):
    """KV in shared regions, which the process copies."""

    def __init__(self, process: CacheTransferManager) -> None:
        super().__init__(DEVICE, HOST, BLOCK)
        layout, owner = RecordLayout((self.spec,)), NAMESPACE.fingerprint
        self.process = process
        self.regions = {
            tier: SharedRegion.create(layout, blocks, tier=tier, namespace=owner)
            for tier, blocks in (("device", DEVICE), ("host", HOST))
        }
        self.device, self.host = (region.rows.reshape(-1, BLOCK, NBYTES) for region in self.regions.values())

    def copy(self, source: str, target: str, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self.process.copy(self.regions[source], self.regions[target], sources, targets)

    def close(self) -> None:
        del self.device, self.host
        for region in self.regions.values():
            region.close()


class BlocksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.process = CacheTransferManager(f"file://{self.directory.name}/store?quota=4MiB", SOON)
        self.kv = KVApart(self.process)
        self.aux = AuxBlocks(
            [ROW],
            blocks=DEVICE,
            host_blocks=HOST,
            namespace=NAMESPACE,
            memory="shared",
            kv=self.kv,
            store=self.process.store,
        )
        self.manager = BlockManager(self.aux)
        self.sequences: dict[str, Sequence] = {}
        self.next_owner = 0

    def teardown(self) -> None:
        for owner in list(self.sequences):
            self.manager.free(owner)
        self.manager.assert_consistent()
        assert self.manager.free_device_blocks == DEVICE
        assert self.manager.free_host_blocks == HOST
        self.aux.close()
        self.process.close()
        self.kv.close()
        self.directory.cleanup()

    def choose(self, data: st.DataObject, swapped: bool = False) -> str | None:
        owners = [o for o, s in self.sequences.items() if s.swapped == swapped]
        return data.draw(st.sampled_from(owners)) if owners else None

    def compute(self, owner: str) -> None:
        """A forward pass over what is not computed yet: KV and rows at its slots."""
        tokens, start = self.sequences[owner].tokens, self.manager.computed(owner)
        slots = self.manager.slots(owner, start, len(tokens))
        positions = range(start, len(tokens))
        self.kv.write(slots, [prefix_digest(tokens[: position + 1]) for position in positions])
        with self.aux.begin_step(slots) as step:
            step.write("topk_ids", canary_rows(ROW, [self.named(tokens, p) for p in positions]))
        self.manager.publish(owner, tokens)

    @staticmethod
    def named(tokens: list[int], position: int) -> tuple[object, ...]:
        return "row", prefix_digest(tokens[: position + 1])

    # ------------------------------------------------------------ a sequence's life

    @rule(tokens=TOKENS)
    def allocate(self, tokens: list[int]) -> None:
        owner = f"o{self.next_owner}"
        if self.manager.allocate(owner, tokens) is None:
            return
        self.next_owner += 1
        self.sequences[owner] = Sequence(tokens)
        self.compute(owner)

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        owner = self.choose(data)
        if owner is None:
            return
        tokens = [*self.sequences[owner].tokens, *more]
        if len(tokens) <= DEVICE * BLOCK and self.manager.append(owner, len(tokens)):
            self.sequences[owner].tokens = tokens
            self.compute(owner)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owner = self.choose(data)
        if owner is not None:
            child = f"o{self.next_owner}"
            self.next_owner += 1
            self.manager.fork(owner, child)
            self.sequences[child] = Sequence(list(self.sequences[owner].tokens))

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        owner = self.choose(data)
        if owner is not None:
            failed = self.manager.counters.moves_failed
            self.sequences[owner].swapped = self.manager.preempt(owner)
            assert self.manager.counters.moves_failed == failed

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        owner = self.choose(data, swapped=True)
        if owner is not None:
            self.sequences[owner].swapped = not self.manager.resume(owner)

    @rule(data=st.data())
    def persist(self, data: st.DataObject) -> None:
        owner = self.choose(data)
        if owner is not None:
            before, full = self.manager.counters.persisted_blocks, len(self.sequences[owner].tokens) // BLOCK
            assert self.manager.begin_persist(owner) == (full > 0)
            self.settle()
            assert self.manager.counters.persisted_blocks == before + full

    def settle(self) -> None:
        assert self.manager.drain(WAIT_S)
        self.manager.poll()

    @rule(data=st.data(), swapped=st.booleans())
    def free(self, data: st.DataObject, swapped: bool) -> None:
        owner = self.choose(data, swapped)
        if owner is not None:
            del self.sequences[owner]
            self.manager.free(owner)

    # ------------------------------------------------------------ the process's life

    @rule(data=st.data(), what=st.sampled_from(("append", "preempt", "persist", "resume")))
    def the_process_dies_under_a_command(self, data: st.DataObject, what: str) -> None:
        """It is stopped before it is killed, so that it answers nothing more. Whatever becomes of the command, every
        claim holds; then the sequence goes, so that what follows does not depend on who was faster.
        """
        owner = self.choose(data, swapped=what == "resume")
        if owner is None:
            return
        sequence, pid = self.sequences[owner], self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        if what == "append":
            self.manager.append(owner, len(sequence.tokens) + 1)
        elif what == "preempt":
            sequence.swapped = self.manager.preempt(owner)
        elif what == "resume":
            sequence.swapped = not self.manager.resume(owner)
        else:
            self.manager.begin_persist(owner)
            self.settle()
        self.every_sequence_finds_its_own_kv_and_rows()
        self.no_block_is_lost()
        del self.sequences[owner]
        self.manager.free(owner)
        while True:
            assert self.process.wait(WAIT_S)
            if self.process.pid not in (pid, None):
                break

    # ------------------------------------------------------------ claims

    @invariant()
    def every_sequence_finds_its_own_kv_and_rows(self) -> None:
        for owner, sequence in self.sequences.items():
            tier = "host" if sequence.swapped else "device"
            table, computed = self.manager.table(owner), self.manager.computed(owner)
            assert computed == len(sequence.tokens)
            rows = self.manager.read("topk_ids", owner, 0, computed)
            assert rows.valid.all()
            for position in range(computed):
                kv = self.kv.digest(tier, table[position // BLOCK], position % BLOCK)
                assert kv == prefix_digest(sequence.tokens[: position + 1]), f"{owner} at {position}"
            wanted = canary_rows(ROW, [self.named(sequence.tokens, p) for p in range(computed)])
            assert np.array_equal(rows.values, wanted), owner

    @invariant()
    def no_block_is_lost(self) -> None:
        self.manager.assert_consistent()


TestBlocksBesideAProcess = BlocksMachine.TestCase
TestBlocksBesideAProcess.settings = examples(12, stateful_step_count=25, deadline=None)

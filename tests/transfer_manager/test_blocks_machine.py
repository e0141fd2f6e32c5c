"""A block manager whose rows and KV a cache-transfer process moves and stores, and that outlives this process.

Method: a row and a KV entry are functions of the token prefix alone. Whatever the process moved, stored or restored,
and whatever it was doing when it died, each sequence finds at each computed position its own prefix's KV and row.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from budget import examples
from canary import canary_rows
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv import prefix_digest

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.transfer_manager import CacheTransferManager, SharedPart, TransferSettings

BLOCK, DEVICE, HOST, WAIT_S = 4, 9, 6, 120.0
ROW = AuxBlockDataSpec("topk_ids", (2, 2), "uint16", BLOCK)
KV = AuxBlockDataSpec("kv", (32,), "uint8", BLOCK)
NAMESPACE = Namespace("m", 0)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    swapped: bool = False


class BlocksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        layout = RecordLayout((KV,))
        self.device = SharedRegion.create(layout, DEVICE, tier="device", namespace=NAMESPACE.fingerprint)
        self.host = SharedRegion.create(layout, HOST, tier="host", namespace=NAMESPACE.fingerprint)
        root = Path(self.directory.name)
        part = SharedPart("kv", self.device, self.host, f"file://{root}/kv?quota=4MiB&segment=64KiB")
        limits = TransferSettings(restart_pause_s=0.01, restart_pause_max_s=0.05)
        store = f"file://{root}/rows?quota=4MiB&segment=64KiB"
        self.blocks = CacheTransferManager(part, store=store, settings=limits)
        self.aux = AuxBlocks(
            [ROW],
            device_blocks=DEVICE,
            host_blocks=HOST,
            namespace=NAMESPACE,
            memory="shared",
            mover=self.blocks.start,
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
        self.blocks.close()
        self.device.close()
        self.host.close()
        self.directory.cleanup()

    def choose(self, data: st.DataObject, swapped: bool = False) -> str | None:
        owners = [o for o, s in self.sequences.items() if s.swapped == swapped]
        return data.draw(st.sampled_from(owners)) if owners else None

    def compute(self, owner: str) -> None:
        """A forward pass over what is not computed yet: KV and rows at its slots."""
        tokens, start = self.sequences[owner].tokens, self.manager.computed(owner)
        slots = self.manager.slots(owner, start, len(tokens))
        positions = range(start, len(tokens))
        for position, slot in zip(positions, slots.tolist(), strict=True):
            block, offset = divmod(slot, BLOCK)
            digest = np.frombuffer(prefix_digest(tokens[: position + 1]), np.uint8)
            self.device.rows[block, offset * 32 : (offset + 1) * 32] = digest
        with self.aux.step(slots) as step:
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
            stored = self.manager.persist(owner)
            assert stored == len(self.sequences[owner].tokens) // BLOCK

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
        process, sequence = self.blocks, self.sequences[owner]
        pid = process.pid
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
            self.manager.persist(owner)
        self.every_sequence_finds_its_own_kv_and_rows()
        self.no_block_is_lost()
        del self.sequences[owner]
        self.manager.free(owner)
        give_up_s = time.monotonic() + WAIT_S
        while process.pid in (None, pid):
            assert time.monotonic() < give_up_s, "no other process came"
            time.sleep(0.005)

    # ------------------------------------------------------------ claims

    @invariant()
    def every_sequence_finds_its_own_kv_and_rows(self) -> None:
        for owner, sequence in self.sequences.items():
            region = self.host if sequence.swapped else self.device
            table, computed = self.manager.table(owner), self.manager.computed(owner)
            assert computed == len(sequence.tokens)
            rows = self.manager.read("topk_ids", owner, 0, computed)
            assert rows.valid.all()
            for position in range(computed):
                block, offset = table[position // BLOCK], position % BLOCK
                kv = region.rows[block, offset * 32 : (offset + 1) * 32].tobytes()
                assert kv == prefix_digest(sequence.tokens[: position + 1]), f"{owner} at {position}"
            wanted = canary_rows(ROW, [self.named(sequence.tokens, p) for p in range(computed)])
            assert np.array_equal(rows.values, wanted), owner

    @invariant()
    def no_block_is_lost(self) -> None:
        self.manager.assert_consistent()


TestBlocksBesideAProcess = BlocksMachine.TestCase
TestBlocksBesideAProcess.settings = examples(12, stateful_step_count=25, deadline=None)

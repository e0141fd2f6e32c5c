"""The block manager under random sequences of requests, with rows and KV whose content says whose they are.

Method: a KV entry names the token prefix, the weights versions, the tenant and the forward pass that computed it; a row
names the KV entry beside which it was made. Whatever the manager reuses, copies, swaps, stores or restores, each
sequence must find, at each computed position, KV of exactly its own prefix, of whatever pass, and the row that the very
same pass made, or a missing one. The model is a list of tokens for each sequence.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manager_world import BLOCK, DEVICE, ManagerWorld, Sequence

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, StorageError
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec

SALTS = st.sampled_from((b"", b"", b"tenant"))
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=16)


class ManagerMachine(ManagerWorld, RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.build()

    # ------------------------------------------------------------ rules

    @precondition(lambda self: len(self.sequences) < 10)
    @rule(data=st.data(), tokens=TOKENS, salt=SALTS, store_fault=st.sampled_from((None, None, None, "rows", "kv")))
    def allocate(self, data, tokens, salt, store_fault) -> None:
        owner = f"req-{self.next_owner}"
        self.next_owner += 1
        before = (self.manager.free_device_blocks, self.manager.owners)
        self.store.fail_get = store_fault == "rows"
        self.kv.fail_next = StorageError if store_fault == "kv" else None
        admission = self.manager.allocate(owner, tokens, salt=salt)
        self.store.fail_get, self.kv.fail_next = False, None
        if admission is None:
            assert (self.manager.free_device_blocks, self.manager.owners) == before
            assert -(-len(tokens) // BLOCK) > before[0] - DEVICE or before[0] < DEVICE
            return
        assert admission.cached_tokens < len(tokens)
        assert admission.cached_tokens % BLOCK == 0
        versions = [self.version] * admission.cached_tokens
        self.sequences[owner] = Sequence(tokens, admission.cached_tokens, versions, salt=salt)
        chunk = data.draw(st.integers(1, len(tokens) - admission.cached_tokens))
        self.compute(owner, admission.cached_tokens + chunk, self.rows_always or data.draw(st.booleans()))

    @rule(data=st.data(), more=st.lists(st.integers(1, 2), max_size=5))
    def append(self, data, more) -> None:
        owner = self.choose(data)
        if owner is None:
            return
        sequence = self.sequences[owner]
        total = len(sequence.tokens) + len(more)
        before = self.manager.table(owner), self.manager.free_device_blocks
        if self.manager.append(owner, total):
            sequence.tokens = sequence.tokens + more
            if data.draw(st.booleans()):
                self.fork_of(owner)
            if sequence.computed < total:
                upto = data.draw(st.integers(sequence.computed + 1, total))
                self.compute(owner, upto, self.rows_always or data.draw(st.booleans()))
        else:
            assert (self.manager.table(owner), self.manager.free_device_blocks) == before

    @rule(data=st.data())
    def a_failed_move_changes_nothing(self, data) -> None:
        owner = self.choose(data)
        if owner is None:
            return
        sequence = self.sequences[owner]
        before = self.manager.table(owner), self.manager.free_device_blocks, self.manager.free_host_blocks
        self.kv.fail_next = RuntimeError
        try:
            if not self.manager.preempt(owner):
                return
        except RuntimeError:
            pass
        finally:
            failed, self.kv.fail_next = self.kv.fail_next is None, None
        if failed:
            assert not self.manager.is_swapped(owner)
            after = self.manager.table(owner), self.manager.free_device_blocks, self.manager.free_host_blocks
            assert after == before
        else:
            sequence.swapped = True

    @rule(data=st.data())
    def fork(self, data) -> None:
        owner = self.choose(data)
        if owner is not None:
            self.fork_of(owner)

    def fork_of(self, owner: str) -> None:
        if len(self.sequences) > 6:
            return
        child = f"req-{self.next_owner}"
        self.next_owner += 1
        self.manager.fork(owner, child)
        parent = self.sequences[owner]
        self.sequences[child] = Sequence(
            parent.tokens[: parent.computed], parent.computed, list(parent.versions[: parent.computed])
        )
        self.sequences[child].salt = parent.salt

    @rule(data=st.data(), rows=st.booleans())
    def decode(self, data, rows) -> None:
        """A decode step: one more token of each of some sequences, in one call each."""
        ready = [o for o, s in self.sequences.items() if not s.swapped and not s.pending]
        chosen = data.draw(st.lists(st.sampled_from(ready), unique=True) if ready else st.just([]))
        seqs = np.array([self.manager.sequence(owner) for owner in chosen], np.int64)
        before = {owner: self.manager.table(owner) for owner in chosen}
        room = self.manager.append_batch(seqs)
        for owner, fits in zip(chosen, room.tolist(), strict=True):
            assert fits or self.manager.table(owner) == before[owner]
        running = [owner for owner, fits in zip(chosen, room.tolist(), strict=True) if fits]
        slots = self.manager.slots_batch(seqs[room])
        identities, tokens = [], []
        for owner, slot in zip(running, slots, strict=True):
            sequence = self.sequences[owner]
            if sequence.computed == len(sequence.tokens):
                sequence.tokens = [*sequence.tokens, data.draw(st.integers(1, 2))]
            sequence.versions[sequence.computed :] = [self.version]
            self.check_alone(owner, np.array([slot]))
            identities.append(self.identity(sequence, sequence.computed))
            tokens.append(sequence.tokens[sequence.computed])
        self.forward(slots, identities, self.rows_always or rows)
        self.manager.publish_batch(seqs[room], tokens)
        for owner in running:
            self.sequences[owner].computed += 1

    @rule(data=st.data())
    def preempt(self, data) -> None:
        owner = self.choose(data)
        if owner is not None and self.manager.preempt(owner):
            self.sequences[owner].swapped = True

    @rule(data=st.data(), fail=st.booleans())
    def resume(self, data, fail) -> None:
        owner = self.choose(data, swapped=True)
        if owner is None:
            return
        before = self.manager.table(owner), self.manager.free_device_blocks, self.manager.free_host_blocks
        self.kv.fail_next = RuntimeError if fail else None
        try:
            if self.manager.resume(owner):
                self.sequences[owner].swapped = False
        except RuntimeError:
            after = self.manager.table(owner), self.manager.free_device_blocks, self.manager.free_host_blocks
            assert after == before
        self.kv.fail_next = None

    @rule(data=st.data())
    def persist(self, data) -> None:
        owner = self.choose(data)
        if owner is not None:
            self.manager.persist(owner)

    @precondition(lambda self: len(self.sequences) < 8)
    @rule(tokens=TOKENS, salt=SALTS)
    def begin_allocate(self, tokens, salt) -> None:
        owner = f"req-{self.next_owner}"
        self.next_owner += 1
        before = (self.manager.free_device_blocks, self.manager.owners)
        admission = self.manager.begin_allocate(owner, tokens, salt=salt)
        if admission is None:
            assert (self.manager.free_device_blocks, self.manager.owners) == before
            return
        versions = [self.version] * admission.cached_tokens
        self.sequences[owner] = Sequence(tokens, admission.cached_tokens, versions, since=self.version, salt=salt)
        self.sequences[owner].pending = admission.pending
        assert admission.restored_tokens == 0
        if admission.pending:
            with pytest.raises(BlockBusyError, match="one whose store is asked"):
                self.manager.append(owner, len(tokens))
        self.settle()

    @rule(data=st.data())
    def begin_persist(self, data) -> None:
        owner = self.choose(data)
        if owner is not None:
            self.manager.begin_persist(owner)
            self.settle()

    @precondition(lambda self: self.gate.waiting)
    @rule(fault=st.sampled_from((None, None, None, "store", "kv")))
    def let_the_store_go_on(self, fault) -> None:
        self.store.fail_get = self.store.fail_put = fault == "store"
        self.kv.fail_next = StorageError if fault == "kv" else None
        self.gate.let_go()
        self.settle()
        self.store.fail_get = self.store.fail_put = False
        self.kv.fail_next = None

    @rule()
    def poll(self) -> None:
        for owner, admission in self.manager.poll().items():
            sequence = self.sequences[owner]
            assert sequence.pending, f"{owner} was settled twice"
            assert not admission.pending
            sequence.pending = False
            more = admission.cached_tokens - sequence.computed
            assert more == admission.restored_tokens
            assert not (more and sequence.since != self.version), f"{owner} got something from before a reset"
            sequence.versions += [sequence.since] * more
            sequence.computed = admission.cached_tokens
        assert self.manager.errands == len(self.aux.jobs)

    @precondition(lambda self: any(s.pending for s in self.sequences.values()))
    @rule(data=st.data())
    def abandon(self, data) -> None:
        owner = data.draw(st.sampled_from([o for o, s in self.sequences.items() if s.pending]))
        self.manager.free(owner)
        self.manager.free(owner)
        del self.sequences[owner]
        self.settle()

    @rule(data=st.data(), swapped=st.booleans(), again=st.booleans())
    def free(self, data, swapped, again) -> None:
        owner = self.choose(data, swapped)
        if owner is None:
            return
        self.manager.free(owner)
        if again:
            self.manager.free(owner)
        del self.sequences[owner]

    @rule()
    def forget_device_cache(self) -> None:
        """A restart: everything but the store is lost."""
        self.end_all()
        self.aux.close()
        stored, self.kv = self.kv.stored, self.new_kv()
        self.kv.stored = stored
        self.start()

    @precondition(lambda self: self.version < 3)
    @rule()
    def reset(self) -> None:
        self.version += 1
        self.manager.reset(weights_version=self.version)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def wrong_calls_change_nothing(self, data) -> None:
        owner = data.draw(st.sampled_from(sorted(self.sequences)))
        with pytest.raises(BlockStateError):
            self.manager.allocate(owner, [1])
        with pytest.raises(BlockStateError):
            self.manager.append("nobody", 1)
        if self.sequences[owner].swapped:
            with pytest.raises(BlockStateError):
                self.manager.slots(owner, 0, 1)

    # ------------------------------------------------------------ claims

    @invariant()
    def every_sequence_finds_its_own_kv(self) -> None:
        for owner, sequence in self.sequences.items():
            for position, entry in enumerate(self.entries(owner)):
                assert self.made.get(entry) == self.identity(sequence, position), f"{owner} at {position}"

    @invariant()
    def rows_are_of_the_pass_that_made_the_kv(self) -> None:
        for owner, sequence in self.sequences.items():
            room = len(self.manager.table(owner)) * BLOCK
            rows = self.manager.read("routing", owner, 0, room)
            assert not rows.valid[sequence.computed :].any(), f"{owner} has rows that it has not computed"
            rows = self.manager.read("routing", owner, 0, sequence.computed)
            found = zip(self.entries(owner), rows.values, rows.valid.tolist(), strict=True)
            for position, (entry, row, valid) in enumerate(found):
                if valid:
                    assert row.tobytes() == self.row_of(entry), f"{owner} at {position}"
                else:
                    old = sequence.versions[position] != self.version
                    assert old or not self.rows_always, f"{owner} lost its row at {position}"

    @invariant()
    def after_reset_nothing_older_is_readable(self) -> None:
        for owner, sequence in self.sequences.items():
            valid = self.manager.read("routing", owner, 0, sequence.computed).valid
            assert not any(valid[p] for p in range(sequence.computed) if sequence.versions[p] != self.version)

    @invariant()
    def no_block_is_lost(self) -> None:
        self.manager.assert_consistent()


class MaskMachine(ManagerMachine):
    policy = "mask"
    rows_always = False


class RowlessGateMachine(ManagerMachine):
    rows_always = False  # some steps produce KV and no rows


TestManagerGate = ManagerMachine.TestCase
TestManagerMask = MaskMachine.TestCase
TestManagerGateWithHoles = RowlessGateMachine.TestCase


def test_gate_never_counts_a_block_without_rows_as_a_hit() -> None:
    """Goal: KV without rows is cut from a hit. Method: compute KV without rows, free, ask for the same tokens."""
    spec = AuxBlockDataSpec("routing", (1,), "uint8", BLOCK)
    for policy, expected in (("gate", 0), ("mask", 3)):
        aux = AuxBlocks([spec], device_blocks=4, namespace=Namespace("m", 0), policy=policy)
        manager = BlockManager(aux)
        manager.allocate("a", [1, 2, 3, 4])
        aux.step(manager.slots("a", 0, 4)).commit()
        manager.publish("a", [1, 2, 3, 4])
        manager.free("a")
        admission = manager.allocate("b", [1, 2, 3, 4])
        assert admission is not None
        assert admission.cached_tokens == expected
        rows = manager.read("routing", "b", 0, expected)
        assert not rows.valid.any()
        assert np.all(rows.values == 0xFF)
        aux.close()

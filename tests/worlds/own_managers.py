"""kvroute's own managers for the life-cycle kit: ``BlockManager`` in its forms, and ``AuxBlocks`` beside it.

``PYTHONPATH=tests/worlds kvroute prove own_managers:Gated`` proves the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from gate import Gate, GatedStore

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import StorageError
from cache_manager.jobs import JobLimits
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.testing.life import BlockManagerAdapter, CanaryKV, MoveFailed

CORE = ("prefix", "salt", "fork", "swap", "reset", "abort", "lost_step", "drafts", "rows", "failing_moves")


class KV:
    """The kit's KV as ``KVBlocks``: a record has the number under which the kit has put the content of its block."""

    def __init__(self, kv: CanaryKV, block_tokens: int) -> None:
        self.kv, self.taken = kv, 0
        self.spec = AuxBlockDataSpec("kv", (), "uint32", block_tokens)
        self.moves = {("device", "device"): kv.copy, ("device", "host"): kv.swap_out, ("host", "device"): kv.swap_in}

    def copy(self, source, target, sources, targets) -> None:
        self.moves[source, target](list(zip(sources.tolist(), targets.tolist(), strict=True)))

    def take(self, blocks, into) -> None:
        for block, row in zip(blocks.tolist(), into, strict=True):
            self._to_store(self.kv.put, self.taken, block)
            row[:] = np.full(self.spec.block_tokens, self.taken, np.uint32).view(np.uint8)
            self.taken += 1

    def fill(self, blocks, given) -> None:
        for block, number in zip(blocks.tolist(), given.view(np.uint32)[:, 0].tolist(), strict=True):
            assert self._to_store(self.kv.get, number, block)

    def _to_store(self, call, *given):
        try:
            return call(*given)
        except MoveFailed as error:
            raise StorageError("the KV failed on purpose") from error


class Store(GatedStore):
    """Fails every other time that the kit wants a failure: the others are the KV's."""

    def __init__(self, kv: CanaryKV, gate: Gate) -> None:
        super().__init__(open_store("memory:?capacity=4MiB"))
        self.kv, self.gate, self.calls = kv, gate, 0

    def _fail(self) -> None:
        self.gate.stop()
        self.calls += 1
        if self.calls % 2:
            try:
                self.kv.may_fail()
            except MoveFailed as error:
                raise StorageError("the store failed on purpose") from error

    def put(self, headers, payloads, *, replace=False):
        self._fail()
        return self.backend.put(headers, payloads, replace=replace)

    def get_into(self, keys, buffers):
        self._fail()
        return self.backend.get_into(keys, buffers)


class Gated(BlockManagerAdapter):
    """``BlockManager``: a block without its rows is no hit."""

    capabilities = CORE
    blocks = range(10)
    host_blocks = range(5)
    hits_need_rows = True

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        self.version, self.gate = 0, Gate()
        self.blocks_kv = KV(kv, self.block_tokens)
        self.store = Store(kv, self.gate) if "store" in self.capabilities else None
        self.spec = AuxBlockDataSpec("row", (1,), "int32", self.block_tokens)
        self.start()

    def start(self) -> None:
        self.aux = AuxBlocks(
            [self.spec],
            blocks=len(self.blocks),
            host_blocks=len(self.host_blocks),
            namespace=Namespace("m", self.version),
            store=self.store,
            kv=self.blocks_kv,
            required=None if self.hits_need_rows else (),
            jobs=JobLimits(threads_max=1, jobs_max=3),
            strict=True,
        )
        self.manager = BlockManager(self.aux)
        self.next_slots: dict[str, int] = {}  # of a decode step that has begun

    def admit(self, seq, tokens, chunk, salt):
        admission = self.manager.allocate(seq, tokens, salt=salt.encode())
        return None if admission is None else admission.cached_tokens

    def grow(self, seq, tokens, upto):
        return self.manager.append(seq, upto)

    def grow_batch(self, tokens: Mapping[str, Sequence[int]]):
        slots = self.manager.append_batch(self._seqs(tokens)).tolist()
        self.next_slots = {seq: slot for seq, slot in zip(tokens, slots, strict=True) if slot >= 0}
        return [seq in self.next_slots for seq in tokens]

    def slots(self, seq, start, stop):
        one = self.next_slots.pop(seq, None)
        slots = [one] if one is not None else self.manager.slots(seq, start, stop).tolist()
        return [divmod(slot, self.block_tokens) for slot in slots]

    def commit(self, seq, tokens):
        self.manager.publish(seq, tokens)

    def commit_batch(self, tokens: Mapping[str, Sequence[int]]):
        self.manager.publish_batch(self._seqs(tokens), [given[-1] for given in tokens.values()])

    def _seqs(self, names):
        return [self.manager.sequence(seq) for seq in names]

    def free(self, seq):
        self.manager.free(seq)

    def table(self, seq):
        return self.manager.table(seq)

    def free_blocks(self):
        return self.manager.free_device_blocks

    def free_host_blocks(self):
        return self.manager.free_host_blocks

    def fork(self, parent, child):
        self.manager.fork(parent, child)
        return True

    def preempt(self, seq):
        return self.manager.preempt(seq)

    def resume(self, seq):
        return self.manager.resume(seq)

    def persist(self, seq):
        self.manager.begin_persist(seq)
        self.gate.open()
        assert self.manager.drain(60.0)

    def reset(self):
        """A version changes and returns: forgotten blocks do not come back with the earlier version."""
        self.version = self.version + 1 if self.store else 1 - self.version
        self.manager.reset(weights_version=self.version)
        return True

    def restart(self):
        self.aux.close()
        self.start()

    def write_rows(self, seq, start, rows):
        with self.aux.begin_step(self.manager.slots(seq, start, start + len(rows))) as step:
            if None not in rows:
                step.write("row", np.array(rows, np.int32).reshape(-1, 1))

    def read_rows(self, seq, start, stop):
        rows = self.manager.read("row", seq, start, stop)
        return [int(value[0]) if valid else None for value, valid in zip(rows.values, rows.valid, strict=True)]

    def ref_counts(self):
        tables = [self.table(seq) for seq in self.manager.owners if not self.manager.state(seq).is_swapped]
        return {block: sum(block in table for table in tables) for block in self.blocks}

    def check(self):
        self.manager.assert_consistent()

    def close(self):
        self.gate.open()
        self.aux.close()


class Stored(Gated):
    """``BlockManager`` with a store that it waits for."""

    capabilities = (*CORE, "store", "restart")


class Behind(Stored):
    """``BlockManager`` with a store that it does not wait for: its calls stop at a gate until :meth:`settle`."""

    capabilities = (*Stored.capabilities, "background")

    def start(self):
        super().start()
        self.waiting: set[str] = set()

    def _still(self) -> None:
        """No store thread runs: each has ended, or waits at the gate."""
        self.gate.settle(self.aux.jobs)

    def admit(self, seq, tokens, chunk, salt):
        restore = bool(self.kv.stored)  # else each would wait for nothing, and little would be computed
        admission = self.manager.begin_allocate(seq, tokens, salt=salt.encode(), restore=restore)
        self._still()
        if admission is None:
            return None
        self.waiting |= {seq} if admission.pending else set()
        return admission.cached_tokens

    def waits(self, seq):
        return seq in self.waiting

    def persist(self, seq):
        self.manager.begin_persist(seq)
        self._still()

    def free(self, seq):
        super().free(seq)
        self.waiting.discard(seq)
        self._still()

    def settle(self):
        if self.gate.waiting:
            self.gate.let_go()
        self._still()
        settled = {seq: admission.cached_tokens for seq, admission in self.manager.poll().items()}
        self.waiting -= settled.keys()
        return settled

    def restart(self):
        self.gate.open()
        self.aux.close()
        self.gate = self.store.gate = Gate()
        self.start()

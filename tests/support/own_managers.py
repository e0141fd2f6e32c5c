"""kvroute's own managers for the life-cycle kit: ``BlockManager`` in its forms, and ``AuxBlocks`` beside it.

``PYTHONPATH=tests/support kvroute prove own_managers:Gated`` proves the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from gate import Gate, GatedStore

from cache_manager.blocks import AuxBlocks
from cache_manager.blocks import AuxBlocks
from cache_manager.errors import StorageError
from cache_manager.stored import JobLimits
from cache_manager.keys import BlockKey, Namespace
from cache_manager.manager import BlockManager
from cache_manager.ports import Absence, BlockRecords, Found, RecordCounters
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.testing.life import BlockManagerAdapter, CanaryKV, MoveFailed

CORE = ("prefix", "salt", "fork", "swap", "reset", "abort", "lost_step", "drafts", "rows", "failing_moves")


class CanaryMover:
    """A ``Mover`` of the kit's KV. In its store an entry has the origin that it was put with."""

    stores, counters = True, RecordCounters()

    def __init__(self, kv: CanaryKV) -> None:
        self.kv, self.origins, self.gate = kv, {}, Gate()
        self.moves = {("device", "device"): kv.copy, ("device", "host"): kv.swap_out, ("host", "device"): kv.swap_in}

    def copy(self, source, target, sources, targets) -> None:
        self.moves[source, target](list(zip(sources.tolist(), targets.tolist(), strict=True)))

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        self.gate.stop()
        for key, block, origin in zip(records.keys, records.blocks, records.origins, strict=True):
            if replace or not self.kv.has(key):
                self._to_store(self.kv.put, key, block, replace=replace)
                self.origins[key] = origin
        return [Found(self.origins[key], b"") for key in records.keys]

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        self.gate.stop()
        there = [self._to_store(self.kv.get, key, block) for key, block in zip(keys, blocks, strict=True)]
        return [Found(self.origins[k], b"") if found else Absence.MISS for k, found in zip(keys, there, strict=True)]

    def _to_store(self, call, *given, **named):
        try:
            return call(*given, **named)
        except MoveFailed as error:
            raise StorageError("the KV's store failed on purpose") from error

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self.kv.has(key) for key in keys]

    def flush(self) -> None: ...


class RowsStore(GatedStore):
    """A store of rows that fails in the KV's place every other time."""

    def __init__(self, kv: CanaryKV, gate: Gate) -> None:
        super().__init__(open_store("memory:?capacity=4MiB"))
        self.kv, self.gate, self.calls = kv, gate, 0

    def _fail(self) -> None:
        self.calls += 1
        if self.calls % 2:
            try:
                self.kv.may_fail()
            except MoveFailed as error:
                raise StorageError("the rows' store failed on purpose") from error

    def put(self, headers, payloads, *, replace=False):
        self._fail()
        return super().put(headers, payloads, replace=replace)

    def get_into(self, keys, buffers):
        self._fail()
        return super().get_into(keys, buffers)


class Gated(BlockManagerAdapter):
    """``BlockManager``: a block without its rows is no hit."""

    capabilities = CORE
    blocks = range(10)
    host_blocks = range(5)
    hits_need_rows = True
    policy = "gate"

    def __init__(self, kv: CanaryKV) -> None:
        super().__init__(kv)
        self.version = 0
        self.mover = CanaryMover(kv)
        self.store = RowsStore(kv, self.mover.gate) if "store" in self.capabilities else None
        self.spec = AuxBlockDataSpec("row", (1,), "int32", self.block_tokens)
        self.start()

    def start(self) -> None:
        self.aux = AuxBlocks(
            [self.spec],
            device_blocks=len(self.blocks),
            host_blocks=len(self.host_blocks),
            namespace=Namespace("m", self.version),
            store=self.store,
            kv=self.mover,
            policy=self.policy,
            jobs=JobLimits(threads_max=1, jobs_max=3),
        )
        self.manager = BlockManager(self.aux)
        self.next_slots: dict[str, int] = {}  # of a decode step that has begun

    def admit(self, seq, tokens, chunk, salt):
        admission = self.manager.allocate(seq, tokens, salt=salt.encode())
        return None if admission is None else admission.cached_tokens

    def grow(self, seq, tokens, upto):
        return self.manager.append(seq, upto)

    def grow_batch(self, tokens: Mapping[str, Sequence[int]]):
        seqs = self._seqs(tokens)
        room = self.manager.append_batch(seqs)
        slots = self.manager.slots_batch(seqs[room]).tolist()
        self.next_slots = dict(zip([seq for seq, fits in zip(tokens, room, strict=True) if fits], slots, strict=True))
        return room.tolist()

    def slots(self, seq, start, stop):
        one = self.next_slots.pop(seq, None)
        slots = [one] if one is not None else self.manager.slots(seq, start, stop).tolist()
        return [divmod(slot, self.block_tokens) for slot in slots]

    def commit(self, seq, tokens):
        self.manager.publish(seq, tokens)

    def commit_batch(self, tokens: Mapping[str, Sequence[int]]):
        self.manager.publish_batch(self._seqs(tokens), [given[-1] for given in tokens.values()])

    def _seqs(self, names):
        return np.array([self.manager.sequence(seq) for seq in names], np.int64)

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
        self.manager.persist(seq)

    def reset(self):
        """There and back: what is forgotten does not come again with a version that was there before."""
        self.version = self.version + 1 if self.store else 1 - self.version
        self.manager.reset(weights_version=self.version)
        return True

    def restart(self):
        self.aux.close()
        self.start()

    def write_rows(self, seq, start, rows):
        with self.aux.step(self.manager.slots(seq, start, start + len(rows))) as step:
            if None not in rows:
                step.write("row", np.array(rows, np.int32).reshape(-1, 1))

    def read_rows(self, seq, start, stop):
        rows = self.manager.read("row", seq, start, stop)
        return [int(value[0]) if valid else None for value, valid in zip(rows.values, rows.valid, strict=True)]

    def ref_counts(self):
        return dict(enumerate(self.aux.holders().tolist()))

    def check(self):
        self.manager.assert_consistent()

    def close(self):
        self.aux.close()


class Masked(Gated):
    """``BlockManager``: KV counts as a hit whether its rows are there or not."""

    policy, hits_need_rows = "mask", False


class Stored(Gated):
    """``BlockManager`` with a store that it waits for."""

    capabilities = (*CORE, "store", "restart")


class StoredMasked(Stored):
    """The same with ``mask``."""

    policy, hits_need_rows = "mask", False


class Behind(Stored):
    """``BlockManager`` with a store that it does not wait for: its calls stop at a gate until :meth:`settle`."""

    capabilities = (*Stored.capabilities, "background")
    deterministic = False  # the order of free blocks depends on when somebody looks

    def start(self):
        super().start()
        self.waiting: set[str] = set()

    def _still(self) -> None:
        """No store thread runs: each has ended, or waits at the gate."""
        self.mover.gate.settle(self.aux.jobs)

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
        for _ in range(1 + self.kv.fail_next):  # a job asks the store of rows and that of KV
            if self.mover.gate.waiting:
                self.mover.gate.let_go()
            self._still()
        settled = {seq: admission.cached_tokens for seq, admission in self.manager.poll().items()}
        self.waiting -= settled.keys()
        return settled

    def kept_blocks(self):
        kept = set(np.flatnonzero(~self.aux.available(list(self.blocks))).tolist())
        if self.manager.errands:
            return kept
        return kept.difference(*(self.table(seq) for seq in self.manager.owners if not self.manager.is_swapped(seq)))

    def ref_counts(self):
        return None  # jobs hold blocks, too

    def close(self):
        self.mover.gate.open()
        self.aux.close()


class Engine(Masked):
    """``AuxBlocks``: a manager that knows of no rows owns the blocks, and its engine says what becomes of them."""

    def start(self):
        super().start()
        self.engine = AuxBlocks(
            [self.spec],
            blocks=len(self.blocks),
            host_blocks=len(self.host_blocks),
            namespace=Namespace("m", self.version),
            strict=True,
        )
        self.kv_copy, self.mover.copy = self.mover.copy, self._copy

    def _copy(self, source, target, sources, targets) -> None:
        self.kv_copy(source, target, sources, targets)
        if target == "device":
            self.engine.renew(targets)
        self.engine.move(source, target, np.column_stack((sources, targets)))

    def admit(self, seq, tokens, chunk, salt):
        cached = super().admit(seq, tokens, chunk, salt)
        if cached is not None:
            self.engine.renew(self.table(seq)[cached // self.block_tokens :])
        return cached

    def grow(self, seq, tokens, upto):
        had = len(self.table(seq))
        fits = super().grow(seq, tokens, upto)
        self.engine.renew(self.table(seq)[had:])
        return fits

    def grow_batch(self, tokens):
        had = {seq: len(self.table(seq)) for seq in tokens}
        fits = super().grow_batch(tokens)
        for seq, n in had.items():
            self.engine.renew(self.table(seq)[n:])
        return fits

    def reset(self):
        super().reset()
        self.engine.reset(weights_version=self.version)
        return True

    def write_rows(self, seq, start, rows):
        step = self.engine.begin_step(self.manager.slots(seq, start, start + len(rows)))
        with step:
            if None not in rows:
                step.write("row", np.array(rows, np.int32).reshape(-1, 1))

    def read_rows(self, seq, start, stop):
        tier = "host" if self.manager.is_swapped(seq) else "device"
        rows = self.engine.read("row", self.table(seq), start, stop, tier=tier)
        there = rows.valid & (np.arange(start, stop) < self.manager.computed(seq))
        return [int(value[0]) if valid else None for value, valid in zip(rows.values, there, strict=True)]

    def close(self):
        self.engine.close()
        super().close()


OWN = (Gated, Masked, Stored, StoredMasked, Behind, Engine)

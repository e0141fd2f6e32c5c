"""What the state machines of a block manager do besides asking it: forward passes, and whose content is whose.

A KV entry names the token prefix, the weights versions, the tenant and the forward pass that computed it; a row names
the KV entry beside which it was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from canary import canary_rows
from gate import Gate, GatedKV, GatedStore
from hypothesis import strategies as st
from kv import prefix_digest

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.jobs import JobLimits
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

BLOCK, DEVICE, HOST = 3, 9, 6


@dataclass(eq=False)
class Sequence:
    tokens: list[int]  # all of them; ``computed`` have KV
    computed: int
    versions: list[int] = field(default_factory=list)  # weights version under which each position was computed
    swapped: bool = False
    pending: bool = False  # the store is being asked for more of it
    since: int = 0  # weights version under which it was admitted
    salt: bytes = b""


class ManagerWorld:
    """One manager, its store behind a gate, and the model: what each sequence has computed under which weights."""

    policy = "gate"
    rows_always = True

    def build(self) -> None:
        self.spec = AuxBlockDataSpec("routing", (2, 2), "uint16", BLOCK)
        self.gate = Gate()
        self.store = GatedStore(open_store("memory:?capacity=4MiB"))
        self.store.gate = self.gate
        self.kv = self.new_kv()
        self.version = 0
        self.start()
        self.sequences: dict[str, Sequence] = {}
        self.next_owner = 0
        self.passes = 0
        self.made: dict[bytes, tuple[object, ...]] = {}  # what each KV entry is of, the pass left out

    def start(self) -> None:
        self.aux = AuxBlocks(
            [self.spec],
            device_blocks=DEVICE,
            host_blocks=HOST,
            namespace=Namespace("m", self.version),
            store=self.store,
            kv=self.kv,
            policy=self.policy,
            jobs=JobLimits(threads_max=1, jobs_max=3),
        )
        self.manager = BlockManager(self.aux, sequences_max=12)

    def new_kv(self) -> GatedKV:
        kv = GatedKV(DEVICE, HOST, BLOCK)
        kv.gate = self.gate
        return kv

    def end_all(self) -> None:
        """End every sequence; the store then ends what it was at."""
        for owner in list(self.sequences):
            self.manager.free(owner)
        self.sequences.clear()
        self.settle()
        assert self.manager.poll() == {}
        assert self.manager.free_device_blocks >= DEVICE - DEVICE // 2, "a store that hangs keeps more than half"
        while self.gate.waiting:
            self.gate.let_go()
            self.settle()
        assert self.manager.drain(60.0)
        assert self.manager.poll() == {}
        assert self.manager.errands == 0

    def settle(self) -> None:
        self.gate.settle(self.aux.jobs)

    def teardown(self) -> None:
        self.end_all()
        self.manager.assert_consistent()
        assert self.manager.free_device_blocks == DEVICE
        assert self.manager.free_host_blocks == HOST
        assert self.aux.in_flight == 0
        self.aux.close()

    # ------------------------------------------------------------ helpers

    def choose(self, data: st.DataObject, swapped: bool = False) -> str | None:
        owners = [o for o, s in self.sequences.items() if s.swapped == swapped and not s.pending]
        return data.draw(st.sampled_from(owners)) if owners else None

    def identity(self, sequence: Sequence, position: int) -> tuple[object, ...]:
        return (sequence.salt, *sequence.versions[: position + 1], *sequence.tokens[: position + 1])

    def row_of(self, entry: bytes) -> bytes:
        return canary_rows(self.spec, [("row", entry)]).tobytes()

    def forward(self, slots, identities, write_rows) -> None:
        """One pass: KV at every slot, and rows that belong to it."""
        self.passes += 1
        entries = [prefix_digest([self.passes, *identity]) for identity in identities]
        self.made |= dict(zip(entries, identities, strict=True))
        self.kv.write(slots.tolist(), entries)
        with self.aux.step(slots) as step:
            if write_rows:
                step.write("routing", canary_rows(self.spec, [("row", entry) for entry in entries]))

    def check_alone(self, owner: str, slots) -> None:
        """What is written is held by its sequence alone, and nobody can find it."""
        for block in {slot // BLOCK for slot in slots.tolist()}:
            others = [o for o, s in self.sequences.items() if o != owner and not s.swapped]
            assert all(block not in self.manager.table(o) for o in others), f"{owner} would write into {block}"
            assert self.aux.reference_counts([block]).tolist() == [1], f"{block} is shared"
            assert self.manager._pool.index.key(block) is None, f"{block} can be found"

    def compute(self, owner: str, upto: int, write_rows: bool = True) -> None:
        """What an engine does in a forward pass: write KV and rows at the slots of the new positions."""
        sequence = self.sequences[owner]
        start = sequence.computed
        if not self.manager.append(owner, upto):  # a fork since the last append may need a copy first
            return
        sequence.versions[start:] = [self.version] * (upto - start)
        slots = self.manager.slots(owner, start, upto)
        self.check_alone(owner, slots)
        self.forward(slots, [self.identity(sequence, p) for p in range(start, upto)], write_rows)
        sequence.computed = upto
        self.manager.publish(owner, sequence.tokens[:upto])

    def entries(self, owner: str) -> list[bytes]:
        """The KV of the sequence's computed tokens."""
        sequence, table = self.sequences[owner], self.manager.table(owner)
        tier = "host" if sequence.swapped else "device"
        return [self.kv.digest(tier, table[p // BLOCK], p % BLOCK) for p in range(sequence.computed)]

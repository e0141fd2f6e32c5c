"""Rows belong to the computation that made the KV, whatever two engines, two stores and their failures do.

Method: every computation of a token draws a salt. Its KV is a digest of the salt and its row a canary of that KV, so
that a row beside the KV of another computation shows itself, as on hardware where equal prefixes make unequal rows. Two
sets of blocks share a store of rows and a store of KV; each store loses and refuses records on its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from canary import canary_rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv import SlotKV

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockStateError, InvalidInputError, StorageError
from cache_manager.keys import BlockKey, Namespace
from cache_manager.lifecycle import State
from cache_manager.ports import HitPolicy
from cache_manager.record import RecordHeader
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.testing.faults import FaultyStore

DEVICE, HOST, TOKENS, KEYS = 4, 2, 3, 3
SPEC = AuxBlockDataSpec("routing", (2, 3), "uint8", TOKENS)
SIDE, BLOCK, KEY = st.sampled_from((0, 1)), st.integers(0, DEVICE - 1), st.integers(0, KEYS - 1)
OFFSETS = st.lists(st.integers(0, TOKENS - 1), min_size=1, unique=True) | st.just(list(range(TOKENS)))


class Side:
    """One engine: rows and KV, over stores that outlive it."""

    def __init__(self, store: FaultyStore, stored: dict, policy: HitPolicy, version: int) -> None:
        self.kv = SlotKV(DEVICE, HOST, TOKENS)
        self.kv.stored = stored
        self.aux = AuxBlocks(
            [SPEC],
            device_blocks=DEVICE,
            host_blocks=HOST,
            namespace=Namespace("m", version),
            store=store,
            kv=self.kv,
            policy=policy,
        )

    def key(self, n: int) -> BlockKey:
        return self.aux.keys.key(None, [n])

    def held(self, block: int) -> bool:
        """Whether somebody holds the block; if not, it is given to an owner of its own."""
        if self.aux.available([block])[0]:
            self.aux.allocate([block], f"owner {block}")
        return bool(self.aux.holds(f"owner {block}", block))


@dataclass(eq=False)
class Crossing:
    """A record on its way to a block whose KV has arrived."""

    side: int
    block: int
    generation: int
    header: RecordHeader
    payload: bytes


class OriginMachine(RuleBasedStateMachine):
    policy: HitPolicy = "gate"

    def __init__(self) -> None:
        super().__init__()
        self.store = FaultyStore(open_store("memory:?capacity=1MiB"))
        self.stored: dict = {}
        self.version = self.salt = 0
        self.open: list[tuple[int, object]] = []
        self.crossing: list[Crossing] = []

    @initialize()
    def start(self) -> None:
        self.sides = [Side(self.store, self.stored, self.policy, 0) for _ in range(2)]

    def teardown(self) -> None:
        while self.open:
            self.end_step(0, commit=True)
        for side in getattr(self, "sides", []):
            side.aux.close()

    # ---------------------------------------------------------------- computing

    @rule(side=SIDE, block=BLOCK, offsets=OFFSETS, end=st.sampled_from(("commit", "commit", "abort", "later", "some")))
    def compute(self, side, block, offsets, end) -> None:
        """A forward pass: KV and rows of a new salt for each token; the rows may be lost or come later."""
        house = self.sides[side]
        if not house.held(block):
            return
        slots = [block * TOKENS + o for o in offsets]
        try:
            step = house.aux.begin_step(slots)
        except BlockStateError:
            return
        self.salt += 1
        kv = [hashlib.sha256(repr((self.salt, slot)).encode()).digest() for slot in slots]
        house.kv.write(slots, kv)
        step.write("routing", canary_rows(SPEC, [(made,) for made in kv]))
        if end == "commit":
            step.commit()
        elif end == "abort":
            step.abort()
        elif end == "some":
            step.commit(np.arange(len(slots)) % 2 == 0)
        else:
            self.open.append((side, step))

    @precondition(lambda self: self.open)
    @rule(n=st.integers(0, 9), commit=st.booleans())
    def end_step(self, n, commit) -> None:
        _, step = self.open.pop(n % len(self.open))
        if commit:
            step.commit()
        else:
            step.abort()

    @rule(side=SIDE, block=BLOCK, forget=st.booleans())
    def free(self, side, block, forget) -> None:
        aux = self.sides[side].aux
        aux.free(f"owner {block}")
        if forget and aux.available([block])[0]:
            aux.evict([block])

    # ---------------------------------------------------------------- moving

    @rule(side=SIDE, block=BLOCK, to=st.integers(0, HOST - 1), fail=st.booleans(), follow=st.booleans())
    def swap_out(self, side, block, to, fail, follow) -> None:
        house = self.sides[side]
        house.kv.fail_next = StorageError if fail else None
        self.attempt(lambda: house.aux.swap_out([(block, to)], leases="follow" if follow else "stay"))
        house.kv.fail_next = None

    @rule(side=SIDE, block=BLOCK, source=st.integers(0, HOST - 1), fail=st.booleans())
    def swap_in(self, side, block, source, fail) -> None:
        house = self.sides[side]
        house.kv.fail_next = StorageError if fail else None
        self.attempt(lambda: house.aux.swap_in([(source, block)]))
        house.kv.fail_next = None
        house.aux.free(f"owner {source}", [source], "host")

    @rule(side=SIDE, block=BLOCK, to=BLOCK, rows=st.none() | st.integers(1, TOKENS))
    def fork(self, side, block, to, rows) -> None:
        house = self.sides[side]
        self.attempt(lambda: house.aux.copy([(block, to)], None if rows is None else [rows]))

    def attempt(self, call) -> object:
        """Do it, or see it refused: then nothing has changed, which the invariant looks at."""
        try:
            return call()
        except (BlockStateError, InvalidInputError, StorageError):
            return None

    # ---------------------------------------------------------------- storing

    @rule(side=SIDE, block=BLOCK, n=KEY, fault=st.sampled_from((None, None, "rows", "KV")))
    def persist(self, side, block, n, fault) -> None:
        house = self.sides[side]
        self.store.fail_put = fault == "rows"
        house.kv.fail_next = StorageError if fault == "KV" else None
        key = house.key(n)
        life = house.aux.generations([block])
        answer = self.attempt(lambda: house.aux.persist({key: block}, generations=life))
        self.store.fail_put, house.kv.fail_next = False, None
        if answer is None or not answer[key]:
            return
        said = "nothing_answers_true_for_what_was_not_stored"
        assert self.stored[key][0] == answer[key], said
        if self.policy == "gate":
            (rows,) = self.store.get_into([key], [memoryview(bytearray(house.aux.layout.nbytes))])
            assert isinstance(rows, RecordHeader), said
            assert rows.origin == answer[key], said

    @rule(side=SIDE, block=BLOCK, n=KEY, fault=st.sampled_from((None, None, None, "rows", "KV", "flip", "reset")))
    def restore(self, side, block, n, fault) -> None:
        house = self.sides[side]
        self.store.fail_get = fault == "rows"
        self.store.flip_next = 77 if fault == "flip" else None
        house.kv.fail_next = StorageError if fault == "KV" else None
        if fault == "reset":
            self.store.during_get = lambda: house.aux.reset(weights_version=house.aux.namespace.weights_version)
        if house.held(block):
            self.attempt(lambda: house.aux.restore({house.key(n): block}, owner=f"owner {block}"))
        self.store.fail_get, self.store.flip_next, self.store.during_get = False, None, None
        house.kv.fail_next = None

    @rule(side=SIDE, n=KEY, part=st.sampled_from(("rows", "KV")))
    def a_store_evicts(self, side, n, part) -> None:
        key = self.sides[side].key(n)
        if part == "rows":
            self.store.delete([key])
        else:
            self.stored.pop(key, None)

    # ---------------------------------------------------------------- ends of everything

    @rule(side=SIDE, further=st.booleans())
    def reset(self, side, further) -> None:
        self.version += further
        aux = self.sides[side].aux
        aux.reset(weights_version=self.version if further else aux.namespace.weights_version)

    @rule(side=SIDE)
    def restart(self, side) -> None:
        """The engine ends; its stores stay."""
        for of, step in [entry for entry in self.open if entry[0] == side]:
            step.abort()
            self.open.remove((of, step))
        self.crossing = [crossing for crossing in self.crossing if crossing.side != side]
        version = self.sides[side].aux.namespace.weights_version
        self.sides[side].aux.close()
        self.sides[side] = Side(self.store, self.stored, self.policy, version)

    # ---------------------------------------------------------------- crossing

    @rule(side=SIDE, source=BLOCK, sink=BLOCK, n=KEY, tokens=st.integers(1, TOKENS))
    def cross(self, side, source, sink, n, tokens) -> None:
        """The first tokens' KV arrives at the other engine, and the rows will at any time after it, or never."""
        sender, receiver = self.sides[side], self.sides[1 - side]
        life = sender.aux.generations([source])
        if sender.aux.has_step([source]) or receiver.aux.has_step([sink]):
            return
        if sender.aux.namespace != receiver.aux.namespace or not receiver.held(sink):
            return
        limit = None if tokens == TOKENS else [tokens]
        export = self.attempt(lambda: sender.aux.export({sender.key(n): source}, limit, generations=life))
        if export is None:
            return
        (record,) = export.records
        if record is not None:
            generation, header = int(receiver.aux.generations([sink])[0]), record.seal()
            self.crossing.append(Crossing(1 - side, sink, generation, header, bytes(record.payload)))
            if receiver.aux.bind_origin(sink, generation, header.origin, tokens):
                receiver.kv.device[sink, :tokens] = sender.kv.device[source, :tokens]
        del record
        export.commit()

    @precondition(lambda self: self.crossing)
    @rule(n=st.integers(0, 9), again=st.booleans())
    def rows_arrive(self, n, again) -> None:
        crossing = self.crossing[n % len(self.crossing)]
        if not again:
            self.crossing.remove(crossing)
        aux = self.sides[crossing.side].aux
        if int(aux.origins([crossing.block])[0]):  # else nobody has said what KV is there: see `install`
            self.attempt(lambda: aux.install(crossing.block, crossing.generation, crossing.header, crossing.payload))

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def rows_are_of_the_pass_that_made_the_kv(self) -> None:
        for house in getattr(self, "sides", []):
            for tier, blocks in (("device", DEVICE), ("host", HOST)):
                read = house.aux.read("routing", range(blocks), tier=tier)
                for at in np.flatnonzero(read.valid):
                    made = house.kv.digest(tier, *divmod(int(at), TOKENS))
                    assert np.array_equal(read.values[at], canary_rows(SPEC, [(made,)])[0])

    @invariant()
    def the_books_are_in_order(self) -> None:
        for house in getattr(self, "sides", []):
            house.aux.assert_consistent()
            assert house.aux.blocks_in(State.LEAVING) == house.aux.blocks_in(State.ARRIVING) == 0


TestOriginGate = OriginMachine.TestCase


class OriginMaskMachine(OriginMachine):
    policy: HitPolicy = "mask"


TestOriginMask = OriginMaskMachine.TestCase
TestOriginMask.settings = settings(max_examples=60)

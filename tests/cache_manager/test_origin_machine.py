"""Rows belong to the computation that made the KV, whatever two engines, two stores and their failures do.

Method: every computation of a token draws a salt. Its KV is a digest of the salt and its row a canary of that KV, so
that a row beside the KV of another computation shows itself, as on hardware where equal prefixes make unequal rows. Two
sets of blocks share a store of rows and a store of KV. Each store loses records on its own, and any one of the puts
that make up a persist fails, is refused, or comes after a put of the same key by the other engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from budget import examples
from canary import canary_rows
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from origin_sides import DEVICE, HOST, SPEC, TOKENS, RowsStore, Side
from origins_of import origins_of

from cache_manager.errors import BlockStateError, InvalidInputError, StorageError
from cache_manager.lifecycle import State
from cache_manager.ports import HitPolicy
from cache_manager.record import RecordHeader
from cache_manager.storage import open_store

KEYS = 2
SIDE, BLOCK, KEY = st.sampled_from((0, 1)), st.integers(0, DEVICE - 1), st.integers(0, KEYS - 1)
OFFSETS = st.lists(st.integers(0, TOKENS - 1), min_size=1, unique=True) | st.just(list(range(TOKENS)))
ENDS = st.sampled_from(("commit", "commit", "abort", "later", "some"))
WHOLE = list(range(TOKENS))
PLANS = st.sampled_from([(), *[(None,) * n + (end,) for n in range(3) for end in ("fail", "refuse", "rival")]])
"""What becomes of the first puts of a persist: nothing, or a failure, no room, another engine's put just before it."""


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
        self.store = RowsStore(open_store("memory:?capacity=1MiB"))
        self.stored: dict = {}
        self.kept: list[tuple[int, np.ndarray]] = []  # KV that somebody else keeps, and the origin beside it
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

    @rule(side=SIDE, block=BLOCK, offsets=OFFSETS, end=ENDS)
    def compute(self, side, block, offsets, end) -> None:
        """A forward pass: KV and rows of a new salt for each token; the rows may be lost or come later."""
        if self.sides[side].held(block):
            self.forward(side, block, offsets, end)

    def forward(self, side, block, offsets, end, *, kept=False) -> None:
        house = self.sides[side]
        slots = [block * TOKENS + o for o in offsets]
        try:
            step = house.aux.begin_step(slots)
        except BlockStateError:
            return
        if kept:
            self.keep(side, block)
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

    @rule(side=SIDE, block=BLOCK)
    def compute_anew(self, side, block) -> None:
        """Another computation of a whole block, in a new life."""
        if self.sides[side].emptied(block):
            self.forward(side, block, WHOLE, "commit")

    @rule(side=SIDE, block=BLOCK, forget=st.booleans())
    def free(self, side, block, forget) -> None:
        aux = self.sides[side].aux
        aux.free(f"owner {block}")
        if forget and aux.available([block])[0]:
            aux.evict([block])

    # ---------------------------------------------------------------- moving

    @rule(side=SIDE, block=BLOCK, to=st.integers(0, HOST - 1), fail=st.booleans(), follow=st.booleans())
    def swap_out(self, side, block, to, fail, follow) -> None:
        aux = self.sides[side].aux
        leases = "follow" if follow else "stay"
        self.move(side, fail, ("device", block), ("host", to), lambda: aux.swap_out([(block, to)], leases=leases))

    @rule(side=SIDE, block=BLOCK, source=st.integers(0, HOST - 1), fail=st.booleans())
    def swap_in(self, side, block, source, fail) -> None:
        aux = self.sides[side].aux
        self.move(side, fail, ("host", source), ("device", block), lambda: aux.swap_in([(source, block)]))
        aux.free(f"owner {source}", [source], "host")

    @rule(side=SIDE, block=BLOCK, to=BLOCK, rows=st.none() | st.integers(1, TOKENS), fail=st.booleans())
    def fork(self, side, block, to, rows, fail) -> None:
        aux = self.sides[side].aux
        limit = None if rows is None else [rows]
        self.move(side, fail, ("device", block), ("device", to), lambda: aux.copy([(block, to)], limit))

    def move(self, side, fail, source, target, call) -> None:
        house = self.sides[side]
        house.kv.fail_next = StorageError if fail else None
        if self.attempt(lambda: [call()]):
            (left,), (came,) = (origins_of(house.aux, [block], tier) for tier, block in (source, target))
            assert left == came != 0, "a copy has the origin of what it is a copy of"
        house.kv.fail_next = None

    def attempt(self, call) -> Any:
        """Do it, or see it refused: then nothing has changed, which the invariant looks at."""
        try:
            return call()
        except (BlockStateError, InvalidInputError, StorageError):
            return None

    # ---------------------------------------------------------------- storing

    @rule(side=SIDE, block=BLOCK, offsets=OFFSETS, end=ENDS, again=OFFSETS, during=st.booleans())
    def keep_between(self, side, block, offsets, end, again, during) -> None:
        """KV is kept between two passes over a block, or when the second has begun and its KV is not there yet."""
        if self.sides[side].held(block):
            self.forward(side, block, offsets, end)
            if not during:
                self.keep(side, block)
            self.forward(side, block, again, "commit", kept=during)

    @rule(side=SIDE, block=BLOCK)
    def keep(self, side, block) -> None:
        """Somebody else keeps the block's KV, as it is now, beside its origin."""
        house = self.sides[side]
        (origin,) = house.aux.origins([block])
        if origin:
            self.kept.append((origin, house.kv.device[block].copy()))

    @rule(side=SIDE, block=BLOCK, n=KEY, lost=st.sampled_from((None, "rows", "KV")), rows=PLANS, kv=PLANS, others=BLOCK)
    def store_anew(self, side, block, n, lost, rows, kv, others) -> None:
        """A store has lost its part of a key, and another computation of it is put."""
        self.compute_anew(side, block)
        if lost:
            self.a_store_evicts(side, n, lost)
        self.persist(side, block, n, rows, kv, others)

    def may_persist(self, side, block) -> bool:
        """An engine persists blocks whose KV is all there. With ``gate`` rows that are missing refuse any other."""
        return self.policy == "gate" or bool(self.sides[side].kv.device[block].any(axis=-1).all())

    @rule(side=SIDE, block=BLOCK, n=KEY, rows=PLANS, kv=PLANS, others=BLOCK)
    def persist(self, side, block, n, rows, kv, others) -> None:
        """A rival puts its block ``others`` under the same key, where the plan says so."""
        if not self.may_persist(side, block):
            return
        house, rival = self.sides[side], self.sides[1 - side]
        key = house.key(n)
        life = house.aux.generations([block])

        def beside() -> None:
            if not self.may_persist(1 - side, others):
                return
            plans, self.store.plan = self.store.plan, ()
            life = rival.aux.generations([others])
            self.attempt(lambda: rival.aux.persist({rival.key(n): others}, generations=life))
            self.store.plan = plans

        self.store.plan, house.kv.plan = rows, kv
        self.store.rival = house.kv.rival = beside
        answer = self.attempt(lambda: house.aux.persist({key: block}, generations=life))
        self.store.plan = house.kv.plan = ()
        if answer is None or not answer[key]:
            return
        said = "nothing_answers_true_for_what_was_not_stored"
        assert self.stored[key][0] == answer[key], said
        if self.policy == "gate":
            (found,) = self.store.get_into([key], [memoryview(bytearray(house.aux.layout.nbytes))])
            assert isinstance(found, RecordHeader), said
            assert found.origin == answer[key], said

    @rule(side=SIDE, block=BLOCK, n=KEY, fault=st.sampled_from((*[None] * 5, "rows", "KV", "flip", "reset")))
    def restore(self, side, block, n, fault) -> None:
        house = self.sides[side]
        self.store.fail_get = fault == "rows"
        self.store.flip_next = 77 if fault == "flip" else None
        house.kv.fail_next = StorageError if fault == "KV" else None
        if fault == "reset":
            self.store.during_get = lambda: house.aux.reset(weights_version=house.aux.namespace.weights_version)
        if house.emptied(block):
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

    @rule(side=SIDE, source=BLOCK, sink=BLOCK, n=KEY, tokens=st.integers(1, TOKENS), anew=st.booleans())
    def cross(self, side, source, sink, n, tokens, anew) -> None:
        """The first tokens' KV arrives at the other engine, and the rows will at any time after it, or never."""
        if anew:
            self.compute_anew(side, source)
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
            (before,) = origins_of(receiver.aux, [sink])
            if receiver.aux.bind_origin(sink, generation, header.origin, tokens):
                (named,) = origins_of(receiver.aux, [sink])
                assert named in (header.origin, before or header.origin), "KV that came has the name it came under"
                receiver.kv.device[sink, :tokens] = sender.kv.device[source, :tokens]
                if before != header.origin:  # what is behind them is of no computation that this origin names
                    receiver.kv.device[sink, tokens:] = 0
        del record
        export.commit()

    @precondition(lambda self: self.crossing)
    @rule(n=st.integers(0, 9), again=st.booleans())
    def rows_arrive(self, n, again) -> None:
        crossing = self.crossing[n % len(self.crossing)]
        if not again:
            self.crossing.remove(crossing)
        aux = self.sides[crossing.side].aux
        if origins_of(aux, [crossing.block])[0]:  # else nobody has said what KV is there: see `install`
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
    def an_origin_names_one_computation(self) -> None:
        """What two blocks, a block and the store, or a block and what somebody else keeps, have under one origin is the
        same as far as both have it."""
        named: dict[int, list] = {}
        for origin, digests in (*self.stored.values(), *self.kept):
            known = named.setdefault(origin, [None] * TOKENS)
            for offset, digest in enumerate(digests):
                if digest.any():  # zeros: never computed
                    assert known[offset] in (None, digest.tobytes()), "two computations under one origin"
                    known[offset] = digest.tobytes()
        for house in getattr(self, "sides", []):
            for tier, blocks in (("device", DEVICE), ("host", HOST)):
                valid = house.aux.read("routing", range(blocks), tier=tier).valid.reshape(blocks, TOKENS)
                for block, origin in enumerate(origins_of(house.aux, range(blocks), tier)):
                    known = named.setdefault(origin, [None] * TOKENS)
                    for offset in np.flatnonzero(valid[block]).tolist():
                        made = house.kv.digest(tier, block, offset)
                        assert known[offset] in (None, made), "two computations under one origin"
                        known[offset] = made

    @invariant()
    def the_books_are_in_order(self) -> None:
        for house in getattr(self, "sides", []):
            house.aux.assert_consistent()
            assert house.aux.blocks_in(State.LEAVING) == house.aux.blocks_in(State.ARRIVING) == 0


TestOriginGate = OriginMachine.TestCase


class OriginMaskMachine(OriginMachine):
    policy: HitPolicy = "mask"


TestOriginMask = OriginMaskMachine.TestCase
TestOriginMask.settings = examples(60)

"""Rows belong to the computation that made the KV, whatever the two engines and their failing store do.

Method: every computation of a token draws a salt. Its KV is a digest of the salt and its row a canary of that KV, so
that a row beside the KV of another computation shows itself, as on hardware where equal prefixes make unequal rows. Two
sets of blocks share a store of rows with their KV. The store loses records, and any one of the puts of a persist fails,
is refused, or comes after a put of the same key by the other engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from canary import canary_rows
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from origin_sides import DEVICE, HOST, SPEC, TOKENS, PlannedStore, Side

from cache_manager.errors import StorageError
from cache_manager.record import RecordHeader
from cache_manager.storage import open_store
from tests.machines.origins_of import origins_of

KEYS = 2
SIDE, BLOCK, KEY = st.sampled_from((0, 1)), st.integers(0, DEVICE - 1), st.integers(0, KEYS - 1)
OFFSETS = st.lists(st.integers(0, TOKENS - 1), min_size=1, unique=True) | st.just(list(range(TOKENS)))
ENDS = st.sampled_from(("commit", "commit", "abort", "later", "some"))
WHOLE = list(range(TOKENS))
PLANS = st.sampled_from([(), *[(None,) * n + (end,) for n in range(2) for end in ("fail", "refuse", "rival", "torn")]])
"""What becomes of the first puts of a persist, such as a failure, no room, or another engine's put just before it."""


@dataclass(eq=False)
class Crossing:
    """A record on its way to a block whose KV has arrived."""

    side: int
    block: int
    generation: int
    header: RecordHeader
    payload: bytes


class OriginMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = PlannedStore(open_store("memory:?capacity=1MiB"))
        self.kept: list[tuple[int, np.ndarray]] = []  # KV that an outside store keeps, and the origin beside it
        self.version = self.salt = 0
        self.open: list[tuple[int, object]] = []
        self.crossing: list[Crossing] = []

    @initialize(required=st.sampled_from((("routing",), ())))
    def start(self, required) -> None:
        self.required = required
        self.sides = [Side(self.store, self.required, 0) for _ in range(2)]

    def teardown(self) -> None:
        while self.open:
            self.end_step(0, commit=True)
        for side in getattr(self, "sides", []):
            side.aux.close()

    # ---------------------------------------------------------------- computing

    @rule(side=SIDE, block=BLOCK, offsets=OFFSETS, end=ENDS)
    def compute(self, side, block, offsets, end) -> None:
        """A forward pass: KV and rows of a new salt for each token; the rows may be lost or come later."""
        self.forward(side, block, offsets, end)

    def forward(self, side, block, offsets, end, *, kept=False) -> None:
        house = self.sides[side]
        house.life(block)
        slots = [block * TOKENS + o for o in offsets]
        step = house.aux.begin_step(slots)
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
        self.sides[side].renewed(block)
        self.forward(side, block, WHOLE, "commit")

    # ---------------------------------------------------------------- moving

    @rule(side=SIDE, block=BLOCK, to=st.integers(0, HOST - 1), fail=st.booleans())
    def swap_out(self, side, block, to, fail) -> None:
        self.sides[side].life(block)
        self.move(side, fail, ("device", block), ("host", to), lambda aux: aux.swap_out([(block, to)]))

    @rule(side=SIDE, block=BLOCK, source=st.integers(0, HOST - 1), fail=st.booleans(), anew=st.booleans())
    def swap_in(self, side, block, source, fail, anew) -> None:
        house = self.sides[side]
        if house.aux.generations([source], "host")[0]:
            (house.renewed if anew else house.life)(block)
            self.move(side, fail, ("host", source), ("device", block), lambda aux: aux.swap_in([(source, block)]))

    @rule(side=SIDE, block=BLOCK, to=BLOCK, rows=st.none() | st.integers(1, TOKENS), fail=st.booleans())
    def fork(self, side, block, to, rows, fail) -> None:
        house = self.sides[side]
        house.life(block)
        house.life(to)
        limit = None if rows is None else [rows]
        if block != to:
            self.move(side, fail, ("device", block), ("device", to), lambda aux: aux.copy([(block, to)], limit))

    def move(self, side, fail, source, target, call) -> None:
        """KV is always moved; rows are moved only where no step in flight writes the target."""
        house = self.sides[side]
        house.kv.fail_next = StorageError if fail else None
        written = target[0] == "device" and house.aux.writing([target[1]])[0]
        kv = house.kv.digests(*source)
        if self.attempt(lambda: [call(house.aux)]):
            assert house.kv.digests(*target) == kv, "KV did not go where the engine had it moved"
            (left,), (came,) = (origins_of(house.aux, [block], tier) for tier, block in (source, target))
            is_named = left != 0  # in a block without an origin nothing was computed, or has come, in this life
            assert written or not is_named or left == came, "a copy has the origin of what it is a copy of"
        house.kv.fail_next = None

    def attempt(self, call) -> Any:
        """Do it, or let it fail; after a failure nothing has changed, which the invariant checks."""
        try:
            return call()
        except StorageError:
            return None

    # ---------------------------------------------------------------- storing

    @rule(side=SIDE, block=BLOCK, offsets=OFFSETS, end=ENDS, again=OFFSETS, during=st.booleans())
    def keep_between(self, side, block, offsets, end, again, during) -> None:
        """KV is kept between two passes over a block, or when the second has begun and its KV is not there yet."""
        self.forward(side, block, offsets, end)
        if not during:
            self.keep(side, block)
        self.forward(side, block, again, "commit", kept=during)

    @rule(side=SIDE, block=BLOCK)
    def keep(self, side, block) -> None:
        """An outside store keeps the block's KV, as it is now, beside its origin."""
        house = self.sides[side]
        (origin,) = house.aux.exchange.origins([block])
        if origin:
            self.kept.append((origin, house.kv.device[block].copy()))

    @rule(side=SIDE, block=BLOCK, n=KEY, lost=st.booleans(), plan=PLANS, others=BLOCK)
    def store_anew(self, side, block, n, lost, plan, others) -> None:
        """Another computation of a key is put, which the store may have lost."""
        self.compute_anew(side, block)
        if lost:
            self.the_store_evicts(side, n)
        self.persist(side, block, n, plan, others)

    def may_persist(self, side, block) -> bool:
        """An engine persists blocks whose KV is all there; rows that are required, and missing, refuse any other."""
        return bool(self.required) or bool(self.sides[side].kv.device[block].any(axis=-1).all())

    @rule(side=SIDE, block=BLOCK, n=KEY, plan=PLANS, others=BLOCK)
    def persist(self, side, block, n, plan, others) -> None:
        """A rival puts its block ``others`` under the same key, where the plan says so."""
        if not self.may_persist(side, block):
            return
        house, rival = self.sides[side], self.sides[1 - side]
        key = house.key(n)

        def beside() -> None:
            if not self.may_persist(1 - side, others):
                return
            plan, self.store.plan = self.store.plan, ()
            self.attempt(lambda: rival.aux.persist({rival.key(n): others}, [rival.life(others)]))
            self.store.plan = plan

        self.store.plan, self.store.rival = plan, beside
        answer = self.attempt(lambda: house.aux.persist({key: block}, [house.life(block)]))
        self.store.plan = ()
        if answer is not None and answer[key]:
            stored = self.store.record(key)
            assert stored is not None, "nothing_answers_true_for_what_was_not_stored"
            assert stored[0].origin == answer[key], "nothing_answers_true_for_what_was_not_stored"

    @rule(
        side=SIDE, block=BLOCK, n=KEY, anew=st.sampled_from((True, True, False)),
        fault=st.sampled_from((*[None] * 5, "get", "fill", "flip", "reset")),
    )  # fmt: skip
    def restore(self, side, block, n, anew, fault) -> None:
        house = self.sides[side]
        life = (house.renewed if anew else house.life)(block)
        if fault == "fill" and not anew:
            return
        self.store.fail_get, house.kv.fill_fails = fault == "get", fault == "fill"
        self.store.flip_next = 77 if fault == "flip" else None
        if fault == "reset":
            self.store.during_get = lambda: self.reset(side, False)
        stored, key = self.store.record(house.key(n)), house.key(n)
        answer = self.attempt(lambda: house.aux.restore({key: block}, [life]))
        self.store.fail_get, self.store.flip_next, self.store.during_get = False, None, None
        house.kv.fill_fails = False
        if answer is not None and answer[key]:
            assert stored is not None
            assert house.kv.device[block].tobytes() == stored[3].tobytes(), "KV that came back is not what was stored"
            assert house.aux.read("routing", [block]).valid.tolist() == stored[2].tolist()

    @rule(side=SIDE, n=KEY)
    def the_store_evicts(self, side, n) -> None:
        self.store.delete([self.sides[side].key(n)])

    # ---------------------------------------------------------------- ends of everything

    @rule(side=SIDE, blocks=st.none() | st.lists(BLOCK))
    def forget(self, side, blocks) -> None:
        self.sides[side].aux.forget(blocks)

    @rule(side=SIDE, further=st.booleans())
    def reset(self, side, further) -> None:
        self.version += further
        if not further:  # no record is on its way from one side of a reset to the other, unless its key is refused
            self.crossing = [crossing for crossing in self.crossing if crossing.side != side]
        aux = self.sides[side].aux
        aux.reset(weights_version=self.version if further else aux.namespace.weights_version)

    @rule(side=SIDE)
    def restart(self, side) -> None:
        """The engine ends; the store stays."""
        for of, step in [entry for entry in self.open if entry[0] == side]:
            step.abort()
            self.open.remove((of, step))
        self.crossing = [crossing for crossing in self.crossing if crossing.side != side]
        version = self.sides[side].aux.namespace.weights_version
        self.sides[side].aux.close()
        self.sides[side] = Side(self.store, self.required, version)

    # ---------------------------------------------------------------- crossing

    @rule(side=SIDE, source=BLOCK, sink=BLOCK, n=KEY, tokens=st.integers(1, TOKENS), anew=st.booleans())
    def cross(self, side, source, sink, n, tokens, anew) -> None:
        """The first tokens' KV arrives at the other engine, and the rows will at any time after it, or never.

        Whatever becomes of the block in that life, its own KV is there: only a new life or a reset leaves it open.
        """
        if anew:
            self.compute_anew(side, source)
        sender, receiver = self.sides[side], self.sides[1 - side]
        life = sender.life(source)
        if sender.aux.writing([source])[0] or receiver.aux.writing([sink])[0]:
            return
        if sender.aux.namespace != receiver.aux.namespace:
            return
        if not sender.kv.device[source, :tokens].any(axis=-1).all():
            return  # KV that was not computed is never sent
        limit = None if tokens == TOKENS else [tokens]
        (record,) = sender.aux.exchange.export({sender.key(n): source}, [life], limit)
        if record is not None:
            generation, header = receiver.life(sink), record.seal()
            self.crossing.append(Crossing(1 - side, sink, generation, header, bytes(record.payload)))
            (before,) = origins_of(receiver.aux, [sink])
            if receiver.aux.exchange.bind_origin(sink, generation, header.origin):
                (named,) = origins_of(receiver.aux, [sink])
                assert named == header.origin, "KV that came has the name it came under"
                receiver.kv.device[sink, :tokens] = sender.kv.device[source, :tokens]
                if before != header.origin:  # the tokens behind them are of no computation that this origin names
                    receiver.kv.device[sink, tokens:] = 0

    @precondition(lambda self: self.crossing)
    @rule(n=st.integers(0, 9), again=st.booleans())
    def rows_arrive(self, n, again) -> None:
        crossing = self.crossing[n % len(self.crossing)]
        if not again:
            self.crossing.remove(crossing)
        aux = self.sides[crossing.side].aux
        aux.exchange.install(crossing.block, crossing.generation, crossing.header, crossing.payload)

    @precondition(lambda self: self.crossing)
    @rule(n=st.integers(0, 9), again=st.booleans())
    def rows_arrive_when_their_block_was_computed_and_forgotten(self, n, again) -> None:
        crossing = self.crossing[n % len(self.crossing)]
        self.forward(crossing.side, crossing.block, WHOLE, "commit")
        self.forget(crossing.side, [crossing.block])
        self.rows_arrive(n, again)

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def rows_are_of_the_pass_that_made_the_kv(self) -> None:
        for house in getattr(self, "sides", []):
            for tier, blocks in (("device", DEVICE), ("host", HOST)):
                read = house.aux.read("routing", range(blocks), tier=tier)
                for at in np.flatnonzero(read.valid):
                    made = house.kv.digest(tier, *divmod(int(at), TOKENS))
                    assert np.array_equal(read.values[at], canary_rows(SPEC, [(made,)])[0])
        for _, rows, valid, kv in self.stored():
            for at in np.flatnonzero(valid):
                assert np.array_equal(rows[at], canary_rows(SPEC, [(kv[at].tobytes(),)])[0])

    def stored(self) -> list:
        """Every record that either engine would find now."""
        keys = {house.key(n) for house in getattr(self, "sides", []) for n in range(KEYS)}
        return [record for key in keys if (record := self.store.record(key)) is not None]

    @invariant()
    def an_origin_names_one_computation(self) -> None:
        """Two holders of one origin (blocks, the store, an outside store) agree wherever both have content."""
        named: dict[int, list] = {}
        for origin, digests in (*((header.origin, kv) for header, _, _, kv in self.stored()), *self.kept):
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


TestOrigin = OriginMachine.TestCase

"""The life of auxiliary rows against a model that is two dictionaries and knows nothing of the code.

Method: rows carry a canary (who wrote them, for which life of which block). After every rule, every row of every tier
is read and must be exactly the one the model expects, or be missing exactly where the model says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from canary import canary_rows
from gate import Gate, GatedStore, until
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import BlockStateError, StorageError
from cache_manager.jobs import JobLimits, Phase
from cache_manager.keys import BlockKey, Namespace
from cache_manager.lifecycle import State
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store

OWNERS = ("a", "b", "c")
DEVICE, HOST = 5, 4
JOBS_MAX = 3


@dataclass(eq=False)
class Life:
    rows: dict[tuple[str, int], bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Block:
    life: Life = field(default_factory=Life)
    owners: set[str] = field(default_factory=set)
    free: bool = True
    departures: int = 0
    arriving: bool = False
    steps: int = 0

    @property
    def still(self) -> bool:
        return not self.departures and not self.arriving


@dataclass(eq=False)
class ModelStep:
    real: object
    tokens: list[tuple[int, int] | None]  # (block, offset), None is padding
    lives: list[Life | None]
    superseded: list[bool]
    rows: dict[str, list[bytes]] = field(default_factory=dict)


@dataclass(eq=False)
class ModelMove:
    real: object
    tiers: tuple[str, str]
    pairs: list[tuple[int, int]]
    lives: list[tuple[Life, Life]]
    followers: list[set[str]]  # whose leases go along: those held when the move began


@dataclass(eq=False)
class ModelJob:
    real: object
    key: BlockKey
    version: int
    block: int
    life: Life
    rows: dict[tuple[str, int], bytes] | None  # what is stored, or what the store gave; None: nothing (yet)
    restores: bool
    failed: bool = False
    origin: int = 0  # of what is stored, or was stored before


class AuxBlocksMachine(RuleBasedStateMachine):
    block_tokens = 3
    memory = "heap"

    def __init__(self) -> None:
        super().__init__()
        self.specs = (
            AuxBlockDataSpec("routing", (2, 3), "uint8", self.block_tokens),
            AuxBlockDataSpec("weights_version", (), "uint32", self.block_tokens),
        )
        self.store = GatedStore(open_store("memory:?capacity=4MiB"))
        self.store.gate = self.gate = Gate()
        self.aux = AuxBlocks(
            self.specs,
            device_blocks=DEVICE,
            host_blocks=HOST,
            namespace=Namespace("m", 0),
            store=self.store,
            required=["routing"],
            memory=self.memory,
            jobs=JobLimits(threads_max=1, jobs_max=JOBS_MAX),
        )
        self.jobs: list[ModelJob] = []
        self.jobs_cancelled = 0
        self.model = {"device": [Block() for _ in range(DEVICE)], "host": [Block() for _ in range(HOST)]}
        self.steps: list[ModelStep] = []
        self.moves: list[ModelMove] = []
        self.stored: dict[BlockKey, dict[tuple[str, int], bytes]] = {}
        self.origins: dict[BlockKey, int] = {}  # of what is stored
        self.keys: dict[int, list[BlockKey]] = {0: []}
        self.version = 0
        self.serial = 0

    def teardown(self) -> None:
        for step in self.steps:
            step.real.abort()
        for move in self.moves:
            move.real.abort()
        while self.gate.waiting:
            self.let_the_store_go_on(fail=False)
        self.poll()
        self.quiescent_means_nothing_in_flight()
        self.aux.close()

    # ------------------------------------------------------------ helpers

    def pick(self, data: st.DataObject, tier: str, allowed, most: int = 3) -> list[int]:
        choices = [i for i, b in enumerate(self.model[tier]) if allowed(b)]
        if not choices:
            return []
        return data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=most, unique=True))

    def end_if_unheld(self, block: Block) -> None:
        if not block.owners and block.still:
            block.free = False

    # ------------------------------------------------------------ owning

    @initialize()
    def start(self) -> None:
        assert self.aux.in_flight == 0

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def allocate(self, data, owner) -> None:
        blocks = self.pick(data, "device", lambda b: not b.owners and b.still)
        self.aux.allocate(blocks, owner)
        for i in blocks:
            block = self.model["device"][i]
            block.life, block.owners, block.free = Life(), {owner}, False

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def allocating_what_is_held_or_moving_changes_nothing(self, data, owner) -> None:
        bad = self.pick(data, "device", lambda b: bool(b.owners) or not b.still, 1)
        good = self.pick(data, "device", lambda b: not b.owners and b.still, 2)
        if bad:
            with pytest.raises(BlockStateError):
                self.aux.allocate(good + bad, owner)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def share(self, data, owner) -> None:
        blocks = self.pick(data, "device", lambda b: not b.free and not b.arriving)
        self.aux.share(blocks, owner)
        for i in blocks:
            self.model["device"][i].owners.add(owner)

    @rule(owner=st.sampled_from(OWNERS), again=st.booleans())
    def free(self, owner, again) -> None:
        for _ in range(1 + again):
            self.aux.free(owner)
        for tier in self.model.values():
            for block in tier:
                if owner in block.owners:
                    block.owners.discard(owner)
                    self.end_if_unheld(block)
        assert not any(self.aux.holds(owner, i) for i in range(DEVICE)), "released_owners_hold_nothing"

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def free_some(self, data, owner) -> None:
        blocks = self.pick(data, "device", lambda _: True)
        self.aux.free(owner, blocks)
        for i in blocks:
            self.model["device"][i].owners.discard(owner)
            if not self.model["device"][i].free:
                self.end_if_unheld(self.model["device"][i])

    @rule(data=st.data(), tier=st.sampled_from(("device", "host")))
    def evict(self, data, tier) -> None:
        blocks = self.pick(data, tier, lambda b: not b.owners and b.still)
        self.aux.evict(blocks, tier)
        for i in blocks:
            self.model[tier][i].life, self.model[tier][i].free = Life(), True

    # ------------------------------------------------------------ steps

    @rule(data=st.data())
    def begin_step(self, data) -> None:
        held = [i for i, b in enumerate(self.model["device"]) if b.owners and b.still]
        places = [(i, o) for i in held for o in range(self.block_tokens)]
        chosen = data.draw(st.lists(st.sampled_from(places), max_size=6, unique=True)) if places else []
        if held and data.draw(st.booleans()):  # a whole block, as a prefill does
            block = data.draw(st.sampled_from(held))
            chosen = [(block, o) for o in range(self.block_tokens)]
        tokens: list[tuple[int, int] | None] = list(chosen)
        for at in data.draw(st.lists(st.integers(0, len(tokens)), max_size=2)):
            tokens.insert(at, None)
        slots = [-1 if t is None else t[0] * self.block_tokens + t[1] for t in tokens]
        real = self.aux.begin_step(np.array(slots, dtype=np.int64))
        for earlier in self.steps:
            earlier.superseded = [s or t in chosen for s, t in zip(earlier.superseded, earlier.tokens, strict=True)]
        lives = [None if t is None else self.model["device"][t[0]].life for t in tokens]
        step = ModelStep(real, tokens, lives, [False] * len(tokens))
        for i, o in chosen:
            for spec in self.specs:
                self.model["device"][i].life.rows.pop((spec.name, o), None)
        for i in {i for i, _ in chosen}:
            self.model["device"][i].steps += 1
        for spec in self.specs:
            if spec.name == "routing" or data.draw(st.booleans()):
                self.serial += 1
                rows = canary_rows(spec, [(self.serial, n, t) for n, t in enumerate(tokens)])
                real.write(spec.name, rows)
                step.rows[spec.name] = [row.tobytes() for row in rows]
                rows[...] = 0  # the caller may use its memory again
        self.steps.append(step)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), how=st.sampled_from(("commit", "keep", "abort")))
    def end_step(self, data, how) -> None:
        step = self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1)))
        keep = [True] * len(step.tokens)
        if how == "abort":
            step.real.abort()
        elif how == "keep":
            keep = data.draw(st.lists(st.booleans(), min_size=len(keep), max_size=len(keep)))
            step.real.commit(np.array(keep, dtype=bool))
        else:
            step.real.commit()
        for i in {t[0] for t in step.tokens if t}:
            self.model["device"][i].steps -= 1
        if how == "abort":
            return
        for n, token in enumerate(step.tokens):
            if token is None or not keep[n] or step.superseded[n]:
                continue
            if self.model["device"][token[0]].life is step.lives[n]:
                for name, rows in step.rows.items():
                    step.lives[n].rows[name, token[1]] = rows[n]

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def prefill(self, data, owner) -> None:
        """A block of a new owner with all of its rows, in one go: what can be stored."""
        for i in self.pick(data, "device", lambda b: not b.owners and b.still, 1):
            self.aux.allocate([i], owner)
            block = self.model["device"][i]
            block.life, block.owners, block.free = Life(), {owner}, False
            with self.aux.step(range(i * self.block_tokens, (i + 1) * self.block_tokens)) as step:
                for spec in self.specs:
                    self.serial += 1
                    rows = canary_rows(spec, [(self.serial, o) for o in range(self.block_tokens)])
                    step.write(spec.name, rows)
                    block.life.rows |= {(spec.name, o): row.tobytes() for o, row in enumerate(rows)}

    # ------------------------------------------------------------ moves

    @rule(data=st.data(), kind=st.sampled_from(("out", "in", "copy")), owner=st.sampled_from((None, *OWNERS)))
    def begin_move(self, data, kind, owner) -> None:
        tiers = {"out": ("device", "host"), "in": ("host", "device"), "copy": ("device", "device")}[kind]
        quiet = lambda b: not b.arriving and not b.steps and not b.free  # noqa: E731
        sources = self.pick(data, tiers[0], quiet)
        if kind == "copy":
            room = lambda b: b.still and not b.steps and (not b.owners or not b.life.rows)  # noqa: E731
        else:
            room = lambda b: b.still and not b.steps and not b.owners  # noqa: E731
        targets = self.pick(data, tiers[1], room)
        if tiers[0] == tiers[1]:
            targets = [t for t in targets if t not in sources]
        pairs = list(zip(sources, targets, strict=False))
        if not pairs:
            return
        if kind != "copy" and owner is not None and not all(owner in self.model[tiers[0]][s].owners for s, _ in pairs):
            owner = None
        begin = {"out": self.aux.begin_swap_out, "in": self.aux.begin_swap_in}.get(kind)
        real = begin(pairs, owner) if begin else self.aux.begin_copy(pairs)
        for s, t in pairs:
            self.model[tiers[0]][s].departures += 1
            block = self.model[tiers[1]][t]
            block.arriving = True
            if not block.owners:
                block.life = Life()
        lives = [(self.model[tiers[0]][s].life, self.model[tiers[1]][t].life) for s, t in pairs]
        followers = [
            {o for o in self.model[tiers[0]][s].owners if owner in (None, o)} if kind != "copy" else set()
            for s, _ in pairs
        ]
        self.moves.append(ModelMove(real, tiers, pairs, lives, followers))

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), commit=st.booleans())
    def end_move(self, data, commit) -> None:
        move = self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1)))
        (move.real.commit if commit else move.real.abort)()
        for (s, t), (source_life, target_life), followers in zip(move.pairs, move.lives, move.followers, strict=True):
            source, target = self.model[move.tiers[0]][s], self.model[move.tiers[1]][t]
            if commit:
                if source.life is source_life and target.life is target_life:
                    target.life.rows = dict(source_life.rows)
                going = source.owners & followers
                source.owners -= going
                target.owners |= going
            source.departures -= 1
            target.arriving = False
            self.end_if_unheld(source)
            if not target.owners:
                target.free = not commit
                if not commit:
                    target.life = Life()
            else:
                target.free = False

    @precondition(lambda self: any(not b.still for b in self.model["device"]))
    @rule(data=st.data())
    def a_block_in_motion_cannot_be_freed_or_written(self, data) -> None:
        (block,) = self.pick(data, "device", lambda b: not b.still, 1)
        for attempt in (
            lambda: self.aux.allocate([block], "a"),
            lambda: self.aux.evict([block]),
            lambda: self.aux.begin_step([block * self.block_tokens]),
        ):
            with pytest.raises(BlockStateError):
                attempt()

    # ------------------------------------------------------------ the store

    def key(self, n: int) -> BlockKey:
        return self.aux.keys.key(None, [n])

    def life(self, block: int) -> dict[str, object]:
        """How a call says which life of the block it means."""
        return {"generations": self.aux.generations([block])}

    def forget_stored(self, key: BlockKey) -> None:
        del self.stored[key], self.origins[key]
        self.keys[self.version].remove(key)

    @rule(data=st.data(), n=st.integers(0, 5), fail=st.booleans())
    def persist(self, data, n, fail) -> None:
        blocks = self.pick(data, "device", lambda b: not b.arriving and not b.steps and not b.free, 1)
        key = self.key(n)
        if not blocks or key in self.stored:
            return
        self.store.fail_put = fail
        rows = dict(self.model["device"][blocks[0]].life.rows)
        complete = all(("routing", o) in rows for o in range(self.block_tokens))
        if fail and complete:
            with pytest.raises(StorageError):
                self.aux.persist({key: blocks[0]}, **self.life(blocks[0]))
        else:
            done = self.aux.persist({key: blocks[0]}, **self.life(blocks[0]))
            assert done == {key: self.aux.origins(blocks)[0] if complete else 0}
            if complete:
                self.stored[key], self.origins[key] = rows, done[key]
                self.keys[self.version].append(key)
        self.store.fail_put = False

    @rule(data=st.data(), fault=st.sampled_from((None, None, "fail", "flip", "reset", "free")))
    def restore(self, data, fault) -> None:
        known = [k for keys in self.keys.values() for k in keys]
        key = data.draw(st.sampled_from([*known, self.key(9)]))
        blocks = self.pick(data, "device", lambda b: b.still and not b.steps and (not b.owners or not b.life.rows), 1)
        if not blocks:
            return
        block = self.model["device"][blocks[0]]
        current = key in self.keys[self.version] or key not in known
        if current and not block.owners:
            block.life, block.free = Life(), True
        if fault == "fail" and current:
            self.store.fail_get = True
            with pytest.raises(StorageError):
                self.aux.restore({key: blocks[0]}, **self.life(blocks[0]))
            self.store.fail_get = False
            return
        if fault == "flip":
            self.store.flip_next = data.draw(st.integers(0, 10**6))
        elif fault == "reset":
            self.store.during_get = self.reset
        elif fault == "free":
            self.store.during_get = lambda: self.free("a", again=False)
        # A key of an older namespace is refused without asking the store.
        block.arriving = current
        done = self.aux.restore({key: blocks[0]}, **self.life(blocks[0]))
        block.arriving = False
        asked = current
        self.store.during_get, self.store.flip_next = None, None
        expected = asked and key in self.stored and fault not in ("flip", "reset")
        assert done == {key: expected}
        if expected:
            block.life.rows = dict(self.stored[key])
            assert self.aux.origins(blocks) == [self.origins[key]]
            if not block.owners:
                block.free = False
        elif asked and not block.owners:
            block.life, block.free = Life(), True
        if fault == "flip" and asked and key in self.stored:
            self.forget_stored(key)  # quarantined

    # ------------------------------------------------------------ the store in the background

    def begun(self, job: ModelJob | None) -> None:
        if job is not None and job.real.phase is not Phase.LANDED:
            self.jobs.append(job)
        self.gate.settle(j.real for j in self.jobs)

    @rule(data=st.data(), n=st.integers(0, 5))
    def begin_persist(self, data, n) -> None:
        blocks = self.pick(data, "device", lambda b: not b.arriving and not b.steps and not b.free, 1)
        if not blocks:
            return
        block, key = self.model["device"][blocks[0]], self.key(n)
        rows = dict(block.life.rows)
        real = self.aux.begin_persist({key: blocks[0]}, **self.life(blocks[0]))
        if not all(("routing", o) in rows for o in range(self.block_tokens)):
            assert real.result() == {key: 0}
        elif len(self.jobs) == JOBS_MAX:
            assert real is None, "a job too many was taken"
        else:
            block.departures += 1
            origin = self.aux.origins(blocks)[0]
            self.begun(ModelJob(real, key, self.version, blocks[0], block.life, rows, restores=False, origin=origin))

    @rule(data=st.data())
    def begin_restore(self, data) -> None:
        known = [k for keys in self.keys.values() for k in keys]
        key = data.draw(st.sampled_from([*known, self.key(9)]))
        blocks = self.pick(data, "device", lambda b: b.still and not b.steps and (not b.owners or not b.life.rows), 1)
        if not blocks:
            return
        block = self.model["device"][blocks[0]]
        real = self.aux.begin_restore({key: blocks[0]}, **self.life(blocks[0]))
        if key in known and key not in self.keys[self.version]:
            assert real.result() == {key: False}, "a key of an older namespace is refused without asking the store"
        elif len(self.jobs) == JOBS_MAX:
            assert real is None, "a job too many was taken"
        else:
            block.arriving = True
            if not block.owners:
                block.life, block.free = Life(), True
            self.begun(ModelJob(real, key, self.version, blocks[0], block.life, None, restores=True))

    @precondition(lambda self: self.gate.waiting)
    @rule(fail=st.booleans())
    def let_the_store_go_on(self, fail) -> None:
        """The store does its part of the earliest job; nothing has landed yet."""
        (job,) = (j for j in self.jobs if j.real.phase is Phase.CARRYING)
        self.store.fail_put = self.store.fail_get = job.failed = fail
        self.gate.let_go()
        until(lambda: job.real.phase is Phase.CARRIED, "the store's answer is lost")
        self.store.fail_put = self.store.fail_get = False
        if job.restores:
            job.rows = None if fail else self.stored.get(job.key)
        elif not fail and self.stored.setdefault(job.key, job.rows) is job.rows:
            self.keys[job.version].append(job.key)
            self.origins[job.key] = job.origin
        elif not fail:
            job.origin = self.origins[job.key]
        self.gate.settle(j.real for j in self.jobs)

    @rule()
    def poll(self) -> None:
        over = [job for job in self.jobs if job.real.phase is Phase.CARRIED]
        assert self.aux.poll() == [job.real for job in over]
        for job in over:
            self.land(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        before = job.real.phase
        self.jobs_cancelled += not job.real.cancelled
        job.real.cancel()
        job.real.cancel()
        if before is Phase.CARRYING:  # the store still reads or fills the block
            assert job.real.phase is Phase.CARRYING
        else:
            assert job.real.phase is Phase.LANDED
            self.land(job)
        self.gate.settle(j.real for j in self.jobs)

    def land(self, job: ModelJob) -> None:
        """What the landing of a job means; and what it says must be that."""
        self.jobs.remove(job)
        block = self.model["device"][job.block]
        if not job.restores:
            block.departures -= 1
            self.end_if_unheld(block)
        else:
            block.arriving = False
            arrived = job.rows is not None and not job.real.cancelled and block.life is job.life
            if arrived:
                block.life.rows = dict(job.rows)
            if not block.owners:
                block.free = not arrived
                block.life = block.life if arrived else Life()
        if job.failed:
            with pytest.raises(StorageError, match="on purpose"):
                job.real.result()
        elif job.restores:
            assert job.real.result() == {job.key: arrived}
        elif not job.real.cancelled:
            assert job.real.result() == {job.key: job.origin}

    @invariant()
    def every_job_is_counted_once(self) -> None:
        counters = self.aux.counters
        in_flight = len(self.jobs)
        assert self.aux.in_flight == in_flight + len(self.steps) + len(self.moves)
        assert counters.jobs_begun == counters.jobs_landed + in_flight
        assert counters.jobs_cancelled == self.jobs_cancelled - sum(job.real.cancelled for job in self.jobs)

    @rule()
    def reset(self) -> None:
        self.version += 1
        self.keys[self.version] = []
        self.aux.reset(weights_version=self.version)
        for tier in self.model.values():
            for block in tier:
                block.life = Life()
                if not block.owners and block.still:
                    block.free = True

    # ------------------------------------------------------------ claims

    @invariant()
    def a_row_read_is_the_row_written_or_missing(self) -> None:
        for tier, blocks in self.model.items():
            for spec in self.specs:
                rows = self.aux.read(spec.name, range(len(blocks)), tier=tier)
                for n, (row, valid) in enumerate(zip(rows.values, rows.valid, strict=True)):
                    i, offset = divmod(n, self.block_tokens)
                    block = blocks[i]
                    expected = None if block.arriving else block.life.rows.get((spec.name, offset))
                    found = row.tobytes() if valid else None
                    assert found == expected, f"{tier} block {i} {spec.name} row {offset}"
                    assert valid or set(row.tobytes()) == {0xFF}

    @invariant()
    def reference_counts_equal_leases(self) -> None:
        for tier, blocks in self.model.items():
            for i, block in enumerate(blocks):
                jobs = [j for j in self.jobs if tier == "device" and j.block == i]
                assert self.aux.reference_counts([i], tier) == [len(block.owners) + len(jobs)]
                for owner in OWNERS:
                    assert self.aux.holds(owner, i, tier) == (owner in block.owners)

    @invariant()
    def one_origin_one_content(self) -> None:
        """Blocks of one origin hold rows of one computation: where both have a row, it is the same."""
        seen: dict[tuple[int, str, int], bytes] = {}
        for tier, blocks in self.model.items():
            for origin, block in zip(self.aux.origins(range(len(blocks)), tier), blocks, strict=True):
                for place, row in ({} if block.arriving else block.life.rows).items():
                    assert origin, "rows of no origin"
                    assert seen.setdefault((origin, *place), row) == row
        for key, rows in self.stored.items():
            for place, row in rows.items():
                assert seen.setdefault((self.origins[key], *place), row) == row

    @invariant()
    def no_block_is_free_and_owned(self) -> None:
        self.aux.assert_consistent()

    @invariant()
    def bytes_used_plus_free_equal_capacity(self) -> None:
        for tier, blocks in self.model.items():
            states = {state: self.aux.blocks_in(state, tier) for state in State}
            assert sum(states.values()) == len(blocks)
            assert states[State.FREE] == sum(b.free and b.still for b in blocks)
            assert states[State.HELD] == sum(bool(b.owners) and b.still for b in blocks)

    def quiescent_means_nothing_in_flight(self) -> None:
        assert self.aux.in_flight == 0


class TwoWordsMachine(AuxBlocksMachine):
    block_tokens = 70  # validity takes two words


class SharedMemoryMachine(AuxBlocksMachine):
    memory = "shared"


TestAuxBlocksHeap = AuxBlocksMachine.TestCase
TestAuxBlocksTwoWords = TwoWordsMachine.TestCase
TestAuxBlocksShared = SharedMemoryMachine.TestCase

"""The life of auxiliary rows against a model that is two dictionaries and knows nothing of the code.

Method: rows carry a canary (who wrote them, for which life of which block). After every rule, every row of every tier
is read and must be exactly the one the model expects, or be missing exactly where the model says so.
"""

from __future__ import annotations

import pytest
from aux_model import JOBS_MAX, OWNERS, AuxModel, Life, ModelJob
from gate import until
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from origins_of import origins_of

from cache_manager.errors import BlockStateError, StorageError
from cache_manager.jobs import Phase
from cache_manager.keys import BlockKey
from cache_manager.lifecycle import State


class AuxBlocksMachine(AuxModel):
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
            assert done == {key: origins_of(self.aux, blocks)[0] if complete else 0}
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
            assert origins_of(self.aux, blocks) == [self.origins[key]]
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
            origin = origins_of(self.aux, blocks)[0]
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
                assert self.aux.holders(tier)[i] == len(block.owners) + len(jobs)
                for owner in OWNERS:
                    assert self.aux.holds(owner, i, tier) == (owner in block.owners)

    @invariant()
    def one_origin_one_content(self) -> None:
        """Blocks of one origin hold rows of one computation: where both have a row, it is the same."""
        seen: dict[tuple[int, str, int], bytes] = {}
        for tier, blocks in self.model.items():
            for origin, block in zip(origins_of(self.aux, range(len(blocks)), tier), blocks, strict=True):
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

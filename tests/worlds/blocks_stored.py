"""What becomes of blocks that are persisted and restored: the rules of the machine of blocks that ask its store."""

from __future__ import annotations

from blocks_model import BLOCK, JOBS_MAX, TOKENS, BlocksModel, ModelJob
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from waiting import until

from cache_manager.jobs import Phase


class BlocksStored(BlocksModel):
    """A job carries its bytes when the store is let go on, and lands when it is polled."""

    @rule(n=st.integers(0, 3), block=BLOCK, old=st.booleans())
    def persist(self, n, block, old) -> None:
        life = self.known[block] - old
        job = self.engine.begin_persist({self.key(n): block}, [life])
        rows = self.lives["device"][block].rows
        if job is None:
            assert len(self.jobs) == JOBS_MAX
        elif not old and len(rows) == TOKENS:
            origin = self.leave("device", block)
            self.jobs.append(ModelJob(job, self.key(n), block, None, dict(rows), origin))
        else:
            assert job.result() == {self.key(n): 0}, "nothing_answers_true_for_what_was_not_stored"

    @rule(n=st.integers(0, 3), block=BLOCK)
    def restore(self, n, block) -> None:
        job = self.engine.begin_restore({self.key(n): block}, [self.known[block]])
        if job is None:
            assert len(self.jobs) == JOBS_MAX
        else:
            self.jobs.append(ModelJob(job, self.key(n), block, self.lives["device"][block]))

    def end_jobs(self) -> None:
        """The store does what it is asked to do, and all of it lands."""
        self.gate.settle(job.real for job in self.jobs)
        while self.gate.waiting:
            self.let_the_store_go_on()
        self.poll()

    @precondition(lambda self: self.gate.waiting)
    @rule()
    def let_the_store_go_on(self) -> None:
        job = next(job for job in self.jobs if job.real.phase is Phase.CARRYING)
        self.gate.let_go()
        until(lambda: job.real.phase is Phase.CARRIED, what="the store does not answer")
        if job.life is None:
            self.stored.setdefault(job.key, (job.origin, job.rows))
        else:
            job.rows = self.stored.get(job.key)
        self.gate.settle(job.real for job in self.jobs)

    @rule()
    def poll(self) -> None:
        carried = [job for job in self.jobs if job.real.phase is Phase.CARRIED]
        assert self.engine.jobs.poll() == [job.real for job in carried]
        for job in carried:
            self.jobs.remove(job)
            (answer,) = job.real.result().values()
            if job.life is None:
                assert answer == self.stored[job.key][0], "its record, or another one, is stored"
                continue
            now = self.lives["device"][job.block]
            busy = any(self.filled_by(step, job.block) for step in self.steps) or job.block in self.filling
            untouched = now is job.life and not now.rows and not now.computed and not busy
            landed = job.rows is not None and untouched and job.block in self.given["device"]
            assert answer == landed, "a restore lands in what is as it was"
            if landed:
                now.rows, now.computed = dict(job.rows[1]), True

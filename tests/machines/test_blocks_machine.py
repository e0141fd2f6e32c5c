"""Blocks that an engine owns, against a model: one dictionary for each life. Devices, stores, moves and feeds are late.

Method: rows carry a canary. An engine gives blocks out, writes, copies, stores and resets as it likes, correctly or
not, also while the bytes of a move are copied. A device writes the rows of in-place steps at any time, in the order of
the steps. After every rule every block is read for the life that the scheduler knows, and has exactly the rows of the
model; and no more rows are ever found under an origin than those that were handed out under it.
"""

from __future__ import annotations

import numpy as np
from budget import examples
from canary import canary_rows
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cache_manager.feed import BlockFeed
from cache_manager.regions.view import RegionView
from tests.machines.blocks_model import (
    BLOCK,
    DEVICE,
    END,
    MEANWHILE,
    SIZES,
    SOME,
    SPEC,
    STEPS_MAX,
    TIERS,
    TOKENS,
    slots_of,
)
from tests.machines.blocks_stored import BlocksStored

ROW = "a_row_read_is_the_row_written_or_missing"


class BlocksMachine(BlocksStored):
    def teardown(self) -> None:
        while self.steps:
            self.end(self.steps[0], commit=False)
        while self.gate.waiting:
            self.let_the_store_go_on()
        self.poll()
        assert self.engine.in_flight == 0, "quiescent_means_nothing_in_flight"
        super().teardown()

    # ---------------------------------------------------------------- lives

    @initialize(blocks=SOME)
    def start(self, blocks) -> None:
        self.renew(blocks, bad=False)

    @rule(blocks=SOME, bad=st.booleans())
    def renew(self, blocks, bad) -> None:
        self.feed.renew(blocks)
        self.deliver()
        self.learn(blocks)
        assert self.filling or not self.engine.read("routing", blocks).valid.any(), ROW
        if bad:  # invalid ids, and generations that are not larger
            assert self.engine.renew([DEVICE, -1, blocks[0]], [9, 9, self.known[blocks[0]]]).tolist() == [0, 0, 0]

    @rule(blocks=SOME)
    def a_batch_is_lost(self, blocks) -> None:
        self.feed.renew(blocks)
        self.feed.take()
        self.lost = True

    @rule(blocks=SOME)
    def a_scheduler_starts_anew(self, blocks) -> None:
        """Beside a living worker: generations begin anew, and older ones no longer count."""
        self.feed, self.lost = BlockFeed(blocks=DEVICE), False
        self.known = [0] * DEVICE
        self.given["device"].clear()
        self.forget_all()
        self.renew(blocks, bad=False)

    @rule()
    def a_batch_comes_twice(self) -> None:
        before = self.engine.counters.feed_repetitions
        self.engine.apply(self.last)
        assert self.engine.counters.feed_repetitions == before + bool(self.last)

    @rule(further=st.booleans())
    def reset(self, further) -> None:
        self.version += further
        self.feed.reset(self.version)
        self.deliver()
        self.forget_all()

    @rule(blocks=SOME)
    def forget_blocks(self, blocks) -> None:
        """Their KV stays, and with it that nothing is restored beside it."""
        self.engine.forget([*blocks, -1])
        for block in blocks:
            computed = self.lives["device"][block].computed
            self.forget("device", block)
            self.lives["device"][block].computed = computed

    @rule(blocks=SOME)
    def origins_are_handed_out(self, blocks) -> None:
        """To be kept beside KV, whatever becomes of the blocks."""
        assert self.engine.exchange.origins(blocks) == [self.leave("device", block) for block in blocks]

    # ---------------------------------------------------------------- steps

    @rule(data=st.data(), in_place=st.booleans(), at_once=st.booleans(), whole=st.sampled_from((True,) * 5 + (False,)))
    def begin_step(self, data, in_place, at_once, whole) -> None:
        """``whole``: the slots are integers; slots of another type are refused, and so is one step too many."""
        slots = data.draw(st.lists(st.integers(-2, END), max_size=6))
        if data.draw(st.booleans()):  # a whole block, as a prefill does, in any token order
            slots = data.draw(st.permutations(slots_of(data.draw(BLOCK))))
        step = self.begin(slots, in_place=in_place, whole=whole)
        if step is not None and at_once and not in_place:
            self.write(step)

    @rule(data=st.data(), whole=st.booleans(), some=st.booleans())
    def a_step_at_once(self, data, whole, some) -> None:
        """A step in one call, which has its own fast path when no other step is open. It covers a whole block or some
        slots; all of the slots are kept, or only some."""
        at = slots_of(data.draw(BLOCK)) if whole else data.draw(st.lists(st.integers(-1, END - 1), max_size=4))
        kept = data.draw(st.lists(st.booleans(), min_size=len(at), max_size=len(at))) if some else [True] * len(at)
        self.at_once(at, kept, some=some)

    @rule(
        blocks=SOME,
        offsets=st.permutations(range(TOKENS)),
        renewed=st.booleans(),
        what=st.none() | st.sampled_from(MEANWHILE),
        which=BLOCK,
    )
    def steps_at_once_follow_each_other(self, blocks, offsets, renewed, what, which) -> None:
        """One row in each of the same blocks, as decode has them: a step like the one before it is looked at less.
        Something becomes of one of these blocks, or of another one, between the second step and the third one."""
        self.room(STEPS_MAX)
        if renewed:
            self.renew(blocks, bad=False)
        for n, offset in enumerate(offsets):
            if n == 2 and what:
                self.something_becomes_of(which, what)
            self.at_once([block * TOKENS + offset for block in blocks], [True] * len(blocks))

    def at_once(self, at, kept, *, some=False) -> None:
        self.serial += 1
        rows = canary_rows(SPEC, [(self.serial, n) for n in range(len(at))])
        mask = np.array(kept, np.bool_) if some else None
        step = self.begin(at, call=lambda slots: self.engine.write_step(slots, {"routing": rows}, mask))
        if step is not None:
            step.rows, step.written = {slot: row.tobytes() for slot, row in zip(at, rows, strict=True)}, True
            self.land(step, step.real, {slot for slot, wanted in zip(at, kept, strict=True) if wanted})

    @rule(block=BLOCK, twice=st.booleans(), renewed=st.booleans(), ended=st.booleans())
    def a_step_follows_a_late_device(self, block, twice, renewed, ended) -> None:
        """Two steps over the same block, which may not have been given out before the device was sent, or not since.
        The device may write, and its step may have ``ended``, after the other step's rows were copied and before they
        are committed."""
        self.room(2)
        late = self.begin(slots_of(block) + slots_of(block)[:1] * twice, in_place=True)
        if renewed:
            self.renew([block], bad=False)
        step = self.begin(slots_of(block))
        self.write(step)
        if ended:
            self.end(late, commit=False)
        self.end(step, commit=True)

    @rule(block=BLOCK, commit=st.booleans(), second=st.sampled_from(("fill", "twice", "refuse")))
    def a_pass_is_followed_by_another(self, block, commit, second) -> None:
        """Two passes in one life: rows handed out after the first are not those that the second makes, or loses."""
        self.room()
        step = self.begin(slots_of(block))
        self.write(step)
        self.end(step, commit=commit)
        self.origins_are_handed_out([block])
        if second == "fill":
            self.fill(block)
        else:
            self.begin(slots_of(block)[:2] + slots_of(block)[:1] * (second == "twice"), whole=second == "twice")

    @rule(block=BLOCK, what=st.sampled_from(MEANWHILE))
    def something_becomes_of_a_block_in_a_pass(self, block, what) -> None:
        """Between what is written and its commit."""
        self.room(2)
        step = self.begin(slots_of(block))
        self.write(step)
        self.something_becomes_of(block, what)
        if step in self.steps:
            self.end(step, commit=True)

    @precondition(lambda self: any(not s.written for s in self.steps))
    @rule(data=st.data())
    def write_step(self, data) -> None:
        self.write(data.draw(st.sampled_from([s for s in self.steps if not s.written])))

    @precondition(lambda self: self.device)
    @rule()
    def a_device_gets_to_it(self) -> None:
        self.the_device_writes()

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), commit=st.booleans())
    def end_step(self, data, commit) -> None:
        self.end(data.draw(st.sampled_from(self.steps)), commit=commit)

    # ---------------------------------------------------------------- moves

    @rule(
        data=st.data(),
        kind=st.sampled_from(tuple(TIERS)),
        fed=st.booleans(),
        meanwhile=st.none() | st.sampled_from(MEANWHILE),
        full=st.booleans(),
    )
    def move(self, data, kind, fed, meanwhile, full) -> None:
        """``meanwhile`` a source or target changes, after bytes have been copied; a source is ``full``."""
        source, target = TIERS[kind]
        targets = data.draw(st.lists(st.integers(0, SIZES[target] - 1), min_size=1, max_size=2, unique=True))
        pairs = [(data.draw(st.integers(0, SIZES[source] - 1)), t) for t in targets]
        rows = data.draw(st.none() | st.lists(st.integers(0, 4), min_size=len(pairs), max_size=len(pairs)))
        if data.draw(st.sampled_from((False, False, True))):
            pairs[0] = (SIZES[source], pairs[0][1])
        bad = any(s == SIZES[source] for s, _ in pairs) or (kind == "copy" and {s for s, _ in pairs} & set(targets))
        if bad:
            meanwhile = None
        if full and source == "device":
            self.renew([min(pairs[0][0], DEVICE - 1)], bad=False)
            self.fill(min(pairs[0][0], DEVICE - 1))
        blocks = [s for s, _ in pairs if source == "device"] + [t for t in targets if target == "device"]
        fed = fed and kind == "copy"
        self.moved(kind, pairs, rows, data.draw(st.sampled_from(blocks)), meanwhile, bad=bad, fed=fed)

    @rule(kind=st.sampled_from(tuple(TIERS)), ends=st.permutations(range(DEVICE)), meanwhile=st.sampled_from(MEANWHILE))
    def something_becomes_of_a_block_in_motion(self, kind, ends, meanwhile) -> None:
        """Of the target if it is on the device, else of the source, which is full."""
        s, t = ends[0] % SIZES[TIERS[kind][0]], ends[1] % SIZES[TIERS[kind][1]]
        self.room(3)
        self.renew(ends[:2], bad=False)
        self.fill(ends[0])
        if kind == "swap_in":
            self.moved("swap_out", [(ends[0], s)], None, ends[0], None, bad=False, fed=False)
        self.moved(kind, [(s, t)], None, s if kind == "swap_out" else t, meanwhile, bad=False, fed=False)

    def moved(self, kind, pairs, rows, one, meanwhile, *, bad, fed) -> None:
        """``pairs`` are moved, and ``meanwhile`` happens to the device block ``one``."""
        source, target = TIERS[kind]
        targets = [t for _, t in pairs]
        to, before = (self.feed if fed else self.engine), self.engine.counters.bad_moves_dropped
        if bad:
            getattr(to, kind)(*((pairs, rows) if kind == "copy" else (pairs,)))
            if fed:
                self.deliver()
            assert self.engine.counters.bad_moves_dropped == before + len(pairs)
            for t in targets:  # the engine has copied the KV all the same
                self.forget(target, t)
                self.lives[target][t].computed = target == "device"
                if target == "host":
                    self.given["host"].add(t)
            return
        if fed:
            self.find_gap()
        took, dropped = {}, 0
        for n, (s, t) in enumerate(pairs):
            written = target == "device" and any(self.filled_by(step, t) for step in self.steps)
            self.forget(target, t)
            self.lives[target][t].computed = target == "device"  # the engine has copied the KV, rows or not
            if target == "host":
                self.given["host"].add(t)
            if s in self.given[source] and t in self.given[target] and not written:
                limit = TOKENS if rows is None or kind != "copy" else rows[n]
                came = {o: row for o, row in self.lives[source][s].rows.items() if o < limit}
                took[t] = s, self.lives[source][s], dict(self.lives[source][s].rows), came, self.lives[target][t]
            else:
                dropped += 1
        in_motion = set(took) if target == "device" else set()
        in_a_pass = {slot // TOKENS for step in self.steps for slot in step.reach} if source == "device" else set()

        def happens() -> None:
            self.filling = in_motion
            for s, life, *_ in took.values():
                life.computed |= bool(self.leave(source, s))  # a block of no origin stays open to rows
            if meanwhile:
                self.something_becomes_of(one, meanwhile)
            self.filling = set()

        self.meanwhile = happens
        getattr(to, kind)(*((pairs, rows) if kind == "copy" else (pairs,)))
        if fed:
            self.deliver()
        self.meanwhile = None
        assert self.engine.counters.bad_moves_dropped == before + dropped
        for t, (s, life, had, came, begun) in took.items():
            if self.lives[target][t] is not begun:
                continue  # its life has changed: nothing has arrived
            now = self.lives[source][s]
            changed = now is not life or any(now.rows.get(o) != row for o, row in had.items())
            if not self.engine.read("routing", [t], tier=target).valid.any():
                changed |= s in in_a_pass  # which has ended meanwhile
            # Nothing of a source that has changed arrives.
            self.lives[target][t].rows = {} if changed else came
            self.lives[target][t].computed = True

    def something_becomes_of(self, block: int, what: str) -> None:
        if what == "renew":
            self.renew([block], bad=False)
        elif what == "reset":
            self.reset(further=False)
        elif what == "forget":
            self.forget_blocks([block])
        elif what == "leave":
            self.origins_are_handed_out([block])
        elif what == "fill":
            self.fill(block)
        elif what == "restore":
            self.restore(0, block)
        else:
            self.room()
            step = self.begin(slots_of(block), in_place=what == "device", whole=what != "refuse")
            if what == "abort":
                self.end(step, commit=False)

    # ---------------------------------------------------------------- the store

    @rule(
        n=st.integers(0, 3),
        source=BLOCK,
        block=BLOCK,
        first=st.none() | st.sampled_from(("abort", "refuse")),
        meanwhile=st.none() | st.sampled_from(MEANWHILE),
    )
    def a_restore_comes_late(self, n, source, block, first, meanwhile) -> None:
        """A pass that leaves no row may have written the block ``first``; the block changes while the store is read."""
        self.renew([source], bad=False)
        self.fill(source)
        self.end_jobs()
        self.persist(n, source, old=False)
        self.end_jobs()
        self.renew([block], bad=False)
        if first:
            self.something_becomes_of(block, first)
        self.restore(n, block)
        if meanwhile == "restore":
            self.restore(n, block)
        elif meanwhile:
            self.something_becomes_of(block, meanwhile)
        self.end_jobs()

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def no_late_device_write_lands_among_valid_rows(self) -> None:
        """And any other row is the one written for the life that the scheduler knows, or missing."""
        lives = self.feed.generations
        for tier, blocks in SIZES.items():
            for b in range(blocks):
                said = {"generations": [int(lives[b])]} if tier == "device" else {}
                read = self.engine.read("routing", [b], tier=tier, **said)
                known = tier == "host" or lives[b] == self.known[b]
                expected = self.lives[tier][b].rows if known else {}
                found = {o: read.values[o].tobytes() for o in range(TOKENS) if read.valid[o]}
                assert found == expected, ROW

    @invariant()
    def an_old_generation_never_becomes_valid(self) -> None:
        for b in range(DEVICE):
            read = self.engine.read("routing", [b], generations=[self.known[b] - 1])
            assert not read.valid.any()
        assert self.engine.generations(range(DEVICE)).tolist() == self.known

    @invariant()
    def what_has_left_under_an_origin_is_all_that_there_is_under_it(self) -> None:
        for tier in SIZES:
            for block, origin in enumerate(self.origins(tier)):
                rows = self.lives[tier][block].rows
                assert origin or not rows, "rows of no origin"
                assert rows.items() <= self.left.get(origin, rows).items(), "two computations under one origin"

    @invariant()
    def the_books_are_in_order(self) -> None:
        self.gate.settle(job.real for job in self.jobs)
        self.engine.assert_consistent()
        assert self.engine.in_flight == len(self.steps) + len(self.jobs)
        assert [step.real for step in self.steps] == self.engine.steps


TestBlocksHeap = BlocksMachine.TestCase


class BlocksShared(BlocksMachine):
    """In SharedMemory, which a view reads beside the scheduler."""

    memory = "shared"

    def __init__(self) -> None:
        super().__init__()
        self.view = RegionView(self.engine.region("device").name)

    def teardown(self) -> None:
        self.view.close()
        super().teardown()

    @invariant()
    def a_view_reads_what_the_worker_reads(self) -> None:
        self.view.follow(self.engine.namespace.fingerprint)
        for lives in (self.feed.generations, [max(known - 1, 0) for known in self.known]):
            seen = self.view.read("routing", range(DEVICE), generations=lives)
            read = self.engine.read("routing", range(DEVICE), generations=lives)
            assert np.array_equal(seen.values, read.values), ROW
            assert np.array_equal(seen.valid, read.valid), ROW


TestBlocksShared = BlocksShared.TestCase
TestBlocksShared.settings = examples(15)

"""Threads that meet in one set of blocks, calls interrupted or made inside another call, and closing it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from amid import amid_a_call
from blocks_house import SPEC, TOKENS, House, slots
from budget import scaled
from standing_still import until_it_waits
from stopped import EVERY, is_stopped
from waiting import GIVE_UP_S

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError
from cache_manager.feed import BlockFeed
from cache_manager.keys import Namespace
from cache_manager.regions.view import RegionView
from cache_manager.spec import AuxBlockDataSpec

WIDE = AuxBlockDataSpec("routing", (1 << 12,), "uint8", TOKENS)  # a copy takes long enough to be met
CALLS = 150


# ---------------------------------------------------------------- threads


def test_moves_of_several_threads_meet() -> None:
    """Goal: the bookkeeping never raises, whichever threads meet, and no row is torn. Method: threads move, give out,
    write, forget and reset the same few blocks; a row is one number, over and over."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    engine = AuxBlocks([WIDE], blocks=8, host_blocks=4, namespace=Namespace("m", 1))
    engine.renew(range(8))
    raised: list[BaseException] = []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)

        def write() -> None:
            rows = np.full((TOKENS, *WIDE.row_shape), rng.integers(256), np.uint8)
            engine.write_step(slots(rng.integers(8)), {"routing": rows})

        calls: list[Callable[[], object]] = [
            lambda: engine.swap_out(
                np.column_stack((rng.choice(8, 3, replace=False), rng.choice(4, 3, replace=False)))
            ),
            lambda: engine.swap_in(np.column_stack((rng.choice(4, 3, replace=False), rng.choice(8, 3, replace=False)))),
            lambda: engine.copy(rng.choice(8, (2, 2), replace=False)),
            lambda: engine.renew(rng.choice(8, 2, replace=False)),
            write,
            write,
            lambda: engine.exchange.origins([rng.integers(8)]),
            lambda: engine.forget([rng.integers(8)]) if rng.random() < 0.2 else None,
            lambda: engine.reset(weights_version=1) if rng.random() < 0.05 else None,
            engine.assert_consistent,
        ]
        for _ in range(CALLS):
            try:
                calls[rng.integers(len(calls))]()
                for tier, blocks in (("device", 8), ("host", 4)):
                    read = engine.read("routing", [rng.integers(blocks)], tier=tier)
                    assert (read.values[read.valid] == read.values[read.valid][:, :1]).all(), "a torn row"
            except BaseException as error:  # noqa: BLE001 - the test fails by it
                raised.append(error)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GIVE_UP_S)
    finally:
        sys.setswitchinterval(before)
    assert Counter(map(repr, raised)) == {}
    assert not any(thread.is_alive() for thread in threads)
    engine.assert_consistent()
    engine.close()


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Threads take turns after a microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def raised_by_two(call: Callable[[], object]) -> list[BaseException]:
    """What the call raises in two threads at once."""
    barrier = threading.Barrier(2)
    raised: list[BaseException] = []

    def run() -> None:
        barrier.wait(GIVE_UP_S)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test fails by it
            raised.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP_S)
    return raised


@pytest.mark.usefixtures("often_switched")
def test_two_threads_close_one_set() -> None:
    """Goal: any thread may close a set, also where another one does. Method: two at once, many times."""
    for _ in range(100):
        assert raised_by_two(House().engine.close) == []


@pytest.mark.usefixtures("often_switched")
def test_a_job_is_handed_out_by_one_poll(house) -> None:
    """Goal: who counts what polls return counts each job once. Method: two threads poll while jobs are carried."""
    house.gate.open()
    (life,) = house.engine.renew([0])
    house.fill(0, "mine")
    polled: Counter[object] = Counter()
    jobs = []

    def polls_to_the_end() -> None:
        while house.engine.jobs:
            polled.update(house.engine.jobs.poll())

    for n in range(200):
        keys = [house.engine.keys.key(None, [n, i]) for i in range(4)]
        jobs += [house.engine.begin_persist({key: 0}, [life]) for key in keys]
        assert raised_by_two(polls_to_the_end) == []
    assert polled == Counter(jobs)


def test_a_call_inside_another_is_refused_and_one_of_another_thread_waits(house) -> None:
    """Goal: a thread never deadlocks with itself, and no call is left half done. Method: a finaliser and a signal
    handler in the middle of a call; another thread's call in the same place."""
    engine, seen = house.engine, []
    engine.renew([0, 1])
    house.fill(0, "mine")
    other = threading.Thread(target=lambda: seen.append(engine.renew([3]).tolist()), daemon=True)

    class Lost:
        def __init__(self) -> None:
            self.itself = self  # a cycle: only the collector ends it

        def __del__(self) -> None:
            handler()

    def handler(*_: object) -> None:
        with pytest.raises(BlockBusyError, match="a finaliser or a signal handler"):
            engine.renew([2])
        seen.append(engine.counters.rows_committed)

    def amid() -> None:
        gc.collect()
        signal.raise_signal(signal.SIGUSR1)
        other.start()
        assert until_it_waits(other)

    before = signal.signal(signal.SIGUSR1, handler)
    Lost()
    try:
        amid_a_call(engine, amid)
    finally:
        signal.signal(signal.SIGUSR1, before)
    other.join(GIVE_UP_S)
    assert seen == [TOKENS, TOKENS, [1]]
    assert engine.generations([2]).tolist() == [0]


JOBS = {
    "list": lambda jobs, _: list(jobs),
    "poll": lambda jobs, _: jobs.poll(),
    "wait": lambda jobs, _: jobs.wait(0),
    "cancel": lambda _, job: job.cancel(),
}


@pytest.mark.parametrize("call", JOBS.values(), ids=JOBS)
def test_a_call_to_jobs_inside_another_is_refused(house, call) -> None:
    """Goal: as above, for the mutex of jobs. Method: a signal handler amid a look at the jobs; later calls."""
    engine = house.engine
    engine.renew([0])
    house.fill(0, "mine")
    job = house.begin_persist(0)
    refused = []

    def handler(*_: object) -> None:
        with pytest.raises(BlockBusyError, match="a finaliser or a signal handler"):
            call(engine.jobs, job)
        refused.append(call)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        engine.jobs.sleep(lambda: signal.raise_signal(signal.SIGUSR1) is None, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused == [call]
    house.gate.open()
    assert job.wait(GIVE_UP_S)


@pytest.mark.parametrize("call", JOBS.values(), ids=JOBS)
def test_a_child_that_was_forked_amid_a_look_at_the_jobs_is_refused(house, call) -> None:
    """Goal: a child has its parent's mutex as it was at the fork, and waits for none of its threads. Method: another
    thread has it while the child is forked."""
    engine = house.engine
    engine.renew([0])
    house.fill(0, "mine")
    job = house.begin_persist(0)
    taken, ended = threading.Event(), threading.Event()

    def looks() -> bool:
        taken.set()
        return ended.wait(GIVE_UP_S)

    other = threading.Thread(target=engine.jobs.sleep, args=(looks, 0), daemon=True)
    other.start()
    assert taken.wait(GIVE_UP_S)
    if not (child := os.fork()):
        signal.alarm(int(GIVE_UP_S))
        try:
            call(engine.jobs, job)
        except BlockStateError as error:
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ended.set()
    other.join(GIVE_UP_S)
    house.gate.open()


# ---------------------------------------------------------------- interrupted calls


def _calls(house: House) -> dict[str, Callable[[], object]]:
    engine = house.engine
    lives = engine.renew(range(5))
    for block in range(4):
        house.fill(block, f"block {block}")
    engine.swap_out([(2, 1)])
    (record,) = engine.exchange.export({house.key: 3}, lives[3:4])
    header, payload = record.seal(), record.payload
    step = engine.begin_step(slots(1))
    step.write("routing", house.rows("new"))
    feed = BlockFeed(6)
    feed.renew([0, 1])
    feed.copy([(3, 0)])
    batch = feed.take()
    engine.persist({house.key: 3}, lives[3:4])
    return {
        "renew": lambda: engine.renew([0, 5]),
        "forget": lambda: engine.forget([0, 1]),
        "reset": lambda: engine.reset(weights_version=2),
        "step": lambda: engine.write_step(slots(0), {"routing": house.rows("new")}),
        "bad step": lambda: engine.write_step(np.array([0, 1, 1, 99]), {"routing": house.rows("new")}),
        "refused step": lambda: engine.write_step(slots(0) * 1.0, {"routing": house.rows("new")}),
        "commit": lambda: step.commit(np.array([True, False, True, True])),
        "abort": step.abort,
        "copy": lambda: engine.copy([(3, 0), (2, 1)]),
        "swap out": lambda: engine.swap_out([(3, 0)]),
        "swap in": lambda: engine.swap_in([(1, 4)]),
        "persist": lambda: engine.persist({engine.keys.key(None, [9]): 3}, lives[3:4]),
        "restore": lambda: engine.restore({house.key: 4}, lives[4:]),
        "install": lambda: engine.exchange.install(4, int(lives[4]), header, payload),
        "bind": lambda: engine.exchange.bind_origin(0, int(lives[0]), 77),
        "origins": lambda: engine.exchange.origins([0, 3]),
        "export": lambda: engine.exchange.export({house.key: 3}, lives[3:4]),
        "read": lambda: engine.read("routing", [0, 1, 2]),
        "feed": lambda: engine.apply(batch),
    }


def _names() -> list[str]:
    house = House()
    house.gate.open()
    names = list(_calls(house))
    house.close()
    return names


@pytest.mark.parametrize("name", _names())
def test_a_call_that_is_interrupted_leaves_nothing_wrong_and_nothing_taken(name: str) -> None:
    """Goal: whatever a signal handler raises in the middle of a call, the lock is free, the books are in order, and
    each readable row is one that was written. Method: each call, interrupted at each possible place."""
    at, stopped = 1, True
    while stopped:
        house = House()
        house.gate.open()
        stopped = is_stopped(_calls(house)[name], at)
        _check_what_is_left(house, f"{name}, interrupted at place {at}")
        at += EVERY
    assert at > EVERY + 1, "it was never interrupted"


@pytest.mark.parametrize("anew", [False, True])
def test_a_batch_that_is_interrupted_leaves_nothing_from_before_it(anew: bool) -> None:
    """Goal: the remaining operations of an interrupted batch are not missed. Method: one of two operations, the second
    a weight update, interrupted at each place; the scheduler, which may have been started ``anew`` before, goes on, and
    its batches are applied."""
    house, feed, at, stopped = House(), BlockFeed(6), 1, True
    while stopped:
        feed.renew(range(6))
        feed.renew([4])
        house.engine.apply(feed.take())
        house.fill(2, "before")
        house.engine.swap_out([(2, 1)])
        feed = BlockFeed(6) if anew else feed
        feed.renew([5])
        feed.reset(at)
        batch = feed.take()
        stopped = is_stopped(lambda: house.engine.apply(batch), at)  # noqa: B023
        feed.renew([4])
        house.engine.apply(feed.take())
        assert house.engine.generations([4]).tolist() == feed.generations[[4]].tolist(), f"place {at}"
        left = [
            house.engine.read("routing", range(n), tier=tier).valid.any() for tier, n in (("device", 6), ("host", 3))
        ]
        assert left == [False, False], f"interrupted at place {at}"
        at += 1
    house.close()


def test_after_a_reset_that_is_interrupted_regions_and_keys_are_of_one_namespace() -> None:
    """Goal: a view of the old weights reads no row of the new ones. Method: a reset interrupted at each place, and then
    any call."""
    house, at, stopped = House(memory="shared"), 1, True
    engine = house.engine
    while stopped:
        at += 1
        stopped = is_stopped(lambda: engine.reset(weights_version=at), at)  # noqa: B023
        engine.renew([0])
        found = {engine.region(tier).namespace for tier in ("device", "host")}
        assert found == {engine.namespace.fingerprint}, f"interrupted at place {at}"
    house.close()


def test_a_read_after_an_interrupted_call_finds_nothing() -> None:
    """Goal: rows from before a change that is half done are not handed out, though reads copy without the lock.
    Method: a reset interrupted at each place, and a read of each tier that names no generations."""
    at, stopped = 1, True
    while stopped:
        house = House()
        house.engine.renew(range(3))
        house.fill(2, "before")
        house.engine.swap_out([(2, 1)])
        stopped = is_stopped(lambda: house.engine.reset(weights_version=2), at)  # noqa: B023
        left = [house.engine.read("routing", range(3), tier=tier).valid.any() for tier in ("host", "device")]
        house.engine.generations([0])
        is_half_done = house.engine.counters.interrupted_calls > 0
        assert left == [False, False] or not is_half_done, f"interrupted at place {at}"
        house.close()
        at += 1


def _check_what_is_left(house: House, when: str) -> None:
    engine, answered = house.engine, []
    other = threading.Thread(target=lambda: answered.append(engine.generations([0])), daemon=True)
    other.start()
    other.join(GIVE_UP_S)
    assert answered, f"{when}: the lock was left taken"
    engine.assert_consistent()
    written = {row.tobytes() for who in ("new", *(f"block {b}" for b in range(4))) for row in house.rows(who)}
    for tier, blocks in (("device", 6), ("host", 3)):
        read = engine.read("routing", range(blocks), tier=tier)
        assert {row.tobytes() for row in read.values[read.valid]} <= written, when
    for job in engine.jobs:
        job.cancel()
        assert job.wait(GIVE_UP_S), f"{when}: a job is left"
    for step in engine.steps:
        step.abort()
    assert engine.in_flight == 0, when
    engine.renew([4])
    assert house.holds(4, house.fill(4, "afterwards")), when
    house.close()


# ---------------------------------------------------------------- what is dropped, and the end


def test_a_step_that_is_dropped_can_be_found_and_ended(house) -> None:
    """Goal: dropping a handle does not stop a device. Method: drop it; the fence stays until the embedder ends the
    step."""
    house.engine.renew([0])
    house.engine.begin_step([0], in_place=True)
    gc.collect()
    house.engine.renew([0])
    house.engine.write_step(slots(0), {"routing": house.rows("next")})
    assert house.valid(0) == [False, True, True, True]
    with pytest.raises(BlockStateError, match="nothing in flight"):
        house.engine.close()
    (step,) = house.engine.steps
    step.abort()
    house.fill(0, "afterwards")


CLOSED = {
    "read": lambda e: e.read("routing", [0]),
    "renew": lambda e: e.renew([0]),
    "forget": lambda e: e.forget(),
    "begin_step": lambda e: e.begin_step([0]),
    "swap_out": lambda e: e.swap_out([(0, 0)]),
    "reset": lambda e: e.reset(weights_version=2),
    "persist": lambda e: e.persist({e.keys.key(None, [1]): 0}, [1]),
    "export": lambda e: e.exchange.export({e.keys.key(None, [1]): 0}, [1]),
    "origins": lambda e: e.exchange.origins([0]),
    "complete": lambda e: e.complete([0]),
}


@pytest.mark.parametrize("call", CLOSED.values(), ids=CLOSED)
def test_after_close_every_call_says_so(house, call) -> None:
    house.engine.renew([0])
    house.engine.close()
    house.engine.close()
    with pytest.raises(BlockStateError, match="AuxBlocks: wanted one that is open, got one that was closed"):
        call(house.engine)


@pytest.mark.parametrize("memory", ["heap", "shared"])
def test_a_call_that_races_with_close_ends_well_or_says_that_it_is_closed(memory) -> None:
    """Goal: close is a state, and calls end only with the error for it. Method: threads call until they get that
    error."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    ended: list[BaseException] = []
    try:
        for n in range(scaled(20)):
            engine = AuxBlocks([SPEC], blocks=2, host_blocks=1, namespace=Namespace("m", 1), memory=memory)
            engine.renew([0, 1])
            rows = {"routing": np.ones((TOKENS, 3, 2), np.uint8)}
            calls = (
                lambda: engine.read("routing", [0, 1]),  # noqa: B023
                lambda: engine.write_step(slots(0), rows),  # noqa: B023
                lambda: engine.swap_out([(0, 0)]),  # noqa: B023
                lambda: engine.complete([0]),  # noqa: B023
                lambda: engine.begin_step([4]).abort(),  # noqa: B023
            )
            begun, over = threading.Barrier(len(calls) + 1), threading.Event()

            def run(call: Callable[[], object]) -> None:
                begun.wait()  # noqa: B023
                try:
                    while True:
                        call()
                        if over.is_set() and call is calls[1]:  # noqa: B023 - which drops what it cannot write
                            raise BlockStateError("AuxBlocks", "one that is open", "one that was closed")
                except BaseException as error:  # noqa: BLE001
                    ended.append(error.with_traceback(None))  # its frames may have views of the memory

            threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
            for thread in threads:
                thread.start()
            begun.wait()
            give_up_s = time.monotonic() + GIVE_UP_S
            while time.monotonic() < give_up_s:
                try:
                    engine.close()
                    break
                except BlockStateError:  # something is in flight
                    time.sleep(1e-4)
                except BufferError:  # it is closed, and a thread is reading
                    over.set()
                    time.sleep(1e-4)
            over.set()
            for thread in threads:
                thread.join(GIVE_UP_S)
            assert len(ended) == (n + 1) * len(calls)
    finally:
        sys.setswitchinterval(before)
    assert {type(error) for error in ended} == {BlockStateError}, ended


def test_a_reset_reaches_readers_in_other_processes() -> None:
    """Goal: after_reset_nothing_older_is_readable, by a view too. Method: a shared region, a view, a reset."""
    house = House(memory="shared")
    lives = house.engine.renew([0])
    house.fill(0, "a")
    with RegionView(house.engine.region("device").name) as view:
        assert view.read("routing", [0], generations=lives).valid.all()
        house.engine.reset(weights_version=2)
        rows = house.fill(0, "b")
        assert not view.read("routing", [0], generations=lives).valid.any(), "of a namespace it has not heard of"
        view.follow(house.engine.namespace.fingerprint)
        assert np.array_equal(view.read("routing", [0], generations=lives).values, rows)
    house.close()

"""Jobs by example: what a slow, hung, failing or full store does to callers that do not wait for it, in any thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from blocks_house import SPEC, TOKENS, House, slots
from standing_still import until_it_waits
from stopped import is_stopped
from waiting import GIVE_UP_S, until

from cache_manager.errors import BlockStateError, ConfigError
from cache_manager.job import Phase
from cache_manager.jobs import JobLimits
from cache_manager.spec import RecordLayout

NBYTES = RecordLayout((SPEC,)).nbytes
PATHS = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
HANGS = """
from blocks_house import House
house = House()
house.engine.renew([0])
house.fill(0, "mine")
job = house.begin_persist(0)
assert not job.wait(0.05)
print("it hangs", flush=True)
"""


def test_a_job_too_many_is_refused_and_changes_nothing() -> None:
    """Goal: full is a normal result. Method: fill the queue by number, with a store that hangs; a caller that waits is
    not queued, and its rows are stored."""
    house = House(jobs=JobLimits(threads_max=1, jobs_max=2))
    house.engine.renew(range(4))
    for block in range(4):
        house.fill(block, "mine")
    jobs = [house.begin_persist(block, n=block) for block in range(3)]
    assert [job is None for job in jobs] == [False, False, True]
    assert house.engine.counters.jobs_refused == 1
    assert house.engine.counters.refused_blocks_not_persisted == 1
    assert len(house.engine.jobs) == house.engine.counters.jobs_begun == 2
    (key, lives) = house.engine.keys.key(None, [3]), house.engine.generations([3])
    assert house.engine.persist({key: 3}, lives) == {key: house.engine.exchange.origins([3])[0]}
    house.close()


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300])
def test_a_caller_may_wait_without_an_end(house: House, timeout_s: float) -> None:
    """Goal: more seconds than Python can wait are as many as it can. Method: a store whose gate opens during the
    wait for one job; for any of them there is one that has come then."""
    house.engine.renew([0])
    house.fill(0, "mine")
    job = house.begin_persist(0)
    assert job is not None
    opening = threading.Timer(0.05, house.gate.open)
    opening.start()
    assert job.wait(timeout_s)
    assert house.engine.jobs.wait(timeout_s)
    assert house.engine.counters.persisted_blocks == 1
    opening.join()


def test_a_store_that_hangs_holds_no_process_that_ends() -> None:
    """Goal: a process ends though a call of its store never does. Method: one begins to store a block, and ends."""
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=GIVE_UP_S, check=False, env=PATHS
    )
    assert (ended.returncode, ended.stdout) == (0, "it hangs\n"), ended.stderr


def test_what_a_refused_job_would_have_left_out_is_counted_once() -> None:
    """Goal: who tries again counts no block and no key twice. Method: of five blocks one is complete; the job is
    refused twice before it begins."""
    house = House(jobs=JobLimits(threads_max=1, jobs_max=1))
    engine = house.engine
    lives = engine.renew(range(4))
    house.fill(0, "mine")
    stale = engine.keys.key(None, [9])
    engine.reset(weights_version=2)
    house.fill(0, "mine")
    key = [engine.keys.key(None, [n]) for n in range(3)]
    blocks = {key[0]: 0, key[1]: 1, key[2]: 2, stale: 3, b"k" * 32: 3}
    generations = [*lives[:2], 99, lives[3], lives[3]]
    first = house.begin_persist(0)
    counters = engine.counters
    for _ in range(2):
        assert engine.begin_persist(blocks, generations) is None
    assert replace(engine.counters, jobs_refused=0, refused_blocks_not_persisted=0) == counters
    house.gate.open()
    assert first.wait(GIVE_UP_S)
    last = engine.begin_persist(blocks, generations)
    assert last.wait(GIVE_UP_S)
    counts = engine.counters
    assert counts.incomplete_blocks_not_persisted == counts.stale_blocks == 1
    assert counts.stale_keys == counts.foreign_keys == 1
    house.close()


def test_close_waits_for_a_call_of_another_thread() -> None:
    """Goal: the set is not closed while a call uses it. Method: a thread's ``persist`` at a store that hangs, and a
    close."""
    house, answers = House(jobs=JobLimits(close_s=0.05)), []
    lives = house.engine.renew([0])
    house.fill(0, "mine")
    thread = threading.Thread(target=lambda: answers.append(house.engine.persist({house.key: 0}, lives)), daemon=True)
    thread.start()
    until(lambda: house.gate.waiting == 1, what="the call never came to the store")
    with pytest.raises(BlockStateError, match="1 jobs"):
        house.engine.close()
    house.gate.open()
    thread.join(GIVE_UP_S)
    house.engine.close()
    assert [[key for key, origin in each.items() if origin] for each in answers] == [[house.key]]


def test_bytes_in_flight_are_bounded_but_one_job_always_fits() -> None:
    house = House(jobs=JobLimits(threads_max=1, jobs_max=8, nbytes_max=2 * NBYTES))
    lives = house.engine.renew(range(5))
    for block in range(5):
        house.fill(block, "mine")
    keys = [house.engine.keys.key(None, [n]) for n in range(5)]
    large = house.engine.begin_persist({keys[n]: n for n in range(3)}, lives[:3])
    assert house.begin_persist(3) is None
    house.let_go()
    assert large.poll()
    assert [house.begin_persist(block, block) is None for block in (3, 4)] == [False, False]
    house.close()


# ---------------------------------------------------------------- several threads, and the end


def test_close_waits_and_then_says_that_jobs_hang() -> None:
    before = set(threading.enumerate())  # an earlier test's store may not have been collected yet
    house = House(jobs=JobLimits(threads_max=1, close_s=0.0))
    house.engine.renew([0, 1])
    for block in (0, 1):
        house.fill(block, "mine")
        house.begin_persist(block, block)
    house.settle()
    with pytest.raises(BlockStateError, match=r"close: wanted nothing in flight, got .*2 jobs"):
        house.engine.close()
    assert all(house.valid(0)), "it is still open"
    house.let_go()
    house.let_go()
    threads = [t for t in threading.enumerate() if t.name == "kvroute-store-job" and t not in before]
    house.engine.close()
    assert threads
    assert not any(t.is_alive() for t in threads)


FORKED = {
    "close": lambda engine, _: engine.close(),
    "read": lambda engine, _: engine.read("routing", [0]),
    "begin_step": lambda engine, _: engine.begin_step([0]),
    "commit": lambda _, step: step.commit(),
}


@pytest.mark.parametrize("call", FORKED.values(), ids=FORKED)
def test_a_forked_child_is_refused_and_changes_nothing(call) -> None:
    """Goal: a child shares the memory of a shared region, and neither states nor threads: it waits for no job of its
    parent, which reads none of its rows. Method: each call in a child; one ends a step that began before the fork."""
    house = House(memory="shared")
    house.engine.renew([0, 1])
    rows = house.fill(0, "mine")
    house.begin_persist(0)
    house.settle()
    step = house.engine.begin_step(slots(1))
    step.write("routing", house.rows("child"))
    child = os.fork()
    if not child:
        try:
            call(house.engine, step)
        except BlockStateError as error:
            os._exit(0 if "forked child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert house.holds(0, rows)
    assert house.valid(1) == [False] * TOKENS
    house.close()


@pytest.mark.parametrize(
    "limits",
    [
        {"threads_max": 0},
        {"jobs_max": 0},
        {"nbytes_max": 0},
        *({"close_s": seconds} for seconds in (-1.0, float("inf"), float("nan"), "3", None)),
    ],
)
def test_limits_that_cannot_be_are_named(limits) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        JobLimits(**limits)


def test_a_begin_that_is_interrupted_leaves_no_job_that_nobody_carries(full) -> None:
    """Goal: a listed job is carried, wherever a signal handler raises in the call that begins it. Method: at each
    place, while the store's thread sleeps."""
    earlier = set(threading.enumerate())  # an earlier test's store may not have ended yet
    full.gate.open()
    at, stopped = 1, True
    while stopped:
        for block in (0, 1):  # an interrupted call forgets all rows
            full.fill(block, f"{block} at {at}")
        before = full.begin_persist(1, 100 + at)
        assert before is not None
        assert before.wait(GIVE_UP_S)
        own = set(threading.enumerate()) - earlier
        (worker,) = [thread for thread in own if thread.name == "kvroute-store-job"]
        assert until_it_waits(worker)
        stopped = is_stopped(lambda: full.begin_persist(0, 1000 + at), at)  # noqa: B023
        for job in list(full.engine.jobs):
            until(lambda: job.phase is not Phase.QUEUED, 20.0, what=f"a job interrupted at place {at}")  # noqa: B023
            assert job.wait(GIVE_UP_S)
        at += 1

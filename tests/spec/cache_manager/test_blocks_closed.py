"""Threads that share a set of blocks, until one of them closes it, and what later calls say."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from blocks_house import SPEC, TOKENS, House, slots
from budget import scaled
from two_threads import raised_by_two
from waiting import GIVE_UP_S

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockStateError
from cache_manager.keys import Namespace
from cache_manager.regions.view import RegionView


def test_two_threads_close_one_set() -> None:
    """Goal: any thread may close a set, also where another one does. Method: two at once, many times."""
    for _ in range(100):
        assert raised_by_two(House().engine.close) == []


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

"""Threads that look at jobs at once, and calls to jobs amid such a look."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from waiting import GIVE_UP_S

from cache_manager.errors import BlockBusyError, BlockStateError

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

"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: dev (the default), ci (the same examples every time), nightly
(longer runs), and hunt, by which planted faults are found. KVROUTE_EXAMPLES is a factor of how many examples are drawn.

SharedMemory regions of a run lie in a directory of that run, so that runs beside each other, and the workers of one,
neither see nor reap each other's. A thread that a failed test left running does not block the end of the run.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from budget import FACTOR, scaled
from hypothesis import HealthCheck, Phase, settings
from own_shm import take_own_shm
from waiting import ENDING_S

OWN_SHM = take_own_shm()
os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # read when triton is first imported: kernels run on the CPU; tests/real/gpu say "0"

# The machines these run on are shared, so that no example is failed for being slow.
ALL = settings(deadline=None, max_examples=scaled(100), suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", ALL)
settings.register_profile("ci", ALL, derandomize=True, print_blob=True)
settings.register_profile("nightly", ALL, stateful_step_count=100, print_blob=True)
# To see a planted fault caught: no shrinking, nothing remembered, one failure reported.
settings.register_profile(
    "hunt",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=300,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where few examples are drawn, whole runs are made only if ``-k`` asks for them."""
    if FACTOR < 1 and not config.getoption("keyword"):
        left = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session", autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Goal: a worker that has to be ended at once fails the run too. Method: the last of all fixtures checks."""
    yield
    assert _threads_left() == []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(exitstatus: int) -> Iterator[None]:
    """Ends the run at once, and as failed, where a thread that is not a daemon is still running after the summary."""
    yield
    if OWN_SHM is not None:
        shutil.rmtree(OWN_SHM, ignore_errors=True)
    if left := _threads_left():
        print(f"\nstill running at the end: {', '.join(left)}", flush=True)
        sys.stderr.flush()
        os._exit(int(exitstatus) or 1)


def _threads_left() -> list[str]:
    """The threads that would keep this process from ending. An executor's workers, which Python ends at its own end,
    are ended first, as torch's module has one for ever: one that is left is busy."""
    gc.collect()
    for executor in gc.get_objects():
        if type(executor) is ThreadPoolExecutor:
            executor.shutdown(wait=False)
    main, give_up_s = threading.main_thread(), time.monotonic() + ENDING_S
    while True:
        left = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
        if not left or time.monotonic() > give_up_s:
            return left
        time.sleep(0.01)

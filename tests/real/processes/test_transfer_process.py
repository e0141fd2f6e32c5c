"""The cache-transfer process: its copies, and the result of a copy when the process is killed or stopped.

How its process begins and ends is that of ``tests/spec/cache_manager/storage/test_apart.py``.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from waiting import GIVE_UP_S, until

from cache_manager.errors import TransferProcessError
from cache_manager.keys import Namespace
from cache_manager.regions import SharedRegion, list_regions
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.transfer_manager import ApartSettings, CacheTransferManager

SOON = ApartSettings(restart_pause_s=0.01, restart_pause_max_s=0.05)
NAMESPACE = Namespace("m", 1)
BLOCKS = 12


def region(tier: str, blocks: int = BLOCKS, rows: int = 16) -> SharedRegion:
    """Filled with bytes that name tier and block; the caller closes it."""
    layout = RecordLayout((AuxBlockDataSpec("kv", (32,), "uint8", rows),))
    found = SharedRegion.create(layout, blocks, tier=tier, namespace=NAMESPACE.fingerprint)
    found.rows[:] = (17 * np.arange(blocks) + (101 if tier == "host" else 0))[:, None] % 256
    return found


Shared = tuple[SharedRegion, SharedRegion]


@pytest.fixture
def shared() -> Iterator[Shared]:
    device, host = region("device"), region("host", 8)
    yield device, host
    device.close()
    host.close()


@pytest.fixture
def process() -> Iterator[CacheTransferManager]:
    with CacheTransferManager(SOON) as manager:
        yield manager


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int64)


def test_a_copy_moves_these_records_and_nothing_else(shared: Shared, process: CacheTransferManager) -> None:
    """Out, in and between device blocks; a source serves two targets."""
    device, host = shared
    was_device, was_host = device.rows.copy(), host.rows.copy()
    process.copy(device, host, ids(3, 3, 4), ids(0, 5, 6))
    process.copy(host, device, ids(7), ids(11))
    process.copy(device, device, ids(1), ids(2))
    wanted_device, wanted_host = was_device.copy(), was_host.copy()
    wanted_host[[0, 5, 6]] = was_device[[3, 3, 4]]
    wanted_device[11], wanted_device[2] = was_host[7], was_device[1]
    assert np.array_equal(host.rows, wanted_host)
    assert np.array_equal(device.rows, wanted_device)


def test_what_cannot_be_copied_is_refused_and_costs_the_process_nothing(
    shared: Shared, process: CacheTransferManager
) -> None:
    """Blocks that do not exist, records of another layout, a region that is gone: nothing is written."""
    device, host = shared
    pid, before = process.pid, host.rows.copy()
    foreign, lost = region("host", rows=8), region("host")
    was = foreign.rows.copy()
    lost.close()
    for target, blocks in ((host, ids(host.blocks)), (host, ids(-1)), (foreign, ids(0)), (lost, ids(0))):
        with pytest.raises(TransferProcessError):
            process.copy(device, target, ids(0), blocks)
    assert np.array_equal(foreign.rows, was)
    foreign.close()
    assert np.array_equal(host.rows, before)
    assert process.pid == pid


def test_regions_that_their_owner_has_closed_are_unmapped(process: CacheTransferManager, shared: Shared) -> None:
    """Goal: an engine that sleeps, or wakes up with other regions, has its shared memory back. Method: the maps of the
    process, after copies between regions that are closed then and regions that are not."""
    device, host = region("device"), region("host")
    names = {device.name, host.name}
    process.copy(device, host, ids(1), ids(2))
    process.copy(*shared, ids(1), ids(2))

    kept = {region.name for region in shared}

    def mapped() -> set[str]:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        return {name for name in names | kept if name in maps}

    assert mapped() == names | kept
    device.close()
    host.close()
    until(lambda: mapped() == kept, what="closed regions are still mapped")
    process.copy(*shared, ids(3), ids(4))
    assert np.array_equal(shared[1].rows[4], shared[0].rows[3])


def test_a_process_killed_in_the_middle_of_a_copy_writes_nothing_after_the_report() -> None:
    """Goal: a killed copy never writes into memory that the engine has taken back. Method: kills while 64 MiB arrive,
    and what is written here afterwards is still there a moment later."""
    layout = RecordLayout((AuxBlockDataSpec("kv", (1 << 16,), "uint8", 32),))
    one, other = (SharedRegion.create(layout, 32, tier="host", namespace=NAMESPACE.fingerprint) for _ in range(2))
    every, torn, rng = np.arange(32), 0, random.Random(3)
    with CacheTransferManager(SOON) as process, ThreadPoolExecutor(1) as threads:
        process.copy(one, other, every, every)
        for turn in range(1, 9):
            one.rows[:], other.rows[:] = turn, 0
            pid = process.pid
            assert pid is not None
            future = threads.submit(process.copy, one, other, every, every)
            until(lambda turn=turn, future=future: future.done() or other.rows[rng.randrange(32), 0] == turn)
            os.kill(pid, signal.SIGKILL)
            try:
                future.result(GIVE_UP_S)
                assert (other.rows == turn).all()
            except TransferProcessError:
                torn += bool((other.rows == turn).any() and not (other.rows == turn).all())
                other.rows[:] = 255
                time.sleep(0.01)
                assert (other.rows == 255).all()
            until(lambda pid=pid: process.pid not in (None, pid))
    with pytest.raises(TransferProcessError, match="closed"):
        process.copy(one, other, every, every)
    names = {one.name, other.name}
    one.close()
    other.close()
    assert torn, "no kill came in the middle of a copy"
    assert not [each for each in list_regions() if each.name in names]

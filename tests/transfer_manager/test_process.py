"""The cache-transfer process: what it copies, and what becomes of a copy when it is killed or stopped.

How its process begins and ends, and its store, are those of ``tests/storage/test_apart.py``.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from mooncake_pool import send
from shared_parts import KV, NAMESPACE
from waiting import until

from cache_manager.errors import TransferProcessError
from cache_manager.regions import SharedRegion, list_regions
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, payload_of, put
from cache_manager.transfer_manager import ApartSettings, CacheTransferManager

Shared = tuple[SharedRegion, SharedRegion]
SOON = ApartSettings(restart_pause_s=0.01, restart_pause_max_s=0.05)
WAIT_S = 60.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[CacheTransferManager]:
    with CacheTransferManager(f"file://{tmp_path}/store?quota=4MiB", SOON) as manager:
        yield manager


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int64)


def end(pid: int | None, how: int = signal.SIGKILL) -> int:
    assert pid is not None
    send(pid, how)
    return pid


def test_a_copy_moves_these_records_and_nothing_else(shared: Shared, process: CacheTransferManager) -> None:
    """Out, in and between device blocks; a source serves two targets."""
    device, host = shared
    was_device, was_host = device.rows.copy(), host.rows.copy()
    process.copy(device, host, ids(3, 4, 3), ids(0, 5, 6))
    process.copy(host, device, ids(7), ids(11))
    process.copy(device, device, ids(1), ids(2))
    wanted_device, wanted_host = was_device.copy(), was_host.copy()
    wanted_host[[0, 5, 6]] = was_device[[3, 4, 3]]
    wanted_device[11], wanted_device[2] = was_host[7], was_device[1]
    assert np.array_equal(host.rows, wanted_host)
    assert np.array_equal(device.rows, wanted_device)


def test_what_cannot_be_copied_is_refused_and_costs_the_process_nothing(
    shared: Shared, process: CacheTransferManager
) -> None:
    """Blocks that are not there, records of another layout, a region that is gone: nothing is written."""
    device, host = shared
    pid, before = process.pid, host.rows.copy()
    other = RecordLayout((AuxBlockDataSpec("kv", (4,), "uint8", 16),))
    foreign = SharedRegion.create(other, 4, tier="host", namespace=NAMESPACE.fingerprint)
    lost = SharedRegion.create(KV, 4, tier="host", namespace=NAMESPACE.fingerprint)
    lost.close()
    for target, blocks in ((host, ids(host.blocks)), (host, ids(-1)), (foreign, ids(0)), (lost, ids(0))):
        with pytest.raises(TransferProcessError):
            process.copy(device, target, ids(0), blocks)
    assert not foreign.rows.any()
    foreign.close()
    assert np.array_equal(host.rows, before)
    assert process.pid == pid


def test_a_store_that_is_busy_does_not_hold_up_a_copy(shared: Shared, tmp_path: Path) -> None:
    """Method: four threads put a thousand records that are synced each, while a block is copied."""
    with CacheTransferManager(f"file://{tmp_path}?quota=64MiB&sync=batch", SOON) as process:
        assert process.store is not None
        records = RecordStore(process.store, LAYOUT)
        with ThreadPoolExecutor(4) as threads:
            puts = [threads.submit(put, records, range(first, 1000, 4)) for first in range(4)]
            process.copy(*shared, ids(1), ids(1))
            assert all(all(each.result(WAIT_S)) for each in puts)
        assert np.array_equal(shared[0].rows[1], shared[1].rows[1])


@pytest.mark.parametrize("how", ["killed", "too slow"])
def test_a_lost_process_fails_its_copies_and_another_takes_over(shared: Shared, tmp_path: Path, how: str) -> None:
    """Method: stopped first, so that the copy is in flight for certain; then killed, or left to its deadline."""
    limits = ApartSettings(restart_pause_s=0.01, call_s=WAIT_S if how == "killed" else 1.0)
    with CacheTransferManager(f"file://{tmp_path}", limits) as process, ThreadPoolExecutor(1) as threads:
        assert process.store is not None
        assert put(RecordStore(process.store, LAYOUT), [1]) == [True]
        first, before = end(process.pid, signal.SIGSTOP), shared[1].rows.copy()
        future = threads.submit(process.copy, *shared, ids(1), ids(1))
        worker = process._apart._worker
        assert worker is not None
        until(lambda: worker.in_flight == 1)
        if how == "killed":
            end(first)
        with pytest.raises(TransferProcessError, match="lost"):
            future.result(WAIT_S)
        assert not Path(f"/proc/{first}").exists()
        assert np.array_equal(shared[1].rows, before)
        assert process.wait(WAIT_S)
        process.copy(*shared, ids(1), ids(1))
        assert np.array_equal(shared[0].rows[1], shared[1].rows[1])
        assert get(RecordStore(process.store, LAYOUT), [1]) == [payload_of(1)]


def test_killed_in_the_middle_of_a_copy_it_writes_no_more_when_that_is_told() -> None:
    """Goal: a block that a lost process was writing belongs to the engine again. Method: copies of 64 MiB, and a
    kill when one of the first blocks has come; when the copy has failed the target is filled with a mark, which stays.
    """
    rng, layout = random.Random(11), RecordLayout((AuxBlockDataSpec("kv", (1 << 16,), "uint8", 16),))
    one, other = (SharedRegion.create(layout, 64, tier="host", namespace=NAMESPACE.fingerprint) for _ in range(2))
    every, torn, whole = np.arange(64), 0, 0
    with CacheTransferManager("", SOON) as process, ThreadPoolExecutor(1) as threads:
        process.copy(one, other, every, every)
        for turn in range(1, 13):
            one.rows[:], other.rows[:] = turn, 0
            future = threads.submit(process.copy, one, other, every, every)
            until(lambda turn=turn, future=future: future.done() or other.rows[rng.randrange(32), 0] == turn)
            end(process.pid)
            try:
                future.result(WAIT_S)
                whole += 1
                assert (other.rows == turn).all()
            except TransferProcessError:
                torn += bool((other.rows == turn).any() and not (other.rows == turn).all())
                other.rows[:] = 255
                time.sleep(0.01)
                assert (other.rows == 255).all()
            assert process.wait(WAIT_S)
    names = {one.name, other.name}
    one.close()
    other.close()
    assert torn, "no kill came in the middle of a copy"
    assert not [region for region in list_regions() if region.name in names]


def test_a_process_without_a_store_has_none_and_closes(shared: Shared) -> None:
    with CacheTransferManager() as process:
        assert process.store is None
        pid = process.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not process.wait(0)
    with pytest.raises(TransferProcessError, match="closed"):
        process.copy(*shared, ids(1), ids(1))

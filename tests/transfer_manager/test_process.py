"""The cache-transfer process: its copies, and the result of a copy when the process is killed or stopped.

How its process begins and ends is that of ``tests/storage/test_apart.py``.
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
from canary import canary_rows
from kv import NBYTES, SlotKV, prefix_digest
from mooncake_pool import send
from numpy.typing import NDArray
from waiting import until

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import TransferProcessError
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.regions import SharedRegion, list_regions
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.transfer_manager import ApartSettings, CacheTransferManager

SOON = ApartSettings(restart_pause_s=0.01, restart_pause_max_s=0.05)
WAIT_S = 60.0
NAMESPACE = Namespace("m", 1)
BLOCK, BLOCKS = 4, 12
ROW = AuxBlockDataSpec("topk_ids", (2, 2), "uint16", BLOCK)


def region(tier: str, blocks: int = BLOCKS, rows: int = 16) -> SharedRegion:
    """Filled with bytes that name tier and block; the caller closes it."""
    layout = RecordLayout((AuxBlockDataSpec("kv", (NBYTES,), "uint8", rows),))
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


def end(pid: int | None, how: int = signal.SIGKILL) -> int:
    assert pid is not None
    send(pid, how)
    return pid


def again(process: CacheTransferManager, but: int) -> None:
    """Wait for another process than this one."""
    until(lambda: process.pid not in (None, but), WAIT_S)


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


@pytest.mark.parametrize("how", ["killed", "too slow"])
def test_a_lost_process_fails_its_copies_and_another_takes_over(shared: Shared, how: str) -> None:
    """Method: stopped first, so that the copy is in flight for certain; then killed, or left to its deadline."""
    limits = ApartSettings(restart_pause_s=0.01, call_s=WAIT_S if how == "killed" else 0.3)
    with CacheTransferManager(limits) as process, ThreadPoolExecutor(1) as threads:
        first, before = end(process.pid, signal.SIGSTOP), shared[1].rows.copy()
        future = threads.submit(process.copy, *shared, ids(1), ids(1))
        if how == "killed":
            time.sleep(0.1)
            end(first)
        with pytest.raises(TransferProcessError, match="lost"):
            future.result(WAIT_S)
        assert not Path(f"/proc/{first}").exists()
        assert np.array_equal(shared[1].rows, before)
        again(process, first)
        process.copy(*shared, ids(1), ids(1))
        assert np.array_equal(shared[0].rows[1], shared[1].rows[1])
    with pytest.raises(TransferProcessError, match="closed"):
        process.copy(*shared, ids(1), ids(1))


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
            end(pid)
            try:
                future.result(WAIT_S)
                assert (other.rows == turn).all()
            except TransferProcessError:
                torn += bool((other.rows == turn).any() and not (other.rows == turn).all())
                other.rows[:] = 255
                time.sleep(0.01)
                assert (other.rows == 255).all()
            again(process, pid)
    names = {one.name, other.name}
    one.close()
    other.close()
    assert torn, "no kill came in the middle of a copy"
    assert not [each for each in list_regions() if each.name in names]


class KVApart(SlotKV):
    """KV in shared regions, which the process copies."""

    def __init__(self, process: CacheTransferManager) -> None:
        super().__init__(BLOCKS, 8, BLOCK)
        self.process = process
        self.regions = {"device": region("device", rows=BLOCK), "host": region("host", 8, BLOCK)}
        self.device, self.host = (each.rows.reshape(-1, BLOCK, NBYTES) for each in self.regions.values())

    def copy(self, source: str, target: str, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self.process.copy(self.regions[source], self.regions[target], sources, targets)


@pytest.mark.parametrize("dies", ["swap out", "swap in", "copy on write", "never"])
def test_a_manager_whose_kv_it_copies_outlives_it(process: CacheTransferManager, dies: str) -> None:
    """Goal: whatever it was doing when it died, each sequence finds at each position its own prefix's KV and row.

    Method: a row and a KV entry are functions of the token prefix. It is stopped before it is killed, so that it
    answers nothing more."""
    kv = KVApart(process)
    tokens = {"a": [1, 0, 1, 1, 0, 1, 1], "b": [0, 0, 1, 0, 1]}
    with AuxBlocks([ROW], blocks=BLOCKS, host_blocks=8, namespace=NAMESPACE, memory="shared", kv=kv) as aux:
        manager = BlockManager(aux)

        def compute(owner: str) -> None:
            start, all_ = manager.computed(owner), tokens[owner]
            slots, positions = manager.slots(owner, start, len(all_)), range(start, len(all_))
            kv.write(slots, [prefix_digest(all_[: at + 1]) for at in positions])
            with aux.begin_step(slots) as step:
                step.write("topk_ids", canary_rows(ROW, [("row", prefix_digest(all_[: at + 1])) for at in positions]))
            manager.publish(owner, all_)

        def check(*swapped: str) -> None:
            manager.assert_consistent()
            for owner, all_ in tokens.items():
                table, rows = manager.table(owner), manager.read("topk_ids", owner, 0, len(all_))
                digests = [prefix_digest(all_[: at + 1]) for at in range(len(all_))]
                tier = "host" if owner in swapped else "device"
                assert [kv.digest(tier, table[at // BLOCK], at % BLOCK) for at in range(len(all_))] == digests
                assert rows.valid.all()
                assert np.array_equal(rows.values, canary_rows(ROW, [("row", each) for each in digests]))

        def under(what: str) -> bool:
            """Whether the next move succeeds: the process is dead at that moment, and is replaced afterwards."""
            if dies == what:
                end(process.pid, signal.SIGSTOP)
                end(process.pid)
            return dies != what

        for owner in tokens:
            assert manager.allocate(owner, tokens[owner]) is not None
            compute(owner)
        check()
        well = under("swap out")
        assert manager.preempt("a") == well
        check(*"a" * well)
        if well:
            well = under("swap in")
            assert manager.resume("a") == well
            check(*"a" * (not well))
        if dies in ("never", "copy on write"):
            manager.fork("a", "c")
            tokens["c"] = [*tokens["a"], 1]
            if under("copy on write"):
                assert manager.append("c", 8)
                compute("c")
            else:
                assert not manager.append("c", 8)
                del tokens["c"]
                manager.free("c")
            check()
        for owner in tokens:
            manager.free(owner)
        manager.assert_consistent()
    del kv.device, kv.host
    for each in kv.regions.values():
        each.close()

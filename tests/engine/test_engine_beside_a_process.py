"""The engine whose KV a cache-transfer process copies, and whose store it has: same tokens, same routes, also when it
is killed."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from engine_runs import NAMESPACE, PLAIN, assert_same, requests_of
from numpy.typing import NDArray
from torch import nn

from cache_manager.ports import TierName
from cache_manager.regions import SharedRegion, list_regions
from cache_manager.spec import RecordLayout
from cache_manager.transfer_manager import ApartSettings, CacheTransferManager
from paged_engine.engine import Engine
from paged_engine.kv import KVShape, PagedKV
from paged_engine.request import EngineConfig, Output

TIGHT = EngineConfig(device_blocks=40, host_blocks=20, memory="shared", restore_wait_s=120.0)
SETTINGS = ApartSettings(restart_pause_s=0.2, restart_pause_max_s=0.5)


class SharedKV(PagedKV):
    """KV in shared regions that the process copies between."""

    def __init__(self, process: CacheTransferManager, shape: KVShape, config: EngineConfig) -> None:
        layout, sizes = RecordLayout((shape.spec(config.block_tokens),)), (config.device_blocks, config.host_blocks)
        tiers: tuple[TierName, TierName] = ("device", "host")
        self._process, namespace = process, NAMESPACE.fingerprint
        self.regions = {
            tier: SharedRegion.create(layout, blocks, tier=tier, namespace=namespace)
            for tier, blocks in zip(tiers, sizes, strict=True)
        }
        device, host = (torch.from_numpy(region.rows) for region in self.regions.values())
        super().__init__(shape, config, tiers=(device, host))

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._process.copy(self.regions[source], self.regions[target], sources, targets)

    def close(self) -> None:
        regions = self.regions
        vars(self).clear()  # the views of the regions
        gc.collect()
        for region in regions.values():
            region.close()


@contextmanager
def beside(
    process: CacheTransferManager, model: nn.Module, config: EngineConfig = TIGHT
) -> Iterator[tuple[Engine, set[str]]]:
    """An engine, and the names of its regions."""
    made: list[SharedKV] = []

    def kv_of(shape: KVShape, config: EngineConfig, _device: torch.device) -> PagedKV:
        made.append(SharedKV(process, shape, config))
        return made[0]

    engine = Engine(model, config, NAMESPACE, store=process.store, kv_of=kv_of)
    regions = {
        region.name for region in (engine.aux.region("device"), engine.aux.region("host"), *made[0].regions.values())
    }
    try:
        yield engine, regions
    finally:
        engine.close()
        process.close()
        made[0].close()


def _run(engine: Engine, process: CacheTransferManager, kill_every: int = 0) -> dict[tuple[str, int], Output]:
    """Until everything is answered; the process is killed after every so many passes, which need it now and then."""
    for request in requests_of():
        engine.add(request)
    outputs: dict[tuple[str, int], Output] = {}
    kill_at = kill_every
    while engine.busy:
        outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        engine.manager.assert_consistent()
        if kill_every and engine.steps >= kill_at:
            kill_at = engine.steps + kill_every
            assert process.wait(120)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
    assert engine.drain()
    assert engine.manager.free_device_blocks == engine.config.device_blocks
    assert engine.manager.free_host_blocks == engine.config.host_blocks
    return outputs


def _plain(model: nn.Module) -> dict[tuple[str, int], Output]:
    with Engine(model, PLAIN, NAMESPACE) as engine:
        for request in requests_of():
            engine.add(request)
        return {(o.request.id, o.sample): o for o in engine.run()}


def test_a_process_moves_and_stores_kv_and_rows_and_nothing_else_changes(model: nn.Module, tmp_path: Path) -> None:
    """Two lives of the engine: in the second one, everything that the first computed comes from the store."""
    plain, made = _plain(model), set[str]()
    for life in range(2):
        process = CacheTransferManager(f"file://{tmp_path}?quota=64MiB", SETTINGS)
        with beside(process, model) as (engine, regions):
            made |= regions
            assert_same(plain, _run(engine, process))
            blocks, rows = engine.manager.counters, engine.aux.counters
            if life:
                assert blocks.restored_tokens > 0
            else:
                assert min(rows.swapped_out_rows, rows.swapped_in_rows, rows.copied_rows, blocks.persisted_blocks) > 0
    assert made.isdisjoint(region.name for region in list_regions())


def test_the_engine_outlives_its_process_again_and_again(qwen: nn.Module, tmp_path: Path) -> None:
    """SIGKILL every twenty passes: what could not be moved is computed again, and every token stays right."""
    process = CacheTransferManager(f"file://{tmp_path}?quota=64MiB", SETTINGS)
    first = process.pid
    with beside(process, qwen) as (engine, _):
        assert_same(_plain(qwen), _run(engine, process, kill_every=20))
        assert process.wait(120)
        assert process.pid != first
        assert engine.manager.counters.moves_failed + engine.manager.counters.store_failures > 0


def test_without_a_process_for_good_what_was_swapped_out_is_computed_again(qwen: nn.Module, tmp_path: Path) -> None:
    """A file stands where the store's directory was, so that no process can start; no request may hang for it."""
    process = CacheTransferManager(f"file://{tmp_path}/store?quota=64MiB", SETTINGS)
    with beside(process, qwen, replace(TIGHT, restore_wait_s=0.5)) as (engine, _):
        for request in requests_of():
            engine.add(request)
        outputs: dict[tuple[str, int], Output] = {}
        while not engine.manager.counters.preemptions:
            outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        (tmp_path / "store").rename(tmp_path / "aside")
        (tmp_path / "store").touch()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while engine.busy:
            outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        assert_same(_plain(qwen), outputs)
        assert not process.wait(0)

"""The engine whose KV and rows a cache-transfer process moves: same tokens, same routes, also when it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from cache_manager.errors import ConfigError, StorageError
from cache_manager.keys import Namespace
from cache_manager.regions import list_regions
from cache_manager.transfer_manager import ApartSettings
from paged_engine.engine import text
from paged_engine.engine.engine import Engine
from paged_engine.engine.memory import RemoteStore
from paged_engine.engine.request import EngineConfig, Output, Request

PLAIN = EngineConfig(device_blocks=300, caching=False)
TIGHT = EngineConfig(device_blocks=40, host_blocks=20, memory="shared", restore_wait_s=120.0)
NAMESPACE = Namespace("tests", weights_version=3)
SETTINGS = ApartSettings(restart_pause_s=0.2, restart_pause_max_s=0.5)


def _requests(count: int) -> list[Request]:
    paragraphs, questions = text.paragraphs(), text.questions()
    return [
        Request(
            f"r{i}",
            tuple(text.opening(paragraphs[i % 2]) + text.turn(questions[i])),
            max_tokens=20,
            n=1 + i % 2,
            temperature=0.8 * (i % 3 > 0),
            seed=5,
        )
        for i in range(count)
    ]


def _run(engine: Engine, requests: Sequence[Request], kill_every: int = 0) -> dict[tuple[str, int], Output]:
    """Until everything is answered; the process is killed after every so many passes, which need it now and then."""
    for request in requests:
        engine.add(request)
    outputs: dict[tuple[str, int], Output] = {}
    kill_at = kill_every
    while engine.busy:
        outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        engine.manager.assert_consistent()
        if kill_every and engine.steps >= kill_at:
            kill_at = engine.steps + kill_every
            process = engine.memory.process
            assert process.wait(120)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
    assert engine.drain()
    assert engine.manager.free_device_blocks == engine.config.device_blocks
    assert engine.manager.free_host_blocks == engine.config.host_blocks
    return outputs


def _same(one: dict[tuple[str, int], Output], other: dict[tuple[str, int], Output]) -> None:
    assert one.keys() == other.keys()
    for key, output in one.items():
        assert output.tokens == other[key].tokens, key
        assert output.routes == other[key].routes, key
        assert output.routes.complete


def _regions(engine: Engine) -> set[str]:
    """The names of the shared regions of the engine's rows and KV."""
    regions = [engine.aux.region("device"), engine.aux.region("host"), *engine.memory._regions.values()]
    return {region.name for region in regions}


def test_a_process_moves_and_stores_kv_and_rows_and_nothing_else_changes(model: nn.Module, tmp_path: Path) -> None:
    """Two lives of the engine: in the second one, everything that the first computed comes from the stores."""
    store = RemoteStore(f"file://{tmp_path}?quota=64MiB", SETTINGS)
    made: set[str] = set()
    with Engine(model, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, _requests(8))
    with Engine(model, TIGHT, NAMESPACE, store=store) as engine:
        made |= _regions(engine)
        _same(plain, _run(engine, _requests(8)))
        blocks, rows = engine.manager.counters, engine.aux.counters
    assert min(rows.swapped_out_rows, rows.swapped_in_rows, rows.copied_rows, blocks.persisted_blocks) > 0
    with Engine(model, TIGHT, NAMESPACE, store=store) as engine:
        made |= _regions(engine)
        _same(plain, _run(engine, _requests(8)))
        assert engine.manager.counters.restored_tokens > 0
        assert engine.aux.store_counters is not None
        assert engine.aux.store_counters.hits > 0
    assert made.isdisjoint(region.name for region in list_regions())


def test_the_engine_outlives_its_process_again_and_again(qwen: nn.Module, tmp_path: Path) -> None:
    """SIGKILL every twenty passes: what could not be moved is computed again, and every token stays right."""
    store = RemoteStore(f"file://{tmp_path}?quota=64MiB", SETTINGS)
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, _requests(8))
    with Engine(qwen, TIGHT, NAMESPACE, store=store) as engine:
        first = engine.memory.process.pid
        _same(plain, _run(engine, _requests(8), kill_every=20))
        assert engine.memory.process.wait(120)
        assert engine.memory.process.pid != first
        assert engine.manager.counters.moves_failed + engine.manager.counters.store_failures > 0


def test_without_a_process_for_good_what_was_swapped_out_is_computed_again(qwen: nn.Module, tmp_path: Path) -> None:
    """A file stands where the store's directory was, so that no process can start; no request may hang for it."""
    store = RemoteStore(f"file://{tmp_path}/store?quota=64MiB", SETTINGS)
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, _requests(8))
    with Engine(qwen, replace(TIGHT, restore_wait_s=0.5), NAMESPACE, store=store) as engine:
        for request in _requests(8):
            engine.add(request)
        outputs: dict[tuple[str, int], Output] = {}
        while not engine.manager.counters.preemptions:
            outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        process = engine.memory.process
        (tmp_path / "store").rename(tmp_path / "aside")
        (tmp_path / "store").touch()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while engine.busy:
            outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        _same(plain, outputs)
        assert not process.wait(0)


def test_rows_in_the_heap_cannot_be_seen_by_a_process(qwen: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory: wanted 'shared' .* got 'heap'"):
        Engine(qwen, PLAIN, NAMESPACE, store=RemoteStore(f"file://{tmp_path}"))


def test_a_process_that_cannot_start_leaves_no_region(qwen: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    before = {region.name for region in list_regions()}
    with pytest.raises(StorageError, match="cannot open the store's directory"):
        Engine(qwen, TIGHT, NAMESPACE, store=RemoteStore(f"file://{tmp_path}/store"))
    assert {region.name for region in list_regions()} <= before

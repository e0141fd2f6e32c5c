"""A pool whose blocks serve layers with rows and layers without: which blocks' rows have memory."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
from toy_requests import EXPERTS
from toy_takers import PROMPT, left, watched

from cache_manager.keys import Namespace
from cache_manager.regions import SharedRegion
from cache_manager.regions.directory import region_path
from cache_manager.regions.header import extent_of
from cache_manager.regions.region import PAGE_NBYTES
from kvroute.connector import Engine, Key, SchedulerRows, Settings, Tokens
from kvroute.connector.worker import WorkerRows
from kvroute.rollout import open_rollouts
from kvroute.routing import ROUTING, routing_spec

BLOCKS, TOKENS, LAYERS, TOP_K = 6, 16, 64, 4
"""A block's rows are as long as a page, and the weights' versions behind them a little longer."""


def needed(engine: Engine, held: set[int]) -> int:
    """Bytes of a region in which these blocks have memory for their rows, and each page that they reach into."""
    extent = extent_of(engine.layout, engine.places.stop)
    pages = set[int]()
    for block in held:
        start = extent.rows_offset + block * engine.layout.nbytes
        pages |= set(range(start // PAGE_NBYTES, -(-(start + engine.layout.nbytes) // PAGE_NBYTES)))
    return extent.rows_offset + PAGE_NBYTES * len(pages)


def test_a_block_has_memory_while_its_layers_have_rows() -> None:
    """Goal: what the engine's groups have is what takes memory, and the rows of the one are not touched by lives of the
    other. Method: both ends; blocks that go from one group to the other and back, beside one that stays; the kernel's
    own count of the file."""
    spec = routing_spec(256, TOP_K, range(LAYERS), num_layers=LAYERS, block_tokens=TOKENS)
    settings = Settings.of({"strict": True, "weights": "m", "weights_version": 0})
    engine = Engine(settings, spec, Namespace("m", 0), BLOCKS, 64, drafts=False, shares_blocks=True)
    with (
        closing(WorkerRows(engine, {"layers.0": torch.zeros(BLOCKS, 1, TOKENS, 8)}, late=False)) as worker,
        closing(SchedulerRows(engine)) as scheduler,
    ):
        scheduler.attach(worker.handshake())
        region = worker.blocks.region("device")
        assert isinstance(region, SharedRegion)

        def step(own: list[int], elsewhere: list[int], written: int | None = None) -> int:
            """Blocks change hands, and each token of one is computed; bytes of the region's memory then."""
            scheduler.given(own)
            scheduler.given_elsewhere(elsewhere)
            worker.begin(scheduler.step({} if written is None else {"r": TOKENS}))
            if written is not None:
                worker.slots = torch.arange(written * TOKENS, (written + 1) * TOKENS)
                for layer in range(LAYERS):
                    worker.ids.hook(layer)(torch.full((TOKENS, TOP_K), layer) + torch.arange(TOP_K))
            worker.end()
            return os.stat(region_path(region.name)).st_blocks * 512

        assert step([1, 2], [3, 4], written=1) == needed(engine, {1, 2})
        rows = worker.blocks.read(ROUTING, [1]).values
        assert step([3], [2]) == needed(engine, {1, 3})
        assert step([], [3, 5]) == needed(engine, {1})
        assert step([2, 5], []) == needed(engine, {1, 2, 5})
        kept = worker.blocks.read(ROUTING, [1])
        assert kept.valid.all()
        assert (kept.values == rows).all()
        assert not worker.missing


def test_a_block_without_memory_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the process reads a sparse region as its other readers do. Method: blocks of a page each; a request's are
    given to layers without rows while the process is stopped, so that it reads there when it goes on."""
    taker = watched(monkeypatch)
    spec = routing_spec(EXPERTS, 2, range(128), num_layers=128, block_tokens=16)
    settings = Settings.of({"weights": "m", "rollouts": f"apart:file://{tmp_path}/rollouts"})
    engine = Engine(settings, spec, Namespace("m", 0), 256, 16, shares_blocks=True)
    worker = WorkerRows(engine, {"layers.0": torch.zeros(256, 1, 16, 1)})
    scheduler = SchedulerRows(engine)
    handshake = worker.handshake()
    scheduler.attach(handshake)
    assert handshake.region is not None
    blocks, tokens = list(range(64)), list(range(5)) * 205
    scheduler.given(blocks)
    worker.begin(scheduler.step({"r": 1024}))
    for layer in range(128):
        worker.ids.hook(layer)(torch.tensor([[layer % EXPERTS, (layer + 1) % EXPERTS]] * 1024))
    worker.slots = torch.arange(1024)
    worker.end()
    with_rows = memory_of(handshake.region)
    taker.kill(signal.SIGSTOP)
    told = scheduler.finished(Key("r"), blocks, 1024, Tokens(tokens, PROMPT))
    assert told is not None
    taker.wait_until_asked()
    scheduler.given_elsewhere(blocks)
    worker.begin(scheduler.step({}))
    worker.end()
    without = memory_of(handshake.region)
    assert without < with_rows - 60 * 4096
    taker.kill(signal.SIGCONT)
    with closing(open_rollouts(f"file://{tmp_path}/rollouts")) as store:
        assert left(told, store).valid.all()
    assert memory_of(handshake.region) == without
    scheduler.close()
    worker.close()


def memory_of(region: str) -> int:
    """Bytes of memory that a region takes."""
    return 512 * region_path(region).stat().st_blocks

"""A pool whose blocks serve layers with rows and layers without: which blocks' rows have memory."""

from __future__ import annotations

import os
from contextlib import closing

import torch

from cache_manager.keys import Namespace
from cache_manager.regions import SharedRegion
from cache_manager.regions.directory import region_path
from cache_manager.regions.header import extent_of
from cache_manager.regions.region import PAGE_NBYTES
from kvroute.connector import Engine, SchedulerRows, Settings
from kvroute.connector.worker import WorkerRows
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

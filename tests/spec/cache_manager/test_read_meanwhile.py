"""``AuxBlocks.read`` while the block that is read changes hands: between any two loads of the reader."""

from __future__ import annotations

import numpy as np
import pytest
from watched_region import Watched

from cache_manager import publish
from cache_manager.blocks import AuxBlocks
from cache_manager.errors import RegionError
from cache_manager.keys import Namespace
from cache_manager.regions.view import RegionView
from cache_manager.spec import AuxBlockDataSpec

SPEC = AuxBlockDataSpec("routing", (2, 2), "uint8", 4)
ROWS = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)


CHANGES = {
    "reset": lambda engine: engine.reset(weights_version=2),
    "forgotten": lambda engine: engine.forget([0]),
    "refused": lambda engine: engine.write_step(np.arange(4.0), {"routing": ROWS + 100}),
    "written anew": lambda engine: engine.write_step(np.arange(4), {"routing": ROWS + 100}),
    "given out": lambda engine: engine.renew([0]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("memory", ["heap", "shared"])
@pytest.mark.parametrize("look", [1, 2])
def test_rows_that_are_gone_when_a_read_ends_are_not_handed_out(look: int, change, memory) -> None:
    """Goal: a read for a generation hands out only what is still valid when it ends, though its copy was whole before.
    Method: as above; most of these leave the block in its generation."""
    with AuxBlocks([SPEC], blocks=2, namespace=Namespace("m", 1), memory=memory) as engine:
        lives = engine.renew([0, 1])
        engine.write_step(np.arange(8), {"routing": np.concatenate([ROWS, ROWS])})
        looks = 0

        def changes() -> None:
            nonlocal looks
            looks += 1
            if looks == look:
                change(engine)

        region = engine.region("device")
        region.words = region.words.view(Watched)
        region.words.loaded = changes  # type: ignore[attr-defined]
        found = engine.read("routing", [0, 1], generations=lives)
        region.words = np.asarray(region.words)
        assert looks >= look
        for row in np.flatnonzero(found.valid[:4]):
            assert np.array_equal(found.values[row], ROWS[row] + 100), "of the pass that is there"
        if change is not CHANGES["reset"]:
            assert found.valid[4:].all(), "what nobody has touched"
            assert np.array_equal(found.values[4:], ROWS)


def test_where_stores_are_not_ordered_the_own_process_reads_under_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: rows can be read on aarch64 hosts, too. Method: pretend that this host is one; the owner reads, and a view,
    as another process has one, is refused."""
    monkeypatch.setattr(publish, "STORES_ARE_ORDERED", False)
    with AuxBlocks([SPEC], blocks=2, namespace=Namespace("m", 1), memory="shared") as engine:
        lives = engine.renew([0, 1])
        engine.write_step(np.arange(4), {"routing": ROWS})
        found = engine.read("routing", [0, 1], generations=lives)
        assert found.valid.tolist() == [True] * 4 + [False] * 4
        assert np.array_equal(found.values[:4], ROWS)
        assert not engine.read("routing", [0], generations=lives[:1] - 1).valid.any()
        with pytest.raises(RegionError, match="orders stores"):
            RegionView(engine.region("device").name)

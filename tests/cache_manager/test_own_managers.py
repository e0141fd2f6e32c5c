"""The life-cycle kit on kvroute's own managers: what it proves of others' it proves of ours."""

from __future__ import annotations

from collections import Counter

import numpy as np
import own_managers
import pytest

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.testing.life import BlockManagerMachine, replay
from cache_manager.testing.life.life import Life
from cache_manager.testing.life.program import read
from cache_manager.testing.life.world import World

RARE = ("store", "restart", "drafts", "lost_step", "failing_moves", "swap")
"""With a store so much can be done that a hundred examples may not come to each of these."""


class TestGated(BlockManagerMachine):
    adapter = own_managers.Gated


class TestMasked(BlockManagerMachine):
    adapter = own_managers.Masked


class TestStored(BlockManagerMachine):
    adapter = own_managers.Stored
    rare = RARE


class TestStoredMasked(BlockManagerMachine):
    adapter = own_managers.StoredMasked
    rare = RARE


class TestBehind(BlockManagerMachine):
    adapter = own_managers.Behind
    rare = RARE


class TestEngine(BlockManagerMachine):
    adapter = own_managers.Engine


def test_gate_never_counts_a_block_without_rows_as_a_hit() -> None:
    """Goal: KV without rows is cut from a hit. Method: compute KV without rows, free, ask for the same tokens."""
    spec = AuxBlockDataSpec("routing", (1,), "uint8", 3)
    for required, expected in ((None, 0), ((), 3)):
        aux = AuxBlocks([spec], blocks=4, namespace=Namespace("m", 0), required=required)
        manager = BlockManager(aux)
        manager.allocate("a", [1, 2, 3, 4])
        aux.begin_step(manager.slots("a", 0, 4)).commit()
        manager.publish("a", [1, 2, 3, 4])
        manager.free("a")
        admission = manager.allocate("b", [1, 2, 3, 4])
        assert admission is not None
        assert admission.cached_tokens == expected
        rows = manager.read("routing", "b", 0, expected)
        assert not rows.valid.any()
        assert np.all(rows.values == 0xFF)
        aux.close()


def test_a_key_passes_to_the_duplicate_that_a_running_sequence_holds() -> None:
    """Goal: what the kit has found stays mended: d finds what b holds. Method: its story, as it was printed."""
    story = (
        "admit a 00 14 - rows ok; free a once; admit b 00 14 - rows ok; admit c 11111111111111 14 - rows ok; "
        "free c once; admit d 000 14 - rows ok"
    )
    replay(type("Small", (own_managers.Gated,), {"blocks": range(8)}), story)


def test_a_key_passes_to_the_duplicate_with_rows() -> None:
    """Goal: what the kit has found after 121,119 operations stays mended: s10 finds what s3 holds, and not the block
    without rows that s4 holds. Method: its story, as it was printed.
    """
    story = (
        "admit s1 11 14 - norows ok; admit s2 11 1 - rows ok; admit s3 11 14 - rows ok; fork s1 s4; "
        "decode s1,s2,s3,s4 0 rows; decode s1,s3,s4 0 rows; swap s2 ok; fork s4 s6; step s1 00 14 rows ok; "
        "decode s1,s3,s4,s6 0 rows; free s1 once; admit s10 110 14 - rows ok"
    )
    replay(own_managers.Gated, story)


@pytest.mark.parametrize("adapter", [own_managers.Stored, own_managers.StoredMasked, own_managers.Behind])
def test_what_was_stored_comes_back_after_a_restart(adapter) -> None:
    """Goal: the kit sees a restore, and its rows. Method: a story; settling is nothing where nothing is behind."""
    counts: Counter[str] = Counter()
    life = Life(World(adapter, counts))
    settle = "; ".join(["settle ok"] * 6)
    line = f"admit a 0000 14 - rows ok; persist a ok; {settle}; restart; admit b 00001 14 - rows ok; {settle}"
    try:
        for operation in read(f"{line}; step b 1 14 rows ok; free b once; finish"):
            life.play(operation)
    finally:
        life.close()
    assert counts["restarts"] == 1
    assert counts["blocks restored"] == 2
    assert counts["rows read"] > 0

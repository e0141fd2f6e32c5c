"""Blocks whose KV is not what it was said to be lose their rows, and nobody else's."""

from __future__ import annotations

import numpy as np

import kvroute


def test_blocks_are_forgotten_by_name() -> None:
    """Goal: ``AuxBlocks.forget(blocks)``. Method: rows of three blocks, one is forgotten, with ids that are none; it
    stays in its life and can be written again.
    """
    spec = kvroute.AuxBlockDataSpec("r", row_shape=(2,), dtype="uint8", block_tokens=4)
    with kvroute.AuxBlocks([spec], blocks=4, namespace=kvroute.Namespace("m", 1), strict=True) as rows:
        lives = rows.renew([0, 1, 2])
        slots = np.arange(12)
        rows.write_step(slots, {"r": np.ones((12, 2), np.uint8)})
        rows.forget([1, 9, -1])
        assert rows.complete([0, 1, 2]).tolist() == [True, False, True]
        assert rows.generations([0, 1, 2]).tolist() == lives.tolist()
        rows.write_step(slots[4:8], {"r": np.full((4, 2), 7, np.uint8)})
        assert rows.read("r", [1], generations=lives[1:2]).values.tolist() == [[7, 7]] * 4
        rows.forget()
        assert not rows.complete([0, 1, 2]).any()
        rows.assert_consistent()

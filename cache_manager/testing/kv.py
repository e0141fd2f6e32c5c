"""The contract of :class:`~cache_manager.ports.KVBlocks`, as tests that an engine's implementation subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from cache_manager.ports import KVBlocks, TierName


class KVBlocksContract(ABC):
    """Subclass it and give :meth:`kv`; pytest collects the tests."""

    @abstractmethod
    def kv(self) -> KVBlocks:
        """A new object with at least 4 blocks in each tier."""

    def test_what_is_filled_in_is_taken_out(self) -> None:
        """Goal: a block's bytes come back whole, in the order of the blocks. Method: fill three, take them reversed."""
        kv = self.kv()
        given = content(kv, 3)
        kv.fill(np.array([2, 0, 3]), given)
        np.testing.assert_array_equal(taken(kv, [3, 0, 2]), given[::-1])

    def test_a_copy_is_in_place_when_it_returns_whatever_becomes_of_its_source(self) -> None:
        """Goal: every pair of tiers, a source with two targets. Method: copy there and back, the source overwritten
        meanwhile."""
        tiers: tuple[TierName, ...] = ("device", "host")
        for there in tiers:
            kv = self.kv()
            given = content(kv, 2)
            kv.fill(np.array([0, 1]), given)
            kv.copy("device", there, np.array([1, 0]), np.array([2, 3]))
            kv.fill(np.array([0, 1]), content(kv, 4)[2:])
            kv.copy(there, "device", np.array([2, 2]), np.array([0, 1]))
            np.testing.assert_array_equal(taken(kv, [0, 1]), given[[1, 1]])

    def test_no_block_is_no_call_that_fails(self) -> None:
        """Goal: an empty batch is harmless. Method: each call without blocks."""
        kv = self.kv()
        none = np.empty(0, np.int64)
        kv.copy("device", "host", none, none)
        kv.fill(none, content(kv, 0))
        assert taken(kv, []).shape == (0, kv.spec.block_nbytes)


def content(kv: KVBlocks, n: int) -> NDArray[np.uint8]:
    """``[n, spec.block_nbytes]``, different in each block."""
    return np.random.default_rng(7).integers(0, 256, (n, kv.spec.block_nbytes), np.uint8)


def taken(kv: KVBlocks, blocks: list[int]) -> NDArray[np.uint8]:
    into = np.zeros((len(blocks), kv.spec.block_nbytes), np.uint8)
    kv.take(np.array(blocks, np.int64), into)
    return into

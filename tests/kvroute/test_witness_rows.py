"""Rows that go by their KV: what a store brings back lands beside the very KV only, in whatever block and engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from kvroute.connector.witness import KvFolder, KvWitness, witnessing
from kvroute.routing import routing_spec
from kvroute.witness import UNKNOWN, Run

TOKENS, POOL = 2, 8
SPEC = routing_spec(num_experts=8, top_k=2, layer_ids=[0, 1], num_layers=2, block_tokens=TOKENS)


class Worker:
    """An engine's worker: KV of one layer in blocks, rows beside it, and a store of rows that it shares."""

    def __init__(self, store: Any) -> None:
        self.kv = torch.zeros(POOL, 1, TOKENS, 8, dtype=torch.bfloat16)
        self.rows = AuxBlocks([SPEC], blocks=POOL, namespace=Namespace("m", 1), store=store, strict=True)
        self.witness = KvWitness(self.rows, KvFolder([self.kv]), POOL)

    def compute(self, blocks: list[int], seed: int, before: int = -1) -> dict[bytes, int]:
        """A prefix whose KV and rows come from ``seed``, stored under keys of its tokens alone."""
        rng = np.random.default_rng(seed)
        lives = self.rows.renew(blocks)
        self.kv[blocks] = torch.from_numpy(rng.normal(size=(len(blocks), 1, TOKENS, 8))).to(torch.bfloat16)
        slots = (np.array(blocks)[:, None] * TOKENS + np.arange(TOKENS)).reshape(-1)
        self.rows.write_step(
            slots, {SPEC.name: rng.permuted(np.tile(np.arange(8), (slots.size, 2, 1)), axis=2)[..., :2]}
        )
        self.name([Run(before, blocks)])
        return self.rows.persist(self.keys(blocks), lives)

    def name(self, runs: list[Run]) -> None:
        self.witness.name(runs, self.witness.look(runs))

    def refused(self, runs: list[Run]) -> list[int]:
        return self.witness.refused(runs, self.witness.look(runs))

    def keys(self, blocks: list[int]) -> Any:
        return {self.rows.keys.adopt(bytes([i]) * 32): block for i, block in enumerate(blocks)}

    def load(self, blocks: list[int], kv: torch.Tensor) -> NDArray[np.bool_]:
        """KV comes from outside, rows from the store; which blocks have rows after the comparison."""
        lives = self.rows.renew(blocks)
        self.rows.restore(self.keys(blocks), lives)
        self.kv[blocks] = kv
        self.refused([Run(-1, blocks)])
        return self.rows.complete(blocks)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.data())
def test_rows_land_beside_their_own_kv_only(seed: int, n: int, data: st.DataObject) -> None:
    """Goal: rows of another computation than the KV are missing, and so are those after it. Method: one worker stores a
    prefix; another loads the same KV, with one value of one block moved by a bit, or not at all.
    """
    store = open_store("memory:")
    first, second = Worker(store), Worker(store)
    blocks, others = [3, 1, 6, 2][:n], [5, 0, 4, 7][:n]
    first.compute(blocks, seed)
    kv = first.kv[blocks].clone()
    at = data.draw(st.integers(0, n))
    if at < n:
        kv.view(torch.int16)[at, 0, data.draw(st.integers(0, TOKENS - 1)), data.draw(st.integers(0, 7))] ^= 1
    assert second.load(others, kv).tolist() == [True] * at + [False] * (n - at)
    found = second.rows.read(SPEC.name, others)
    own = first.rows.read(SPEC.name, blocks)
    assert (found.values[: at * TOKENS] == own.values[: at * TOKENS]).all()
    assert not found.valid[at * TOKENS :].any()
    for worker in (first, second):
        worker.rows.close()


def test_rows_of_a_prefix_that_nobody_saw_are_never_taken_for_sound() -> None:
    """Goal: an unknown block before makes all after it unknown. Method: blocks are named after one whose witness was
    never taken; they keep an origin that no KV says, and what loads them is refused.
    """
    store = open_store("memory:")
    first, second = Worker(store), Worker(store)
    first.rows.renew([7])
    first.compute([1, 2], 5, before=7)
    assert not second.load([3, 4], first.kv[[1, 2]]).any()
    first.rows.close()
    second.rows.close()


def test_a_witness_is_of_one_life_and_of_a_known_prefix() -> None:
    """Goal: nothing is claimed about KV that nobody saw. Method: the same KV behind a block in the life in which it was
    seen, in another life, and behind one never seen; and the same prefix in other blocks.
    """
    worker = Worker(open_store("memory:"))
    worker.kv[:] = 1
    worker.rows.renew(range(POOL))

    def witnesses(before: int, blocks: list[int]) -> list[int]:
        runs = [Run(before, blocks)]
        return worker.witness._take(runs, worker.witness.look(runs))[2]

    first, second = witnesses(-1, [0, 1])
    assert witnesses(0, [2]) == [second]
    assert witnesses(-1, [5, 6]) == [first, second]
    worker.rows.renew([0])
    assert witnesses(0, [2]) == witnesses(7, [3]) == witnesses(3, [4]) == [UNKNOWN]
    worker.rows.close()


def test_what_has_no_rows_is_not_refused() -> None:
    """Goal: a miss is a miss, no mismatch. Method: KV is loaded for which the store has no rows."""
    worker = Worker(open_store("memory:"))
    worker.rows.renew([2])
    assert worker.refused([Run(-1, [2])]) == []
    assert worker.refused([]) == []
    worker.rows.close()


@given(st.integers(0, 2**32 - 1))
def test_a_block_that_is_given_out_again_is_another_prefix(seed: int) -> None:
    """Goal: a witness lives as long as its block's life. Method: the block before is given out again; what follows it
    is stored under no witness, and rows of the earlier life stay sound.
    """
    store = open_store("memory:")
    first, second = Worker(store), Worker(store)
    kept = first.compute([0, 1], seed)
    kv = first.kv[[0, 1]].clone()
    first.rows.renew([0])
    first.rows.renew([1])
    first.name([Run(0, [1])])
    assert second.load([6, 7], kv).all()
    assert all(kept.values())
    first.rows.close()
    second.rows.close()


def test_which_layers_witness() -> None:
    """Goal: the last layer, all for 8-bit KV, none where routers are behind the last KV. Method: names as vLLM has."""
    wide = {f"model.layers.{i}.self_attn.attn": torch.zeros(2, 1, 2, 8) + i for i in (0, 2, 1)}
    assert [float(kv.max()) for kv in witnessing(wide, [0, 1, 2])] == [2.0]
    narrow = {name: kv.to(torch.float8_e4m3fn) for name, kv in wide.items()}
    assert [float(kv.float().max()) for kv in witnessing(narrow, [2])] == [0.0, 1.0, 2.0]
    with pytest.raises(ConfigError, match="one behind layer 2"):
        witnessing(wide, [1, 2, 3])
    with pytest.raises(ConfigError, match="number of their layer"):
        witnessing({"attn": torch.zeros(1, 8)}, [0])

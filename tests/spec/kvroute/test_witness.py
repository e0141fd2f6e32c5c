"""A block's witness: any change of its KV or of the KV before it is seen, and rows land beside that very KV only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import ConfigError, InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from kvroute.connector.limits import LIMITS, Limits
from kvroute.connector.witness import KvFolder, KvWitness, by_block, witnessing
from kvroute.routing import routing_spec
from kvroute.witness import ROOT, UNKNOWN_WITNESS, Run, chained, fold_keys, fold_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
seeds = st.integers(0, 2**32 - 1)


def kv_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes as KV: every bit pattern, NaNs included."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def folds(
    layers: list[torch.Tensor], blocks: Sequence[int], first_head: int = 0, limits: Limits = LIMITS
) -> NDArray[np.uint64]:
    folder = KvFolder(layers, first_head, limits=limits)
    found: NDArray[np.uint64] = folder.folds(blocks).numpy().view(np.uint64)
    return found


def raw_bytes(kv: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = kv.contiguous().view(torch.uint8).numpy()
    return found


@given(seeds, st.sampled_from(DTYPES), st.sampled_from([(5, 2, 4, 16), (3, 1, 8, 24), (4, 7, 8)]), st.booleans())
def test_the_device_folds_as_the_reference_does(
    seed: int, dtype: torch.dtype, shape: tuple[int, ...], turned: bool
) -> None:
    """Goal: one definition, whatever lies where in memory. Method: random bytes of every dtype that KV has; torch
    against numpy, in any order and in parts; the same view over permuted memory.
    """
    kv = kv_of(seed, shape, dtype)
    blocks = np.random.default_rng(seed).integers(0, shape[0], 6).tolist()
    expected = fold_reference(raw_bytes(kv)[blocks]).tolist()
    if turned:
        kv = kv.transpose(1, 2).contiguous().transpose(1, 2)
    limits = Limits(gather_nbytes_max=4 * KvFolder([kv]).block_nbytes)
    assert folds([kv], blocks, limits=limits).tolist() == expected
    assert folds([kv], []).tolist() == []


@given(seeds, st.sampled_from(DTYPES), st.data())
def test_one_word_that_differs_is_always_seen(seed: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """Goal: a fold is a permutation of each word. Method: change any bits of one word; that block's fold differs."""
    kv = kv_of(seed, (3, 2, 4, 16), dtype)
    before = folds([kv], [0, 1, 2])
    words = kv.view(torch.int64).view(3, -1)
    word = data.draw(st.integers(0, words.shape[1] - 1))
    words[1, word] ^= data.draw(st.integers(-(2**63), 2**63 - 1).filter(bool))
    after = folds([kv], [0, 1, 2])
    assert (before != after).tolist() == [False, True, False]


def test_two_changes_in_upper_bits_do_not_cancel() -> None:
    """Goal: sums of products would lose 48 of 64 bits where only each word's last bfloat16 differs: two changes then
    cancel once in 2^16. Method: a quarter of a million pairs of such changes; none cancels.
    """
    rng = np.random.default_rng(7)
    words = rng.integers(0, 2**64, (1 << 18, 2), np.uint64)
    changed = words ^ (rng.integers(1, 2**16, words.shape).astype(np.uint64) << np.uint64(48))
    assert not (fold_reference(words) == fold_reference(changed)).any()
    assert ((words * fold_keys(0, 2)[0]).sum(1) == (changed * fold_keys(0, 2)[0]).sum(1)).any(), "the weakness is gone"


@given(seeds, st.sampled_from([(1, 7), (4, 4), (2, 3, 3)]))
def test_folds_of_ranks_add_up(seed: int, split: tuple[int, ...]) -> None:
    """Goal: engines of other tensor-parallel sizes can compare. Method: the ranks' sum against that of all heads."""
    heads = sum(split)
    kv = kv_of(seed, (3, heads, 4, 16), torch.bfloat16)
    firsts = np.cumsum([0, *split[:-1]]).tolist()
    parts = [folds([kv[:, f : f + n]], [0, 1, 2], first_head=f) for f, n in zip(firsts, split, strict=True)]
    assert np.sum(parts, axis=0, dtype=np.uint64).tolist() == folds([kv], [0, 1, 2]).tolist()


@given(seeds, st.sampled_from([1, 2, 4]))
def test_blocks_that_kernels_have_in_parts_are_folded_whole(seed: int, parts: int) -> None:
    """Goal: the fold of a block is of its own KV, and the same however kernels divide it. Method: blocks in parts;
    ranks that divide the heads; KV of other blocks changes."""
    whole = kv_of(seed, (4, 2, 8, 16), torch.bfloat16)
    divided = whole.unflatten(2, (parts, 8 // parts)).transpose(1, 2).flatten(0, 1).contiguous()
    seen = by_block(divided, 4)
    assert seen.data_ptr() == divided.data_ptr(), "not copied"
    expected = folds([whole], [2]).tolist()
    assert folds([seen], [2]).tolist() == expected
    ranks = [folds([seen[:, head : head + 1]], [2], first_head=head) for head in (0, 1)]
    assert np.sum(ranks, axis=0, dtype=np.uint64).tolist() == expected
    divided[: 2 * parts].view(torch.int16).bitwise_xor_(1)
    assert folds([seen], [2]).tolist() == expected
    divided.view(torch.int16)[3 * parts - 1, 1, -1, -1] ^= 1
    assert folds([seen], [2]).tolist() != expected


@given(seeds)
def test_of_several_layers_each_counts(seed: int) -> None:
    """Goal: of 8-bit KV all layers are folded, and none stands for another. Method: change one; swap two."""
    first, second = (kv_of(seed + i, (2, 1, 4, 16), torch.float8_e4m3fn) for i in (0, 1))
    both = folds([first, second], [0, 1]).tolist()
    assert folds([second, first], [0, 1]).tolist() != both
    first.view(torch.uint8)[1, 0, 3, 5] ^= 1
    assert [a == b for a, b in zip(folds([first, second], [0, 1]).tolist(), both, strict=True)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("shape", [(4,), (0, 3, 8), (4, 1, 3)])
def test_kv_without_whole_words_is_refused(shape: tuple[int, ...]) -> None:
    """Goal: no byte is left out of a fold. Method: KV without blocks, and blocks of nine bytes."""
    with pytest.raises(ConfigError, match="whole 8-byte words"):
        KvFolder([torch.zeros(shape, dtype=torch.uint8)])
    with pytest.raises(InvalidInputError, match="whole words"):
        fold_reference(np.zeros((2, 9), np.uint8))


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


def test_a_witness_is_of_one_life_and_of_a_known_prefix() -> None:
    """Goal: nothing is claimed about KV that was not seen. Method: the same KV behind a block in the life in which it
    was seen, in another life, and behind one never seen; and the same prefix in other blocks."""
    worker = Worker(open_store("memory:"))
    worker.kv[:] = 1
    worker.rows.renew(range(POOL))

    def witnesses(before: int, blocks: list[int]) -> list[int]:
        worker.name([Run(before, blocks)])
        return worker.rows.exchange.origins(blocks)

    first, second = witnesses(-1, [0, 1])
    assert witnesses(0, [2]) == [second]
    assert witnesses(-1, [5, 6]) == [first, second]
    worker.rows.renew([0, 2])
    assert witnesses(0, [2]) == witnesses(7, [3]) == witnesses(3, [4]) == [UNKNOWN_WITNESS]
    assert UNKNOWN_WITNESS not in (first, second, chained(ROOT, 0))
    worker.rows.close()


def test_what_has_no_rows_is_not_refused() -> None:
    """Goal: a miss is a miss, no mismatch. Method: KV is loaded for which the store has no rows, or whose rows were
    forgotten, because the load had failed."""
    worker = Worker(open_store("memory:"))
    worker.compute([3], 0)
    worker.rows.renew([2])
    assert worker.refused([Run(-1, [2])]) == []
    worker.rows.restore(worker.keys([2]), worker.rows.generations([2]))
    worker.rows.forget([2])
    assert worker.refused([Run(-1, [2])]) == []
    assert worker.refused([]) == []
    worker.rows.close()


def test_which_layers_witness() -> None:
    """Goal: the last layer is folded, all layers for 8-bit KV, none where routers are behind the last KV. Method: names
    as vLLM has."""
    wide = {f"model.layers.{i}.self_attn.attn": torch.zeros(2, 1, 2, 8) + i for i in (0, 2, 1)}
    assert [float(kv.max()) for kv in witnessing(wide, [0, 1, 2])] == [2.0]
    narrow = {name: kv.to(torch.float8_e4m3fn) for name, kv in wide.items()}
    assert [float(kv.float().max()) for kv in witnessing(narrow, [2])] == [0.0, 1.0, 2.0]
    with pytest.raises(ConfigError, match="one behind layer 2"):
        witnessing(wide, [1, 2, 3])
    with pytest.raises(ConfigError, match="number of their layer"):
        witnessing({"attn": torch.zeros(1, 8)}, [0])


@pytest.mark.parametrize("indexer_first", [True, False])
def test_the_cache_of_an_indexer_does_not_witness(indexer_first: bool) -> None:
    """Goal: rows are compared with the KV that attention reads. The fold was of the indexer's cache: other KV beside it
    went unseen. Method: DeepSeek-V3.2's names and sizes, in both orders; each layer's KV has its number."""
    caches = dict[str, torch.Tensor]()
    for layer in range(3):
        indexer = {f"model.layers.{layer}.self_attn.indexer.k_cache": torch.zeros(2, 4, 132, dtype=torch.uint8)}
        latent = {f"model.layers.{layer}.self_attn.attn": torch.full((2, 1, 4, 576), layer, dtype=torch.bfloat16)}
        caches |= {**indexer, **latent} if indexer_first else {**latent, **indexer}
    (kv,) = witnessing(caches, [1, 2])
    assert (kv.dtype, float(kv.max())) == (torch.bfloat16, 2.0)
    eight_bits = {name: kv.to(torch.float8_e4m3fn) if kv.dtype == torch.bfloat16 else kv for name, kv in caches.items()}
    assert [float(kv.float().max()) for kv in witnessing(eight_bits, [1, 2])] == [0.0, 1.0, 2.0]

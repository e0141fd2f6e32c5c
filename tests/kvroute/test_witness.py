"""A block's witness: any change of its KV or of the KV before it is seen, whatever layout and ranks are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, InvalidInputError
from kvroute.connector.witness import KvFolder
from kvroute.witness import ROOT, UNKNOWN, chained, fold_keys, fold_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
seeds = st.integers(0, 2**32 - 1)


def kv_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes as KV: every bit pattern, NaNs included."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def folds(layers: list[torch.Tensor], blocks: Sequence[int], first_head: int = 0) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = KvFolder(layers, first_head).folds(blocks).numpy().view(np.uint64)
    return found


def raw_bytes(kv: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = kv.contiguous().view(torch.uint8).numpy()
    return found


@given(seeds, st.sampled_from(DTYPES), st.sampled_from([(5, 2, 4, 16), (3, 1, 8, 24), (4, 7, 8)]))
def test_the_device_folds_as_the_reference_does(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Goal: one definition. Method: random bytes of every dtype that KV has; torch against numpy, in any order."""
    kv = kv_of(seed, shape, dtype)
    blocks = np.random.default_rng(seed).integers(0, shape[0], 6).tolist()
    assert folds([kv], blocks).tolist() == fold_reference(raw_bytes(kv)[blocks]).tolist()


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


@given(seeds)
def test_the_layout_in_memory_does_not_matter(seed: int) -> None:
    """Goal: engines that keep heads or tokens first agree. Method: the same view over permuted memory."""
    kv = kv_of(seed, (4, 2, 8, 16), torch.bfloat16)
    tokens_first = kv.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    assert not tokens_first.is_contiguous()
    assert folds([kv], [3, 0]).tolist() == folds([tokens_first], [3, 0]).tolist()


@given(seeds, st.sampled_from([(1, 7), (4, 4), (2, 3, 3)]))
def test_folds_of_ranks_add_up(seed: int, split: tuple[int, ...]) -> None:
    """Goal: engines of other tensor-parallel sizes can compare. Method: the ranks' sum against that of all heads."""
    heads = sum(split)
    kv = kv_of(seed, (3, heads, 4, 16), torch.bfloat16)
    firsts = np.cumsum([0, *split[:-1]]).tolist()
    parts = [folds([kv[:, f : f + n]], [0, 1, 2], first_head=f) for f, n in zip(firsts, split, strict=True)]
    assert np.sum(parts, axis=0, dtype=np.uint64).tolist() == folds([kv], [0, 1, 2]).tolist()


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


def test_a_large_batch_is_folded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the copy of KV has a limit. Method: a limit of three blocks for ten; the folds are those without it."""
    kv = kv_of(3, (10, 2, 4, 16), torch.float32)
    whole = folds([kv], range(10)).tolist()
    monkeypatch.setattr("kvroute.connector.witness.GATHER_NBYTES_MAX", 3 * KvFolder([kv]).block_nbytes)
    assert folds([kv], range(10)).tolist() == whole
    assert folds([kv], []).tolist() == []


@pytest.mark.parametrize("shape", [(4,), (0, 3, 8), (4, 1, 3)])
def test_kv_without_whole_words_is_refused(shape: tuple[int, ...]) -> None:
    """Goal: nothing is left out of a fold. Method: KV without blocks, and blocks of nine bytes."""
    with pytest.raises(ConfigError, match="whole 8-byte words"):
        KvFolder([torch.zeros(shape, dtype=torch.uint8)])
    with pytest.raises(InvalidInputError, match="whole words"):
        fold_reference(np.zeros((2, 9), np.uint8))


@given(seeds, st.integers(1, 8), st.data())
def test_a_change_is_seen_in_every_later_block(seed: int, n: int, data: st.DataObject) -> None:
    """Goal: a block is accepted only if all before it match. Method: change one block of a chain; it and all after it
    have other witnesses, those before have the same.
    """
    kv = kv_of(seed, (n, 1, 2, 16), torch.float32)

    def witnesses() -> list[int]:
        found = [ROOT]
        for fold in folds([kv], range(n)).tolist():
            found.append(chained(found[-1], fold))
        return found[1:]

    before = witnesses()
    at = data.draw(st.integers(0, n - 1))
    kv.view(torch.uint8)[at, 0, 1, 3] ^= 1
    assert [a == b for a, b in zip(before, witnesses(), strict=True)] == [True] * at + [False] * (n - at)
    assert UNKNOWN not in before
    assert chained(UNKNOWN, 13) == UNKNOWN != chained(ROOT, 0)

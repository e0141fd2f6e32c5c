"""The reference capture against a triple loop in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvroute.capture.reference import capture_reference

LAYERS, BLOCK_TOKENS = 3, 16


def loop(topk_ids: list[list[list[int]]], slots: list[int], rows: list[list[list[int]]]) -> list[list[list[int]]]:
    """What capture means, token by token, layer by layer, id by id."""
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        for layer, ids in enumerate(topk_ids):
            for k, expert in enumerate(ids[token]):
                rows[slot][layer][k] = expert
    return rows


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.uint32], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 200])
def test_the_reference_is_the_loop(tokens: int, top_k: int, dtype: torch.dtype) -> None:
    """Goal: the few lines mean what they say. Method: random ids up to the dtype's last, slots in random order, a fifth
    of them padding (any negative number), and memory that already holds something everywhere else.
    """
    random = np.random.default_rng(tokens * 100 + top_k)
    last = min(torch.iinfo(dtype).max, (1 << 31) - 1)
    blocks = tokens // BLOCK_TOKENS + 2
    source = torch.int32 if top_k % 2 else torch.int64
    ids = random.integers(0, last, endpoint=True, size=(LAYERS, tokens, top_k))
    ids[:, :1] = last
    slots = random.permutation(blocks * BLOCK_TOKENS)[:tokens].astype(np.int64)
    padding = random.random(tokens) < 0.2
    slots[padding] = np.where(random.random(tokens) < 0.5, -1, -random.integers(1, 1 << 40, size=tokens))[padding]
    before = random.integers(0, last, endpoint=True, size=(blocks * BLOCK_TOKENS, LAYERS, top_k))
    rows = torch.from_numpy(before).to(dtype)

    capture_reference([torch.from_numpy(layer).to(source) for layer in ids], torch.from_numpy(slots), rows)

    assert rows.numpy().tolist() == loop(ids.tolist(), slots.tolist(), before.tolist())


def test_it_writes_into_memory_that_is_not_torchs_own() -> None:
    """Goal: rows go straight into a region. Method: a torch view of a NumPy array of the spec's dtype."""
    region = np.zeros((8, 2, 2), np.uint16)
    ids = torch.tensor([[300, 5]])
    capture_reference([ids, ids + 1], torch.tensor([6]), torch.from_numpy(region))
    assert region[6].tolist() == [[300, 5], [301, 6]]
    assert region.sum() == region[6].sum()

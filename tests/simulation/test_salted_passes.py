"""Rows and KV stay of one pass under evictions, refusals, failures, restarts, forks and preemptions, on shared
stores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from budget import scaled
from salted_passes import salted_run


@pytest.mark.parametrize("seed", range(6))
def test_each_row_is_of_the_pass_that_made_the_kv_beside_it(seed: int, tmp_path: Path) -> None:
    """Goal: no sequence finds KV of another prefix or of other weights, or a row of another pass. Method: a salt for
    every pass; one to three engines on a store in memory or in files, seeded operations, and everything that is present
    is read after each."""
    done = salted_run(seed, max(100, scaled(300)), tmp_path if seed % 3 == 2 else None)
    assert done["rows compared"] > 0


@pytest.mark.whole
def test_every_possible_event_has_happened(tmp_path: Path) -> None:
    """Goal: the runs above mean something. Method: what four longer ones have seen."""
    done = Counter[str]()
    for seed in range(100, 104):
        (tmp_path / str(seed)).mkdir()
        done += salted_run(seed, 500, tmp_path / str(seed) if seed % 2 else None)
    wanted = {"prefix_hit_tokens", "restored_tokens", "evicted_blocks", "preemptions", "cow_blocks", "store_failures"}
    assert {seen for seen in wanted if not done[seen]} == set()
    assert done["rows missing"] < done["rows compared"]

"""The witness of KV that a store keeps is of all ranks' heads."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engine import judge
from toy_ranks import ToyRanks
from toy_requests import Asked

from kvroute.connector import routes


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_kv_that_is_wrong_in_one_rank_alone_has_no_rows(tmp_path: Path, later: bool, late: bool) -> None:
    """Goal: the witness is of all ranks' heads. Method: two engines of two ranks; a bit of the second rank's KV."""
    tokens = list(range(11))
    settings = {"kept": dict[bytes, Any](), "late": late, "store": f"file://{tmp_path}/rows", "witness": "flagged"}
    with closing(ToyRanks(**settings)) as first:
        first.ask("a", tokens)
        first.settle()
    pages = [settings["kept"][name]["layers.1"].view(torch.int32) for name in Asked("", tokens).block_hashes]
    settings["store"] += "?mode=read"
    for damaged, verdict in (
        ({}, {"right": 11}),
        ({1: 0}, {"right": 7, "missing": 4}),
        ({0: 1}, {"right": 3, "missing": 8}),
    ):
        for block, head in damaged.items():
            pages[block][head, 2, 3] ^= 1
        with closing(ToyRanks(later=later, **settings)) as other:
            assert judge(routes(other.ask("b", tokens)), tokens) == verdict
            assert other.loaded == 8

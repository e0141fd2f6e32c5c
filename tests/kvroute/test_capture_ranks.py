"""Ranks that route different tokens of one step write into one region, and one of them commits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANK = Path(__file__).parents[1] / "support" / "capture_rank.py"


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=TWO_GPUS)])
def test_two_ranks_capture_their_shards_of_the_tokens(tmp_path: Path, backend: str) -> None:
    """Goal: token shards (data-parallel attention, sequence-parallel MoE) are put together without copying a row.

    Method: two processes, gloo over loopback or NCCL on a GPU each, one SharedMemory region; each writes its tokens'
    rows at their slots; the owner commits with every rank's verdict, and compares with the ids of all tokens. A bad row
    of the other rank is missing.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), backend, str(rank), str(tmp_path)],
            env={**os.environ, "TRITON_INTERPRET": "1" if backend == "gloo" else "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)

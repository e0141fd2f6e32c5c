"""Data parallelism with expert parallelism on a CPU: every row of both ranks, judged by transformers.

Stock vLLM starts two ranks there and ends in their first pass; :mod:`bench.peers.vllm_ranks` supplies what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from bench.vllm_gpu import CLOSE, Starter
from bench.vllm_models import Judge
from bench.vllm_parallel import CASES, PLUGIN, checkpoints, run


@pytest.fixture
def starter() -> Iterator[Starter]:
    with ExitStack() as stack:
        yield Starter(stack, ranks=PLUGIN)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("DP 2 + EP", "behind the router, whole"),
        ("DP 2 + EP, gathered before the router", "before the router, whole"),
    ],
)
def test_each_rank_has_the_rows_of_its_own_tokens(starter: Starter, name: str, layout: str) -> None:
    """Goal: no rank has another's rows, whatever its routers see. Method: two front ends with prompts of their own,
    prefix hits, preemption, another embedding; dummy batches, because one rank is asked less."""
    case = CASES[name]
    homes = checkpoints(starter.home, case.family, case.dtype)
    answers, preempted, layouts = run(starter, name, case, homes)
    judges = [Judge(home, CLOSE[case.dtype]) for home in homes]
    assert min(preempted) > 0
    assert layouts.keys() == {layout, f"{layout}, of several sizes"}
    for told in answers:
        counts = np.zeros(4, np.int64)
        for answer in told:
            assert answer["rows"]["versions"] == [answer["version"]]
            counts += judges[answer["version"]].judge([*answer["prompt"], *answer["tokens"]], answer["rows"])
        right, missing, wrong, close = counts.tolist()
        assert (missing, wrong) == (0, 0)
        assert close < right / 1000
        assert right > 2000
        assert sum(answer["cached"] for answer in told) > 500

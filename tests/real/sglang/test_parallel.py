"""Ranks with requests of their own, replicas behind one controller and attention data parallelism; and ranks that share
their requests, with a part of the KV and a store each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_scenarios import FIRST, SMALL, all_right, of, ours, prompts, tally

from bench.sglang_gpu import HOST

Serve = Callable[..., list[dict[str, Any]]]
Models = Callable[..., Path]
UNEVEN: list[Any] = [
    ["uneven ranks", "ask", {"prompts": prompts(13, 20, 90, 33, 140, 7, 61), "new": 20}],
    ["chunked prefill", "ask", {"prompts": prompts(2, 150, 31)}],
    ["n = 3", "ask", {"prompts": prompts(5, 50), "n": 3}],
]


def of_one_rank(rank: int) -> list[Any]:
    """Requests of one rank, beside an idle one: hits, retraction, and KV that is evicted and comes back."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("one rank", {"prompts": FIRST, "alone": True}),
        ("radix hits", {"prompts": prompts(3, 80, 90, 64, head=48)}),
        ("others", {"prompts": prompts(32, *[120] * 5)}),
        ("evicted and loaded", {"prompts": FIRST}),
        ("retraction", {"prompts": prompts(8, 70, 70, 70, 70), "new": 90, "retracted": True}),
    ]
    return [[name, "ask", more | {"rank": rank}] for name, more in asked]


@pytest.mark.parametrize("kind", ["replicas", "attention"])
def test_each_rank_answers_with_rows_of_its_own_requests(
    serve: Serve, model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Goal: no row is of another rank's request, and none is missing. Method: two ranks with uneven, padded and idle
    passes; the second one loads KV again that it has evicted, from our linker's store or from its pages on the host.
    """
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # else each rank wants a NUMA node of its own
    home = model("qwen3_moe")
    options: dict[str, Any] = {"dp_size": 2, "chunked_prefill_size": 64} | ours(tmp_path / "{rank}", weights="w")
    if kind == "attention":
        options = {"tp_size": 2, "attn_dp_size": 2, "chunked_prefill_size": 128} | HOST
    answers = serve(home, [*UNEVEN, *of_one_rank(1)], settings={"strict": True}, **SMALL, **options)
    counts = tally(home, kind, answers)
    assert all(count["wrong"] == count["missing"] == 0 < count["right"] for count in counts.values())
    assert counts["evicted and loaded"]["loaded"] > 0
    assert max(answer["hits"] for answer in of(answers, "radix hits")) > 0
    print(all_right({"A": home}, answers))


def test_ranks_that_share_requests_load_the_same(
    serve: Serve, model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: with tensor parallelism KV and rows come back from the stores of both ranks, or are computed by both.
    Method: two ranks whose KV is evicted and loaded; then the second one's records are spoiled; then both have them
    again."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    home = model("qwen3_moe")
    options = {"tp_size": 2, "chunked_prefill_size": 64} | ours(tmp_path / "{rank}", weights="w")
    others = ["others", "ask", {"prompts": prompts(32, *[120] * 5)}]
    do = [
        *UNEVEN[:2],
        ["plain", "ask", {"prompts": FIRST, "alone": True}],
        ["radix hits", "ask", {"prompts": prompts(3, 80, 90, 64, head=48)}],
        others,
        ["evicted and loaded", "ask", {"prompts": FIRST}],
        ["retraction", "ask", {"prompts": prompts(8, 70, 70, 70, 70), "new": 90, "retracted": True}],
        others,
        ["", "spoil", {"home": str(tmp_path / "1")}],
        ["spoiled on one rank", "ask", {"prompts": FIRST}],
        others,
        ["stored again", "ask", {"prompts": FIRST}],
    ]
    answers = serve(home, do, settings={"strict": True}, **SMALL, **options)
    counts = tally(home, "tensor", answers)
    assert all(count["wrong"] == count["missing"] == 0 < count["right"] for count in counts.values())
    for scenario in "evicted and loaded", "stored again":
        assert counts[scenario]["loaded"] == 64 + 80 + 112, scenario
    assert counts["spoiled on one rank"]["loaded"] < 64 + 80 + 112
    print(all_right({"A": home}, answers))

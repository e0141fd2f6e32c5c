"""Models with layers that forget: windows (SWA), or states of convolutions, which have pages of their own in SGLang.

Rows go with the pages of the layers that attend to all tokens. Stock SGLang beside kvroute in it, asked the same;
transformers judges.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_scenarios import FIRST, SMALL, of, ours, prompts, tally, theirs

from bench.sglang_gpu import HOST

Serve = Callable[..., list[dict[str, Any]]]
Models = Callable[..., Path]
DO: list[Any] = [
    ["plain", "ask", {"prompts": FIRST, "alone": True}],
    ["chunked prefill", "ask", {"prompts": prompts(2, 150)}],
    ["radix hits", "ask", {"prompts": prompts(3, 80, 90, 64, head=48)}],
    ["turns", "turns", {"prompts": prompts(4, 60, 41)}],
    ["retraction", "ask", {"prompts": prompts(8, 70, 70, 70, 70), "new": 90, "retracted": True}],
    ["others", "ask", {"prompts": prompts(9, 120, 120, 120)}],
    ["evicted and loaded", "ask", {"prompts": FIRST}],
    ["more turns", "turns", {"prompts": FIRST[:2]}],
]
GONE: list[Any] = [  # the process that stores routes
    ["is killed", "signal_rollouts", {"prompts": prompts(61, 40, 33), "number": signal.SIGKILL}],
    ["is stopped", "signal_rollouts", {"prompts": prompts(62, 40, 33), "number": signal.SIGSTOP}],
]
LATE = "wanted a process that stores them"
"""Why an answer has no routes where the next process takes too long to start, as on a busy machine."""
STATES = {
    "page_size": 1,
    "disable_overlap_schedule": True,
    "mamba_radix_cache_strategy": "no_buffer",
    "max_mamba_cache_size": 16,
    "hicache_mem_layout": "page_first_direct",
}
"""With which SGLang keeps states where there is no GPU."""
FAMILIES: dict[str, dict[str, Any]] = {"mellum": {}, "lfm2_moe": STATES}
KEPT = [tier for tier in os.environ.get("KVROUTE_HYBRID_KEPT", "").split(",") if tier]
"""Of ``linker``, ``linker of others`` and ``storage``: CI has time for none, each takes a minute and a half."""
HYBRID = os.environ.get("KVROUTE_HYBRID", ",".join(FAMILIES)).split(",")  # CI has time for one


@pytest.mark.parametrize("family", HYBRID)
def test_rows_go_with_the_pages_of_all_tokens(
    serve: Serve, model: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """Goal: no row is wrong or missing, through hits, turns, retraction, eviction to the host and loading. Method: a
    pool that later requests push earlier ones out of; the windows are shorter than the prompts. Routes are stored by a
    process of their own, which is killed, and stopped: each answer comes, with its routes or the reason."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    home, options = model(family), SMALL | HOST | {"chunked_prefill_size": 64} | FAMILIES[family]
    settings = {"strict": True, "rollouts": f"apart:?call=3s,file://{tmp_path}/rollouts"}
    with ThreadPoolExecutor(2) as pool:
        engines = [
            pool.submit(serve, home, DO, kvroute=False, **options),
            pool.submit(serve, home, DO + GONE, settings=settings, **options),
        ]
        stock, answers = (engine.result() for engine in engines)
    due, found = tally(home, f"{family}, stock", stock), tally(home, f"{family}, kvroute", answers)
    for name, _, asked in GONE:
        count = found.pop(name)
        assert (count["right"], count["wrong"], count["missing"]) == (sum(len(p) + 7 for p in asked["prompts"]), 0, 0)
    refused = [(answer["scenario"], answer["refused"]) for answer in answers if "refused" in answer]
    assert all(name in dict.fromkeys(each[0] for each in GONE) and LATE in why for name, why in refused), refused
    assert due["evicted and loaded"]["wrong"] > 0, "what kvroute is for"
    for scenario, count in found.items():
        rows = due[scenario]["right"] + due[scenario]["wrong"]
        assert (count["right"], count["wrong"], count["missing"]) == (rows, 0, 0), scenario
    assert found["evicted and loaded"]["loaded"] > 0
    assert max(answer["hits"] for answer in of(answers, "turns")) > 0


@pytest.mark.parametrize("tier", KEPT)
@pytest.mark.parametrize("family", HYBRID)
def test_rows_come_with_windows_and_states_of_a_store(
    serve: Serve, model: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, tier: str
) -> None:
    """Goal: no row is wrong or missing, through eviction to a store and loading, in another engine, too. Method: our
    linker beside one of files in stock SGLang; that one and HiCache's storage with kvroute beside them."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    home, options = model(family), SMALL | {"chunked_prefill_size": 64} | FAMILIES[family]
    if tier != "storage":
        options.pop("hicache_mem_layout", None)
    settings: dict[str, Any] = {"strict": True, "weights": "w"}
    other = theirs("linker of others" if tier == "linker" else tier, tmp_path / "stock")
    kept = ours(tmp_path / "store", weights="w") if tier == "linker" else theirs(tier, tmp_path / "files")
    if tier != "linker":
        settings["store"] = f"file://{tmp_path}/store"
        settings["witness"] = "flagged"
    runs = {
        "stock": pool_run(serve, home, kvroute=False, settings=settings, **{**other, **options}),
        "kvroute": pool_run(serve, home, settings=settings, **{**kept, **options}),
    }
    with ThreadPoolExecutor(2) as pool:
        engines = {name: pool.submit(run, DO) for name, run in runs.items()}
        answers = {name: engine.result() for name, engine in engines.items()}
    due, found = (tally(home, f"{family}, {tier}, {name}", each) for name, each in answers.items())
    assert due["evicted and loaded"]["wrong"] > 0, "what kvroute is for"
    for scenario, count in found.items():
        rows = due[scenario]["right"] + due[scenario]["wrong"]
        assert (count["right"], count["wrong"], count["missing"]) == (rows, 0, 0), scenario
    assert found["evicted and loaded"]["loaded"] > 0
    again = tally(home, f"{family}, {tier}, another engine", runs["kvroute"](DO[:1]))["plain"]
    assert (again["right"], again["loaded"] > 0) == (found["plain"]["right"], True)


def pool_run(serve: Serve, home: Path, **options: Any) -> Callable[[list[Any]], list[dict[str, Any]]]:
    return lambda do: serve(home, do, **options)

"""Goal: every row of every answer is right or missing. Method: stock SGLang beside kvroute in it, asked the same.

Transformers judges, by the experts that a float32 forward pass over the very tokens of an answer is given.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experts_seen import experts_of
from far_judge import Judge, Tally
from models import reference

Serve = Callable[..., list[dict[str, Any]]]
PAGE = 16
SMALL = {"max_total_tokens": 512, "max_running_requests": 4, "page_size": PAGE, "context_length": 400}


def prompts(seed: int, *lengths: int, head: int = 0) -> list[list[int]]:
    """Of these lengths, with a common head of ``head`` tokens."""
    source = random.Random(seed)
    first = [source.randrange(3, 512) for _ in range(head)]
    return [first + [source.randrange(3, 512) for _ in range(n - head)] for n in lengths]


def scenarios(longest: int = 150) -> list[Any]:
    """What every engine is asked; later ones push earlier ones out of a pool of 512 tokens."""
    first = prompts(1, 70, 33, 16)
    return [
        ["plain", "ask", {"prompts": first}],
        ["chunked prefill", "ask", {"prompts": prompts(2, longest)}],
        ["radix hits", "ask", {"prompts": prompts(3, 80, 90, 64, head=48)}],
        ["turns", "turns", {"prompts": prompts(4, 60, 41)}],
        ["n = 3", "ask", {"prompts": prompts(5, 50), "n": 3}],
        ["part of a route", "ask", {"prompts": prompts(6, 40), "start": 21}],
        ["abort", "abort", {"prompts": prompts(7, 30, 40, 30, 40)}],
        ["retraction", "ask", {"prompts": prompts(8, 70, 70, 70, 70), "new": 90}],
        ["evicted and loaded", "ask", {"prompts": prompts(9, 120, 120, 120)}],
        ["evicted and loaded", "ask", {"prompts": first}],
    ]


def tally(home: Path, answers: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Rows of SGLang's own field by scenario: right, wrong, missing (-1), and how many came from a linker."""
    found: dict[str, Counter[str]] = {}
    for each in answers:
        tokens = [*each["prompt"], *each["tokens"]]
        seen = experts_of(reference(home, torch.float32), torch.tensor([tokens[:-1]]))
        due = np.sort(seen, axis=-1)[each["start"] :]
        field = np.array(each["field"]).reshape(len(due), -1, due.shape[2])
        rows = np.sort(field[:, field.shape[1] - due.shape[1] :], axis=-1)
        missing = (rows < 0).any(axis=(1, 2))
        right = (rows == due).all(axis=(1, 2))
        count = found.setdefault(each["scenario"], Counter())
        count.update(
            right=int(right.sum()),
            missing=int((missing & ~right).sum()),
            wrong=int((~missing & ~right).sum()),
            loaded=sum(n for tier, n in each["cached"].items() if tier != "device" and isinstance(n, int)),
        )
    return found


def shown(title: str, found: dict[str, Counter[str]]) -> None:
    print(f"\n{title:44} right  wrong  missing  loaded")
    for scenario, count in found.items():
        print(f"{scenario:44} {count['right']:5}  {count['wrong']:5}  {count['missing']:7}  {count['loaded']:6}")


def linked(linker: str, module: str, **extra: Any) -> dict[str, Any]:
    """Options of an engine with an external linker."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": linker,
            "linker_module_path": module,
            "linker_extra_config": extra,
        },
    }


def ours(store: Path, **extra: Any) -> dict[str, Any]:
    return linked("KvrouteLinker", "kvroute.integrations.sglang", store=f"file://{store}", strict=True, **extra)


HOST = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}


def theirs(tier: str, home: Path) -> dict[str, Any]:
    """Options of an engine whose KV is kept by somebody else, in the folder ``home``."""
    home.mkdir(exist_ok=True)
    if tier == "linker of others":
        return linked("FileLinker", "file_linker", home=str(home))
    extra = {"prefetch_threshold": PAGE, "file_storage_path": str(home)}
    storage = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": json.dumps(extra)}
    return HOST | storage | {"hicache_ratio": 2.0, "hicache_storage_prefetch_policy": "wait_complete"}


def all_right(homes: dict[str, Path], answers: list[dict[str, Any]], **given: Any) -> Tally:
    """Every layer of every row of whole routes, and what each trainer gets of them."""
    judge = Judge(homes)
    total = sum(
        (judge.judge({"prompt": a["prompt"], "completions": [a]}, **given) for a in answers if not a["start"]), Tally()
    )
    assert total.right == total.due, str(total)
    assert not total.wrong, str(total)
    return total


@pytest.mark.parametrize("tier", ["linker", "host"])
def test_scenarios(serve: Serve, model: Callable[..., Path], tmp_path: Path, tier: str) -> None:
    """Method: KV comes back from a linker, ours or somebody else's, or from SGLang's own pages on the host; with
    overlap and without."""
    home, common = model("qwen3_moe"), SMALL | {"chunked_prefill_size": 64}
    settings = {"store": f"file://{tmp_path}/rows", "witness": "flagged", "strict": True}
    late, soon = ({"disable_overlap_schedule": each} for each in (False, True))
    runs: dict[str, dict[str, Any]] = {f"stock SGLang, {tier}": {"kvroute": False}}
    if tier == "host":
        runs |= {"kvroute, host, overlap": late, "kvroute, host, no overlap": soon}
        runs = {name: each | HOST for name, each in runs.items()}
    else:
        stock, beside = (theirs("linker of others", tmp_path / each) for each in ("stock", "beside"))
        runs[f"stock SGLang, {tier}"] |= stock
        runs["kvroute, a linker of others"] = beside | {"settings": settings}
        runs["kvroute, linker, overlap"] = late | ours(tmp_path / "late")
        runs["kvroute, linker, no overlap"] = soon | ours(tmp_path / "soon")
    with ThreadPoolExecutor(2) as pool:
        engines = [pool.submit(serve, home, scenarios(), **common, **each) for each in runs.values()]
    answers = {name: engine.result() for name, engine in zip(runs, engines, strict=True)}
    found = {name: tally(home, each) for name, each in answers.items()}
    for name, each in found.items():
        shown(name, each)
    stock_found = found.pop(f"stock SGLang, {tier}")
    assert stock_found["evicted and loaded"]["wrong"] > 0, "what kvroute is for"
    for name, each in found.items():
        for scenario, count in each.items():
            assert (count["wrong"], count["missing"]) == (0, 0), (name, scenario)
            assert count["right"] == sum(stock_found[scenario][kind] for kind in ("right", "wrong")), (name, scenario)
        assert each["evicted and loaded"]["loaded"] > 0
        print(all_right({"A": home}, answers[name]))


@pytest.mark.parametrize("tier", ["linker of others", "storage"])
def test_rows_go_by_kv_that_somebody_else_keeps(
    serve: Serve, model: Callable[..., Path], tmp_path: Path, tier: str
) -> None:
    """Goal: KV of a linker or a storage that knows no rows has its own rows beside it, or none, and says why.

    Method: engines on one folder of KV. Stock SGLang fills it, and loads what it has evicted. With kvroute, KV without
    rows is no hit; with rows it is one, until a bit of the last layer of one page is another. In a third engine KV
    without rows may be a hit, and what the last router chose for what is loaded is left out.
    """
    home, files, due = model("qwen3_moe"), theirs(tier, tmp_path / "files"), 3 * 7 + 280
    first, others, new = prompts(31, 70, 90, 120), prompts(32, *[120] * 11), prompts(33, 70, 90, 120)

    def engine(asked: dict[str, list[list[int]]], **settings: Any) -> tuple[dict[str, Counter[str]], Any]:
        do: list[Any] = []
        for name, given in asked.items():
            change = [[name, "change", {"home": str(tmp_path / "files")}]] if name == "changed" else []
            do += [*change, [name, "ask", {"prompts": given}], ["others", "ask", {"prompts": others}]]
        given = {"weights": "w", "strict": True} | settings
        answers = serve(home, do, kvroute=bool(settings), settings=given, **SMALL, **files)
        shown(f"{tier}, {settings or 'stock'}", found := tally(home, answers))
        return found, {name: [each for each in answers if each["scenario"] == name] for name in asked}

    stock, _ = engine({"computed": first, "loaded": first})
    assert stock["computed"]["right"] == due
    assert stock["loaded"]["wrong"] > 0, "what kvroute is for"

    def with_rows() -> None:
        asked = {"no hit": first, "loaded": first, "changed": first}
        found, answers = engine(asked, store=f"file://{tmp_path}/store", witness="flagged")
        assert (found["no hit"]["right"], found["no hit"]["loaded"]) == (due, 0)
        assert found["loaded"]["right"] == due
        assert found["loaded"]["loaded"] > 0
        all_right({"A": home}, answers["loaded"])
        changed = found["changed"]
        assert (changed["right"], changed["missing"]) == (due - PAGE, PAGE)
        (gap,) = [gap for each in answers["changed"] for gap in each["why"]]
        assert (gap[1] - gap[0], gap[2]) == (PAGE, "rows of other KV than was loaded")

    def without_rows() -> None:
        asked = {"no rows": first, "new": new, "loaded": new}
        found, answers = engine(asked, store=f"file://{tmp_path}/empty", rows=False)
        kept, last = found["no rows"], found["loaded"]
        assert kept["loaded"] > 0
        assert (kept["right"], kept["missing"]) == (due - kept["loaded"], kept["loaded"])
        why = {gap[2] for each in answers["no rows"] for gap in each["why"]}
        assert why == {"the store of rows does not have them"}
        assert last["loaded"] > 0
        judge = Judge({"A": home})
        judged = sum((judge.judge({"prompt": a["prompt"], "completions": [a]}) for a in answers["loaded"]), Tally())
        assert (judged.due - judged.right, sum(judged.wrong.values())) == (last["loaded"], 0)

    with_rows()
    without_rows()


def test_another_engine_loads_what_one_has_stored(serve: Serve, model: Callable[..., Path], tmp_path: Path) -> None:
    """Method: a second engine, of two other families; all KV of its first answers is from the store."""

    def loads(family: str) -> None:
        home, asked = model(family), [["first", "ask", {"prompts": prompts(11, 70, 90, 120)}]]
        options = SMALL | ours(tmp_path / family, weights="w", rollouts=f"file://{tmp_path}/rollouts-{family}")
        first, second = (serve(home, asked, **options) for _ in range(2))
        assert sum(each["cached"].get("host", 0) for each in first) == 0
        assert sum(each["cached"].get("host", 0) for each in second) == 64 + 80 + 112
        for answers in first, second:
            count = tally(home, answers)["first"]
            assert (count["wrong"], count["missing"], count["right"]) == (0, 0, 3 * 7 + 280)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(loads, ["mixtral", "glm4_moe"]))


def test_weights_change(serve: Serve, model: Callable[..., Path], tmp_path: Path) -> None:
    """Goal: rows have the version that made them. Method: updates with a flush, without one, and amidst answers."""
    a, b = model("qwen3_moe"), model("qwen3_moe", 1)
    asked = prompts(21, 70, 33)
    do = [
        ["A", "ask", {"prompts": asked}],
        ["", "update", {"model": str(b), "version": "7", "flush": True}],
        ["B", "ask", {"prompts": asked}],
        ["B again", "ask", {"prompts": asked}],
        ["A to B", "flush", {}],
        ["", "update", {"model": str(a), "version": "8", "flush": True}],
        ["amidst", "update_amidst", {"prompts": prompts(22, 40, 40), "model": str(b), "version": "9", "new": 200}],
    ]
    answers = serve(a, do, **SMALL, **ours(tmp_path / "store", weights="w"))
    of = {name: [each for each in answers if each["scenario"] == name] for name, *_ in do}
    homes = {"A": a, "B": b}
    all_right(homes, of["A"], before="A")
    for name in "B", "B again":
        assert all_right(homes, of[name], before="B", labels={7: "B"}).labelled == 70 + 33 + 2 * 7
    judge, total = Judge(homes), Tally()
    for each in of["amidst"]:
        given = {"prompt": each["prompt"], "completions": [each]}
        total += judge.judge(given, before="A", after="B", labels={8: "A", 9: "B"})
    assert (total.right, total.labelled) == (total.due, total.due // 3), str(total)
    assert not total.wrong, str(total)


def test_pages_of_one_token_and_no_linker(serve: Serve, model: Callable[..., Path]) -> None:
    home = model("qwen3_moe")
    answers = serve(home, scenarios(), **SMALL | {"page_size": 1})
    for scenario, count in tally(home, answers).items():
        assert (count["wrong"], count["missing"]) == (0, 0), scenario
    all_right({"A": home}, answers)


def test_what_is_not_followed_is_refused_by_name(serve: Serve, model: Callable[..., Path]) -> None:
    """Goal: no engine runs that would lose rows without a word. Method: a linker that keeps KV, and no store."""
    with pytest.raises(AssertionError, match="a store for the rows of KV that is loaded"):
        serve(model("qwen3_moe"), [], **SMALL | linked("FileLinker", "file_linker"))

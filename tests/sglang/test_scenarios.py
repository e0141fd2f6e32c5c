"""Goal: every row of every answer is right or missing. Method: stock SGLang beside kvroute in it, asked the same.

Transformers judges, by the experts that a float32 forward pass over the very tokens of an answer is given.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
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
            loaded=each["cached"].get("host", 0),
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


def all_right(homes: dict[str, Path], answers: list[dict[str, Any]], **given: Any) -> Tally:
    """Every layer of every row of whole routes, and what each trainer gets of them."""
    judge = Judge(homes)
    total = sum(
        (judge.judge({"prompt": a["prompt"], "completions": [a]}, **given) for a in answers if not a["start"]), Tally()
    )
    assert total.right == total.due, str(total)
    assert not total.wrong, str(total)
    return total


HOST = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}


@pytest.mark.parametrize("tier", ["linker", "host"])
def test_scenarios(serve: Serve, model: Callable[..., Path], tmp_path: Path, tier: str) -> None:
    """Method: KV comes back from a linker's store, or from SGLang's own pages on the host; with overlap and without."""
    home, common = model("qwen3_moe"), SMALL | {"chunked_prefill_size": 64}
    theirs = linked("PlainLinker", "plain_linker") if tier == "linker" else HOST
    stock = tally(home, serve(home, scenarios(), kvroute=False, **common, **theirs))
    shown(f"stock SGLang, {tier}", stock)
    assert stock["evicted and loaded"]["wrong"] > 0, "what kvroute is for"
    for overlap in True, False:
        own = ours(tmp_path / f"store-{overlap}") if tier == "linker" else HOST
        answers = serve(home, scenarios(), disable_overlap_schedule=not overlap, **common, **own)
        found = tally(home, answers)
        shown(f"with kvroute, {tier}, {'overlap' if overlap else 'no overlap'}", found)
        for scenario, count in found.items():
            assert (count["wrong"], count["missing"]) == (0, 0), scenario
            assert count["right"] == sum(stock[scenario][each] for each in ("right", "wrong")), scenario
        assert found["evicted and loaded"]["loaded"] > 0
        print(all_right({"A": home}, answers))


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_another_engine_loads_what_one_has_stored(
    serve: Serve, model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Method: the second engine of other pages and another family; all KV of its first answers is from the store."""
    home, asked = model(family), [["first", "ask", {"prompts": prompts(11, 70, 90, 120)}]]
    options = SMALL | ours(tmp_path / "store", weights="w", rollouts=f"file://{tmp_path}/rollouts")
    first, second = (serve(home, asked, **options) for _ in range(2))
    assert sum(each["cached"].get("host", 0) for each in first) == 0
    assert sum(each["cached"].get("host", 0) for each in second) == 64 + 80 + 112
    for answers in first, second:
        count = tally(home, answers)["first"]
        assert (count["wrong"], count["missing"], count["right"]) == (0, 0, 3 * 7 + 280)


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
    """Goal: no engine runs that would lose rows without a word. Method: a linker that keeps KV without them."""
    with pytest.raises(AssertionError, match="the linker KvrouteLinker, or none"):
        serve(model("qwen3_moe"), [], **SMALL | {"page_size": 16, **linked("PlainLinker", "plain_linker")})

"""Goal: every row of every answer is right or missing. Method: stock SGLang beside kvroute in it, asked the same.

Transformers judges, by the experts that a float32 forward pass over the very tokens of an answer is given.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_judge import CUT, judge_drawn
from far_judge import Judge, Tally
from models import routing
from safetensors.torch import save_file
from weights_recorder import judge_weights

from bench.sglang_gpu import HOST
from bench.vllm_drafts import read, write
from kvroute import Routes, RoutingWeights
from kvroute.integrations.sglang.rows import WHY
from kvroute.integrations.sglang.versions import release
from kvroute.replay.prime_rl import routed_experts_and_weights

Serve = Callable[..., list[dict[str, Any]]]
Models = Callable[..., Path]
RELEASE = release(version("sglang"))
PAGE = 16
SMALL = {"max_total_tokens": 512, "max_running_requests": 4, "page_size": PAGE, "context_length": 400}


def prompts(seed: int, *lengths: int, head: int = 0) -> list[list[int]]:
    """Of these lengths, with a common head of ``head`` tokens."""
    source = random.Random(seed)
    first = [source.randrange(3, 512) for _ in range(head)]
    return [first + [source.randrange(3, 512) for _ in range(n - head)] for n in lengths]


FIRST = prompts(31, 70, 90, 120)
DUE = 3 * 7 + 280
WITH_WEIGHTS = {"routing_weights": True, "strict": True}
SCENARIOS: list[Any] = [  # later ones push earlier ones out of a pool of 512 tokens
    ["plain", "ask", {"prompts": FIRST, "alone": True}],
    ["chunked prefill", "ask", {"prompts": prompts(2, 150)}],
    ["radix hits", "ask", {"prompts": prompts(3, 80, 90, 64, head=48)}],
    ["turns", "turns", {"prompts": prompts(4, 60, 41)}],
    ["n = 3", "ask", {"prompts": prompts(5, 50), "n": 3}],
    ["part of a route", "ask", {"prompts": prompts(6, 40), "start": 21}],
    ["no token", "ask", {"prompts": prompts(10, 50, 33), "new": 0}],
    ["abort", "abort", {"prompts": prompts(7, 30, 40, 30, 40)}],
    ["retraction", "ask", {"prompts": prompts(8, 70, 70, 70, 70), "new": 90, "retracted": True}],
    ["others", "ask", {"prompts": prompts(9, 120, 120, 120)}],
    ["evicted and loaded", "ask", {"prompts": FIRST}],
]

DRAWN_FROM = prompts(51, 70, 40, 33)
DRAWS: list[Any] = [  # behind the others, in one engine
    ["plain", "draw", {"prompts": DRAWN_FROM, "sampling": CUT}],
    ["prefix hits", "draw", {"prompts": DRAWN_FROM, "sampling": CUT}],
    ["min-p", "draw", {"prompts": DRAWN_FROM[:2], "sampling": {**CUT, "top_p": 1.0, "min_p": 0.3}}],
    ["top-k of one", "draw", {"prompts": DRAWN_FROM[:2], "sampling": {"temperature": 0.5, "top_k": 1}}],
    ["a turn", "draw_turns", {"prompts": DRAWN_FROM[:2], "sampling": CUT}],
    ["aborted", "draw_aborted", {"prompts": prompts(53, 50, 33), "sampling": CUT}],
    ["more than the pool has room for", "draw", {"prompts": prompts(52, 70, 70, 70, 70), "sampling": CUT, "new": 90}],
]


def of(answers: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [each for each in answers if each["scenario"] == name]


def loaded(answers: list[dict[str, Any]]) -> int:
    """How many tokens of these prompts came from anywhere but the device."""
    tiers = [entry for answer in answers for entry in answer["cached"].items()]
    return sum(n for tier, n in tiers if tier != "device" and isinstance(n, int))


def tally(home: Path, title: str, answers: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Rows of SGLang's own field by scenario: right, wrong, missing (-1), and how many tokens were loaded."""
    found: dict[str, Counter[str]] = {}
    for each in answers:
        tokens = [*each["prompt"], *each["tokens"]]
        if each["tokens"] or RELEASE >= (0, 5, 15):  # earlier ones have the row of the last token of a prompt, too
            tokens = tokens[:-1]
        due = routing(home, tokens)[each["start"] :]
        field = np.array(each["field"]).reshape(len(due), -1, due.shape[2])
        rows = np.sort(field[:, field.shape[1] - due.shape[1] :], axis=-1)
        if "routes" in each:  # kvroute's answer says the same
            told = Routes.from_json(each["routes"])
            same = np.where(told.known[:, :, None], told.ids.astype(np.int32), -1)
            assert (same == field[:, field.shape[1] - due.shape[1] :]).all(), each["scenario"]
        missing, right = (rows < 0).any(axis=(1, 2)), (rows == due).all(axis=(1, 2))
        found.setdefault(each["scenario"], Counter()).update(
            right=int(right.sum()),
            missing=int((missing & ~right).sum()),
            wrong=int((~missing & ~right).sum()),
            retractions=each["retractions"],
            loaded=loaded([each]),
        )
    columns = ("right", "wrong", "missing", "loaded", "retractions")
    print("\n" + title.ljust(44), *columns, sep="  ")
    for scenario, count in found.items():
        print(scenario.ljust(44), *(str(count[name]).rjust(len(name)) for name in columns), sep="  ")
    assert "retraction" not in found or found["retraction"]["retractions"] > 0
    return found


def linked(linker: str, module: str, **extra: Any) -> dict[str, Any]:
    """Options of an engine with an external linker."""
    named = {"linker": linker, "linker_module_path": module, "linker_extra_config": extra}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": named,
    }


def ours(store: Path, **extra: Any) -> dict[str, Any]:
    return linked("KvrouteLinker", "kvroute.integrations.sglang", store=f"file://{store}", strict=True, **extra)


def theirs(tier: str, home: Path) -> dict[str, Any]:
    """Options of an engine whose KV is kept by a linker or a storage without rows, in the folder ``home``."""
    home.mkdir(exist_ok=True)
    if tier == "linker of others":
        return linked("FileLinker", "file_linker", home=str(home))
    extra = {"prefetch_threshold": PAGE, "file_storage_path": str(home)}
    storage = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": json.dumps(extra)}
    return HOST | storage | {"hicache_ratio": 2.0, "hicache_storage_prefetch_policy": "wait_complete"}


def judged(homes: dict[str, Path], answers: list[dict[str, Any]], **given: Any) -> Tally:
    """Every layer of every row of whole routes, and what each trainer gets of them; none is wrong."""
    judge, whole = Judge(homes), [each for each in answers if not each["start"]]
    total = sum((judge.judge({"prompt": a["prompt"], "completions": [a]}, **given) for a in whole), Tally())
    assert not total.wrong, str(total)
    return total


def all_right(homes: dict[str, Path], answers: list[dict[str, Any]], **given: Any) -> Tally:
    total = judged(homes, answers, **given)
    assert total.right == total.due, str(total)
    return total


@pytest.mark.parametrize("tier", ["linker", "host"])
def test_scenarios(serve: Serve, model: Models, tmp_path: Path, tier: str) -> None:
    """Method: KV comes back from our linker, of a model with a layer without routers, and in a second engine, too; or
    from SGLang's own pages on the host, with overlap, and without it in pages of one token. There tokens are drawn,
    too, and what each was drawn from is judged: through hits, turns, aborts with a resume, and a full pool. Of ids with
    weights beside them each bit is judged."""
    home, common = model("glm4_moe" if tier == "linker" else "qwen3_moe"), SMALL | {"chunked_prefill_size": 64}
    if tier == "linker":
        kept = ours(tmp_path / "store", weights="w", rollouts=f"file://{tmp_path}/rollouts")
        runs = {"stock": theirs("linker of others", tmp_path / "files") | {"kvroute": False}, "overlap": kept}
    else:
        soon = {"disable_overlap_schedule": True, "page_size": 1}
        weighted = {"settings": WITH_WEIGHTS, "record": tmp_path / "record"} if RELEASE >= (0, 5, 23) else {}
        runs = {"stock": HOST | {"kvroute": False}, "overlap": HOST | weighted, "no overlap": HOST | soon}
    draws = DRAWS if tier == "host" and RELEASE >= (0, 5, 23) else []
    plans = {name: SCENARIOS + draws * (name == "overlap") for name in runs}
    with ThreadPoolExecutor(2) as pool:
        engines = {name: pool.submit(serve, home, plans[name], **common | each) for name, each in runs.items()}
        answers = {name: engine.result() for name, engine in engines.items()}
    drawn = [answer for answer in answers["overlap"] if "drawn" in answer]
    answers["overlap"] = [answer for answer in answers["overlap"] if "drawn" not in answer]
    found = {name: tally(home, f"{tier}, {name}", each) for name, each in answers.items()}
    stock = found.pop("stock")
    assert stock["evicted and loaded"]["wrong"] > 0, "what kvroute is for"
    for name, each in found.items():
        for scenario, count in each.items():
            due = stock[scenario]["right"] + stock[scenario]["wrong"]
            assert (count["wrong"], count["missing"], count["right"]) == (0, 0, due), (name, scenario)
        assert each["evicted and loaded"]["loaded"] > 0
        if tier == "host":  # the judge knows this family
            print(all_right({"A": home}, answers[name]))
    if draws:
        weights = judge_weights(tmp_path / "record", [home], answers["overlap"])
        assert weights == {name: Counter(right=3 * 4 * count["right"]) for name, count in found["overlap"].items()}
        counts = judge_drawn(home, drawn)
        assert counts["prefix hits"]["hits"] >= counts["plain"]["hits"] + 3 * 32
        assert counts["a turn, the second"]["hits"] >= 2 * 32
        assert all(len(answer["tokens"]) < 60 for answer in drawn if answer["drawn"] == "aborted")
    if tier == "linker":
        again = serve(home, SCENARIOS[:1], **SMALL | kept)
        count = tally(home, "another engine", again)["plain"]
        assert (count["right"], count["loaded"]) == (DUE, 64 + 80 + 112)


@pytest.mark.parametrize("tier", ["linker of others", "storage"])
def test_rows_follow_kv_that_another_component_keeps(
    serve: Serve, model: Models, tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: KV of a linker or a storage that knows no rows has its own rows beside it, or none with a reason.

    Method: engines on one folder of KV. Stock SGLang fills it, and loads what it has evicted. With kvroute, KV without
    rows is no hit; with rows it is one, until a bit of the last layer of one page is another, and then none again.
    Where KV must be the same bits in two engines, its prompts are asked alone: other requests of a pass change the
    last ones.
    """
    home, files = model("qwen3_moe"), theirs(tier, tmp_path / "files")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))  # up to 0.5.16
    first = {"prompts": FIRST, "alone": True}

    def engine(asked: dict[str, Any], more: list[Any], **settings: Any) -> tuple[dict[str, Counter[str]], Any]:
        do: list[Any] = []
        for name, given in asked.items():
            change = [[name, "change", {"home": str(tmp_path / "files")}]] if name == "changed" else []
            do += [*change, [name, "ask", given], ["others", "ask", {"prompts": prompts(32, *[120] * 11)}]]
        given = {"weights": "w", **WITH_WEIGHTS} | settings
        alone = {} if settings or RELEASE >= (0, 5, 22) else {"disable_overlap_schedule": True}  # else stock has zeros
        record = tmp_path / "record" if settings and RELEASE >= (0, 5, 23) else None
        given["routing_weights"] = record is not None
        answers = serve(
            home, do + more, kvroute=bool(settings), settings=given, record=record, **SMALL, **files, **alone
        )
        found = tally(home, f"{tier}, {settings or 'stock'}", answers)
        assert not settings or not sum(each["wrong"] for each in found.values())
        assert {gap[2] for each in answers for gap in each.get("why", ())} <= {WHY}
        return found, answers

    stock, _ = engine({"computed": first, "loaded": first}, [])
    assert stock["computed"]["right"] == DUE
    assert stock["loaded"]["wrong"] > 0, "what kvroute is for"

    asked = {"no hit": first, "loaded": first, "changed": first, "no hit again": first}
    found, answers = engine(asked, SCENARIOS, store=f"file://{tmp_path}/store", witness="flagged")
    assert (found["no hit"]["right"], found["no hit"]["loaded"]) == (DUE, 0)
    assert (found["loaded"]["right"], found["loaded"]["loaded"]) == (DUE, 64 + 80 + 112)
    all_right({"A": home}, of(answers, "loaded"))
    if RELEASE >= (0, 5, 23):
        weights = judge_weights(tmp_path / "record", [home], answers)
        assert {name: count["right"] for name, count in weights.items()} == {
            name: 3 * 4 * count["right"] for name, count in found.items()
        }
        assert weights["changed"]["missing"] == 3 * 4 * PAGE
    assert (found["changed"]["right"], found["changed"]["missing"]) == (DUE - PAGE, PAGE)
    (gap,) = [gap for each in of(answers, "changed") for gap in each["why"]]
    assert (gap[1] - gap[0], gap[2]) == (PAGE, WHY)
    assert found["no hit again"]["right"] == DUE


def test_weights_change(serve: Serve, model: Models, tmp_path: Path) -> None:
    """Goal: rows have the version that made them, and tokens keep the rows that they were sampled with. Method: updates
    with a flush, without one, and amidst answers, whose KV stays or is given up and computed again. Ids have weights
    beside them, also where both come from the store with their KV."""
    a, b = model("qwen3_moe"), model("qwen3_moe", 1)
    asked = prompts(21, 70, 33)
    do = [
        ["A", "ask", {"prompts": asked}],
        ["others", "ask", {"prompts": prompts(23, *[120] * 5)}],
        ["A, loaded", "ask", {"prompts": asked}],
        ["", "update", {"model": str(b), "version": "7", "flush": True}],
        ["B", "ask", {"prompts": asked}],
        ["B again", "ask", {"prompts": asked}],
        ["A to B", "flush", {}],
        ["", "update", {"model": str(a), "version": "8", "flush": True}],
        ["amidst", "update_amidst", {"prompts": prompts(22, 40, 40), "model": str(b), "version": "9", "new": 200}],
        [
            *("retracted", "update_amidst"),
            {"prompts": prompts(24, 40, 33), "model": str(a), "version": "10", "new": 200, "retract": True},
        ],
    ]
    record = tmp_path / "record" if RELEASE >= (0, 5, 23) else None
    linker = ours(tmp_path / "store", weights="w", routing_weights=record is not None)
    answers = serve(a, do, record=record, **SMALL, **linker)
    homes = {"A": a, "B": b}
    all_right(homes, of(answers, "A"), before="A")
    all_right(homes, of(answers, "A, loaded"), before="A")
    assert loaded(of(answers, "A, loaded")) >= 64 + 32
    if record is not None:
        changed = of(answers, "amidst") + of(answers, "retracted")
        still = [answer for answer in answers if answer not in changed]
        for count in [*judge_weights(record, [a, b], still).values(), *judge_weights(record, [], changed).values()]:
            assert count == Counter(right=count["right"])
        answer, *_ = of(answers, "A, loaded")
        assert_trainer_gets(RoutingWeights.from_json(Routes.from_json(answer["routes"]), answer["weights"]))
    for name in "B", "B again":
        assert all_right(homes, of(answers, name), before="B", labels={7: "B"}).labelled == 70 + 33 + 2 * 7
    total = all_right(homes, of(answers, "amidst"), before="A", after="B", labels={8: "A", 9: "B"})
    assert total.labelled == total.due // 3, str(total)
    retracted = of(answers, "retracted")
    total = all_right(homes, retracted, before="B", after="A", labels={9: "B", 10: "A"})
    assert total.labelled == total.due // 3, str(total)
    for answer in retracted:
        (start, cut, first), (_, stop, last) = Routes.from_json(answer["routes"]).weights_versions
        assert (start, first, last, stop) == (0, 9, 10, len(answer["prompt"]) + len(answer["tokens"]) - 1)
        assert cut > len(answer["prompt"])


def assert_trainer_gets(found: RoutingWeights) -> None:
    """prime-rl's array has the ids, and the bits of their weights."""
    sample = routed_experts_and_weights(found, found.routes.stop + 1, frozen_router=True)
    array = np.frombuffer(sample["data"], sample["dtype"]).reshape(sample["shape"])
    layers, top_k = list(found.routes.layer_ids), found.routes.top_k
    assert (array[:-1, layers, :top_k] == found.routes.ids).all()
    assert array[:-1, layers, top_k:].tobytes() == found.weights.tobytes()


def adapted(target: Path, home: Path) -> Path:
    """An adapter (LoRA) of each layer's attention, and beside it, in ``merged``, a checkpoint with the same change."""
    config, weights = read(target)
    random, layers = torch.Generator().manual_seed(1), {}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.o_proj"
        weight = weights[f"{name}.weight"]
        down, up = (
            0.5 * torch.randn(shape, generator=random) for shape in ((4, weight.shape[1]), (weight.shape[0], 4))
        )
        layers |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        weights[f"{name}.weight"] = (weight.float() + up @ down).to(weight.dtype)
    home.mkdir()
    save_file(layers, home / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["o_proj"], "bias": "none"}
    (home / "adapter_config.json").write_text(json.dumps(said))
    shutil.copytree(target, home / "merged")
    write(home / "merged", config, weights)
    return home


def test_a_rollout_store_that_hangs_holds_no_other_request(serve: Serve, model: Models, tmp_path: Path) -> None:
    """Goal: SGLang's scheduler waits for no rollout store, and an answer's routes are there when it comes. Then, in the
    same engine, rows are of the adapter that a request names, also with prefix hits between those with and without."""
    home = model("qwen3_moe")
    adapter = adapted(home, tmp_path / "adapter")
    hangs = {"prompts": prompts(41, 60, 50, 40, 30), "gate": f"{tmp_path}/rollouts/open"}
    do = [["hangs", "while_the_store_hangs", hangs], ["after", "ask", {"prompts": prompts(42, 50, 30), "n": 3}]]
    names = "base", "adapted", "base again", "adapted again"
    more = [{"prompts": FIRST, "adapter": "one" if "adapted" in name else None} for name in names]
    do += [[name, "ask", each] for name, each in zip(names, more, strict=True)]
    lora = {"enable_lora": True, "lora_paths": [f"one={adapter}"], "lora_backend": "torch_native"}
    settings = {"rollouts": f"gated://{tmp_path}/rollouts", "strict": True}
    answers = serve(home, do, settings=settings, **SMALL, **lora)
    assert not [answer["refused"] for answer in answers if "refused" in answer]
    assert all_right({"A": home}, of(answers, "hangs")).due
    assert all_right({"A": home}, of(answers, "after")).due
    for name in names:
        weights = adapter / "merged" if "adapted" in name else home
        assert all_right({"A": weights}, of(answers, name)).due == 3 * DUE


def test_what_is_not_followed_is_refused_by_name(serve: Serve, model: Models) -> None:
    """Goal: an engine that would lose rows silently does not start. Method: a linker that keeps KV, and no store."""
    with pytest.raises(AssertionError, match="a store for the rows of KV that is loaded"):
        serve(model("qwen3_moe"), [], **SMALL | linked("FileLinker", "file_linker"))

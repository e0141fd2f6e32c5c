"""Goal: with speculative decoding every row is the model's own, of an accepted token at its position.

Method: drafts of each kind, of which some are rejected; what stock SGLang says, asked the same, stands beside it.
Transformers judges by the tokens of the answers alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_scenarios import FIRST, SMALL, all_right, of, prompts, tally

from bench.sglang_gpu import HOST
from bench.vllm_drafts import eagle3, noisy, with_mtp

Serve = Callable[..., list[dict[str, Any]]]
Models = Callable[..., Path]
REPEATED = [[11, 12, 13, 14] * 8, [21, 22, 23] * 9 + [5], [7, 8] * 12]
ASKED: list[Any] = [
    ["drafts", "ask", {"prompts": [*REPEATED, *prompts(1, 40)], "new": 40}],
    ["chunked prefill", "ask", {"prompts": prompts(2, 150)}],
    ["radix hits", "ask", {"prompts": prompts(3, 80, 90, 64, head=48)}],
    ["turns", "turns", {"prompts": [*prompts(4, 60), REPEATED[0]], "new": 30}],
    ["part of a route", "ask", {"prompts": prompts(6, 40), "start": 21}],
    ["no token", "ask", {"prompts": prompts(10, 50, 33), "new": 0}],
    ["stop string", "stop", {"prompts": prompts(14, 20, 31), "words": 3}],
    ["abort", "abort", {"prompts": prompts(7, 30, 40, 30, 40)}],
    ["retraction", "ask", {"prompts": prompts(8, 70, 70, 70, 70), "new": 90, "retracted": True}],
]
LOADED: list[Any] = [
    ["plain", "ask", {"prompts": FIRST, "alone": True}],
    *ASKED,
    ["others", "ask", {"prompts": prompts(9, 120, 120, 120)}],
    ["evicted and loaded", "ask", {"prompts": FIRST}],
]
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 6,
    "speculative_ngram_max_bfs_breadth": 4,
    "page_size": 1,
}
TOGETHER = {"chunked_prefill_size": 64, "skip_tokenizer_init": False}


def with_head(target: Path, home: Path) -> Path:
    """A head of EAGLE-3, by the name that SGLang has for it."""
    eagle3(target, home)
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}))
    return home


def test_drafts_from_the_requests_themselves(serve: Serve, model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: trees of n-grams, whose accepted KV moves to other slots, with pages on the host and overlap scheduling;
    then new weights, amidst answers too. Stock SGLang loses the rows of each pass of its n-gram worker with overlap."""
    monkeypatch.setenv("OVERLAP_WITH_DRAFTS", "1")
    a, b = model("qwen3_moe"), model("qwen3_moe", 1)
    updates: list[Any] = [
        ["", "flush", {}],
        ["", "update", {"model": str(b), "version": "8", "flush": True}],
        ["B", "ask", {"prompts": REPEATED, "new": 30}],
        ["amidst", "update_amidst", {"prompts": prompts(22, 40, 40), "model": str(a), "version": "9", "new": 200}],
    ]
    options = SMALL | TOGETHER | TREE | HOST
    with ThreadPoolExecutor(2) as pool:
        stock = pool.submit(serve, a, LOADED, kvroute=False, **options)
        ours = pool.submit(serve, a, LOADED + updates, settings={"strict": True}, **options)
        answers, rows = stock.result(), ours.result()
    counts = tally(a, "n-grams, stock", answers)
    assert all(count["right"] == 0 < count["wrong"] for count in counts.values()), "what kvroute is for"
    later = of(rows, "B") + of(rows, "amidst")
    counts = tally(a, "n-grams, kvroute", [each for each in rows if each not in later])
    assert all(count["wrong"] == count["missing"] == 0 < count["right"] for count in counts.values())
    assert counts["evicted and loaded"]["loaded"] > 0
    homes = {"A": a, "B": b}
    total = all_right(homes, of(rows, "B"), before="B", labels={8: "B"})
    assert total.labelled == total.due // 3
    total = all_right(homes, of(rows, "amidst"), before="B", after="A", labels={8: "B", 9: "A"})
    assert total.labelled == total.due // 3


KINDS: dict[str, tuple[str, Callable[[Path, Path], Path], dict[str, Any]]] = {
    "model": ("mixtral", lambda target, home: noisy(target, home, 0.1), {"speculative_algorithm": "STANDALONE"}),
    "eagle3": ("qwen3_moe", with_head, {"speculative_algorithm": "EAGLE3"}),
    "mtp": ("glm4_moe", with_mtp, {"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True}),
}
"""The model, what makes its drafts, and SGLang's name of it. The first and the last have routers of their own."""


def test_drafts_of_a_model_a_head_and_mtp_layers(
    serve: Serve, model: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Method: chains, with overlap scheduling but for MTP."""
    monkeypatch.setenv("OVERLAP_WITH_DRAFTS", "1")
    with ThreadPoolExecutor(2) as pool:
        engines = {}
        for kind, (family, make, options) in KINDS.items():
            drafts = make(model(family), tmp_path / kind)
            home = drafts if kind == "mtp" else model(family)  # MTP's are in the model's own checkpoint
            if kind != "mtp":
                options = options | {"speculative_draft_model_path": str(drafts)}
            given = SMALL | TOGETHER | CHAIN | options
            engines[kind] = pool.submit(serve, home, ASKED, settings={"strict": True}, **given)
        answers = {kind: engine.result() for kind, engine in engines.items()}
    for kind, (family, *_) in KINDS.items():
        counts = tally(model(family), f"{kind}, kvroute", answers[kind])
        assert all(count["wrong"] == count["missing"] == 0 < count["right"] for count in counts.values())

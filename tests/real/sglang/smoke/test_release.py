"""A release of SGLang that has not all tests, with one engine: `make smoke-sglang` runs this on each that a trainer
pins."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from test_scenarios import PAGE, SCENARIOS, SMALL, all_right, of, prompts, tally, theirs

from bench.sglang_gpu import HOST
from kvroute import Routes
from kvroute.integrations.sglang import radix, versions

Serve = Callable[..., list[dict[str, Any]]]
Models = Callable[..., Path]
SGLANG = version("sglang")
FLUSHING = versions.release(SGLANG) >= (0, 5, 22)  # it flushes while requests wait
ASKED = prompts(21, 70, 33)
FILES = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"  # where an older release keeps its files


def test_this_release_is_in_the_table() -> None:
    assert SGLANG in {judged.version for judged in versions.JUDGED}


def test_every_row_is_right(serve: Serve, model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: rows of prefix hits, of KV that comes back, of answers that end with a string, and of weights before and
    after an update are right. Method: one engine, whose routes go to a rollout store, with pages on the host, a storage
    behind them and a store of rows."""
    a, b = model("qwen3_moe"), model("qwen3_moe", 1)
    do: list[Any] = [
        *SCENARIOS,
        ["stop string", "stop", {"prompts": prompts(11, 44, 61), "words": 4}],
        ["A", "ask", {"prompts": ASKED}],
        ["", "flush", {}],  # when nothing runs; a weight update ends an older engine where something does
        ["", "update", {"model": str(b), "version": "7", "flush": True}],
        ["B", "ask", {"prompts": ASKED}],
        ["B again", "ask", {"prompts": ASKED}],
        ["", "flush", {}],
        ["", "update", {"model": str(a), "version": "8", "flush": True}],
        ["amidst", "update_amidst", {"prompts": prompts(22, 40, 40), "model": str(b), "version": "9", "new": 200}],
    ]
    short = prompts(24, PAGE - 1, PAGE - 4)  # no page of theirs is hit, where an older release cannot flush
    asked = {"prompts": short, "model": str(a), "version": "10", "new": 200}
    do.append(["retracted", "update_amidst", {**asked, "retract": True, "flush": FLUSHING}])
    settings: dict[str, Any] = {"rollouts": f"file://{tmp_path}/rollouts", "strict": True, "weights": "w"}
    settings |= {"store": f"file://{tmp_path}/rows", "witness": "flagged"}
    options = theirs("storage", tmp_path / "files")
    monkeypatch.setenv(FILES, str(tmp_path / "files"))
    answers = serve(a, do, settings=settings, skip_tokenizer_init=False, chunked_prefill_size=64, **SMALL, **options)
    homes = {"A": a, "B": b}
    first = [each for each in answers if each["scenario"] not in ("B", "B again", "amidst", "retracted")]
    later = [*of(answers, "B"), *of(answers, "B again")]
    counts = tally(a, f"SGLang {SGLANG}", first) | tally(b, "after an update", later)
    assert all(count["wrong"] == count["missing"] == 0 < count["right"] for count in counts.values())
    assert counts["evicted and loaded"]["loaded"] > 0
    for name in "radix hits", "turns", "B again":
        assert max(each["hits"] for each in of(answers, name)) >= PAGE, name
    print(all_right(homes, first))
    assert all_right(homes, later, before="B", labels={7: "B"}).labelled == 2 * (70 + 33 + 2 * 7)
    total = all_right(homes, of(answers, "amidst"), before="A", after="B", labels={8: "A", 9: "B"})
    assert total.labelled == total.due // 3, str(total)
    total = all_right(homes, of(answers, "retracted"), before="B", after="A", labels={9: "B", 10: "A"})
    assert total.labelled == total.due // 3, str(total)
    for answer in of(answers, "retracted"):
        (_, cut, first), (_, _, last) = Routes.from_json(answer["routes"]).weights_versions
        assert (first, last) == (9, 10)
        assert cut >= len(answer["prompt"]) + 2, "tokens that the old weights had sampled keep their rows"
    spans = [Routes.from_json(each["routes"]).weights_versions for each in of(answers, "amidst")]
    assert [[version for *_, version in each] for each in spans] == [[8, 9]] * 2


if SGLANG != versions.PREFERRED:

    def test_a_part_that_no_hook_follows_is_refused_by_name(
        serve: Serve, model: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Goal: an older release ends with the part's name, and never with rows that nobody follows. Method: an
        external linker, or where there is none, pages on the host in SGLang's other tree."""
        if FLUSHING:
            options: dict[str, Any] = {versions.LINKER: True}
            refusal = f"{versions.LINKER}: wanted False: SGLang {SGLANG} has not sglang.srt.mem_cache."
        else:
            options = HOST
            monkeypatch.setenv("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "1")
            refusal = f"{versions.HOST}: wanted a model whose layers attend to all tokens, with a {radix.FOLLOWED}"
        with pytest.raises(AssertionError, match=re.escape(f"SGLang with kvroute: {refusal}")):
            serve(model("qwen3_moe"), [], **SMALL, **options)

"""``kvroute bench`` against servers that answer as vLLM and SGLang do, over a small model.

With vLLM itself: ``tests/real/vllm/test_server.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from row_server import NEW, Engine, none, serving
from salted_moe import small_moe

from kvroute.cli import FAILED, USAGE, main
from kvroute.verify.bench import NOT_COMPARED

ROUNDS, REQUESTS, PROMPT = 2, 4, 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("checkpoint")
    small_moe(0).save_pretrained(home)
    return home


def bench(url: str, model: Path, *more: str) -> int:
    numbers = {"rounds": ROUNDS, "requests": REQUESTS, "at-once": 2, "prompt": PROMPT, "new": NEW}
    flags = [text for name, number in numbers.items() for text in (f"--{name}", str(number))]
    return main(["bench", "--url", url, "--model", str(model), "--dtype", "float32", *flags, *more])


def test_rows_are_measured_against_none(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: an operator sees what rows cost here. Method: SGLang's way, one server that is asked with rows and without;
    every row is judged, and so is the round that is not counted, and prompts that were asked again."""
    with serving(Engine("sglang", none)) as url:
        assert bench(url, checkpoint, "--json", "-") == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    due = ((ROUNDS + 1) * REQUESTS + 4) * (PROMPT + NEW - 1)
    assert facts["all"] == {"right": due, "wrong": 0, "missing": 0, "unjudged": 0}
    assert facts["rows_nbytes"] == (PROMPT + NEW - 1) * 3 * 4  # layers, top_k: one byte each
    sides = facts["with_rows"], facts["without"]
    assert [len(side["tokens_per_second"]) for side in sides] == [ROUNDS, ROUNDS]
    # in int32 and base64, beside what both have
    assert facts["with_rows"]["answer_nbytes"] - facts["without"]["answer_nbytes"] >= facts["rows_nbytes"] * 4
    ratios = [ours / theirs for ours, theirs in zip(*(side["tokens_per_second"] for side in sides), strict=True)]
    assert facts["ratios"] == pytest.approx(ratios, rel=1e-2)
    assert "tokens a second with rows, relative to those without: " in printed.err


def test_vllm_is_compared_with_a_server_without_rows(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Method: alone, nothing is compared, and the text says why; beside a server without rows it is; one that has rows,
    too, is refused."""
    with serving(Engine("vllm", none)) as url, serving(Engine("vllm", lambda *_: None)) as bare:
        assert bench(url, checkpoint) == 0
        assert f"not compared: {NOT_COMPARED}" in capsys.readouterr().out
        assert bench(url, checkpoint, "--without", bare) == 0
        assert "relative to those without: " in capsys.readouterr().out
        assert bench(url, checkpoint, "--without", url) == USAGE
        assert "--without: wanted a server whose answers have no rows" in capsys.readouterr().err
        assert bench(bare, checkpoint) == USAGE
        assert "--enable-return-routed-experts" in capsys.readouterr().err


def test_wrong_and_missing_rows_are_found(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Method: rows of other positions, then rows that kvroute says not to have."""
    with serving(Engine("vllm", lambda rows, *_: np.roll(rows, 1, axis=0))) as url:
        assert bench(url, checkpoint) == FAILED
    capsys.readouterr()
    with serving(Engine("kvroute", none)) as url:
        assert bench(url, checkpoint, "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)
    (cause,) = facts["missing"]
    assert "rows were not kept" in cause
    assert facts["missing"][cause] == facts["all"]["missing"] > 0


def test_what_cannot_be_measured_is_said_at_once(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("http://127.0.0.1:1", checkpoint, "--prompt", "100000") == USAGE
    assert "--prompt, --new: wanted at most " in capsys.readouterr().err
    assert bench("http://127.0.0.1:1", checkpoint) == USAGE
    assert "http://127.0.0.1:1/v1/models: wanted an answer" in capsys.readouterr().err

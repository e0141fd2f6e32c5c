"""The zoo of families inside vLLM: what ends there is a line of its table, and the page shows the results."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bench.vllm_families import FAMILIES
from bench.vllm_zoo import apart, markdown, of_machines, short
from cache_manager.errors import ConfigError

ROOT = Path(__file__).parents[3]
RESULTS = {"CPU": ROOT / "bench/results/vllm-zoo-cpu", "H200": ROOT / "bench/results/vllm-zoo-h200"}


def answers(value: int) -> int:
    return value


def refuses(_: int) -> None:
    raise ConfigError("zoo", "a bear", "a beetle")


def fails(_: int) -> None:
    raise ValueError("no kernel")


def dies(_: int) -> None:
    os.write(1, b"the last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_: int) -> None:
    time.sleep(3600)


@pytest.mark.parametrize(
    ("part", "outcome"),
    [
        (answers, {"value": 3}),
        (refuses, {"error": "ConfigError: zoo: wanted a bear, got a beetle", "by": "kvroute"}),
        (fails, {"error": "ValueError: no kernel", "by": "vLLM"}),
        (dies, {"error": "ended with code -9: the last words", "by": ""}),
        (hangs, {"error": "no answer in 1 s", "by": ""}),
    ],
)
def test_what_ends_is_an_outcome(part: Any, outcome: dict[str, Any], tmp_path: Path) -> None:
    """Goal: a family that crashes or hangs ends nothing but itself. Method: each way to end, in a process."""
    limit_s = 1 if part is hangs else 60
    assert apart(part, limit_s, tmp_path / "log", 3) == outcome


def test_an_error_in_the_table_is_short() -> None:
    wordy = (
        "ValidationError: 1 error for VllmConfig\n  Value error, no | kernel [type=value_error, input_value=...]\n more"
    )
    assert short(wordy) == "no / kernel"
    assert len(short("x" * 1000)) < 200


def test_a_verdict_takes_the_place_of_refusals() -> None:
    judged, refused = {"family": "mixtral", "right": 1}, {"family": "mixtral", "refused": "no kernel"}
    other = {"family": "dbrx", "refused": "no weight"}
    lines = of_machines({"CPU": [refused, other], "H200": [judged]})
    assert lines == [{**other, "machine": "CPU"}, {**judged, "machine": "H200"}]
    assert of_machines({"CPU": [judged], "H200": [refused]}) == [{**judged, "machine": "CPU"}]


def test_the_page_shows_the_results() -> None:
    """Goal: the page's table is that of the committed results, and none of their rows is wrong."""
    results = {machine: json.loads((place / "zoo.json").read_text())["families"] for machine, place in RESULTS.items()}
    lines = of_machines(results)
    assert [line["family"] for line in lines] == list(FAMILIES)
    assert "\n".join(markdown(lines)) in (ROOT / "docs/vllm.md").read_text()
    assert not [line for lines in results.values() for line in lines if line.get("not computed with")]

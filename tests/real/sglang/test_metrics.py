"""kvroute's numbers at SGLang's ``/metrics``."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import engine_environment
from serve import FIXED, Asked
from test_scenarios import FIRST, PAGE, SMALL, prompts, theirs
from test_verify import running
from waiting import GIVE_UP_S, until

from kvroute.connector.job_counts import NOT_RESTORED
from kvroute.connector.meter import EVENTS, SECONDS, WITHOUT_ROWS


def fetched(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 (our own)
    with urllib.request.urlopen(request, timeout=GIVE_UP_S) as answer:  # noqa: S310
        return str(answer.read().decode())


def test_numbers_of_rows_are_among_those_of_sglang(plugins: Path, model: Callable[..., Path], tmp_path: Path) -> None:
    """Goal: why rows are missing, and what else is counted, is at ``/metrics`` with SGLang's own labels. Method: a
    linker of others keeps KV, of which one bit changes: its rows are of other KV."""
    home, files = model("qwen3_moe"), tmp_path / "files"
    options = {"model_path": home, **FIXED, **SMALL, **theirs("linker of others", files), "enable_metrics": True}
    settings = {"store": f"file://{tmp_path}/store", "rollouts": f"file://{tmp_path}/rollouts", "weights": "w"}
    environment = engine_environment(plugins, kvroute=True) | {"KVROUTE_SGLANG": json.dumps(settings)}
    with running(environment, tmp_path / "log", options) as url:

        def ask(asked: list[list[int]]) -> None:
            for prompt in asked:
                sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
                fetched(f"{url}/generate", body)

        def value(name: str, **labels: str) -> float:
            """The sample with these labels; 0: there is none."""
            wanted = [f'{label}="{text}"' for label, text in labels.items()]
            for line in fetched(f"{url}/metrics").splitlines():
                sample, _, number = line.rpartition(" ")
                if sample.startswith(name + "{") and all(text in sample for text in wanted):
                    assert re.search(r'[{,]model_name="', sample)
                    assert re.search(r'[{,]tp_rank="0"', sample)
                    return float(number)
            return 0.0

        ask([*FIRST, *prompts(32, *[120] * 11)])
        Asked.change(None, "", str(files))
        ask(FIRST)
        cause = NOT_RESTORED["absent_blocks_not_restored"]

        def is_counted() -> bool:
            ask(prompts(33, 8))  # numbers of an earlier pass come with a later one
            return value(WITHOUT_ROWS, cause=cause) > 0

        until(is_counted, what="the cause is not at /metrics")
        assert value(WITHOUT_ROWS, cause=cause) == PAGE
        assert value(EVENTS, tier="blocks", event="rows_committed") > 1000
        assert value(EVENTS, tier="store", event="hits") > 0
        assert value(EVENTS, tier="answers", event="left") > 2 * len(FIRST)
        assert value(EVENTS, tier="answers", event="refused") == 0
        for what in ("persist", "restore", "answer"):
            assert value(f"{SECONDS}_count", what=what) > 0, what

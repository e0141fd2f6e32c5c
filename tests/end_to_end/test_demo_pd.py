"""``kvroute demo-pd`` as a person runs it: three processes, and every row that crossed is right."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from nursery import ENGINE, nursery
from rich.console import Console

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.routes import Routes
from paged_engine.demo.workload import conversations
from paged_engine.demo_pd.network import Loopback
from paged_engine.demo_pd.options import DemoPDOptions
from paged_engine.demo_pd.run import DemoPD, _progress
from paged_engine.engine.engine import Engine
from paged_engine.engine.models import build_model
from paged_engine.engine.text import VOCAB_SIZE

NUMBERS = {"transferred_rows", "transfer_retries", "late_messages", "prefill_recomputed_tokens"}


def test_every_row_that_crossed_is_right(tmp_path: Path) -> None:
    """Goal: the promise holds across processes. Method: the demo itself, small, over Mooncake's engine on loopback, and
    its numbers; ``.ci/run`` runs it over ZeroMQ between network namespaces."""
    report = tmp_path / "numbers.json"
    argv = ["-m", "kvroute.cli", "demo-pd", "--requests", "8", "--network", "loopback", "--link", "mooncake"]
    ran = nursery(*ENGINE).run([*argv, "--json", str(report)], timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every row is right" in ran.stdout
    found = json.loads(report.read_text())
    assert found.keys() >= NUMBERS
    assert (found["network"], found["ok"], found["tokens_match"]) == ("loopback", True, True)
    assert (found["rows_wrong"], found["rows_missing"], found["rows_judged_by_recompute"]) == (0, 0, 0)
    assert found["recompute_agreement"] == 1.0
    assert found["transferred_rows"] > 0
    assert found["exit_statuses"] == [0, 0, 0]
    assert found["blocks_returned"] is True


def test_the_judge_sees_a_tampered_and_a_missing_row() -> None:
    """Goal: the judgement can fail. Method: true answers, of which one row is changed and one taken away."""
    run = DemoPD(DemoPDOptions(requests=1), Loopback(), Console(file=io.StringIO()))
    request = conversations(1, 0)[0].ask()
    model = build_model("qwen3_moe", seed=0, vocab_size=VOCAB_SIZE)
    with Engine(model, DemoPDOptions().demo.plain_engine, Namespace("m", weights_version=0)) as engine:
        engine.add(request)
        outputs = {(output.request.id, output.sample): output for output in engine.run()}
    key, honest = next(iter(outputs.items()))
    ids, valid = honest.routes.ids.copy(), honest.routes.valid.copy()
    ids[3, 0] = (ids[3, 0] + 1) % 16
    valid[5] = False
    routes = Routes(ids, valid, honest.routes.layer_ids, honest.routes.num_experts, honest.routes.num_layers)
    with _progress(Console(file=io.StringIO())) as progress:
        run._plainly(outputs, progress)
        assert (run._judge(outputs, progress).wrong, run._judge(outputs, progress).missing) == (0, 0)
        verdict = run._judge(outputs | {key: replace(honest, routes=routes)}, progress)
    assert (verdict.wrong, verdict.missing) == (1, 1)


def test_bad_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--requests: wanted 1 to"):
        DemoPDOptions(requests=0)
    with pytest.raises(ConfigError, match="--json: wanted a file in a directory that exists"):
        DemoPDOptions(json=tmp_path / "none" / "x.json")

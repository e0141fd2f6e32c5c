"""``kvroute demo-pd`` as a person runs it: two processes, and every row that crossed is right."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from nursery import ENGINE, nursery
from rich.console import Console

from cache_manager.keys import Namespace
from kvroute.routes import Routes
from paged_engine.bodies import DRAW
from paged_engine.demo import Driver
from paged_engine.engine import Engine
from paged_engine.options import Options
from paged_engine.workload import conversations

NUMBERS = {"transferred_rows", "transferred_blocks", "handovers", "clients_left", "swapped_out_rows", "cow_rows"}


def test_every_row_that_crossed_is_right(tmp_path: Path) -> None:
    """Goal: the promise holds across processes. Method: the demo itself, small, and its numbers."""
    report = tmp_path / "numbers.json"
    argv = ["-m", "kvroute.cli", "demo-pd", "--requests", "8", "--json", str(report)]
    ran = nursery(*ENGINE).run(argv, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every row is right" in ran.stdout
    found = json.loads(report.read_text())
    assert all(found[happened] > 0 for happened in NUMBERS), found
    assert (found["ok"], found["tokens_match"], found["blocks_returned"]) == (True, True, True)
    assert (found["rows_wrong"], found["rows_missing"], found["rows_judged_by_recompute"]) == (0, 0, 0)
    assert found["recompute_agreement"] == 1.0
    assert found["exit_statuses"] == [0, 0]


def test_the_judge_sees_a_tampered_and_a_missing_row() -> None:
    """Goal: the judgement can fail. Method: true answers, of which one row is changed and one taken away, and one
    token."""
    options = Options(requests=1)
    run = Driver(options, Console(file=io.StringIO()))
    request = replace(conversations(1, 0)[0].ask(), draw=DRAW)
    with Engine(run.build(), options.plain_engine, Namespace("m", weights_version=0)) as engine:
        engine.add(request)
        outputs = {(output.request.id, output.sample): output for output in engine.run()}
    key, honest = next(iter(outputs.items()))
    ids, valid = honest.routes.ids.copy(), honest.routes.valid.copy()
    ids[3, 0] = (ids[3, 0] + 1) % 16
    valid[5] = False
    routes = Routes(ids, valid, honest.routes.layer_ids, honest.routes.num_experts, honest.routes.num_layers)
    assert run.plainly(outputs, watched=True, draw=DRAW)
    other = replace(honest, tokens=(*honest.tokens[:-1], honest.tokens[-1] ^ 1))
    assert not run.plainly(outputs | {key: other}, draw=DRAW)
    found = [run.judge(each, {}) for each in (outputs, outputs | {key: replace(honest, routes=routes)})]
    assert [(verdict.rows_wrong, verdict.rows_missing) for verdict in found] == [(0, 0), (1, 1)]

"""``kvroute demo`` as a person runs it: every way of moving rows happens, and every row comes out right.

``.ci/run`` runs it on another model, and with a Mooncake pool.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from nursery import ENGINE, Born, nursery
from waiting import GIVE_UP_S

from cache_manager.keys import Namespace
from cache_manager.progress import Progress
from cache_manager.storage import open_store
from kvroute.capture.capture import RoutingCapture
from kvroute.cli import COMMANDS, main
from kvroute.routes import Routes
from paged_engine.drivers import Clients, Demo, Driver
from paged_engine.engine import Engine
from paged_engine.options import Options
from paged_engine.pool import running_pool
from paged_engine.processes import until
from paged_engine.scheduler import Work
from paged_engine.workload import conversations

torch.set_num_threads(1)
DEADLINE_S = GIVE_UP_S

KEYS = {
    "requests", "tokens", "rows_expected", "rows_wrong", "rows_missing", "prefix_hit_rows", "swapped_out_rows",
    "swapped_in_rows", "restored_rows", "cow_rows", "evicted_blocks", "tokens_match",
    "recompute_agreement", "seconds", "update_samples", "update_rows_expected", "update_rows_recomputed",
    "slot_rows_wrong", "came_from",
}  # fmt: skip


def test_everything_happens_and_every_row_is_right(tmp_path: Path) -> None:
    """Goal: the promise holds end to end. Method: the demo itself, small, and its numbers."""
    console = io.StringIO()
    report = tmp_path / "numbers.json"
    status = Demo(Options(requests=8, model="deepseek_v3", json=report), Progress(console)).run()
    found = json.loads(report.read_text())
    assert found.keys() >= KEYS
    assert status == 0, found
    assert (found["rows_wrong"], found["rows_missing"], found["rows_judged_by_recompute"]) == (0, 0, 0)
    assert (found["update_rows_wrong"], found["update_rows_missing"]) == (0, 0)
    assert (found["tokens_match"], found["recompute_agreement"]) == (True, 1.0)
    assert found["requests"] == 8
    for happened in KEYS - {"rows_wrong", "rows_missing", "came_from"}:
        assert found[happened] > 0, happened
    assert sum(found["came_from"].values()) == found["rows_expected"]
    assert found["swapped_out_rows"] >= found["swapped_in_rows"]
    text = console.getvalue()
    assert "every row is right" in text
    assert "after restart" in text
    wrong, expected = f"{found['slot_rows_wrong']:,}", f"{found['rows_expected']:,}"
    assert f"kvroute: 0 of {expected} rows wrong, 0 missing\n" in text
    assert f"a buffer keyed by slot, in the same passes: {wrong} of {expected} rows wrong\n" in text
    assert "one row through its life: position " in text
    assert found["store"] == "a temporary directory, removed"
    assert not re.search(r"kvroute-store|swapped_in_rows|\x1b", text)


def test_a_pool_that_is_killed_in_mid_run_costs_time_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a failing cache never fails a request. Method: SIGKILL the lender and the master, after the restart."""
    with running_pool() as pool:
        passes = iter(range(10**6))
        observe = Clients.observe

        def kill_and_observe(clients: Clients, work: list[Work]) -> AbstractContextManager[None]:
            if after_restart() and next(passes) == 3:
                os.kill(pool.owner_pid, signal.SIGKILL)
                os.kill(pool.master_pid, signal.SIGKILL)
            return observe(clients, work)

        monkeypatch.setattr(Clients, "observe", kill_and_observe)
        console = io.StringIO()
        after_restart = lambda: "engine stopped" in console.getvalue()  # noqa: E731
        report = tmp_path / "numbers.json"
        url = f"{pool.url}&timeout_ms=1000"
        status = Demo(Options(requests=6, store=url, json=report), Progress(console)).run()
        assert next(passes) > 3, "it was killed"
    found = json.loads(report.read_text())
    assert status == 0, found
    assert (found["rows_wrong"], found["rows_missing"], found["tokens_match"]) == (0, 0, True)
    assert found["store_failures"] > 0


@pytest.mark.parametrize("command", ["demo --store mooncake", "demo-pd"])
def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path, command: str) -> None:
    """Goal: master, owner and servers end with the demo. Method: SIGKILL. Those of ``demo-pd`` went on for ever."""
    log, others = tmp_path / "log", list[psutil.Process]()
    child = _child(log, *command.split(), "--requests", "400")
    try:
        children = psutil.Process(child.pid).children
        until(lambda: child.poll() is not None or len(children()) == 2, "both are there", DEADLINE_S)
        others = children()
        assert len(others) == 2, log.read_text()
    finally:
        child.kill()
        child.wait()
    assert not psutil.wait_procs(others, DEADLINE_S)[1]


def test_rows_at_the_wrong_tokens_fail_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the exit status means something. Method: hand the rows of each pass to its tokens in reverse."""
    rows = RoutingCapture.rows
    monkeypatch.setattr(RoutingCapture, "rows", lambda capture: rows(capture)[::-1])
    report = tmp_path / "numbers.json"
    console = io.StringIO()
    assert Demo(Options(requests=2, json=report), Progress(console)).run() == 1
    found = json.loads(report.read_text())
    assert found["rows_wrong"] != 0
    assert found["tokens_match"] is True


def test_the_judge_sees_a_tampered_and_a_missing_row() -> None:
    """Goal: the judge can fail. Method: a true answer; one row of it changed and one removed; one token changed; and
    the answer cut short."""
    options = Options(requests=1)
    run = Driver(options, Progress(io.StringIO()))
    with Engine(run.build(), options.engine, Namespace("m", weights_version=0)) as engine:
        engine.add(replace(conversations(1, 0)[0].ask(), n=1))
        (honest,) = engine.run()
    ids, valid = honest.routes.ids.copy(), honest.routes.valid.copy()
    ids[3, 0] = (ids[3, 0] + 1) % 16
    valid[5] = False
    routes = Routes(ids, valid, honest.routes.layer_ids, honest.routes.num_experts, honest.routes.num_layers)
    other = (*honest.tokens[:-1], honest.tokens[-1] ^ 1)
    short = Routes(honest.routes.ids[:-1], valid[:-1] | True, routes.layer_ids, routes.num_experts, routes.num_layers)
    for change, wrong in (
        ({}, (0, 0, 0)),
        ({"routes": routes}, (0, 1, 1)),
        ({"tokens": other}, (1, 0, 0)),
        ({"tokens": honest.tokens[:-1], "routes": short}, (1, 0, 0)),
    ):
        found = run.judge({("", 0): replace(honest, **change)})
        assert (found.answers_wrong, found.rows_wrong, found.rows_missing) == wrong, change


def _child(log: Path, *arguments: str) -> Born:
    with log.open("ab") as file:
        return nursery(*ENGINE).start(["-m", "kvroute.cli", *arguments], stdout=file, stderr=file)


def test_a_killed_run_leaves_a_store_that_the_next_goes_on_from(tmp_path: Path) -> None:
    """Goal: no crash makes a row wrong. Method: SIGKILL in mid-run, then a second real process on the same store."""
    store, log = tmp_path / "store", tmp_path / "log"
    where = ["--store", store.as_uri()]
    child = _child(log, "demo", "--requests", "400", *where)
    until(lambda: child.poll() is not None or _stored_blocks(store) >= 100, "much is stored", DEADLINE_S)
    child.kill()
    assert child.wait() == -signal.SIGKILL, log.read_text()
    report = tmp_path / "numbers.json"
    child = _child(log, "demo", "--requests", "8", "--json", str(report), *where)
    assert child.wait(GIVE_UP_S) == 0, log.read_text()
    found = json.loads(report.read_text())
    assert (found["rows_wrong"], found["rows_missing"], found["tokens_match"]) == (0, 0, True)
    assert found["rows_judged_by_recompute"] > 100  # rows that the killed process had computed
    assert found["store_failures"] == 0


def _stored_blocks(store: Path) -> int:
    """Blocks that the running process has stored."""
    with open_store(f"{store.as_uri()}?mode=read&absent=wait") as reader:
        return reader.usage()["records"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("demo --model gpt", "--model: invalid choice: 'gpt' (choose from"),
        ("demo-pd --requests many", "--requests: wanted an integer of 1 to 100000, got 'many'"),
        ("demo --device-blocks 3", "--device-blocks: wanted at least "),
        ("demo --host-blocks -1", "--host-blocks: wanted an integer of 0 or more, got '-1'"),
        ("demo --store ftp://somewhere", "argument --store: wanted one of apart, file, memory"),
        ("demo --store file://{file}/below", "cannot open the store's directory"),
        ("demo --json {file}/below/numbers.json", "--json: wanted a file that can be written"),
        ("demo --json {directory}", "--json: wanted a file that can be written"),
        ("demo --device tpu", "--device: invalid choice: 'tpu' (choose from"),
        ("demo --device cuda", "--device: wanted cpu, for torch sees no CUDA GPU here, got cuda"),
        ("demo --frobnicate", "unrecognized arguments: --frobnicate"),
        ("prefill --port 70000", "--port: wanted an integer of 0 to 65535, got '70000'"),
        ("prefill --port 0 --device-blocks 0", "--device-blocks: wanted an integer of 1 or more, got '0'"),
        ("decode --port 0 --prefill localhost", "--prefill: wanted"),
        ("decode --port 0 --weights-version 4294967296", "--weights-version: wanted an integer of 0 to 4294967295"),
        ("prove x:y --examples -1", "--examples: wanted an integer of 1 or more, got '-1'"),
        ("verify --url http://x --model m --requests 0", "--requests: wanted an integer of 1 or more, got '0'"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(
    arguments: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: one line names the flag, what it accepts and what it got, before anything starts. A port of 70,000 was a
    traceback, and a weights version of 2**32 was served until the first row with it overflowed."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (file := tmp_path / "file").touch()
    given = arguments.replace("{file}", str(file)).replace("{directory}", str(tmp_path)).split()
    lends = ["--transfer-address", "tcp://127.0.0.1:1"] if given[0] == "prefill" else []
    try:
        status = main([*given, *lends])
    except SystemExit as ended:
        status = int(str(ended.code))
    complaint = capsys.readouterr().err
    assert status == 2
    assert complaint.count("\n") == 1
    assert wanted in complaint


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_empty_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a default is shown where there is one. ``decode`` and ``verify`` had ``([])`` and ``()``."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert not re.search(r"\((\[\])?\)", capsys.readouterr().out)


def test_output_that_nobody_reads_is_no_traceback() -> None:
    """Goal: ``kvroute demo | head -1`` ends as other commands do. Method: the reader has gone before the first line."""
    gone, closed = os.pipe()
    os.close(gone)
    with os.fdopen(closed, "w") as out:
        ran = subprocess.run(
            [sys.executable, "-m", "kvroute", "shm", "ls"], stdout=out, stderr=subprocess.PIPE, check=False
        )
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_version_regions_and_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvroute 0.")
    assert main(["shm", "ls"]) == 0
    helped = nursery(*ENGINE).run(["-m", "kvroute", "--help"], timeout=GIVE_UP_S)
    assert helped.stdout.startswith("usage: kvroute")

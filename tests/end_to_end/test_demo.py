"""``kvroute demo`` as a person runs it: every way of moving rows happens, and every row comes out right.

``.ci/run`` runs it on another model, and with a Mooncake pool.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from nursery import ENGINE, Born, nursery
from rich.console import Console

from cache_manager.storage import open_store
from kvroute.capture.capture import RoutingCapture
from kvroute.cli import main
from paged_engine.demo import Clients, demo
from paged_engine.engine import Span
from paged_engine.options import Options
from paged_engine.pool import running_pool

torch.set_num_threads(1)

KEYS = {
    "requests", "tokens", "rows_expected", "rows_wrong", "rows_missing", "prefix_hit_rows", "swapped_out_rows",
    "swapped_in_rows", "restored_rows", "cow_rows", "evicted_blocks", "tokens_match",
    "recompute_agreement", "seconds", "update_samples", "update_rows_expected", "update_rows_recomputed",
}  # fmt: skip


def test_everything_happens_and_every_row_is_right(tmp_path: Path) -> None:
    """Goal: the promise holds end to end. Method: the demo itself, small, and its numbers."""
    console = Console(file=io.StringIO(), width=120)
    report = tmp_path / "numbers.json"
    status = demo(Options(requests=8, model="deepseek_v3", out=tmp_path, json=report), console)
    found = json.loads(report.read_text())
    assert found.keys() >= KEYS
    assert status == 0, found
    assert (found["rows_wrong"], found["rows_missing"], found["rows_judged_by_recompute"]) == (0, 0, 0)
    assert (found["update_rows_wrong"], found["update_rows_missing"]) == (0, 0)
    assert found["tokens_match"] is True
    assert found["recompute_agreement"] == 1.0
    assert found["requests"] == 8
    for happened in KEYS - {"rows_wrong", "rows_missing"}:
        assert found[happened] > 0, happened
    assert found["swapped_out_rows"] >= found["swapped_in_rows"]
    assert (tmp_path / "expert-load.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("store-*"))  # its own store is removed
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "every row is right" in text
    assert "after restart" in text


def test_a_pool_that_is_killed_in_mid_run_costs_time_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a request never dies of its cache. Method: SIGKILL the lender, and by it the master, after the restart."""
    with running_pool() as pool:
        passes = iter(range(10**6))
        begin = Clients.begin

        def begin_and_kill(clients: Clients, spans: Sequence[Span]) -> None:
            if after_restart() and next(passes) == 3:
                os.kill(pool.owner_pid, signal.SIGKILL)
            begin(clients, spans)

        monkeypatch.setattr(Clients, "begin", begin_and_kill)
        console = Console(file=io.StringIO(), width=120)
        after_restart = lambda: "engine stopped" in console.file.getvalue()  # type: ignore[attr-defined]  # noqa: E731
        report = tmp_path / "numbers.json"
        url = f"{pool.url}&timeout_ms=1000"
        status = demo(Options(requests=6, store=url, out=tmp_path, json=report), console)
        assert next(passes) > 3, "it was killed"
    found = json.loads(report.read_text())
    assert status == 0, found
    assert (found["rows_wrong"], found["rows_missing"], found["tokens_match"]) == (0, 0, True)
    assert found["store_failures"] > 0


def test_a_killed_demo_leaves_no_pool_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = _child(log, "--store", "mooncake", "--requests", "400", "--out", str(tmp_path))
    try:
        _wait_until(lambda: child.poll() is not None or "lends the memory" in log.read_text().replace("\n", " "))
        pids = [int(pid) for pid in re.findall(r"process (\d+)", log.read_text().replace("\n", " "))]
        assert len(pids) == 2, log.read_text()
    finally:
        child.kill()
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_rows_at_the_wrong_tokens_fail_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the exit status means something. Method: hand the rows of each pass to its tokens in reverse."""
    rows = RoutingCapture.rows
    monkeypatch.setattr(RoutingCapture, "rows", lambda capture, positions=None: rows(capture, positions)[::-1])
    report = tmp_path / "numbers.json"
    console = Console(file=io.StringIO(), width=120)
    assert demo(Options(requests=2, out=tmp_path, json=report), console) == 1
    found = json.loads(report.read_text())
    assert found["rows_wrong"] != 0
    assert found["tokens_match"] is True


def _child(log: Path, *arguments: str) -> Born:
    with log.open("ab") as file:
        return nursery(*ENGINE).start(["-m", "kvroute.cli", "demo", *arguments], stdout=file, stderr=file)


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_run_leaves_a_store_that_the_next_goes_on_from(tmp_path: Path) -> None:
    """Goal: no crash makes a row wrong. Method: SIGKILL in mid-run, then a second real process on the same store."""
    store, log = tmp_path / "store", tmp_path / "log"
    where = ["--store", store.as_uri(), "--out", str(tmp_path)]
    child = _child(log, "--requests", "400", *where)
    _wait_until(lambda: child.poll() is not None or _stored_blocks(store) >= 100)
    child.kill()
    assert child.wait() == -signal.SIGKILL, log.read_text()
    report = tmp_path / "numbers.json"
    child = _child(log, "--requests", "12", "--json", str(report), *where)
    assert child.wait(200) == 0, log.read_text()
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
        (["--model", "gpt"], "--model: wanted one of qwen3_moe, deepseek_v3, olmoe, mixtral, got gpt"),
        (["--requests", "0"], "--requests: wanted 1 to 100000, got 0"),
        (["--requests", "many"], "--requests: wanted an integer, got 'many'"),
        (["--device-blocks", "3"], "--device-blocks: wanted at least "),
        (["--host-blocks", "-1"], "--host-blocks: wanted 0 or more, got -1"),
        (["--seed", "-1"], "--seed: wanted an integer in [0, 2**63), got -1"),
        (["--store", "ftp://somewhere"], "store scheme: wanted one of apart, file, memory"),
        (["--store", "file://{file}/below"], "cannot open the store's directory"),
        (["--store", "mooncake://h:1/x?segment=1GiB"], "--store: wanted a pool without segment="),
        (["--out", "{file}/below"], "--out: wanted a directory that can be written"),
        (["--json", "{file}/below/numbers.json"], "--json: wanted a directory that can be written"),
        (["--json", "{directory}"], "--json: wanted a file"),
        (["--device", "tpu"], "--device: wanted cpu or cuda, got tpu"),
        pytest.param(
            ["--device", "cuda"],
            "--device: wanted cpu, for torch sees no CUDA GPU here, got cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="here it is no bad input"),
        ),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(
    arguments: list[str], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    given = [a.replace("{file}", str(file)).replace("{directory}", str(tmp_path)) for a in arguments]
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    try:
        status = main(["demo", *given, *out])
    except SystemExit as ended:
        status = int(str(ended.code))
    complaint = capsys.readouterr().err
    assert status == 2
    assert complaint.count("\n") == 1
    assert wanted in complaint


def test_version_regions_and_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvroute 0.")
    assert main(["shm", "ls"]) == 0
    helped = nursery(*ENGINE).run(["-m", "kvroute", "--help"], timeout=60)
    assert helped.stdout.startswith("usage: kvroute")

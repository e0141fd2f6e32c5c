"""The benches that need nothing but this environment run to their end; each bench judges its own results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GIVE_UP_S

from bench.step import race

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "command",
    [
        "replay --tokens 1024 --rounds 1",
        "kinds --tokens 256 --rounds 1",
        "receipt --tokens 32 --micro-batches 1 --rounds 1",
        "step --quick --rounds 1 --sequences --blocks 20",
        "handover --sequences 2 --tokens 64 --dp 2 --homes file mooncake",
        "ends --answers 8 --rounds 1",
        "transfer --quick --links ipc",
        "stores --quick --kib 8 --total-mib 1 --rounds 1",
    ],
)
def test_a_bench_runs(command: str, tmp_path: Path) -> None:
    """Goal: the README's commands print a table, and write their numbers. ``--json`` of ``transfer`` wrote nothing.
    Method: run each in its own process, with little to do."""
    numbers = tmp_path / "numbers.json"
    found = subprocess.run(
        [sys.executable, "-m", *f"bench.{command}".split(), "--json", str(numbers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "---" in found.stdout
    assert len(json.loads(numbers.read_text())) > 1


def test_a_step_has_fewer_rounds_than_turns() -> None:
    """Goal: a quick look is possible. Method: one round of four sequences; this once ended in an IndexError."""
    assert race(4, prefill=False, cold=False, rounds=1)["manager and step"].cpu_seconds

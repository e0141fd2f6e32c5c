"""The benches that need nothing but this environment run to their end; their results are judged by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        "replay --tokens 1024 --rounds 1",
        "step --quick --rounds 1 --sequences --blocks 20 --tokens 8192",
        "handover --sequences 2 --tokens 64",
        "transfer --quick --links ipc",
        "stores --quick --kib 8 --total-mib 1 --rounds 1 --only memory",
    ],
)
def test_a_bench_runs(command: str) -> None:
    """Goal: who types what the README says gets a table. Method: each in a process of its own, with little to do."""
    found = subprocess.run(
        [sys.executable, "-m", *f"bench.{command}".split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "---" in found.stdout

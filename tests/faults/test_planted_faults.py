"""Goal: the tests can fail. Method: plant each fault in a copy of the package and see the named claim break."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planted import FAULTS, Fault
from planted_connector import CONNECTOR_FAULTS
from planted_core import CORE_FAULTS
from planted_memory import MEMORY_FAULTS
from planted_routes import ROUTES_FAULTS

import cache_manager

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "fault",
    [*FAULTS, *CORE_FAULTS, *MEMORY_FAULTS, *CONNECTOR_FAULTS, *ROUTES_FAULTS],
    ids=lambda fault: fault.name.replace(" ", "-"),
)
def test_a_planted_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    copy = tmp_path / fault.package
    original = Path(cache_manager.__file__).parents[1] / fault.package
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / fault.file).read_text()
    assert source.count(fault.before) == 1, "the code has changed: bring the fault up to date"
    (copy / fault.file).write_text(source.replace(fault.before, fault.after))
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", fault.test],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(tmp_path), str(original.parent))),
            "HYPOTHESIS_PROFILE": "hunt",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 1, f"not caught: {fault.name}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    assert fault.claim in ran.stdout, f"caught, but not by {fault.claim}:\n{ran.stdout[-4000:]}"

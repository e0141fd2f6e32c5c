"""Package indexes have other packages called transfer and cache_manager: kvroute reports them and stops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GIVE_UP_S


@pytest.mark.parametrize("name", ["cache_manager", "transfer"])
@pytest.mark.parametrize("kind", ["a file", "a package"])
def test_a_foreign_package_is_named_at_import(tmp_path: Path, name: str, kind: str) -> None:
    """Goal: kvroute never runs with parts of another package. Method: a module of that name is found first."""
    place = tmp_path / f"{name}.py" if kind == "a file" else tmp_path / name / "__init__.py"
    place.parent.mkdir(exist_ok=True)
    place.write_text("raise AssertionError('this ran')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvroute"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {name}: wanted kvroute's own package of this name, got {place}"), last
    assert f"pip uninstall -y {name.replace('_', '-')}" in last

"""Package indexes have other packages called transfer and cache_manager: kvroute reports them and stops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GIVE_UP_S


def last_line(place: Path) -> str:
    """What ``import kvroute`` ends with where modules in ``place`` are found first."""
    code = f"import sys; sys.path.insert(0, {str(place)!r}); import kvroute"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert ran.returncode == 1
    return ran.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["cache_manager", "transfer"])
@pytest.mark.parametrize("kind", ["a file", "a package"])
def test_a_foreign_package_is_named_at_import(tmp_path: Path, name: str, kind: str) -> None:
    """Goal: kvroute never runs with parts of another package. Method: a module of that name is found first, and then a
    distribution that brings it."""
    place = tmp_path / f"{name}.py" if kind == "a file" else tmp_path / name / "__init__.py"
    place.parent.mkdir(exist_ok=True)
    place.write_text("raise AssertionError('this ran')\n")
    wanted = f"ImportError: {name}: wanted kvroute's own package of this name, got {place}. "
    assert last_line(tmp_path) == f"{wanted}No installed distribution brings it: give your file another name"
    metadata = tmp_path / "other_kit-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-kit\nVersion: 1.2\n")
    (metadata / "top_level.txt").write_text(f"{name}\n")
    line = last_line(tmp_path)
    assert line.startswith(f"{wanted}It is of the distribution other-kit: pip uninstall -y other-kit, and ")

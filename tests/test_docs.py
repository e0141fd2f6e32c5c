"""The documents tell the truth: their examples run, their links lead somewhere, their fault table is the faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from planted import FAULTS
from planted_connector import CONNECTOR_FAULTS
from planted_core import CORE_FAULTS
from planted_memory import MEMORY_FAULTS
from planted_routes import ROUTES_FAULTS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])
EXAMPLES = [
    (page, i, code)
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize(("page", "i", "code"), EXAMPLES, ids=[f"{p.stem}-{i}" for p, i, _ in EXAMPLES])
def test_an_example_runs_as_it_stands(page: Path, i: int, code: str, tmp_path: Path) -> None:
    """An example that begins with its own file's name, ``# NAME.py``, is there for the later ones of its page."""
    for earlier in (text for known, at, text in EXAMPLES if known == page and at < i):
        if named := re.match(r"# (\w+\.py)\n", earlier):
            (tmp_path / named[1]).write_text(earlier)
    ran = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, f"{page.name}, example {i}:\n{ran.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_fault_table_is_the_faults() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text()
    faults = (*FAULTS, *CORE_FAULTS, *MEMORY_FAULTS, *CONNECTOR_FAULTS, *ROUTES_FAULTS)
    rows = [f"| {f.name} (`{f.file}`) | `{f.claim}` |" for f in faults]
    assert text[text.index("| planted fault |") :].splitlines()[2:] == rows

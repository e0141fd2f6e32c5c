"""The documents tell the truth: their examples run, their links lead somewhere, their fault table is the faults."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from all_planted import ALL
from nursery import THIRD_PARTY, nursery

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
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    ran = nursery(*THIRD_PARTY).run(
        ["-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, warn="error", timeout=120
    )
    assert ran.returncode == 0, f"{page.name}, example {i}:\n{ran.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_fault_table_is_the_faults() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text()
    rows = [f"| {f.name} (`{f.file}`) | `{f.claim}` |" for f in ALL]
    assert text[text.index("| planted fault |") :].splitlines()[2:] == rows


def test_the_page_of_faults_names_tests_that_exist() -> None:
    """Also the rules of state machines, which are methods; and every numbered fault is there once."""
    page = (ROOT / "docs" / "faults.md").read_text()
    named = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", page)
    assert len(named) > 150
    functions = {file: _functions(ROOT / file) for _, file in named}
    assert [f"{file}::{name}" for name, file in named if name not in functions[file]] == []
    matrix = [name for file in (ROOT / "tests" / "fault_matrix").glob("test_*.py") for name in _functions(file)]
    several = re.compile(r"(?:(?<=test_)|(?<=\d_))r(\d\d)_")
    numbered = sorted((int(each), name) for name in matrix for each in several.findall(name))
    rows = re.findall(r"^\| R(\d+) \| [^|]+\|[^|]+\|[^|]+\|[^|]+\| \[`(\w+)`\]", page, re.MULTILINE)
    assert numbered == [(int(row), name) for row, name in rows]


def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}

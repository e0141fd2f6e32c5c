"""``docs/faults.md`` is what the tests say: no row twice, none forgotten, no test that is not there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.fault_matrix import classes
from tests.fault_matrix.classes import BUG_CLASSES, BUGS
from tests.fault_matrix.crossing import CROSSING_BUGS, CROSSING_HAZARDS, PENDING_BUGS, PENDING_HAZARDS
from tests.fault_matrix.hazards import HAZARD_CLASSES, HAZARDS
from tests.fault_matrix.matrix import NOT_APPLICABLE, ROWS
from tests.fault_matrix.table import page, rows

ROOT = Path(__file__).parents[2]
KEPT = BUG_CLASSES + CROSSING_BUGS + HAZARD_CLASSES + CROSSING_HAZARDS


def test_the_page_is_what_the_script_prints() -> None:
    printed = (ROOT / "docs" / "faults.md").read_text()
    assert printed == page(), "run: python -m tests.fault_matrix.table > docs/faults.md"


def test_every_row_is_there_once() -> None:
    there = [row.row for row, _ in rows()] + list(NOT_APPLICABLE)
    assert sorted(there, key=lambda row: int(row[1:])) == list(ROWS)


def test_a_test_is_called_after_its_row() -> None:
    for row, test in rows():
        assert test.split("::")[1].startswith(f"test_r{int(row.row[1:]):02d}_"), test


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (BUG_CLASSES + CROSSING_BUGS + PENDING_BUGS, BUGS),
        (HAZARD_CLASSES + CROSSING_HAZARDS + PENDING_HAZARDS, HAZARDS),
    ],
    ids=["bugs", "hazards"],
)
def test_every_class_is_there_once(found: tuple[classes.BugClass, ...], wanted: tuple[str, ...]) -> None:
    assert sorted(n for each in found for n in each.numbers) == sorted(wanted)


def test_every_test_that_is_named_is_there() -> None:
    """Also the invariants and rules of the state machines, which are methods."""
    named = [test for row, first in rows() for test in (first, *row.also)]
    named += [test for each in KEPT for test in each.tests]
    functions: dict[str, set[str]] = {}
    for test in named:
        file, name = test.split("::")
        if file not in functions:
            tree = ast.parse((ROOT / file).read_text())
            functions[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions[file], test

"""Prints ``docs/faults.md``: ``python -m tests.fault_matrix.table > docs/faults.md``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.fault_matrix.classes import BUG_CLASSES, BugClass
from tests.fault_matrix.crossing import CROSSING_BUGS, CROSSING_HAZARDS, PENDING_BUGS, PENDING_HAZARDS
from tests.fault_matrix.hazards import HAZARD_CLASSES
from tests.fault_matrix.matrix import NOT_APPLICABLE, FaultRow

HERE: Final = Path(__file__).parent

HEAD: Final = """\
# Faults

What breaks other systems that keep blocks for an engine, done to kvroute. *This page is printed by*
`python -m tests.fault_matrix.table` *from the tests it names; a test fails where the two differ.*

## The same fault, side by side

Each row is a fault that was given to a released version of a peer, on a CPU, with the named component alone, and what
it was seen to do then, unless the row says that its source was read. The test gives the same fault to kvroute. A peer
may have changed since.
"""

CLASSES: Final = """
## Classes of published bugs

What keeps each class of bug from kvroute, and the test that would see it come back. Numbers with a # are those of the
projects' public trackers.
"""

HAZARDS: Final = """
## Hazards of auxiliary rows

What goes wrong with rows in particular when blocks are used again, swapped, stored and read by others.
"""

PENDING: Final = """
## Not there yet

What kvroute does not keep away, because the part that has to do so does not exist.
"""


def rows() -> Iterator[tuple[FaultRow, str]]:
    """The rows and their tests (``file::test``), by number."""
    found: list[tuple[FaultRow, str]] = []
    sys.path += [support for support in [str(HERE.parent / "support")] if support not in sys.path]
    for file in sorted(HERE.glob("test_*.py")):
        if file.stem != "test_table":
            module = importlib.import_module(f"tests.fault_matrix.{file.stem}")
            for name, test in vars(module).items():
                if isinstance(row := getattr(test, "fault", None), FaultRow):
                    found.append((row, f"tests/fault_matrix/{file.name}::{name}"))
    yield from sorted(found, key=lambda pair: int(pair[0].row[1:]))


def page() -> str:
    """The whole document."""
    lines = [HEAD, *_table("|  | fault | peer | what it does | what kvroute does | tests |")]
    for row, test in rows():
        cells = (row.row, row.given, row.peer, row.peer_does, row.kvroute_does, _tests((test, *row.also)))
        lines.append(_row(cells))
    lines += [_row((row, "does not apply", "", "", why, "")) for row, why in NOT_APPLICABLE.items()]
    for text, classes in ((CLASSES, BUG_CLASSES + CROSSING_BUGS), (HAZARDS, HAZARD_CLASSES + CROSSING_HAZARDS)):
        lines += [text, *_table("| bug | seen in | what keeps it away | tests |")]
        lines += [_row((each.bug, each.seen, each.mechanism, _tests(each.tests))) for each in _numbered(classes)]
    lines += [PENDING, *_table("| bug | seen in | what is missing |")]
    lines += [_row((each.bug, each.seen, each.mechanism)) for each in _numbered(PENDING_BUGS + PENDING_HAZARDS)]
    return "\n".join(lines) + "\n"


def _numbered(classes: Iterable[BugClass]) -> Iterator[BugClass]:
    """In the order of their numbers; hazards are called by theirs."""
    for each in sorted(classes, key=lambda each: (each.numbers[0][0] == "H", int(each.numbers[0].lstrip("H")))):
        if each.numbers[0].startswith("H"):
            yield BugClass(each.numbers, f"{each.numbers[0]}: {each.bug}", each.seen, each.mechanism, each.tests)
        else:
            yield each


def _table(head: str) -> tuple[str, str]:
    return head, "|---" * (head.count("|") - 1) + "|"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _tests(tests: Iterable[str]) -> str:
    """Links to the files, with the names of the tests."""
    return "<br>".join(f"[`{name}`](../{file})" for file, name in (test.split("::") for test in tests))


if __name__ == "__main__":
    sys.stdout.write(page())

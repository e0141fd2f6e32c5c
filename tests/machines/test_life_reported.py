"""The life-cycle kit finds the faults that trackers of engines have reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_faults import FAULTS
from tiny_reported import REPORTED
from tiny_told import check_sound_without

from cache_manager.testing.life import (
    INVARIANTS,
)


@pytest.mark.parametrize("fault", REPORTED, ids=lambda fault: fault.__name__)
def test_a_reported_fault_is_found_by_its_invariant(fault) -> None:
    """Goal: what engines had is found. Method: a manager with that one fault; without it, it passes the same story."""
    check_sound_without(fault)


def test_every_invariant_has_a_fault_that_breaks_it() -> None:
    assert {fault.breaks for fault in FAULTS + REPORTED} == INVARIANTS.keys()


def test_the_page_of_proofs_lists_the_planted_faults() -> None:
    """Goal: its table is true. Method: its rows name faults that are there, and all of the reported ones."""
    page = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text()
    told = set(re.findall(r"^\|[^|]+\| `(\w+)` \|", page.partition("## What was planted")[2], flags=re.MULTILINE))
    assert {fault.__name__ for fault in REPORTED} < told < {fault.__name__ for fault in FAULTS + REPORTED}

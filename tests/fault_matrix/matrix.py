"""The fault matrix: what each of its tests says about itself, and the rows that have no test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

ROWS: Final = tuple(f"R{n}" for n in range(1, 24))

NOT_APPLICABLE: Final[dict[str, str]] = {}
"""Rows that no part of kvroute can meet, and why."""

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One row of the table; ``also`` are further tests (``file::test``) of the same fault."""

    row: str
    given: str
    peer: str
    peer_does: str
    kvroute_does: str
    also: tuple[str, ...] = ()


def fault(
    row: str, *, given: str, peer: str, peer_does: str, kvroute_does: str, also: tuple[str, ...] = ()
) -> Callable[[Test], Test]:
    """Says of a test which row of the matrix it is, for ``python -m tests.fault_matrix.table``."""

    def mark(test: Test) -> Test:
        test.fault = FaultRow(row, given, peer, peer_does, kvroute_does, also)  # type: ignore[attr-defined]
        return test

    return mark

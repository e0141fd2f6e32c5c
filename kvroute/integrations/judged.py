"""What the tables of judged releases of the engines consist of."""

from __future__ import annotations

from typing import NamedTuple


class Judged(NamedTuple):
    """A release, and how its rows were judged against transformers."""

    version: str
    how: tuple[str, ...]  # of the table's WAYS
    date: str  # of the last judgement, ISO 8601
    note: str = ""


__all__ = ["Judged"]

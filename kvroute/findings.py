"""Findings of a command, and where they go: JSON to a file or to standard output, and text for people beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, TextIO

STDOUT: Final = Path("-")
"""In place of a file for JSON."""


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


class Finding(NamedTuple):
    """What was seen of a subject, and what helps."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


def findings_text(findings: Iterable[Finding]) -> str:
    """A line for each finding, and one below it for its remedy."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:<8} {finding.subject:<16} {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<25} -> {finding.remedy}")
    return "\n".join(lines) + "\n"


def console(json: Path | None) -> TextIO:
    """Where text goes: standard output, unless the JSON goes there."""
    return sys.stderr if json == STDOUT else sys.stdout


def write_json(json: Path | None, text: str) -> None:
    """Write the JSON, if it was asked for."""
    if json == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    elif json is not None:
        json.write_text(text)


__all__ = ["STDOUT", "Finding", "Level", "console", "findings_text", "write_json"]

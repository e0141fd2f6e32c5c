"""Where the findings of a command go: JSON to a file or to standard output, and text for people beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, TextIO

STDOUT: Final = Path("-")
"""In place of a file for JSON."""


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


__all__ = ["STDOUT", "console", "write_json"]

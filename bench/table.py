"""The tables that the benchmarks print: aligned columns, and once a process the machine that they come from."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np


def machine() -> str:
    """The processor, its cores, the kernel and the versions that matter to a number."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    versions = f"Linux {platform.release()}, Python {platform.python_version()}, numpy {np.__version__}"
    return f"{model}, {cores} cores, {versions}"


@cache
def _print_machine() -> None:
    print(f"machine: {machine()}", flush=True)


class Table:
    """Rows under a title; cells are text that is already formatted. The first column is left-aligned.

    >>> Table("two sums", ["what", "ms"]).row("small", "1").row("large", "12").text()
    'two sums\\nwhat   ms\\n-----  --\\nsmall   1\\nlarge  12'
    """

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.columns = tuple(columns)
        self.rows: list[tuple[str, ...]] = []

    def row(self, *cells: str) -> Table:
        """Add a row with a cell for every column; the table, so that calls chain."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: wanted {len(self.columns)} cells, got {len(cells)}")
        self.rows.append(cells)
        return self

    def text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        lines.insert(1, tuple("-" * width for width in widths))
        body = []
        for first, *rest in lines:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            body.append("  ".join([first.ljust(widths[0]), *cells]))
        return "\n".join([self.title, *body])

    def print(self) -> None:
        _print_machine()
        print("\n" + self.text() + "\n", flush=True)

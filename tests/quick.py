"""The tests that the changed files touch, for ``make quick``: ``python -m tests.quick`` prints their paths.

A test file is touched when it changed, or when it names a module that changed. Tests of whole processes, and tests that
need another environment, are left to ``make test`` and its neighbours.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("end_to_end", "faults", "managers", "serving", "sglang", "simulation", "study", "trainers", "vllm")
FILES_MAX = 12
"""So that it is over in a minute; the files that name most of what changed come first."""


def changed() -> list[Path]:
    """Python files that differ from the merge base with main, or that git does not know yet."""
    base = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    names = _git("diff", "--name-only", "--diff-filter=d", base[0]) + _git("ls-files", "--others", "--exclude-standard")
    return [Path(name) for name in names if name.endswith(".py")]


def touched(files: Iterable[Path]) -> list[str]:
    """Changed tests, then tests that name a changed module, those that name most first."""
    files = list(files)
    own = [file for file in files if file.name.startswith("test_") and file.parts[0] == "tests"]
    named = [re.compile(rf"(from|import) {re.escape(_module(file))}\b") for file in files if file not in own]
    counts = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = path.relative_to(ROOT)
        if file not in own and (count := sum(bool(name.search(path.read_text())) for name in named)):
            counts[file] = count
    found = own + sorted(counts, key=lambda file: (-counts[file], file))
    return [str(file) for file in found if file.parts[1] not in LEFT_OUT]


def _module(file: Path) -> str:
    """The name under which a file is imported; support modules have their own name."""
    parts = file.with_suffix("").parts
    if parts[:2] in (("tests", "support"), ("tests", "faults")):
        parts = parts[2:]
    return ".".join(parts).removesuffix(".__init__")


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return ran.stdout.split()


if __name__ == "__main__":
    paths = touched(changed())
    if left := paths[FILES_MAX:]:
        print(f"{len(left)} more files of tests are touched: make test", file=sys.stderr)
    print(*paths[:FILES_MAX])

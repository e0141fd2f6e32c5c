"""Every planted fault, and those that a developer's run plants."""

from __future__ import annotations

import subprocess
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from planted import Fault, read
from waiting import GIVE_UP_S

ROOT: Final = Path(__file__).parents[2]
LISTS: Final = {path.name: read(path) for path in sorted(Path(__file__).parent.glob("*.faults"))}
ALL: Final[tuple[Fault, ...]] = tuple(fault for faults in LISTS.values() for fault in faults)
OTHERS: Final = 6


def chosen() -> list[Fault]:
    """Faults whose file, test or list differs from ``main`` or is not committed, and six others by the commit.

    All of them where git cannot tell what has changed.
    """
    try:
        head = _git("rev-parse", "HEAD")[0]
        names = {*_git("diff", "--name-only", _base()), *_git("ls-files", "--others", "--exclude-standard")}
    except (OSError, subprocess.CalledProcessError):
        return list(ALL)
    return choose(names, int(head, 16))


def choose(changed: AbstractSet[str], turn: int) -> list[Fault]:
    """What to plant where the files ``changed`` differ; ``turn`` says which six others."""
    own = [
        fault
        for name, faults in LISTS.items()
        for fault in faults
        if changed & {f"tests/faults/{name}", fault.file, fault.test.partition("::")[0]}
    ]
    others = [fault for fault in ALL if fault not in own]
    first = turn * OTHERS % max(len(others), 1)
    return own + (others[first:] + others[:first])[:OTHERS]


def _base() -> str:
    for branch in ("main", "origin/main"):
        try:
            return _git("merge-base", "HEAD", branch)[0]
        except subprocess.CalledProcessError:
            continue
    return "HEAD"


def _git(*arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=GIVE_UP_S)
    return ran.stdout.split()

"""Faults to plant in a copy of the code, each with the test that must catch it and the claim that must break.

``docs/invariants.md`` has the claims. The lists are the files ``*.faults`` beside this one. A fault is its name, the
file and the test that must fail, and what is replaced, as in a patch::

    # a move does not carry the origin
    cache_manager/table.py tests/machines/test_blocks_machine.py::TestBlocksHeap: rows of no origin
    -        self.origins.carry(ids, origins[arrived])

The text behind the minus signs, whole lines or a part of one, occurs once in the file; the text behind the plus signs
takes its place. Behind the test, after a colon, is the claim that it must name, unless that is the test's own name. A
state machine may meet a fault in several ways, and which is first depends on how it draws: then there are claims with
`` | `` between them, and it must name one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """``removed``, which occurs once in ``file``, gives way to ``added``; ``test`` must then fail and say one of
    ``claims``."""

    name: str
    file: str
    test: str
    claims: tuple[str, ...]
    removed: str
    added: str

    @property
    def package(self) -> str:
        return self.file.partition("/")[0]

    def plant(self, source: str) -> str:
        """The file's text with the fault. Lines that nothing replaces go with their line breaks."""
        assert source.count(self.removed) == 1, "the code has changed: bring the fault up to date"
        lines = not self.added and f"\n{self.removed}\n" in f"\n{source}"
        return source.replace(self.removed + "\n" * lines, self.added)


def read(path: Path) -> list[Fault]:
    """The faults of one list."""
    faults = []
    for entry in path.read_text().split("\n# ")[1:]:
        name, where, *lines = entry.rstrip("\n").split("\n")
        file, _, rest = where.partition(" ")
        test, _, said = rest.partition(": ")
        claims = tuple((said or test.rpartition("::")[2]).split(" | "))
        removed, added = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        faults.append(Fault(name, file, test, claims, removed, added))
    return faults

"""The life-cycle kit on managers of a page: it must find each fault, and report none in a sound manager."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from tiny_faults import FAULTS
from tiny_managers import KeepsRows, Plain, Sharing, Storing

from cache_manager.testing.life import (
    CAPABILITIES,
    INVARIANTS,
    BlockManagerMachine,
    InvariantBroken,
    prove,
    replay,
)
from cache_manager.testing.life.command import summary
from cache_manager.testing.life.machine import ALL, unexercised


class TestPlain(BlockManagerMachine):
    adapter = Plain
    examples = steps = 50


class TestKeepsRows(BlockManagerMachine):
    adapter = KeepsRows
    examples = steps = 50


class TestSharing(BlockManagerMachine):
    adapter = Sharing
    steps = 40


class TestStoring(BlockManagerMachine):
    adapter = Storing
    steps = 40


def test_a_story_says_what_a_reader_needs() -> None:
    """Goal: the whole of a story. Method: the shortest program that breaks a manager which forgets its reset."""
    admit = ("admit", "s1", [0, 0], ALL, "", True, False)
    program = [admit, ("free", "s1", False), ("reset", False), ("admit", "s2", [0, 0, 0], ALL, "", True, False)]
    with pytest.raises(InvariantBroken) as caught:
        replay(next(fault for fault in FAULTS if fault.breaks == "reset_forgets"), program)
    for part in (
        "reset_forgets: After a reset",
        "b0[0] holds KV at position 0 of [0], written in line 1 by s1",
        "s2 needs KV at position 0 of [0], weights 1",
        "1. admit s1 [0, 0] -> [b0], 0 tokens cached, computes [0, 2)",
        "3. reset: new weights",
    ):
        assert part in str(caught.value), f"{part!r} is missing in\n{caught.value}"


def test_the_kit_needs_no_other_package() -> None:
    """Goal: ``kvroute prove`` works where Hypothesis is not installed. Method: a process that cannot import it."""
    script = "import sys; sys.modules['hypothesis'] = None; import cache_manager.testing.life.command"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_run_that_exercised_nothing_fails() -> None:
    """Goal: no empty proof. Method: managers that refuse everything, and one that never hits though it says it can."""

    class Refusing(Plain):
        unclaimed: ClassVar = {"refusal_is_honest": "it refuses everything", "all_come_back": "the same"}

        def admit(self, seq, tokens, chunk, salt):
            return None

    machine = type("Machine", (BlockManagerMachine,), {"adapter": Refusing, "examples": 3})
    with pytest.raises(AssertionError, match="nothing was exercised"):
        machine().test_life_of_blocks()
    assert "not claimed   refusal_is_honest, broken" in summary(Refusing, prove(Refusing, examples=3))

    class NeverHits(Sharing):
        finds_held = False

        def match(self, tokens, salt):
            return []

    missing = unexercised(NeverHits, prove(NeverHits, examples=60, steps=30, seed=1))
    assert missing == ["prefix: it was never exercised"]


class Closes(Plain):
    def close(self):
        raise OSError("still busy")


def test_a_manager_that_cannot_end_is_a_finding() -> None:
    with pytest.raises(InvariantBroken, match=r"close\(\) raised OSError\('still busy'\)"):
        prove(Closes, examples=1)


def test_lost_and_doubled_blocks_are_named() -> None:
    class FreesTwice(Plain):
        def free(self, seq):
            self.free_list += self.tables.get(seq, [])
            super().free(seq)

    with pytest.raises(InvariantBroken, match=r"free twice: \['b\d'"):
        prove(FreesTwice)
    FreesTwice.free_ids = lambda _: None
    with pytest.raises(InvariantBroken, match="counted twice"):
        prove(FreesTwice)
    with pytest.raises(InvariantBroken, match=r"of 8 blocks: \d lost \(b\d"):
        prove(next(fault for fault in FAULTS if fault.__name__ == "Leaky"))


def test_the_page_lists_every_capability_and_invariant() -> None:
    """Goal: the page is complete. Method: its rows are the capabilities and the invariants."""
    page = (Path(__file__).parents[4] / "docs" / "concepts" / "life-cycle-kit.md").read_text()
    rows = [f"| `{name}` | {what} |" for name, what in CAPABILITIES.items()]
    rows += [f"| `{name}` | {claim} |" for name, claim in INVARIANTS.items()]
    listed = [line for line in page.splitlines() if re.match(r"\| `\w+` \| .* \|$", line)]
    assert [line for line in listed if line.count(" | ") == 1] == rows

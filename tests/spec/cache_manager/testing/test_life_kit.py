"""The life-cycle kit on managers of a page: it must find each fault, and report none in a sound manager."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from finding import check_found
from tiny_faults import FAULTS
from tiny_managers import KeepsRows, Plain, Sharing, Storing
from tiny_reported import REPORTED

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life import (
    CAPABILITIES,
    INVARIANTS,
    BlockManagerAdapter,
    BlockManagerMachine,
    InvariantBroken,
    prove,
    replay,
)
from cache_manager.testing.life.command import summary
from cache_manager.testing.life.machine import ALL, unexercised
from kvroute.cli import FAILED, USAGE, main


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


@pytest.mark.parametrize("fault", FAULTS + REPORTED, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_by_its_invariant_and_told_shortly(fault) -> None:
    """Goal: each invariant can break, and its story is short and can be replayed. Method: a manager with that one
    fault; the manager without the fault passes the same story."""
    program = check_found(fault, (fault.breaks, *fault.also))
    assert fault in REPORTED or len(program) <= 9
    sound = next(manager for manager in fault.__mro__ if manager.__module__ == Plain.__module__)
    replay(sound, program)


def test_every_invariant_has_a_fault_that_breaks_it() -> None:
    assert {fault.breaks for fault in FAULTS + REPORTED} == INVARIANTS.keys()


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


class SaltIsABoolean(Sharing):
    """Knows whether there is a salt, but not its value."""

    breaks = "salts_apart"

    def key(self, salt, tokens):
        return super().key((bool(salt[0]), salt[1]), tokens)


class BreaksLate(Plain):
    """Loses a block with the eightieth sequence that ends."""

    breaks = "no_block_lost"
    ended = 0

    def free(self, seq):
        self.ended += seq in self.tables
        super().free(seq)
        if self.ended == 80:
            self.free_list.pop()


@pytest.mark.parametrize("fault", [SaltIsABoolean, BreaksLate], ids=lambda fault: fault.__name__)
def test_what_needs_other_salts_or_long_lives_is_found(fault) -> None:
    with pytest.raises(InvariantBroken) as caught:
        prove(fault)
    assert caught.value.name == fault.breaks


class FailsAtOnce(Plain):
    def __init__(self, kv):
        raise OSError("no device")


def test_an_adapter_without_methods_and_a_run_of_nothing_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"admit\(\), grow\(\), commit\(\)"):
        prove(type("Empty", (BlockManagerAdapter,), {}))
    with pytest.raises(InvalidInputError, match="examples: wanted 1 or more, got 0"):
        prove(Plain, examples=0)


class ForgetsTrue(Plain):
    def admit(self, seq, tokens, chunk, salt):
        self.tables[seq] = []
        if Plain.grow(self, seq, tokens, len(tokens)):
            return 0
        del self.tables[seq]
        return None

    def grow(self, seq, tokens, upto):
        Plain.grow(self, seq, tokens, upto)


class Closes(Plain):
    def close(self):
        raise OSError("still busy")


ODD = {
    "grow": (vars(ForgetsTrue), r"grow\(\): wanted bool, got None, after: "),
    "no number": ({"free_blocks": lambda _: "many"}, r"free_blocks\(\): wanted int, got 'many'"),
    "admit": (
        {"admit": lambda self, *given: Plain.admit(self, *given) is not None},
        r"admit\(\): wanted int \| None, got True",
    ),
    "no table": ({"table": lambda *_: None}, r"table\(\): wanted Sequence\[int \| None\], got None, after: admit s1"),
    "words": ({"table": lambda *_: "ab"}, r"table\(\): wanted Sequence\[int \| None\], got 'ab'"),
    "counts": ({"ref_counts": lambda _: [1, 2]}, r"ref_counts\(\): wanted Mapping\[int, int\] \| None, got \[1, 2\]"),
    "ids": ({"free_ids": lambda _: 5}, r"free_ids\(\): wanted Sequence\[int\] \| None, got 5"),
    "slots": ({"slots": lambda *_: []}, r"slots\(\): wanted Sequence\[tuple\[int, int\]\], got \[\]"),
    "batch": ({"grow_batch": lambda *_: None}, r"grow_batch\(\): wanted Sequence\[bool\], got None"),
    "signature": ({"admit": lambda _, seq: len(seq)}, r"admit\(\): wanted the parameters self, seq, .* got .* _, seq$"),
    "size": ({"block_tokens": "2"}, r"blocks: wanted two blocks of one token or more, got 8 blocks of '2'"),
    "pool": ({"blocks": 5}, r"blocks: wanted a collection of block ids, got 5"),
    "word": ({"capabilities": "prefix"}, r"capabilities: wanted a tuple of names, got 'prefix'"),
    "capability": ({"capabilities": ("teleport",)}, "capabilities: wanted some of"),
    "invariant": ({"unclaimed": {"no_luck": ""}}, "unclaimed: wanted some of"),
    "few blocks": ({"blocks": range(1)}, "blocks: wanted two blocks"),
    "method": ({"capabilities": ("swap", "rows")}, r"a method of its own: preempt\(\), .*read_rows\(\)"),
    "init": ({"__init__": FailsAtOnce.__init__}, "no device"),
}


@pytest.mark.parametrize(("wrong", "said"), ODD.values(), ids=ODD)
def test_an_answer_of_the_wrong_kind_is_named(wrong, said) -> None:
    """Goal: a user's first mistakes are reported in one line, and not as a broken invariant of blocks."""
    with pytest.raises(InvalidInputError, match=said) as caught:
        prove(type("Wrong", (Plain,), dict(wrong)))
    assert "\n" not in str(caught.value)


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


def test_the_command_line(capsys) -> None:
    """Goal: status, summary, story and list of ``kvroute prove``. Method: a sound manager, a leaky one, wrong names."""
    few = ["--examples", "60", "--steps", "30"]
    assert main(["prove", "tiny_managers:Sharing", *few]) == 0
    out = capsys.readouterr().out
    assert "every invariant held" in out
    assert "capabilities  prefix" in out
    assert main(["prove", "tiny_faults:Leaky", *few, "--seed", "3"]) == FAILED
    out = capsys.readouterr().out
    assert "no_block_lost" in out
    assert "seed 3, " in out
    capsys.readouterr()
    assert main(["prove", "--invariants"]) == 0
    assert set(re.findall("^[a-z_]+$", capsys.readouterr().out, flags=re.MULTILINE)) == INVARIANTS.keys()
    for wrong in ("tiny_managers", "no_such_module:Plain", "tiny_managers:Block", "tiny_faults:FAULTS"):
        assert main(["prove", wrong]) == USAGE
        assert "wanted MODULE:ADAPTER" in capsys.readouterr().err
    assert main(["prove", "tiny_managers:Shared"]) == USAGE
    assert re.search(r"got tiny_managers:Shared; tiny_managers has .*\bSharing\b", capsys.readouterr().err)


def test_the_page_lists_every_capability_and_invariant() -> None:
    """Goal: the page is complete. Method: its rows are the capabilities and the invariants."""
    page = (Path(__file__).parents[4] / "docs" / "concepts" / "life-cycle-kit.md").read_text()
    rows = [f"| `{name}` | {what} |" for name, what in CAPABILITIES.items()]
    rows += [f"| `{name}` | {claim} |" for name, claim in INVARIANTS.items()]
    listed = [line for line in page.splitlines() if re.match(r"\| `\w+` \| .* \|$", line)]
    assert [line for line in listed if line.count(" | ") == 1] == rows


def test_the_page_of_proofs_lists_the_planted_faults() -> None:
    """Goal: its table is true. Method: its rows name faults that are there, and all of the reported ones."""
    page = (Path(__file__).parents[4] / "docs" / "proofs.md").read_text()
    told = set(re.findall(r"^\|[^|]+\| `(\w+)` \|", page.partition("## What was planted")[2], flags=re.MULTILINE))
    assert {fault.__name__ for fault in REPORTED} < told < {fault.__name__ for fault in FAULTS + REPORTED}

"""The life-cycle kit on managers of a page: what it must find, and that it finds nothing where there is nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import pytest
from finding import check_found
from hypothesis import given
from hypothesis import strategies as st
from tiny_faults import FAULTS
from tiny_managers import KeepsRows, Plain, Sharing, Storing
from tiny_reported import REPORTED

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life import CAPABILITIES, INVARIANTS, BlockManagerMachine, InvariantBroken, prove, replay
from cache_manager.testing.life.program import SHAPES, read, written
from cache_manager.testing.life.summary import check_exercised, summary, unexercised
from kvroute.cli import FAILED, USAGE, main

WORDS = {
    "name": st.sampled_from(("s1", "s12")),
    "names": st.lists(st.sampled_from(("s1", "s2")), max_size=2),
    "tokens": st.lists(st.integers(0, 2), max_size=4),
    "count": st.integers(0, 14),
    "salt": st.sampled_from(("", "A")),
}
OPERATIONS = st.one_of(
    st.tuples(st.just(kind), *(WORDS.get(shape, st.booleans()) for shape in shapes)) for kind, shapes in SHAPES.items()
)


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
    """Goal: each invariant can break, and its story is short and comes again. Method: a manager with that one fault;
    the manager that it was planted in lives through the story."""
    line = check_found(fault, (fault.breaks, *fault.also))
    assert fault in REPORTED or len(read(line)) <= 9
    sound = next(manager for manager in fault.__mro__ if manager.__module__ == Plain.__module__)
    replay(sound, line)


def test_every_invariant_has_a_fault_that_breaks_it() -> None:
    assert {fault.breaks for fault in FAULTS} == INVARIANTS.keys()


def test_a_story_says_what_a_reader_needs() -> None:
    """Goal: the whole of a story. Method: the shortest program that breaks a manager which forgets its reset."""
    line = "admit s1 00 14 - rows ok; free s1 once; reset running; admit s2 000 14 - rows ok"
    with pytest.raises(InvariantBroken) as caught:
        replay(next(fault for fault in FAULTS if fault.breaks == "reset_forgets"), line)
    for part in (
        "reset_forgets: After a reset",
        "b0[0] holds KV at position 0 of [0], written in line 1 by s1",
        "s2 needs KV at position 0 of [0], weights 1",
        "1. admit s1 [0, 0] -> [b0], 0 tokens cached, computes [0, 2)",
        "3. reset: new weights",
        "vllm#57727",
    ):
        assert part in str(caught.value), f"{part!r} is missing in\n{caught.value}"


@given(program=st.lists(OPERATIONS, max_size=5))
def test_a_line_is_its_program(program) -> None:
    assert read(written(program)) == program


@pytest.mark.parametrize("line", ["dance s1", "free s1", "free s1 never", "admit s1 00 all - rows ok"])
def test_a_line_that_is_no_program_is_named(line: str) -> None:
    with pytest.raises(InvalidInputError, match="replay"):
        read(line)


def test_the_same_seed_gives_the_same_lives() -> None:
    """Goal: a seed can be played again. Method: count what two runs of one seed did, and one of another."""
    first, again, other = (prove(Sharing, examples=5, steps=20, seed=seed) for seed in (4, 4, 5))
    assert first == again != other


def test_a_run_that_exercised_nothing_fails() -> None:
    """Goal: no empty proof. Method: managers that refuse everything, and one that never hits though it says it can."""

    class Refusing(Plain):
        unclaimed: ClassVar = {"refusal_is_honest": "it refuses everything", "all_come_back": "the same"}

        def admit(self, seq, tokens, chunk, salt):
            return None

    counts = prove(Refusing, examples=3)
    with pytest.raises(AssertionError, match="nothing was exercised"):
        check_exercised(Refusing, counts)
    assert "not claimed   refusal_is_honest, broken" in summary(Refusing, counts)

    class NeverHits(Sharing):
        finds_held = False

        def match(self, tokens, salt):
            return []

    missing = unexercised(NeverHits, prove(NeverHits, examples=60, steps=30, seed=1))
    assert missing == ["prefix: no admission hit anything"]


@pytest.mark.parametrize(
    "wrong",
    [{"capabilities": ("teleport",)}, {"unclaimed": {"no_luck": ""}}, {"blocks": range(1)}],
    ids=["capability", "invariant", "blocks"],
)
def test_an_adapter_that_cannot_be_is_named(wrong) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        prove(type("Wrong", (Plain,), wrong), examples=1)


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
    assert "seed 3" in out
    line = re.search('--replay "(.*)"', out)
    assert line is not None
    assert main(["prove", "tiny_faults:Leaky", "--replay", line[1]]) == FAILED
    assert main(["prove", "tiny_managers:Plain", "--replay", line[1]]) == 0
    capsys.readouterr()
    assert main(["prove", "--invariants"]) == 0
    assert set(re.findall("^[a-z_]+$", capsys.readouterr().out, flags=re.MULTILINE)) == INVARIANTS.keys()
    for wrong in ("tiny_managers", "no_such_module:Plain", "tiny_managers:Block", "tiny_faults:FAULTS"):
        assert main(["prove", wrong]) == USAGE
        assert "wanted MODULE:ADAPTER" in capsys.readouterr().err


def test_the_page_lists_what_there_is() -> None:
    """Goal: the page is complete. Method: its rows are the capabilities and the invariants."""
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "life-cycle-kit.md").read_text()
    rows = [f"| `{name}` | {what} |" for name, what in CAPABILITIES.items()]
    rows += [f"| `{name}` | {invariant.claim} |" for name, invariant in INVARIANTS.items()]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


def test_the_page_of_proofs_tells_what_was_planted() -> None:
    """Goal: its table is true. Method: its rows name faults that are there, and all of the reported ones."""
    page = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text()
    told = set(re.findall(r"^\|[^|]+\| `(\w+)` \|", page.partition("## What was planted")[2], flags=re.MULTILINE))
    assert {fault.__name__ for fault in REPORTED} < told < {fault.__name__ for fault in FAULTS + REPORTED}

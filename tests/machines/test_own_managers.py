"""The life-cycle kit on kvroute's own managers: it proves of them what it proves of other managers."""

from __future__ import annotations

import own_managers
import pytest
from budget import scaled

from cache_manager.testing.life import BlockManagerMachine, replay

SOME = scaled(100)
RARE = ("store", "restart", "drafts", "lost_step", "failing_moves", "swap")
"""With a store so much can be done that not even a hundred examples come to each of these: there may be fewer."""


class TestGated(BlockManagerMachine):
    adapter = own_managers.Gated


class TestStored(BlockManagerMachine):
    adapter = own_managers.Stored
    rare, examples = RARE, SOME


class TestBehind(BlockManagerMachine):
    adapter = own_managers.Behind
    rare, examples = RARE, SOME


def test_a_key_passes_to_the_duplicate_with_rows() -> None:
    """Goal: what the kit has found after 121,119 operations stays mended: s10 finds what s3 holds, and not the block
    without rows that s4 holds. Method: its story, in its operations.
    """
    story = [
        ("admit", "s1", [1, 1], 14, "", False, False),
        ("admit", "s2", [1, 1], 1, "", True, False),
        ("admit", "s3", [1, 1], 14, "", True, False),
        ("fork", "s1", "s4"),
        ("decode", ["s1", "s2", "s3", "s4"], 0, True),
        ("decode", ["s1", "s3", "s4"], 0, True),
        ("swap", "s2", False),
        ("fork", "s4", "s6"),
        ("step", "s1", [0, 0], 14, True, False),
        ("decode", ["s1", "s3", "s4", "s6"], 0, True),
        ("free", "s1", False),
        ("admit", "s10", [1, 1, 0], 14, "", True, False),
    ]
    replay(own_managers.Gated, story)


@pytest.mark.parametrize("adapter", [own_managers.Stored, own_managers.Behind])
def test_what_was_stored_comes_back_after_a_restart(adapter) -> None:
    """Goal: the kit sees a restore, and its rows. Method: a story; settling does nothing where no work is pending."""
    settle = [("settle", False)] * 6
    story = [("admit", "a", [0] * 4, 14, "", True, False), ("persist", "a", False), *settle, ("restart",)]
    story += [("admit", "b", [0, 0, 0, 0, 1], 14, "", True, False), *settle, ("step", "b", [1], 14, True, False)]
    counts = replay(adapter, [*story, ("free", "b", False), ("finish",)])
    assert counts["restart"] == 1
    assert counts["store"] == 2
    assert counts["rows"] > 0

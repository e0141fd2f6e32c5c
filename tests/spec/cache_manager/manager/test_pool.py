"""Which block is given out next, and which are found by their keys."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house import PROMPT, House
from waiting import GIVE_UP_S


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


def test_a_chain_loses_its_tail_before_its_head(house) -> None:
    """Goal: what is left of an evicted prefix can be found. Method: evict two of its blocks, then one more."""
    house.run("a", list(range(13)))
    house.manager.free("a")
    house.run("b", list(range(100, 123)))  # six blocks: five are free
    house.manager.free("b")
    assert house.run("c", list(range(13))) == 8, "the third block has gone"


@pytest.mark.parametrize("required", [None, ()])
def test_a_reset_around_the_manager_is_noticed(required) -> None:
    """Goal: the manager finds only blocks whose rows aux still has. Method: reset aux itself, there and back; one
    sequence is swapped."""
    house = House(device=8, required=required)
    house.run("a", PROMPT)
    house.manager.free("a")
    house.run("b", PROMPT[:8])
    assert house.manager.preempt("b")
    house.aux.reset(weights_version=1)
    house.aux.reset(weights_version=0)
    assert house.manager.resume("b")
    assert house.manager.allocate("c", PROMPT).cached_tokens == 0
    house.manager.assert_consistent()
    house.close()


def test_blocks_are_given_out_once_where_python_runs_without_asserts() -> None:
    """Goal: ``python -O`` gives no block to two sequences. Method: two sequences in such an interpreter."""
    asked = """
import numpy as np
from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec

blocks = AuxBlocks([AuxBlockDataSpec("rows", (1,), "uint8", 4)], blocks=8, namespace=Namespace("m", 1))
manager = BlockManager(blocks)
a, b = (manager.allocate(owner, [seed + i for i in range(8)]).blocks for owner, seed in (("a", 0), ("b", 50)))
print(len({*a, *b}), blocks.generations([*a, *b]).min())
"""
    ran = subprocess.run(
        [sys.executable, "-O", "-c", asked], capture_output=True, text=True, timeout=GIVE_UP_S, check=True
    )
    assert ran.stdout.split() == ["4", "1"]

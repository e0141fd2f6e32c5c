"""What adversarial tests found in the block manager, by example: each of these failed before."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house import PROMPT, House
from waiting import GIVE_UP_S

from cache_manager.errors import TransferProcessError


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


# ---------------------------------------------------------------- groups sampled from one prompt


def test_a_chain_loses_its_tail_before_its_head(house) -> None:
    """Goal: what is left of an evicted prefix can be found. Method: evict two of its blocks, then one more."""
    house.run("a", list(range(13)))
    house.manager.free("a")
    house.run("b", list(range(100, 123)))  # six blocks: five are free
    house.manager.free("b")
    assert house.run("c", list(range(13))) == 8, "the third block has gone"


# ---------------------------------------------------------------- moves that fail


@pytest.mark.parametrize("when", ["fail_next", "fail_after"])
@pytest.mark.parametrize("call", ["append", "preempt", "resume"])
def test_a_move_that_a_lost_process_fails_is_no_room_now(when, call) -> None:
    """Goal: the call answers False, and every block is where it was. Method: a KV whose copy fails at once, or half
    way; then the same call again. The kit tests the same with exceptions."""
    tokens = list(range(100, 114))
    house = House(device=8, host=4)
    house.run("a", tokens)
    if call == "resume":
        assert house.manager.preempt("a")
    elif call == "append":
        house.manager.fork("a", "child")
    calls = {
        "append": lambda: house.manager.append("a", 15),
        "preempt": lambda: house.manager.preempt("a"),
        "resume": lambda: house.manager.resume("a"),
    }
    before = house.state()
    setattr(house.kv, when, TransferProcessError)
    assert calls[call]() is False
    assert house.manager.counters.moves_failed == 1
    assert house.state() == before
    assert house.has_kv_of("a", tokens)
    assert calls[call]() is True
    assert house.has_kv_of("a", tokens)
    assert house.has_rows_of("a", "x", 14)
    house.close()


def test_what_has_come_back_is_found_under_its_own_keys(house) -> None:
    """Goal: a resumed block has the key of its own content. Method: swap out and in, then ask for prefixes of it."""
    tokens = list(range(14))
    house.run("a", tokens)
    assert house.manager.preempt("a")
    house.run("b", list(range(100, 132)))  # all eight blocks: nothing of "a" is left on the device
    house.manager.free("b")
    assert house.manager.resume("a")
    assert house.manager.allocate("c", tokens[:9]).cached_tokens == 8
    assert house.manager.table("c")[:2] == house.manager.table("a")[:2]
    assert house.has_kv_of("c", tokens[:8])
    assert house.has_rows_of("c", "x", 8)
    assert house.manager.allocate("d", tokens[4:]).cached_tokens == 0


# ---------------------------------------------------------------- resets


def test_a_sequence_from_before_a_reset_there_and_back_is_not_found(house) -> None:
    """Goal: KV of other weights is found under no key of these weights. Method: reset A to B to A in mid-sequence, then
    publish."""
    house.manager.allocate("a", PROMPT)
    house.manager.reset(weights_version=1)
    house.manager.reset(weights_version=0)
    house.compute("a", PROMPT)
    assert all(house.decode(["a"], [token])[0] for token in (10, 11))
    assert house.persist("a") == 0
    house.manager.fork("a", "child")
    house.manager.free("a")
    assert house.manager.allocate("b", [*PROMPT, 10, 11]).cached_tokens == 0


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


# ---------------------------------------------------------------- interpreters without asserts


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

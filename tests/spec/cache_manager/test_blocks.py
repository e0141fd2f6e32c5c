"""AuxBlocks by example: each hazard of blocks that an engine gives out again whenever it likes."""

from __future__ import annotations

import numpy as np
import pytest
from amid_a_copy import when_copied
from blocks_house import TOKENS, slots
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec

SMALL = st.tuples(st.sampled_from(((), (1,), (2, 3))), st.sampled_from(("bool", "uint8", "uint16", "uint64")))


@given(st.sampled_from((1, 2, 64, 65)), st.integers(1, 3), st.lists(SMALL, min_size=1, max_size=3), st.booleans())
def test_rows_of_every_layout_are_written_where_they_are_read(
    tokens: int, blocks: int, kinds: list, whole: bool
) -> None:
    """Goal: no layout ends a forward pass. Method: blocks of one token and of more, of one spec and of more, with rows
    of one byte among them, written at once and by a step."""
    specs = [AuxBlockDataSpec(f"s{i}", shape, dtype, tokens) for i, (shape, dtype) in enumerate(kinds)]
    with AuxBlocks(specs, blocks=blocks, namespace=Namespace("m", 1), strict=True) as engine:
        engine.renew(range(blocks))
        at = np.arange(blocks * tokens)[::-2].copy()
        rows = {
            spec.name: np.resize(at[:, None] + np.arange(6), (at.size, *spec.row_shape)).astype(spec.numpy_dtype)
            for spec in specs
        }
        if whole:
            assert engine.write_step(at, rows) == at.size
        else:
            with engine.begin_step(at) as step:
                for name, of_spec in rows.items():
                    step.write(name, of_spec)
        for name, of_spec in rows.items():
            read = engine.read(name, range(blocks))
            assert np.flatnonzero(read.valid).tolist() == sorted(at.tolist())
            assert np.array_equal(read.values[at], of_spec)
        assert engine.counters.interrupted_calls == 0


def test_a_step_in_place_waits_for_the_device_of_the_one_before_it(house) -> None:
    """Goal: a late device fences its block. Method: the block's next life, also one written in place, commits first."""
    engine = house.engine
    engine.renew([1])
    late = engine.begin_step(slots(1)[:2], in_place=True)
    engine.renew([1])
    step = engine.begin_step(slots(1), in_place=True)
    step.wrote("routing")
    assert step.commit() == 2
    assert house.valid(1) == [False, False, True, True]
    assert late.commit() == 0


# ---------------------------------------------------------------- moves beside steps


def test_a_second_move_into_a_block_is_dropped(house) -> None:
    """Goal: the bytes of one move never lie under the rows of another. Method: a move of two blocks; between the two,
    another thread tries to copy into the second. Then the copy is made again."""
    engine = house.engine
    engine.renew(range(6))
    rows = [house.fill(block, f"block {block}") for block in (0, 2, 3)]
    with when_copied(house.engine, lambda: engine.copy([(2, 1)])):
        engine.copy([(3, 4), (0, 1)])
    assert engine.counters.bad_moves_dropped == 1
    assert house.holds(4, rows[2])
    assert house.valid(1) == [False] * TOKENS
    engine.copy([(2, 1)])
    assert house.holds(1, rows[1])


# ---------------------------------------------------------------- the store


@pytest.mark.parametrize("came", [False, True])
def test_rows_do_not_come_back_beside_kv_of_another_computation(house, came: bool) -> None:
    """Goal: a restore respects the name of KV that an engine has loaded or was sent. Method: KV of another name, then
    of the rows' name."""
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "a")
    key, (origin,), lives = engine.keys.key(None, [1]), engine.exchange.origins([0]), engine.generations([1])
    engine.persist({key: 0}, engine.generations([0]))
    for name in (origin ^ 1, origin):
        if came:
            assert engine.exchange.bind_origin(1, int(lives[0]), name)
        else:
            engine.exchange.name_origins([1], lives, np.array([name], np.uint64))
        assert engine.restore({key: 1}, lives) == {key: name == origin}
        assert engine.counters.absent_blocks_not_restored == 1


def test_a_copy_brings_the_first_rows_that_it_may() -> None:
    """Goal: a fork has no row beyond its prefix. Method: one pair may copy two of four rows, another pair all four."""
    spec = AuxBlockDataSpec("routing", row_shape=(2,), dtype="uint8", block_tokens=4)
    with AuxBlocks([spec], blocks=4, namespace=Namespace("m", weights_version=1)) as aux:
        lives = aux.renew([0, 1, 2])
        aux.write_step(np.arange(4), {"routing": np.arange(8).reshape(4, 2)})
        aux.copy([(0, 1), (0, 2)], rows=[2, 4])
        assert aux.read("routing", [1], generations=lives[1:2]).valid.tolist() == [True, True, False, False]
        assert aux.read("routing", [2], generations=lives[2:]).valid.all()


def test_a_set_of_blocks_shows_what_it_is() -> None:
    """Goal: a debugger and a log show sizes and namespace, not an address in memory."""
    spec = AuxBlockDataSpec("routing", (2, 1), "uint8", 4)
    with AuxBlocks([spec], blocks=8, host_blocks=2, namespace=Namespace("m", 17)) as aux:
        shown = "AuxBlocks(routing; 8 device and 2 host blocks of 4 tokens, no store, 'm' at weights version 17)"
        assert repr(aux) == shown

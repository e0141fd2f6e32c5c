"""AuxBlocks by example: each hazard of blocks that an engine gives out again whenever it likes."""

from __future__ import annotations

import numpy as np
import pytest
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


def test_a_set_of_blocks_shows_what_it_is() -> None:
    """Goal: a debugger and a log show sizes and namespace, not an address in memory."""
    spec = AuxBlockDataSpec("routing", (2, 1), "uint8", 4)
    with AuxBlocks([spec], blocks=8, host_blocks=2, namespace=Namespace("m", 17)) as aux:
        shown = "AuxBlocks(routing; 8 device and 2 host blocks of 4 tokens, no store, 'm' at weights version 17)"
        assert repr(aux) == shown

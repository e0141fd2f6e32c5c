"""A step that is written at once is a step: the same rows, bits, words, origins and counters as one begun and ended."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.engine_blocks import EngineBlocks
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec

BLOCKS = 5
slots_given = st.lists(st.integers(-2, BLOCKS * 3 + 1), max_size=9)
ids = st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("write"), slots_given),
        st.tuples(st.just("run"), st.tuples(st.integers(0, 6), st.integers(1, 4))),
        st.tuples(st.just("renew"), ids),
        st.tuples(st.just("forget"), ids),
        st.tuples(st.just("copy"), ids),
    ),
    max_size=12,
)


def state(engine: EngineBlocks, specs: list[AuxBlockDataSpec]) -> list[Any]:
    """Everything that a reader, a store or an operator can see, but for how origins are drawn."""
    everything, region = np.arange(BLOCKS), engine.region("device")
    known = dict.fromkeys(engine.origins(everything))
    found: list[Any] = [engine.counters, engine.generations(everything).tolist(), region.words.tolist()]
    found.append([list(known).index(origin) if origin else -1 for origin in engine.origins(everything)])
    for spec in specs:
        rows = engine.read(spec.name, everything)
        found += [rows.valid.tolist(), rows.values[rows.valid].tolist()]
    return found


@given(calls, st.sampled_from([(3, 1), (3, 2)]), st.integers(0, 2**32 - 1))
def test_it_leaves_what_a_step_leaves(asked: list[Any], shape: tuple[int, int], seed: int) -> None:
    """Goal: nobody can tell which way a step went. Method: two sets get the same calls, slots good and bad; one writes
    at once, the other with an empty step of its own in flight, which makes every write take a step.
    """
    tokens, specs_n = shape
    specs = [AuxBlockDataSpec(f"r{i}", row_shape=(2,), dtype="uint16", block_tokens=tokens) for i in range(specs_n)]
    plain, stepping = (EngineBlocks(specs, blocks=BLOCKS, namespace=Namespace("m", 1)) for _ in range(2))
    rng = np.random.default_rng(seed)
    for engine in (plain, stepping):
        engine.renew(range(BLOCKS - 1))
    for name, what in asked:
        if name in ("write", "run"):
            at = np.array(what if name == "write" else range(what[0], sum(what)), np.int64)
            rows = {spec.name: rng.integers(0, 1 << 16, (at.size, 2)) for spec in specs}
            beside = stepping.begin_step([])
            assert plain.write_step(at, rows) == stepping.write_step(at, rows)
            beside.commit()
        else:
            for engine in (plain, stepping):
                if name == "copy":
                    engine.copy(np.array(what[: len(what) // 2 * 2], np.int64).reshape(-1, 2))
                else:
                    getattr(engine, name)(what)
        for engine in (plain, stepping):
            engine.assert_consistent()
        assert state(plain, specs) == state(stepping, specs)
    for engine in (plain, stepping):
        engine.close()

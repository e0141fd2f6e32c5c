"""Bytes move from block to block, also where threads, steps and other moves meet."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from amid_a_copy import when_copied
from blocks_house import TOKENS, House, slots
from unreadable import UNREADABLE
from waiting import GIVE_UP_S

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec

WIDE = AuxBlockDataSpec("routing", (1 << 12,), "uint8", TOKENS)  # a copy takes long enough to be met


CALLS = 150


def test_moves_of_several_threads_meet() -> None:
    """Goal: the bookkeeping never raises, whichever threads meet, and no row is torn. Method: threads move, give out,
    write, forget and reset the same few blocks; a row is one number, over and over."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    engine = AuxBlocks([WIDE], blocks=8, host_blocks=4, namespace=Namespace("m", 1))
    engine.renew(range(8))
    raised: list[BaseException] = []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)

        def write() -> None:
            rows = np.full((TOKENS, *WIDE.row_shape), rng.integers(256), np.uint8)
            engine.write_step(slots(rng.integers(8)), {"routing": rows})

        calls: list[Callable[[], object]] = [
            lambda: engine.swap_out(
                np.column_stack((rng.choice(8, 3, replace=False), rng.choice(4, 3, replace=False)))
            ),
            lambda: engine.swap_in(np.column_stack((rng.choice(4, 3, replace=False), rng.choice(8, 3, replace=False)))),
            lambda: engine.copy(rng.choice(8, (2, 2), replace=False)),
            lambda: engine.renew(rng.choice(8, 2, replace=False)),
            write,
            write,
            lambda: engine.exchange.origins([rng.integers(8)]),
            lambda: engine.forget([rng.integers(8)]) if rng.random() < 0.2 else None,
            lambda: engine.reset(weights_version=1) if rng.random() < 0.05 else None,
            engine.assert_consistent,
        ]
        for _ in range(CALLS):
            try:
                calls[rng.integers(len(calls))]()
                for tier, blocks in (("device", 8), ("host", 4)):
                    read = engine.read("routing", [rng.integers(blocks)], tier=tier)
                    assert (read.values[read.valid] == read.values[read.valid][:, :1]).all(), "a torn row"
            except BaseException as error:  # noqa: BLE001 - the test fails by it
                raised.append(error)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GIVE_UP_S)
    finally:
        sys.setswitchinterval(before)
    assert Counter(map(repr, raised)) == {}
    assert not any(thread.is_alive() for thread in threads)
    engine.assert_consistent()
    engine.close()


@pytest.mark.parametrize("given", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("strict", [False, True])
def test_where_the_pairs_of_a_copy_cannot_be_read_no_row_of_before_is(given, strict: bool) -> None:
    """Goal: as above, for a copy of the engine, also in a set that raises. Method: pairs that name no block."""
    house = House(strict=strict)
    house.engine.renew([0, 2])
    house.fill(2, "first")
    if strict:
        with pytest.raises(InvalidInputError, match="pairs: wanted"):
            house.engine.copy(given)
    else:
        house.engine.copy(given)
    assert house.valid(2) == [False] * TOKENS
    assert house.engine.counters.bad_moves_dropped > 0
    house.close()


def test_blocks_in_motion_are_named_as_such() -> None:
    """Goal: as above, for blocks into which bytes are being copied. Method: calls from another thread meanwhile."""
    house = House(strict=True)
    engine = house.engine
    engine.renew([0, 1])
    house.fill(0, "mine")
    errors: list[str] = []

    def calls() -> None:
        for call in (lambda: engine.renew([1]), lambda: engine.begin_step(slots(1))):
            with pytest.raises(InvalidInputError) as error:
                call()
            errors.append(str(error.value))

    with when_copied(house.engine, calls):
        engine.copy([(0, 1)])
    assert errors == [
        "renew: wanted blocks that are not being copied into, got block 1",
        f"slots: wanted slots of blocks that are not being copied into, got {slots(1)[0]}",
    ]
    house.close()


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


def test_a_copy_brings_the_first_rows_that_it_may() -> None:
    """Goal: a fork has no row beyond its prefix. Method: one pair may copy two of four rows, another pair all four."""
    spec = AuxBlockDataSpec("routing", row_shape=(2,), dtype="uint8", block_tokens=4)
    with AuxBlocks([spec], blocks=4, namespace=Namespace("m", weights_version=1)) as aux:
        lives = aux.renew([0, 1, 2])
        aux.write_step(np.arange(4), {"routing": np.arange(8).reshape(4, 2)})
        aux.copy([(0, 1), (0, 2)], rows=[2, 4])
        assert aux.read("routing", [1], generations=lives[1:2]).valid.tolist() == [True, True, False, False]
        assert aux.read("routing", [2], generations=lives[2:]).valid.all()

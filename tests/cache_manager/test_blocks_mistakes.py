"""AuxBlocks by example: a mistake of the engine is dropped and counted, or raised in a strict set."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from blocks_house import TOKENS, House, slots

from cache_manager.errors import BlockBusyError, InvalidInputError, KVRouteError
from cache_manager.feed import BlockFeed


def test_a_mistake_inside_a_forward_pass_is_dropped_counted_and_logged_once(house, caplog) -> None:
    """Goal: a set that is not strict never raises. Method: each mistake; the valid rows of the same call land."""
    engine = house.engine
    engine.renew([0])
    mistakes = (
        (np.array([0, 999, 1]), 2, "outside"),
        (np.array([-7, 0]), 1, "negative"),
        (np.array([0, 1, 0]), 1, "twice: nobody knows which of the two has its KV there"),
        (np.array([0, 20]), 1, "never given out"),
    )
    with caplog.at_level(logging.WARNING):
        for at, landed, _ in mistakes:
            assert engine.write_step(at, {"routing": house.rows("x", at.size)}) == landed
        assert engine.write_step(slots(0), {"routing": house.rows("x", 2)}) == 0
        assert engine.write_step(slots(0), {"nothing": house.rows("x")}) == 0
        assert engine.write_step(np.array([0.5]), {"routing": house.rows("x", 1)}) == 0
    assert engine.counters.bad_writes_dropped == 5 + 4 + 4 + 1
    assert len([r for r in caplog.records if "write_step" in r.getMessage()]) == 1
    assert engine.in_flight == 0


UNREADABLE = {
    "half": np.array([0.5]),
    "not a number": np.array([np.nan, 1.0]),
    "text": ["1"],
    "nothing": None,
    "ragged": [[0, 1], [2]],
    "a mask": np.array([True, False]),
}


@pytest.mark.parametrize("given", UNREADABLE.values(), ids=UNREADABLE)
def test_where_the_slots_of_a_pass_cannot_be_read_no_row_of_before_is(house, given) -> None:
    """Goal: a row of one pass never lies beside the KV of the next, where it is unknown which blocks that has written.
    Method: slots that name no block; later steps work again."""
    engine = house.engine
    engine.renew([0, 2])
    for block in (0, 2):
        house.fill(block, "first")
    engine.swap_out([(0, 1)])
    assert engine.write_step(given, {"routing": house.rows("second")}) == 0
    assert house.valid(0) == house.valid(2) == [False] * TOKENS
    assert house.valid(1, "host") == [True] * TOKENS, "which no pass writes"
    assert engine.counters.bad_writes_dropped > 0
    house.fill(0, "third")


def test_a_pass_that_is_refused_inside_another_call_leaves_no_row_of_before(house) -> None:
    """Goal: as above, where the loss cannot even be recorded. Method: a signal handler begins a step, with slots that
    name no block, while a call of its own thread has the lock."""
    house.engine.renew([0])
    house.fill(0, "first")
    with house.engine._lock, pytest.raises(BlockBusyError):
        house.engine.begin_step([0.5])
    assert house.valid(0) == [False] * TOKENS
    house.fill(0, "second")


def test_what_a_strict_set_raises_names_the_blocks() -> None:
    """Goal: an error names the block, for those who debug an engine. Method: bad ids, old lives, sources never given
    out."""
    engine = House(strict=True).engine
    engine.renew([0, 1], [5, 7])
    for call, message in (
        (lambda: engine.renew([2, -1, 900]), "renew: wanted .* got blocks -1, 900$"),
        (lambda: engine.renew([0, 1], [5, 8]), "renew: wanted .* got block 0$"),
        (lambda: engine.copy([(5, 1)]), "move: wanted .* got block 1$"),
        (lambda: engine.renew(range(100, 120)), "got blocks 100, 101, .*, 107 and 12 more$"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            call()
    engine.close()


def test_generations_never_go_back(house) -> None:
    engine = house.engine
    assert engine.renew([0, 1], [5, 7]).tolist() == [5, 7]
    assert engine.renew([]).size == 0
    rows = house.fill(0, "mine")
    assert engine.renew([0, 1], [4, 8]).tolist() == [0, 8]
    assert house.holds(0, rows), "the life that was known"
    assert engine.read("routing", [0], generations=[4]).valid.tolist() == [False] * TOKENS
    assert engine.renew([0], [5]).tolist() == [0]  # somebody else has given out the same life
    assert engine.read("routing", [0], generations=[5]).valid.tolist() == [False] * TOKENS
    with pytest.raises(InvalidInputError, match="generations"):
        engine.renew([0, 1], [9])


NO_IDS = {
    "floats": [0.7],
    "a mask": np.array([True, False]),
    "nested": [[0, 1]],
    "ragged": [[0], [1, 2]],
    "text": "01",
    "none": None,
    "a number": 1,
    "an iterator": iter([0]),
    "objects": [object()],
    "not a number": [float("nan")],
    "too large": [1 << 70],
}
CALLS = {
    "renew": lambda e, x: e.renew(x),
    "renew's generations": lambda e, x: e.renew([0], [1] if x is None else x),
    "forget": lambda e, x: e.forget([0] if x is None else x),
    "complete": lambda e, x: e.complete(x),
    "generations": lambda e, x: e.generations(x),
    "origins": lambda e, x: e.origins(x),
    "read": lambda e, x: e.read("routing", x),
    "read's generations": lambda e, x: e.read("routing", [0], generations=[1] if x is None else x),
    "copy": lambda e, x: e.copy([x, 0]),
    "copy's rows": lambda e, x: e.copy([(0, 1)], [1, 2] if x is None else x),
    "write_step's slots": lambda e, x: e.write_step(x, {"routing": np.zeros((1, 3, 2), np.uint8)}),
    "write_step's rows": lambda e, x: e.write_step(slots(1), {"routing": x}),
    "write_step's mapping": lambda e, x: e.write_step(slots(1), x),
    "commit's keep": lambda e, x: e.write_step(
        slots(1), {"routing": np.zeros((TOKENS, 3, 2), "u1")}, [True] if x is None else x
    ),
    "name_origins' blocks": lambda e, x: e.name_origins(x, [1], np.array([5], np.uint64)),
    "name_origins' generations": lambda e, x: e.name_origins([0], x, np.array([5], np.uint64)),
    "name_origins' origins": lambda e, x: e.name_origins([0], [1], x),
    "persist's generations": lambda e, x: e.persist({e.keys.key(None, [1]): 0}, x),
    "persist's block": lambda e, x: e.persist({e.keys.key(None, [1]): x}, [1]),
    "persist's blocks": lambda e, x: e.persist(x, [1]),
    "bind_origin's origin": lambda e, x: e.bind_origin(0, 1, x, 0),
    "bind_origin's tokens": lambda e, x: e.bind_origin(0, 1, 77, x),
    "export's rows": lambda e, x: e.export({e.keys.key(None, [1]): 0}, [1], [9] if x is None else x),
    "apply": lambda e, x: e.apply(x),
    "the feed's renew": lambda _, x: BlockFeed(4).renew(x),
    "the feed's copy": lambda _, x: BlockFeed(4).copy(x),
    "the feed's persist": lambda e, x: BlockFeed(4).persist({e.keys.key(None, [1]): x}),
    "the feed's blocks": lambda _, x: BlockFeed(0 if isinstance(x, int) else x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_invalid_arguments_are_typed_errors_or_dropped_and_give_nothing_out(call) -> None:
    """Goal: no raw error, and only the named blocks begin a life or get rows. Method: each argument of each call gets
    values of the wrong kind; strict and not."""
    for strict in (True, False):
        house = House(strict=strict)
        house.gate.open()
        lives = house.engine.renew([0, 1])
        house.fill(0, "mine")
        for what, given in NO_IDS.items():
            try:
                call(house.engine, given)
            except KVRouteError:
                pass
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
            assert house.engine.generations([0, 1]).tolist() == lives.tolist(), f"{what} gave blocks out"
            read = house.engine.read("routing", range(6))
            assert not read.valid[TOKENS:].any(), f"{what} has made rows"
            assert house.engine.in_flight == 0
        house.engine.assert_consistent()
        house.close()

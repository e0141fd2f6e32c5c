"""AuxBlocks by example: a mistake of the engine is dropped and counted, or raised in a strict set."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from amid import amid_a_call
from amid_a_copy import when_copied
from blocks_house import TOKENS, House, slots
from stopped import interrupt

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, KVRouteError, RowError, SpecError
from cache_manager.feed import BlockFeed
from cache_manager.keys import Namespace
from cache_manager.own_keys import OUTDATED_MAX
from cache_manager.spec import AuxBlockDataSpec


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
    (line,) = (message for message in caplog.messages if "bad_writes_dropped" in message)
    assert line.startswith("begin_step: wanted slots of the pool, each once, in blocks that were given out")
    assert engine.in_flight == 0


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 2, 9)], ids=["padding left out", "longer rows"])
def test_rows_are_as_many_as_the_slots_that_the_step_began_with(house, shape) -> None:
    """Goal: the error names the shape that the caller knows, and padding may hold anything. Method: a step with padding
    is written with rows of two other shapes, then with a row that fits no spec at the padding."""
    engine = house.engine
    engine.renew([0])
    rows = house.rows("x", 3)
    with engine.begin_step(np.array([1, -1, 2])) as step:
        with pytest.raises(RowError, match=rf"wanted shape \(3, .*got shape \({shape[0]}, {shape[1]}"):
            step.write("routing", np.zeros(shape, np.uint8))
        padded = rows.astype(np.int64)
        padded[1] = 1 << 40
        step.write("routing", padded)
    read = engine.read("routing", [0])
    assert read.valid.tolist() == [False, True, True, *[False] * (TOKENS - 3)]
    assert np.array_equal(read.values[1:3], rows[[0, 2]])


class Refusing:
    """What numpy makes no array of: a tensor on a device raises TypeError, one with a gradient RuntimeError."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        raise self.error("not on this machine")


class Incomparable:
    """An integer to numpy, which compares to none."""

    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise TypeError("not with another")


UNREADABLE = {
    "a structure": np.array([(0,), (1,)], [("slot", "i8")]),
    "an object that compares to none": [Incomparable(), Incomparable()],
    "half": np.array([0.5]),
    "not a number": np.array([np.nan, 1.0]),
    "text": ["1"],
    "nothing": None,
    "ragged": [[0, 1], [2]],
    "a mask": np.array([True, False]),
    "a tensor on a device": Refusing(TypeError),
    "a tensor with a gradient": Refusing(RuntimeError),
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
    with pytest.raises(InvalidInputError, match="slots: wanted a flat array of integers"):
        engine.begin_step(given)
    assert house.valid(0) == house.valid(2) == [False] * TOKENS
    for block in (0, 2):
        house.fill(block, "second")
    assert engine.write_step(given, {"routing": house.rows("third")}) == 0
    assert house.valid(0) == house.valid(2) == [False] * TOKENS
    assert house.valid(1, "host") == [True] * TOKENS, "which no pass writes"
    assert engine.counters.bad_writes_dropped > 0
    house.fill(0, "fourth")


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


@pytest.mark.parametrize("call", ["begin_step", "copy"])
def test_an_error_that_nobody_expects_leaves_no_row_of_before(house, call: str) -> None:
    """Goal: as above. Method: an error at each conversion that is none of numpy's."""
    house.engine.renew([0])
    house.fill(0, "first")
    with pytest.raises(OSError, match="not on this machine"):
        getattr(house.engine, call)(Refusing(OSError))
    assert house.valid(0) == [False] * TOKENS


class Interrupted:
    """Integers whose first conversion ends with Ctrl-C."""

    def __init__(self, values: object) -> None:
        self.values = np.array(values)
        self.conversions = 0

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        self.conversions += 1
        if self.conversions == 1:
            raise KeyboardInterrupt
        return self.values


@pytest.mark.parametrize("call", ["begin_step", "write_step", "copy", "swap_in"])
def test_an_interrupted_call_leaves_no_row_of_before(house, call: str) -> None:
    """Goal: whatever ends the call, the engine's pass or copy has run or will. Method: Ctrl-C amid the conversion."""
    engine = house.engine
    engine.renew([0])
    house.fill(0, "first")
    named = slots(0) if call.endswith("step") else [(1, 0)]
    arguments = (Interrupted(named), {}) if call == "write_step" else (Interrupted(named),)
    with pytest.raises(KeyboardInterrupt):
        getattr(engine, call)(*arguments)
    assert house.valid(0) == [False] * TOKENS


def test_a_pass_that_is_refused_inside_another_call_leaves_no_row_of_before(house) -> None:
    """Goal: as above, where the loss cannot even be recorded. Method: a signal handler begins a step, with slots that
    name no block, while a call of its own thread has the lock."""
    house.engine.renew([0])
    house.fill(0, "first")

    def handler() -> None:
        with pytest.raises(BlockBusyError):
            house.engine.begin_step([0.5])

    amid_a_call(house.engine, handler)
    assert house.valid(0) == [False] * TOKENS
    house.fill(0, "second")


def test_what_a_strict_set_raises_names_the_blocks() -> None:
    """Goal: an error names the block and its one cause, for those who debug an engine. Method: each cause alone."""
    engine = House(strict=True).engine
    engine.renew([0, 1], [5, 7])
    step = engine.begin_step(slots(0)[:1])
    for call, message in (
        (lambda: engine.renew([2, -1, 900]), r"renew: wanted block ids in \[0, 6\), got blocks -1, 900"),
        (lambda: engine.renew([2, 3, 2]), "renew: wanted each block once, got block 2"),
        (lambda: engine.renew([0, 1], [5, 8]), "renew: wanted generations larger .*, got block 0"),
        (lambda: engine.renew([1], [1 << 47]), f"renew: wanted generations .* below {1 << 47}, got block 1"),
        (lambda: engine.renew(range(100, 120)), "got blocks 100, 101, .*, 107 and 12 more"),
        (lambda: engine.copy([(5, 1)]), "move: wanted sources that were given out, .* got block 5"),
        (lambda: engine.copy([(1, 4)]), "move: wanted targets that were given out, got block 4"),
        (lambda: engine.copy([(1, 0)]), "move: wanted targets into which no .* step .* got block 0"),
        (lambda: engine.begin_step([5, 6, 5]), "slots: wanted each slot once, got 5"),
        (lambda: engine.begin_step(slots(2)), f"slots: wanted slots of blocks that were given out, got {slots(2)[0]}"),
    ):
        with pytest.raises(InvalidInputError, match=message + "$"):
            call()
    step.abort()
    engine.close()


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


class Asking(logging.Handler):
    """A handler that asks the set and then raises."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self.house = house
        self.answers: list[int] = []

    def handle(self, record: logging.LogRecord) -> bool:
        self.answers.append(self.house.engine.in_flight)
        raise OSError(record.getMessage())


@contextmanager
def asked_by_a_handler(house: House) -> Iterator[Asking]:
    """The handler gets what the set logs."""
    handler = Asking(house)
    logger = logging.getLogger("cache_manager")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def apply_with_a_gap(house: House) -> None:
    feed = BlockFeed(6)
    feed.renew([1])
    house.engine.apply(feed.take())


REPORTED = {
    "renew": lambda house: house.engine.renew([0, 99]),
    "begin_step": lambda house: house.engine.begin_step([0.5]),
    "write_step": lambda house: house.engine.write_step(slots(0), {"routing": None}),
    "copy": lambda house: house.engine.copy([(5, 0)]),
    "copy of nothing": lambda house: house.engine.copy(None),
    "persist": lambda house: house.engine.persist({b"k" * 32: 0}, [1]),
    "begin_restore": lambda house: house.engine.begin_restore({b"k" * 32: 0}, [1]),
    "export": lambda house: house.engine.exchange.export({b"k" * 32: 0}, [1]),
    "apply": apply_with_a_gap,
    "generations after an interrupted call": lambda house: interrupt(house.engine, 5),
}


@pytest.mark.parametrize("call", REPORTED)
def test_whatever_a_logging_handler_does_the_books_are_in_order(house, call: str) -> None:
    """Goal: a handler that asks the set is answered, and one that raises keeps no row of before readable. Method: every
    call that logs."""
    engine = house.engine
    feed = BlockFeed(6)
    feed.renew([0])
    engine.apply(feed.take())
    house.fill(0, "first")
    life = engine.generations([0])
    with asked_by_a_handler(house) as handler, pytest.raises(OSError, match="counted as"):
        REPORTED[call](house)
    assert handler.answers == [0]
    is_about_keys = call in ("persist", "begin_restore", "export")
    assert house.valid(0) == [is_about_keys] * TOKENS
    if call == "renew":
        assert engine.generations([0]) == life + 1
    assert engine.in_flight == 0
    engine.assert_consistent()


@pytest.mark.parametrize("key", [b"k", "k", 7, b"h" * 32], ids=repr)
def test_a_key_that_was_made_nowhere_is_a_mistake(key, caplog) -> None:
    """Goal: an engine's own hash that was not adopted is no silent "nothing stored". Method: persist, restore and
    export under it, strict or not; then under a key from before a reset, which is late."""
    for strict in (True, False):
        house = House(strict=strict)
        engine = house.engine
        (life,) = engine.renew([0]).tolist()
        house.fill(0, "mine")
        for call in (engine.persist, engine.restore, engine.begin_persist, engine.exchange.export):
            if strict:
                with pytest.raises(InvalidInputError, match=r"keys: wanted keys that .* has adopted"):
                    call({key: 0}, [life])
            else:
                call({key: 0}, [life])
        assert engine.counters.foreign_keys == (0 if strict else 4)
        assert engine.counters.stale_keys == 0
        engine.reset(weights_version=2)
        assert engine.persist({house.key: 0}, [life]) == {house.key: 0}
        assert engine.counters.stale_keys == 1
        house.close()
    assert [record.message[:36] for record in caplog.records] == ["keys: wanted keys that AuxBlocks.key"]


def test_of_many_resets_the_latest_are_remembered() -> None:
    """Goal: what a set keeps of its past is bounded. Method: more resets than it remembers, and the first one's key."""
    house = House()
    (life,) = house.engine.renew([0]).tolist()
    for version in range(2, OUTDATED_MAX + 2):
        house.engine.reset(weights_version=version)
    house.engine.persist({house.key: 0}, [life])
    assert (house.engine.counters.stale_keys, house.engine.counters.foreign_keys) == (1, 0)
    house.engine.reset(weights_version=0)
    house.engine.persist({house.key: 0}, [life])
    assert (house.engine.counters.stale_keys, house.engine.counters.foreign_keys) == (1, 1)
    house.close()


def test_a_step_after_the_end_is_counted(caplog) -> None:
    """Goal: rows that land nowhere are not lost in silence. Method: steps of a set that is closed, and of a forked
    child's copy."""
    for strict in (True, False):
        engine = House(strict=strict).engine
        engine.renew([0])
        engine.close()
        for n in (1, 2):
            if strict:
                with pytest.raises(BlockStateError, match="wanted one that is open"):
                    engine.write_step(np.array(slots(0)), {})
            else:
                assert engine.write_step(np.array(slots(0)), {}) == 0
            assert engine.counters.bad_writes_dropped == n * TOKENS
    assert len(caplog.records) == 2
    engine = House().engine
    if not (child := os.fork()):
        landed = engine.write_step(np.array(slots(0)), {})
        os._exit(0 if landed == 0 and engine.counters.bad_writes_dropped == TOKENS else 1)
    assert os.waitpid(child, 0)[1] == 0
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
    "a tensor on a device": Refusing(TypeError),
    "a tensor with a gradient": Refusing(RuntimeError),
}
CALLS = {
    "renew": lambda e, x: e.renew(x),
    "renew's generations": lambda e, x: e.renew([0], [1] if x is None else x),
    "forget": lambda e, x: e.forget([0] if x is None else x),
    "complete": lambda e, x: e.complete(x),
    "generations": lambda e, x: e.generations(x),
    "origins": lambda e, x: e.exchange.origins(x),
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
    "name_origins' blocks": lambda e, x: e.exchange.name_origins(x, [1], np.array([5], np.uint64)),
    "name_origins' generations": lambda e, x: e.exchange.name_origins([0], x, np.array([5], np.uint64)),
    "name_origins' origins": lambda e, x: e.exchange.name_origins([0], [1], x),
    "persist's generations": lambda e, x: e.persist({e.keys.key(None, [1]): 0}, x),
    "persist's block": lambda e, x: e.persist({e.keys.key(None, [1]): x}, [1]),
    "persist's blocks": lambda e, x: e.persist(x, [1]),
    "bind_origin's origin": lambda e, x: e.exchange.bind_origin(0, 1, x),
    "export's rows": lambda e, x: e.exchange.export({e.keys.key(None, [1]): 0}, [1], [9] if x is None else x),
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


def test_a_spec_without_its_list_is_refused() -> None:
    """Goal: the error says what is missing, where Python would ask for a spec's iterator."""
    spec = AuxBlockDataSpec("routing", (2, 1), "uint8", 4)
    with pytest.raises(SpecError, match="specs: wanted a sequence of AuxBlockDataSpec, got a single one"):
        AuxBlocks(spec, blocks=1, namespace=Namespace("m", 1))  # type: ignore[arg-type]

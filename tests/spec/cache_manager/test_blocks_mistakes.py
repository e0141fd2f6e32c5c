"""What is wrong in a call to a set of blocks is named, and gives nothing out."""

from __future__ import annotations

import numpy as np
import pytest
from blocks_house import TOKENS, House, slots
from unreadable import Refusing

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import InvalidInputError, KVRouteError, SpecError
from cache_manager.feed import BlockFeed
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec


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

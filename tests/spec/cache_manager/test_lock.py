"""What a set counts and says of mistakes, and that its lock is held, by whom."""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest
from amid import amid_a_call
from blocks_house import TOKENS, House, slots
from standing_still import until_it_waits
from stopped import interrupt
from waiting import GIVE_UP_S

from cache_manager.errors import BlockBusyError, InvalidInputError
from cache_manager.feed import BlockFeed
from cache_manager.lock import NAMED_MAX, AuxCounters
from cache_manager.ports import RecordCounters
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT
from transfer.counters import Counters


def test_nothing_has_happened_at_the_start() -> None:
    """Goal: the first number that an operator sees is of things that happened. Method: every counter of a new set, a
    new store of records, and a node."""
    house = House()
    with MemoryStore(1 << 20) as backend:
        for counters in (house.engine.counters, AuxCounters(), RecordStore(backend, LAYOUT).counters, RecordCounters()):
            assert not any(asdict(counters).values())
    assert not any(value for value in asdict(Counters()).values() if isinstance(value, int))
    house.close()


@pytest.mark.parametrize("n", [1, 2, NAMED_MAX, NAMED_MAX + 1, NAMED_MAX + 20])
def test_a_mistake_names_blocks_as_far_as_a_line_holds(n: int) -> None:
    """Goal: a line, and no block of it in vain. Method: as many wrong blocks as are named, fewer, and more."""
    house = House(strict=True)
    wrong = list(range(100, 100 + n))
    named = ", ".join(map(str, wrong[:NAMED_MAX]))
    rest = f" and {n - NAMED_MAX} more" if n > NAMED_MAX else ""
    with pytest.raises(InvalidInputError, match=f"got block{'s' if n > 1 else ''} {named}{rest}$"):
        house.engine.renew(wrong)
    house.close()


CALLS = {
    "in_flight": lambda house: house.engine.in_flight,
    "steps": lambda house: house.engine.steps,
    "generations": lambda house: house.engine.generations([0]),
    "complete": lambda house: house.engine.complete([0]),
    "writing": lambda house: house.engine.writing([0]),
    "origins": lambda house: house.engine.exchange.origins([0]),
    "renew": lambda house: house.engine.renew([1]),
    "retire": lambda house: house.engine.retire([1]),
    "forget": lambda house: house.engine.forget([0]),
    "reset": lambda house: house.engine.reset(weights_version=2),
    "begin_step": lambda house: house.engine.begin_step(slots(0)).abort(),
    "write_step": lambda house: house.engine.write_step(slots(0), {"routing": house.rows("x")}),
    "read": lambda house: house.engine.read("routing", [0]),
    "copy": lambda house: house.engine.copy([(0, 1)]),
    "swap_out": lambda house: house.engine.swap_out([(0, 1)]),
    "persist": lambda house: house.engine.persist({house.key: 0}, [1]),
    "begin_restore": lambda house: house.engine.begin_restore({house.key: 0}, [1]),
    "export": lambda house: house.engine.exchange.export({house.key: 0}, [1]),
    "bind_origin": lambda house: house.engine.exchange.bind_origin(0, 1, 5),
    "name_origins": lambda house: house.engine.exchange.name_origins([0], [1], np.array([5], np.uint64)),
    "assert_consistent": lambda house: house.engine.assert_consistent(),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_waits_for_one_of_another_thread(call: str) -> None:
    """Goal: nothing is seen, or changed, amid a change. Method: each call begins amid one of another thread,
    and is over when that is."""
    house = House()
    house.gate.open()
    house.engine.renew([0, 1])
    house.fill(0, "mine")
    thread = threading.Thread(target=CALLS[call], args=(house,), daemon=True)

    def amid() -> None:
        thread.start()
        assert until_it_waits(thread)

    amid_a_call(house.engine, amid)
    thread.join(GIVE_UP_S)
    assert not thread.is_alive()
    house.close()


def test_a_call_inside_another_is_refused_and_one_of_another_thread_waits(house) -> None:
    """Goal: a thread never deadlocks with itself, and no call is left half done. Method: a finaliser and a signal
    handler in the middle of a call; another thread's call in the same place."""
    engine, seen = house.engine, []
    engine.renew([0, 1])
    house.fill(0, "mine")
    other = threading.Thread(target=lambda: seen.append(engine.renew([3]).tolist()), daemon=True)

    class Lost:
        def __init__(self) -> None:
            self.itself = self  # a cycle: only the collector ends it

        def __del__(self) -> None:
            handler()

    def handler(*_: object) -> None:
        with pytest.raises(BlockBusyError, match="a finaliser or a signal handler"):
            engine.renew([2])
        seen.append(engine.counters.rows_committed)

    def amid() -> None:
        gc.collect()
        signal.raise_signal(signal.SIGUSR1)
        other.start()
        assert until_it_waits(other)

    before = signal.signal(signal.SIGUSR1, handler)
    gc.disable()  # until the call collects
    Lost()
    try:
        amid_a_call(engine, amid)
    finally:
        gc.enable()
        signal.signal(signal.SIGUSR1, before)
    other.join(GIVE_UP_S)
    assert seen == [TOKENS, TOKENS, [1]]
    assert engine.generations([2]).tolist() == [0]


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

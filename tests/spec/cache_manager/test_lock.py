"""What a set counts and says of mistakes; that its lock is held, and by whom, is in ``test_blocks_threads.py``."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from blocks_house import House

from cache_manager.errors import InvalidInputError
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

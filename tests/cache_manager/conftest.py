"""What several files of examples start from; others have fixtures of these names of their own."""

from __future__ import annotations

import pytest
from aux_house import new_aux
from budget import ALL_LIVES
from engine_house import House

from cache_manager.storage import open_store
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.life import BlockManagerMachine

BlockManagerMachine.examples = ALL_LIVES


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(open_store("memory:"))


@pytest.fixture(params=["heap", "shared"])
def aux(request, store):
    with new_aux(store, request.param) as blocks:
        yield blocks


@pytest.fixture
def house():
    """Blocks that an engine gives out."""
    house = House()
    yield house
    house.gate.open()
    house.engine.close()

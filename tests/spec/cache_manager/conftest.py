"""Fixtures that several test files share; other test files define their own fixtures of these names."""

from __future__ import annotations

import pytest
from blocks_house import House
from budget import ALL_LIVES

from cache_manager.testing.life import BlockManagerMachine

BlockManagerMachine.examples = ALL_LIVES


@pytest.fixture
def house():
    """Blocks that an engine gives out."""
    house = House()
    yield house
    house.close()
